"""The descent of joint least squares: sweeps and extrapolated steps until nothing is gained."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, namespace
from lsrdecomp.solvers.iteration import IterationStep
from lsrdecomp.solvers.pair.problem import PairProblem, PairState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.solvers.batched_terms import Stacks


def steps(
    problem: PairProblem, state: PairState, tolerance: float, min_square_gain: float = 0.0
) -> Iterator[IterationStep[PairState]]:
    """Sweep from ``state`` until every problem has converged.

    A problem has converged when a sweep lowers its error by no more than ``tolerance`` of it. A
    problem whose squared error falls by no more than ``min_square_gain`` has converged too.
    """
    xp = namespace(state.error)
    length = xp.ones_like(state.error)
    # Sweeps between extrapolated steps, each of which costs a third of a sweep: by hand.
    interval = 2
    index = 0
    converged = False
    while not converged:
        # Descent 1: every block of the output side, then of the input side, each at its own
        # minimum.
        before = state
        state = problem.sweep(before)
        # Descent 2: now and then one step farther in the direction of the sweep, kept where the
        # error falls.
        if index % interval == interval - 1:
            state, length = extrapolated(problem, before, state, length)
        # Descent 3: the end, when the second sweep or a later one gained little everywhere.
        gained_little = before.error - state.error <= tolerance * before.error
        if min_square_gain > 0.0:
            square_gain = before.error**2 - state.error**2
            gained_little = xp.logical_or(gained_little, square_gain <= min_square_gain)
        converged = index > 0 and bool(xp.all(gained_little))
        yield IterationStep(state, None, converged=converged)
        index += 1


def descend(
    problem: PairProblem,
    state: PairState,
    max_sweeps: int,
    tolerance: float,
    min_square_gain: float = 0.0,
) -> PairState:
    """Return the state after at most ``steps`` steps."""
    for step in islice(steps(problem, state, tolerance, min_square_gain), max_sweeps):
        state = step.state
    return state


def extrapolated(
    problem: PairProblem, before: PairState, after: PairState, length: Array
) -> tuple[PairState, Array]:
    """Take one more step in the direction of the last sweep, kept where the error falls.

    The second value is the length of the next such step, which grows after a success and shrinks
    after a failure, but never below that of the sweep itself: the line search of [1]_, its two
    factors set by hand.

    .. [1] R. Bro, Multi-way analysis in the food industry, 1998, section 4.4, line search in
           alternating least squares.
    """
    xp = namespace(length)
    sides: list[Stacks] = []
    for old_side, new_side in zip(before.pair, after.pair, strict=True):
        moved = []
        for old, new in zip(old_side, new_side, strict=True):
            moved.append(new + length[:, None, None] * (new - old))
        sides.append(moved)
    trial = problem.state((sides[0], sides[1]))
    is_better = trial.error < after.error
    shorter = xp.maximum(length / 8.0, xp.ones_like(length))
    next_length = xp.where(is_better, 2.0 * length, shorter)
    return PairState.select(is_better, trial, after), next_length
