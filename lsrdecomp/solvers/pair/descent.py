"""The descent of joint least squares: sweeps, now and then an extrapolated step, until nothing more is gained."""

from __future__ import annotations

from collections.abc import Iterator

from lsrdecomp.arrays import Array, namespace
from lsrdecomp.solvers.pair.problem import PairProblem, PairState
from lsrdecomp.solvers.progress import Step, iterate

LENGTHEN = 2.0
"""Growth of the extrapolated step after each success."""

EVERY = 2
"""Sweeps between extrapolated steps, each a third of a sweep: more of them cost what they save."""


def steps(problem: PairProblem, state: PairState, tolerance: float, least: float = 0.0) -> Iterator[Step[PairState]]:
    """Sweeps from ``state``; settled when one lowers the error of no problem by more than ``tolerance`` of it.

    A problem whose squared error falls by no more than ``least`` counts as settled too.
    """
    xp, index = namespace(state.error), 0
    length = xp.ones_like(state.error)
    while True:
        # Descent 1: every block of the out side, then of the in side, each at its own minimum.
        before, state = state, problem.sweep(state)
        # Descent 2: now and then one step farther the way the sweep went, kept where the error falls. With a ridge the
        # error is not what is minimised.
        if problem.ridge == 0.0 and index % EVERY == 1:
            state, length = extrapolated(problem, before, state, length)
        # Descent 3: enough when the second sweep or a later one gained little everywhere.
        little = before.error - state.error <= tolerance * before.error
        if least > 0.0:
            little = xp.logical_or(little, before.error**2 - state.error**2 <= least)
        yield Step(state, None, settled=index > 0 and bool(xp.all(little)))
        index += 1


def descend(
    problem: PairProblem, state: PairState, sweeps: int, tolerance: float = 1e-4, least: float = 0.0
) -> PairState:
    """Where at most so many `steps` come to."""
    return iterate(steps(problem, state, tolerance, least), state, most=sweeps)[0]


def extrapolated(problem: PairProblem, before: PairState, after: PairState, length: Array) -> tuple[PairState, Array]:
    """One more step in the direction of the last sweep, kept where the error falls; longer next time if it did [1]_.

    .. [1] R. Bro, Multi-way analysis in the food industry, 1998, section 4.4, line search in alternating least squares.
    """
    xp = namespace(length)
    out, into = (
        [new + length[:, None, None] * (new - old) for old, new in zip(*side, strict=True)]
        for side in zip(before.pair, after.pair, strict=True)
    )
    trial = problem.state((out, into))
    better = trial.error < after.error
    grown = xp.where(better, LENGTHEN * length, xp.maximum(length / LENGTHEN**3, xp.ones_like(length)))
    return PairState.chosen(better, trial, after), grown
