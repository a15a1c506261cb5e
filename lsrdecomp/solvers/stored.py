"""A solver's answer as it will be stored: the fewest terms of a number type, or the fewest bytes, within an error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lsrdecomp.arrays import dtype_name
from lsrdecomp.errors import BudgetError, ConvergenceError
from lsrdecomp.formats.mixed_precision import (
    SMALL_FORMATS,
    StoredMatrix,
    as_stored,
    least_bytes,
    smallest,
)
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import ErrorBudget, precision, unit_roundoff
from lsrdecomp.solvers.base import ErrorKind, Event, Solution, Solver, Status
from lsrdecomp.solvers.decomposition import Decomposition

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.progress import SolveProgress
    from lsrdecomp.targets.base import Target

CANCELLING = 10.0
"""A γ above this is what keeps a rounded sum from its tolerance; below it the type itself is too
coarse."""
HOPELESS = 100.0
"""Rounding that exceeds the tolerance by more than this is not to be mended by other terms of the
same type."""
PATIENCE = 3
"""Further numbers of terms that are tried without the stored error, or the bytes, falling."""
FALLS = 0.7
"""By what factor the stored error of one more term must fall to count as progress."""
TRUNCATION_SHARE = {2: 0.25, 3: 0.8}
"""Share of a budget that the first candidates may use before rounding. Two factors: orthogonal
terms are nested, so one accurate solve serves. More factors: few terms, then one more at a time."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be solved, again and again with other numbers of terms."""

    target: Target
    shape: KroneckerShape
    solver: Solver
    most: int | None  # terms
    progress: SolveProgress  # of all solves together

    @property
    def nested(self) -> bool:
        """Whether the best s terms are the first s of the best s + 1."""
        return self.shape.essential.order <= 2

    @property
    def last(self) -> int:
        """The most terms worth asking for."""
        return self.shape.max_separation_rank if self.most is None else self.most

    def solve(self, *, rank: int | None = None, atol: float | None = None) -> Solution:
        most = self.most if rank is None else rank
        return self.progress.solve(
            self.solver, self.target, self.shape, rank=most, atol=atol, event=Event.start
        )


def measured(
    target: Target, solution: Solution, storage: str | None, goal: float | None
) -> Decomposition:
    """The record of a solution rounded to ``storage`` (None: as computed), its error measured after rounding.

    The status is judged by that error: what the solver thought of its own tolerance or storage type
    counts only where the error is above ``goal``.
    """
    computed = solution.approximation
    stored = computed if storage is None else as_stored(computed, storage)
    norm = target.norm
    if (
        stored is computed and solution.relative_error is not None
    ):  # measured already, and nothing rounded since
        error = solution.relative_error * norm
    else:
        error = target.residual_norm(stored)
    status = solution.status
    if goal is not None and error <= goal * (1.0 + 1e-12):
        status = Status.converged
    elif goal is not None and status in (
        Status.converged,
        Status.ill_conditioned,
        Status.rank_reached,
    ):
        status = (
            Status.ill_conditioned if stored.condition > CANCELLING else Status.precision_exhausted
        )
    return Decomposition(
        approximation=stored,
        relative_error=error / norm if norm > 0.0 else error,
        status=status,
        storage=storage or precision(dtype_name(stored.factors[0])).name,
        target_norm=norm,
        sweeps=solution.sweeps,
        optimality_gap=solution.optimality_gap,
        gap_kind=solution.gap_kind,
    )


def within(problem: Problem, goal: float, storage: str | None) -> Decomposition:
    """The fewest terms found whose stored error is at most ``goal``; else the nearest record, with the reason.

    Where the first answer is lost to rounding, one term more is tried, then less truncation; terms
    that are not nested are fitted anew for each number of them, since a sum that was grown term by
    term may cancel where another does not.
    """
    # Stored 1: as few terms as reach the goal before rounding; mostly they do after it too.
    first = problem.solve(atol=goal)
    best = measured(problem.target, first, storage, goal)
    if best.status.met:
        return best
    # Stored 2: where rounding took too much, other terms may bear it, unless it took far too much.
    lost = _lost_to_rounding(first, best)
    if lost > HOPELESS * goal:
        return best
    return (
        _less_truncation(problem, goal, storage, best)
        if problem.nested
        else _anew(problem, goal, storage, best)
    )


def _lost_to_rounding(solution: Solution, record: Decomposition) -> float:
    """‖M̂ − stored M̂‖_F."""
    if record.approximation is solution.approximation:
        return 0.0
    return (solution.approximation - record.approximation).norm


