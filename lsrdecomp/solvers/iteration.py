"""The one loop of all solvers: it counts steps, tells callbacks, and stops at a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lsrdecomp.solvers.solver import Event, Solution, Solver, Sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.target import Target

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class IterationStep(Generic[StateT]):
    """The state that one step of an iteration has reached, and the figures that describe it."""

    state: StateT
    relative_error: float | None  # None: the error was not computed, so nothing is recorded
    condition: float = 1.0
    objective: float | None = None
    converged: bool = False  # further steps would change nothing that matters


class SolveProgress:
    """The records of one solve so far, the callback that gets them, and the limit on them.

    It is handed down to every loop of a solve, and from one solver to the next, so that records are
    numbered through.
    """

    def __init__(
        self, on_sweep: Callable[[Sweep], Any] | None = None, max_sweeps: float = math.inf
    ) -> None:
        self.max_sweeps = max_sweeps
        self._on_sweep = on_sweep
        self._sweeps: list[Sweep] = []
        self._next_event = Event.start

    @property
    def sweeps(self) -> tuple[Sweep, ...]:
        """All records so far."""
        return tuple(self._sweeps)

    @property
    def exhausted(self) -> bool:
        """Whether the solve has used all the sweeps that it may take."""
        return len(self._sweeps) >= self.max_sweeps

    def mark(self, event: Event) -> None:
        """Say what the next record begins; the first, and a change of solver, stay as they are."""
        if self._sweeps and self._next_event is not Event.hand_over:
            self._next_event = event

    def record(
        self, relative_error: float, condition: float = 1.0, objective: float | None = None
    ) -> None:
        """Add a record and tell the callback."""
        index = len(self._sweeps) + 1
        sweep = Sweep(index, relative_error, condition, self._next_event, objective)
        self._next_event = Event.step
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
        """Solve the same problem by another solver, its records appended to those so far.

        ``event`` is what the other solver's first record begins.
        """
        if self._sweeps:
            self.mark(event)
        solution = solver.solve(target, shape, rank=rank, atol=atol, on_sweep=self._adopt)
        has_all_sweeps = solution.sweeps == self.sweeps
        return solution if has_all_sweeps else replace(solution, sweeps=self.sweeps)

    def _adopt(self, sweep: Sweep) -> None:
        if self._next_event is Event.step:
            self._next_event = sweep.event
        self.record(sweep.relative_error, sweep.condition, sweep.objective)


def iterate(
    steps: Iterator[IterationStep[StateT]],
    initial: StateT,
    progress: SolveProgress | None = None,
    *,
    max_steps: float = math.inf,
) -> tuple[StateT, bool]:
    """Take steps until one has converged, none is left, or a limit is reached.

    The limits are ``max_steps`` of this loop and the sweeps that ``progress`` still allows.

    Returns
    -------
    state : StateT
        That of the last step; ``initial`` if no step was taken.
    ended : bool
        Whether the iteration ended by itself, not by a limit.
    """
    state = initial
    n_steps = 0
    while n_steps < max_steps and not (progress is not None and progress.exhausted):
        step = next(steps, None)
        if step is None:
            return state, True
        state = step.state
        n_steps += 1
        if progress is not None and step.relative_error is not None:
            progress.record(step.relative_error, step.condition, step.objective)
        if step.converged:
            return state, True
    return state, False
