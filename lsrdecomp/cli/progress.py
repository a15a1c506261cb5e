"""How far a verb is and how long it will take: a bar on a terminal, a line a minute elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from lsrdecomp.checkpoints.progress import Step

EVERY = 60.0
"""Seconds between two lines where nobody watches."""
BAR = 12


@contextmanager
def follow(*, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[Step], None]]:
    """Yields the callback that shows steps on stderr.

    On a terminal there is one line with a bar, counts and the time left, which is gone when the block ends. Elsewhere
    there is a line a minute, so that a log tells that the run lives; a run of less than a minute by ``clock``, in
    seconds, writes none.
    """
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _bar(clock) as show:
            yield show
    else:
        yield _Lines(clock).show


@contextmanager
def _bar(clock: Callable[[], float]) -> Iterator[Callable[[Step], None]]:
    """One line: a bar, the stage, how much of it is done, the time left. On a narrow terminal the stage is cut."""
    console, pace = Console(stderr=True), _Pace(clock)
    with Progress(BarColumn(BAR), TextColumn("{task.description}"), console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def show(step: Step) -> None:
            left = pace.left(step)
            rest = "".join(f" · {words}" for words in (_counts(step, "/"), left) if words)
            room = max(1, console.width - BAR - cell_len(rest) - 2)
            stage = step.stage
            if cell_len(stage) > room:
                stage = f"{set_cell_size(stage, room - 1).rstrip()}…"
            bars.update(task, description=escape(f"{stage}{rest}"), total=step.total or None, completed=step.done)
            bars.refresh()

        yield show


class _Pace:
    """How long a stage has run, and how much of it was done when it began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stage, self._begun, self._done_at_start = ("", 0), clock(), 0

    def left(self, step: Step) -> str:
        """What is left of the stage, in words; what comes before the first count is no measure."""
        now = self._clock()
        if (step.stage, step.total) != self._stage or step.done == 0:
            self._stage, self._begun, self._done_at_start = (step.stage, step.total), now, step.done
        return time_left(step.done - self._done_at_start, step.total - self._done_at_start, now - self._begun)


class _Lines:
    """A line when a minute has gone by since the last one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._last, self._pace = clock, clock(), _Pace(clock)

    def show(self, step: Step) -> None:
        now, left = self._clock(), self._pace.left(step)
        if now - self._last >= EVERY:
            self._last = now
            counts = _counts(step, " of ")
            words = f"{step.stage}{counts and ': ' + counts}{left and ', ' + left}"
            print(f"lsrdecomp: {words}", file=sys.stderr, flush=True)


def _counts(step: Step, of: str) -> str:
    """ "3 of 24 layers"; nothing where the number is not known."""
    return f"{step.done:,}{of}{step.total:,} {step.unit}".rstrip() if step.total else ""


def time_left(done: int, total: int, seconds: float) -> str:
    """ "about 3 min left" for so much done in so many seconds; nothing while that cannot be told."""
    if not 0 < done < total or seconds <= 0.0:
        return ""
    left = seconds * (total - done) / done
    return f"about {left:.0f} s left" if left < 90.0 else f"about {left / 60.0:.0f} min left"
