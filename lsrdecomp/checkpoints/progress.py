"""Where a long run stands, as every function with an ``on_step`` tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """Where a run stands.

    Examples
    --------
    >>> step = ProgressUpdate("measuring", done=3, total=12, unit="layers")
    >>> f"{step.stage}: {step.done} of {step.total} {step.unit}"
    'measuring: 3 of 12 layers'
    """

    stage: str  # in a few words
    done: int
    total: int  # 0: not known
    unit: str = ""  # what is counted


OnStep = Callable[[ProgressUpdate], Any]


class Counter:
    """Calls ``on_step`` as the parts of a stage are done; silent without it."""

    def __init__(self, on_step: OnStep | None, stage: str, total: int, unit: str) -> None:
        self._on_step, self.stage, self._total, self._unit = on_step, stage, total, unit
        self._done = 0
        self.add(0)

    def add(self, count: int = 1) -> None:
        """So many more are done."""
        self._done += count
        if self._on_step is not None:
            self._on_step(ProgressUpdate(self.stage, self._done, self._total, self._unit))
