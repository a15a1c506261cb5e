"""The one loop of all solvers: who counts steps, tells callbacks, and ends an iteration at its limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lsrdecomp.solvers.base import Event, Solution, Solver, Sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.base import Target

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class Step(Generic[StateT]):
    """Where one step of an iteration has come to."""

    state: StateT
    relative_error: float | None  # None: not looked at, so nothing is recorded
    condition: float = 1.0
    objective: float | None = None
    settled: bool = False  # further steps would change nothing that matters


class SolveProgress:
    """What one solve has done so far, told to a callback, and how much it may still do.

    Handed down to every loop of a solve, and from one solver to the next, so that records are
    numbered through.
    """

    def __init__(
        self, on_sweep: Callable[[Sweep], Any] | None = None, limit: float = math.inf
    ) -> None:
        self.limit = limit
        self._on_sweep = on_sweep
        self._sweeps: list[Sweep] = []
        self._event = Event.start

    @property
    def sweeps(self) -> tuple[Sweep, ...]:
        return tuple(self._sweeps)

    @property
    def exhausted(self) -> bool:
        return len(self._sweeps) >= self.limit

    def mark(self, event: Event) -> None:
        """The next record begins something; of two marks before it a change of solver is the one that is kept."""
        if self._event is not Event.hand_over:
            self._event = event

    def note(
        self, relative_error: float, condition: float = 1.0, objective: float | None = None
    ) -> None:
        sweep = Sweep(len(self._sweeps) + 1, relative_error, condition, self._event, objective)
        self._event = Event.step
        self._sweeps.append(sweep)
        if self._on_sweep is not None:
            self._on_sweep(sweep)

    def solve(
        self,
        solver: Solver,
        target: Target,
        shape: KroneckerShape,
        *,
        rank: int | None,
        atol: float | None,
        event: Event = Event.hand_over,
    ) -> Solution:
        """Another solver's solution of the same problem, its records behind those so far; ``event`` is its first."""
        if self._sweeps:
            self.mark(event)
        solution = solver.solve(target, shape, rank=rank, atol=atol, on_sweep=self._adopt)
        return replace(solution, sweeps=self.sweeps)

    def _adopt(self, sweep: Sweep) -> None:
        if self._event is Event.step:
            self._event = sweep.event
        self.note(sweep.relative_error, sweep.condition, sweep.objective)


def iterate(
    steps: Iterator[Step[StateT]],
    begun: StateT,
    progress: SolveProgress | None = None,
    *,
    most: float = math.inf,
) -> tuple[StateT, bool]:
    """Take steps until one is settled, none is left, ``most`` are taken, or the solve has none left to take.

    Returns
    -------
    (state, bool)
        Of the last step, ``begun`` if there is none; and whether it ended by itself, not by a
        limit.
    """
    state, taken = begun, 0
    while taken < most and not (progress is not None and progress.exhausted):
        step = next(steps, None)
        if step is None:
            return state, True
        state, taken = step.state, taken + 1
        if progress is not None and step.relative_error is not None:
            progress.note(step.relative_error, step.condition, step.objective)
        if step.settled:
            return state, True
    return state, False
