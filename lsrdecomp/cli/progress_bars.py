"""Progress of a verb: a bar on a terminal, a line a minute elsewhere, nothing with --quiet."""

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

from lsrdecomp.lora.files.progress import ProgressUpdate

BAR_WIDTH = 12
"""Characters of the bar; by hand: the words beside it say more."""
WHOLE_RUN = ("", -1)
"""Stands in the place of a stage where bar and time are of the whole run."""


@contextmanager
def follow(
    *,
    quiet: bool = False,
    clock: Callable[[], float] = time.monotonic,
    log_seconds: float = 60.0,
) -> Iterator[Callable[[ProgressUpdate], None]]:
    """Yield the callback that shows steps on stderr.

    On a terminal there is one line with a bar, counts and the time left, which is gone when the
    block ends. Bar and time are of the whole run where steps know their share of it. Elsewhere
    there is a line a minute, so that a log tells that the run lives; a run of less than a minute by
    ``clock``, in seconds, writes none.

    Parameters
    ----------
    quiet : bool
        Show nothing.
    clock : callable
        Seconds that pass.
    log_seconds : float
        Seconds between two lines where nobody watches.
    """
    if quiet:
        yield lambda _: None
        return
    is_terminal = sys.stderr.isatty()
    console = Console(stderr=True)
    # rich tells the time left in both cases; it is started, and draws, on a terminal alone.
    bars = Progress(
        BarColumn(BAR_WIDTH),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        get_time=clock,
        speed_estimate_period=math.inf,  # the mean over the whole run or stage
    )
    with bars if is_terminal else nullcontext():
        bars.add_task("", total=None)
        task = bars.tasks[0]
        measured = ("", 0)
        last_line = clock()

        def show(step: ProgressUpdate) -> None:
            nonlocal measured, last_line
            measured = _advance(bars, step, measured)
            if is_terminal:
                text = _text_beside_bar(step, task, console.width - BAR_WIDTH)
                bars.update(task.id, description=escape(text))
                bars.refresh()
            elif clock() - last_line >= log_seconds:
                last_line = clock()
                print(_log_line(step, task), file=sys.stderr, flush=True)

        yield show


def _advance(bars: Progress, step: ProgressUpdate, measured: tuple[str, int]) -> tuple[str, int]:
    """Advance the bar by a step, and return what it measures then: the whole run or a stage.

    A stage is measured anew where it follows another; what comes before its first count is no
    measure.
    """
    task = bars.tasks[0]
    if step.share is not None:
        if measured != WHOLE_RUN:
            bars.reset(task.id, total=1.0)
        bars.update(task.id, completed=step.share)
        return WHOLE_RUN
    stage = (step.stage, step.total)
    if stage != measured or step.done == 0:
        bars.reset(task.id, total=step.total or None)
    bars.update(task.id, completed=step.done)
    return stage


def _text_beside_bar(step: ProgressUpdate, task: Task, width: int) -> str:
    """Return stage, counts and time left; on a narrow terminal the stage is cut."""
    parts = [_counts(step, "/"), _time_left(task)]
    figures = "".join(f" · {part}" for part in parts if part)
    room = max(1, width - cell_len(figures) - 2)
    stage = step.stage
    if cell_len(stage) > room:
        stage = f"{set_cell_size(stage, room - 1).rstrip()}…"
    return f"{stage}{figures}"


def _log_line(step: ProgressUpdate, task: Task) -> str:
    """Return the stage, how much of it is done and the time left as a line of a log."""
    figures = ", ".join(filter(None, [_counts(step, " of "), _time_left(task)]))
    return f"lsrdecomp: {step.stage}: {figures}" if figures else f"lsrdecomp: {step.stage}"


def _counts(step: ProgressUpdate, separator: str) -> str:
    """Return "3 of 24 layers"; nothing where the number is not known."""
    if not step.total:
        return ""
    return f"{step.done:,}{separator}{step.total:,} {step.unit}".rstrip()


def _time_left(task: Task) -> str:
    """Return "about 3 min left"; nothing while that cannot be told."""
    seconds = task.time_remaining
    if not seconds:
        return ""
    if seconds < 90.0:
        return f"about {seconds:.0f} s left"
    return f"about {seconds / 60.0:.0f} min left"