def _less_truncation(
    problem: Problem, goal: float, storage: str | None, best: Decomposition
) -> Decomposition:
    """One more term, then tighter and tighter tolerances, until truncation and rounding together meet the goal."""
    if best.status is Status.rank_exhausted or best.separation_rank >= problem.last:
        return best
    more = problem.solve(rank=best.separation_rank + 1)
    tried = measured(problem.target, more, storage, goal)
    allowed = goal
    for _ in range(8):
        if tried.status.met:
            return tried
        if tried.error > 0.999 * best.error:
            return best if best.error <= tried.error else tried
        best, allowed = tried, allowed * min(0.9, goal / tried.error)
        if allowed == 0.0 or best.separation_rank >= problem.last:
            break
        tried = measured(problem.target, problem.solve(atol=allowed), storage, goal)
    return tried if tried.error <= best.error else best


def _anew(problem: Problem, goal: float, storage: str | None, best: Decomposition) -> Decomposition:
    """A fresh fit of each number of terms in turn, while the stored error falls."""
    idle = 0
    for rank in range(max(best.separation_rank, 1), problem.last + 1):
        tried = measured(problem.target, problem.solve(rank=rank), storage, goal)
        if tried.status.met:
            return tried
        idle = 0 if tried.error < FALLS * best.error else idle + 1
        best = min(best, tried, key=lambda record: record.error)
        if idle == PATIENCE:
            break
    return best


def fewest_bytes(problem: Problem, budget: ErrorBudget, throw: bool) -> Decomposition:
    """The record with the fewest bytes whose certified error keeps the budget.

    Raises `ConvergenceError` with ``throw`` if none does; else the record in float32, without
    ``stored``.
    """
    target, goal = problem.target, budget.allowed(problem.target.norm)
    formats = SMALL_FORMATS if budget.storage is None else (budget.storage,)
    # Bytes 1: terms that leave room for rounding.
    first = problem.solve(atol=TRUNCATION_SHARE[2 if problem.nested else 3] * goal)
    solution, (best, refusal) = first, _stored(target, first.approximation, goal, formats)
    # Bytes 2: a sum in this very shape may be stored as it is.
    separated = getattr(target, "matrix", None)
    if isinstance(separated, SeparatedMatrix) and separated.kronecker_shape == problem.shape:
        exact = Solution(separated.truncate(problem.last), Status.converged)
        own, _ = _stored(target, exact.approximation, goal, formats)
        if own is not None and (best is None or own.bytes < best.bytes):
            best, solution = own, exact
    # Bytes 3: fresh fits of more terms, which may be rounded more coarsely, until they cannot have
    # fewer bytes.
    if not problem.nested:
        idle, rank = 0, max(first.approximation.separation_rank, 1)
        while idle < PATIENCE and rank <= problem.last:
            if best is not None and least_bytes(problem.shape, rank, formats) >= best.bytes:
                break
            tried = problem.solve(rank=rank)
            stored, words = _stored(target, tried.approximation, goal, formats)
            if stored is not None and (best is None or stored.bytes < best.bytes):
                best, solution, idle = stored, tried, 0
            else:
                refusal, idle = words or refusal, idle + 1
            rank += 1
    if best is not None:
        return _record(target, solution, best, budget)
    record = measured(target, solution, "float32", goal)
    if throw:
        raise ConvergenceError(refusal, record)
    return record


def _stored(
    target: Target, approximation: SeparatedMatrix, goal: float, formats: tuple[str, ...]
) -> tuple[StoredMatrix | None, str]:
    """The fewest bytes that keep the goal, or why there are none."""
    try:
        return smallest(target, approximation, atol=goal, formats=formats), ""
    except BudgetError as error:
        return None, str(error)


def _record(
    target: Target, solution: Solution, stored: StoredMatrix, budget: ErrorBudget
) -> Decomposition:
    approximation = stored.approximation
    computed = approximation.condition * unit_roundoff(budget.compute) * target.norm
    enough = computed <= budget.allowed(target.norm) or math.isclose(target.norm, 0.0)
    return Decomposition(
        approximation=approximation,
        relative_error=stored.relative_error,
        status=Status.converged if enough else Status.ill_conditioned,
        storage=budget.storage or "mixed",
        target_norm=target.norm,
        error_kind=ErrorKind.bounded,
        sweeps=solution.sweeps,
        optimality_gap=solution.optimality_gap,
        gap_kind=solution.gap_kind,
        stored=stored,
    )
