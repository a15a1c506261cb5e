"""Where a long run stands, as every function with an ``on_step`` tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """A message to ``on_step``: which stage a run is in, and how much of that is done.

    Attributes
    ----------
    stage : str
        In a few words.
    done : int
    total : int
        0 if not known.
    unit : str
        What is counted.

    Examples
    --------
    >>> update = ProgressUpdate("measuring", done=3, total=12, unit="layers")
    >>> f"{update.stage}: {update.done} of {update.total} {update.unit}"
    'measuring: 3 of 12 layers'
    """

    stage: str
    done: int
    total: int
    unit: str = ""


OnStep = Callable[[ProgressUpdate], Any]


class Counter:
    """Calls ``on_step`` as the parts of a stage are done; silent without it."""

    def __init__(self, on_step: OnStep | None, stage: str, total: int, unit: str) -> None:
        self.stage = stage
        self._on_step = on_step
        self._total = total
        self._unit = unit
        self._done = 0
        self.add(0)

    def add(self, count: int = 1) -> None:
        """Count so many more as done."""
        self._done += count
        if self._on_step is not None:
            self._on_step(ProgressUpdate(self.stage, self._done, self._total, self._unit))
