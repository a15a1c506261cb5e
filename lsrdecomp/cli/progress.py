"""How far a verb is and how long it will take: a bar on a terminal, a line a minute elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 60.0
"""Seconds between two lines where nobody watches."""


class Step(Protocol):
    """Where a run stands: a stage in a few words, how much of it is done."""

    @property
    def stage(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def unit(self) -> str: ...


@contextmanager
def follow(*, quiet: bool = False) -> Iterator[Callable[[Step], None]]:
    """Yields the callback that shows steps on stderr.

    On a terminal each stage has a bar with counts and the time left. Elsewhere there is a line a minute, so that a log
    tells that the run lives; a run of less than a minute writes none.
    """
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _bars() as show:
            yield show
    else:
        yield _Lines(time.monotonic).show


@contextmanager
def _bars() -> Iterator[Callable[[Step], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, tuple[Step, object]] = {}

        def show(step: Step) -> None:
            known = tasks.get("now")
            if known is None or known[0].stage != step.stage or known[0].total != step.total:
                if known is not None:
                    bars.remove_task(known[1])  # type: ignore[arg-type]
                tasks["now"] = known = (step, bars.add_task(step.stage, total=step.total, unit=step.unit))
            bars.update(known[1], completed=step.done)  # type: ignore[arg-type]

        yield show


class _Lines:
    """A line when a minute has gone by since the last one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._last = clock, clock()
        self._stage, self._begun = "", self._last

    def show(self, step: Step) -> None:
        now = self._clock()
        if step.stage != self._stage or step.done == 0:
            self._stage, self._begun = step.stage, now
        if now - self._last >= EVERY:
            self._last = now
            left = time_left(step.done, step.total, now - self._begun)
            counted = f"{step.done:,} of {step.total:,} {step.unit}".rstrip()
            print(f"lsrdecomp: {step.stage}: {counted}{left}", file=sys.stderr)


def time_left(done: int, total: int, seconds: float) -> str:
    """ ", about 3 min left" for so much done in so many seconds; nothing while that cannot be told."""
    if not 0 < done < total or seconds <= 0.0:
        return ""
    left = seconds * (total - done) / done
    return f", about {left:.0f} s left" if left < 90.0 else f", about {left / 60.0:.0f} min left"
