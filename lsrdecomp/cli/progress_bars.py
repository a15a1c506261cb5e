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
from rich.progress import BarColumn, Progress, TextColumn

from lsrdecomp.lora.files.progress import ProgressUpdate

BAR_WIDTH = 12
"""Characters of the bar; by hand: the words beside it say more."""
WHOLE_RUN = ("", -1)
"""Stands in the place of a stage where bar and time are of the whole run."""
LATER = 0.1
"""Share of the time left by which the estimated end may move without being doubted; by hand."""


class TimeLeft:
    """The time left in words, as long as it falls: an estimate that rises tells nothing."""

    def __init__(self) -> None:
        self._end = math.inf

    def text(self, seconds: float | None, now: float) -> str:
        """Return "about 3 min left"; nothing while that cannot be told.

        >>> left = TimeLeft()
        >>> left.text(120.0, now=0.0), left.text(24.0, now=60.0), left.text(40.0, now=120.0)
        ('about 2 min left', 'about 24 s left', '')
        """
        if not seconds:
            return ""
        end = now + seconds
        is_later = end > self._end + LATER * seconds
        self._end = end
        if is_later:
            return ""
        if seconds < 90.0:
            return f"about {seconds:.0f} s left"
        return f"about {seconds / 60.0:.0f} min left"


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
    there is a line a minute, so that a log tells that the run lives, and for a run of several steps
    one at once; any other run of less than a minute by ``clock``, in seconds, writes none.

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
        is_begun = False
        left = TimeLeft()

        def show(step: ProgressUpdate) -> None:
            nonlocal measured, last_line, is_begun, left
            before = measured
            measured = _advance(bars, step, measured)
            if measured != before:
                left = TimeLeft()
            is_first_of_several = not is_begun and step.stage.startswith("step ")
            is_begun = True
            is_due = is_first_of_several or clock() - last_line >= log_seconds
            if not is_terminal and not is_due:
                return
            last_line = clock()
            time_left = left.text(task.time_remaining, last_line)
            if is_terminal:
                text = _text_beside_bar(step, time_left, console.width - BAR_WIDTH)
                bars.update(task.id, description=escape(text))
                bars.refresh()
            else:
                print(_log_line(step, time_left), file=sys.stderr, flush=True)

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


def _text_beside_bar(step: ProgressUpdate, time_left: str, width: int) -> str:
    """Return stage, counts and time left; on a narrow terminal the stage is cut."""
    parts = [_counts(step, "/"), time_left]
    figures = "".join(f" · {part}" for part in parts if part)
    room = max(1, width - cell_len(figures) - 2)
    stage = step.stage
    if cell_len(stage) > room:
        stage = f"{set_cell_size(stage, room - 1).rstrip()}…"
    return f"{stage}{figures}"


def _log_line(step: ProgressUpdate, time_left: str) -> str:
    """Return the stage, how much of it is done and the time left as a line of a log."""
    figures = ", ".join(filter(None, [_counts(step, " of "), time_left]))
    return f"lsrdecomp: {step.stage}: {figures}" if figures else f"lsrdecomp: {step.stage}"


def _counts(step: ProgressUpdate, separator: str) -> str:
    """Return "3 of 24 layers"; nothing where the number is not known."""
    if not step.total:
        return ""
    return f"{step.done:,}{separator}{step.total:,} {step.unit}".rstrip()
