"""What an iteration has done so far, told to a callback, and how much it may still do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lsrdecomp.solvers.base import Sweep


class Journal:
    """Counts sweeps and Newton steps of one solve; handed down to every loop of it."""

    def __init__(self, limit: int, on_sweep: Callable[[Sweep], Any] | None = None) -> None:
        self.sweeps: list[Sweep] = []
        self.limit = limit
        self._on_sweep = on_sweep

    @property
    def exhausted(self) -> bool:
        return len(self.sweeps) >= self.limit

    def note(self, relative_error: float, condition: float) -> None:
        sweep = Sweep(len(self.sweeps) + 1, relative_error, condition)
        self.sweeps.append(sweep)
        if self._on_sweep is not None:
            self._on_sweep(sweep)
