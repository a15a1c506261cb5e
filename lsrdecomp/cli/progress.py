"""How far a verb is and how long it will take: a bar on a terminal, a line a minute elsewhere, nothing with --quiet."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, Task, TextColumn

from lsrdecomp.checkpoints.progress import ProgressUpdate

EVERY = 60.0
"""Seconds between two lines where nobody watches."""
BAR = 12


@contextmanager
def follow(
    *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[ProgressUpdate], None]]:
    """Yields the callback that shows steps on stderr.

    On a terminal there is one line with a bar, counts and the time left, which is gone when the
    block ends. Elsewhere there is a line a minute, so that a log tells that the run lives; a run of
    less than a minute by ``clock``, in seconds, writes none.
    """
    if quiet:
        yield lambda _: None
        return
    watched, console = sys.stderr.isatty(), Console(stderr=True)
    # rich tells the time left in both cases; it is started, and draws, on a terminal alone.
    bars = Progress(
        BarColumn(BAR),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        get_time=clock,
        speed_estimate_period=math.inf,  # the mean over the whole stage
    )
    with bars if watched else nullcontext():
        bars.add_task("", total=None)
        (task,), stage, last = bars.tasks, ("", 0), clock()

        def show(step: ProgressUpdate) -> None:
            nonlocal stage, last
            if (
                step.stage,
                step.total,
            ) != stage or step.done == 0:  # what comes before the first count is no measure
                stage = step.stage, step.total
                bars.reset(task.id, total=step.total or None)
            bars.update(task.id, completed=step.done)
            if watched:
                bars.update(task.id, description=escape(_line(step, task, console.width - BAR)))
                bars.refresh()
            elif clock() - last >= EVERY:
                last = clock()
                words = ", ".join(filter(None, (_counts(step, " of "), _time_left(task))))
                print(
                    f"lsrdecomp: {step.stage}{words and ': ' + words}", file=sys.stderr, flush=True
                )

        yield show


def _line(step: ProgressUpdate, task: Task, width: int) -> str:
    """Beside the bar: the stage, how much of it is done, the time left. On a narrow terminal the stage is cut."""
    rest = "".join(f" · {words}" for words in (_counts(step, "/"), _time_left(task)) if words)
    room = max(1, width - cell_len(rest) - 2)
    stage = step.stage
    if cell_len(stage) > room:
        stage = f"{set_cell_size(stage, room - 1).rstrip()}…"
    return f"{stage}{rest}"


def _counts(step: ProgressUpdate, of: str) -> str:
    """ "3 of 24 layers"; nothing where the number is not known."""
    return f"{step.done:,}{of}{step.total:,} {step.unit}".rstrip() if step.total else ""


def _time_left(task: Task) -> str:
    """ "about 3 min left"; nothing while that cannot be told."""
    left = task.time_remaining
    if not left:
        return ""
    return f"about {left:.0f} s left" if left < 90.0 else f"about {left / 60.0:.0f} min left"
