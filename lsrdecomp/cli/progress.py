"""How far a verb is and how long it will take: a bar on a terminal, a line a minute elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lsrdecomp.compression.progress import Step

EVERY = 60.0
"""Seconds between two lines where nobody watches."""


@contextmanager
def follow(*, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[Step], None]]:
    """Yields the callback that shows steps on stderr.

    On a terminal each stage has a bar with counts and the time left. Elsewhere there is a line a minute, so that a log
    tells that the run lives; a run of less than a minute by ``clock``, in seconds, writes none.
    """
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _bars() as show:
            yield show
    else:
        yield _Lines(clock).show


@contextmanager
def _bars() -> Iterator[Callable[[Step], None]]:
    """One bar at a time: the present stage, how much of it is done, what it does now, the time left."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        now: tuple[TaskID, str, int] | None = None

        def show(step: Step) -> None:
            nonlocal now
            if now is None or now[1:] != (step.stage, step.total):
                if now is not None:
                    bars.remove_task(now[0])
                now = bars.add_task(step.stage, total=step.total or None, count=""), step.stage, step.total
            bars.update(now[0], completed=step.done, count=_counts(step, "/"))

        yield show


class _Lines:
    """A line when a minute has gone by since the last one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._last = clock, clock()
        self._stage, self._begun, self._known = ("", 0), self._last, 0

    def show(self, step: Step) -> None:
        now = self._clock()
        if (step.stage, step.total) != self._stage or step.done == 0:  # what comes before the first count is no measure
            self._stage, self._begun, self._known = (step.stage, step.total), now, step.done
        if now - self._last >= EVERY:
            self._last = now
            left = time_left(step.done - self._known, step.total - self._known, now - self._begun)
            counts = _counts(step, " of ")
            print(f"lsrdecomp: {step.stage}{counts and ': ' + counts}{left}", file=sys.stderr, flush=True)


def _counts(step: Step, of: str) -> str:
    """ "3 of 24 layers", and what is done now; nothing where neither is known."""
    counts = f"{step.done:,}{of}{step.total:,} {step.unit}".rstrip() if step.total else ""
    return ", ".join(words for words in (counts, step.part) if words)


def time_left(done: int, total: int, seconds: float) -> str:
    """ ", about 3 min left" for so much done in so many seconds; nothing while that cannot be told."""
    if not 0 < done < total or seconds <= 0.0:
        return ""
    left = seconds * (total - done) / done
    return f", about {left:.0f} s left" if left < 90.0 else f", about {left / 60.0:.0f} min left"
