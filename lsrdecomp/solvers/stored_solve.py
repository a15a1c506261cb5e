"""A solver's answer as it will be stored: the fewest terms, or bytes, within an error."""

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
from lsrdecomp.precision import LARGE_CONDITION, ErrorBudget, precision, unit_roundoff
from lsrdecomp.solvers.choice import with_start
from lsrdecomp.solvers.decomposition import Decomposition
from lsrdecomp.solvers.solver import ErrorKind, Event, Solution, Solver, Status

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.iteration import SolveProgress
    from lsrdecomp.targets.target import Target


PATIENCE = 3
"""Further numbers of terms that are tried without progress, or without fewer bytes. By hand on the
problems of ``tests/problems.py``, as are all shares of this file."""


@dataclass(frozen=True, slots=True)
class StorageProblem:
    """A matrix that is solved again and again, for other numbers of terms."""

    target: Target
    shape: KroneckerShape
    solver: Solver
    max_terms: int | None  # as it was requested
    progress: SolveProgress  # of all solves together

    @property
    def is_nested(self) -> bool:
        """Whether the best s terms are the first s of the best s + 1."""
        return self.shape.essential.order <= 2

    @property
    def last_rank(self) -> int:
        """The most terms worth a solve."""
        return self.shape.max_separation_rank if self.max_terms is None else self.max_terms

    def solve(
        self,
        *,
        rank: int | None = None,
        atol: float | None = None,
        init: SeparatedMatrix | None = None,
    ) -> Solution:
        """Solve for a number of terms, or for a tolerance with at most the requested terms.

        A solver that takes a start begins from the terms of ``init``.
        """
        max_terms = self.max_terms if rank is None else rank
        solver = self.solver if init is None else with_start(self.solver, None, init, self.shape)
        return self.progress.solve(
            solver, self.target, self.shape, rank=max_terms, atol=atol, event=Event.start
        )

    def measure(
        self, solution: Solution, storage: str | None, goal: float | None = None
    ) -> Decomposition:
        """Return the record of a solution as it is stored: see the function of this name."""
        return measure(self.target, solution, storage, goal)


def measure(
    target: Target,
    solution: Solution,
    storage: str | None,
    goal: float | None = None,
) -> Decomposition:
    """Round a solution to ``storage``, measure its error after rounding, and return the record.

    With ``storage`` None nothing is rounded. The status is judged by the measured error: the
    solver's own verdict on its tolerance or storage type counts only where that is above ``goal``.
    """
    norm = target.norm
    computed = solution.approximation
    stored = computed if storage is None else as_stored(computed, storage)
    if stored is computed and solution.relative_error is not None:
        error = solution.relative_error * norm  # measured already, and nothing rounded since
    else:
        error = target.residual_norm(stored)
    return Decomposition(
        approximation=stored,
        relative_error=error / norm if norm > 0.0 else error,
        status=_status(solution.status, stored, error, goal),
        storage=storage or precision(dtype_name(stored.factors[0])).name,
        target_norm=norm,
        sweeps=solution.sweeps,
        optimality_gap=solution.optimality_gap,
        gap_kind=solution.gap_kind,
        note=solution.note,
    )


def _status(
    status: Status,
    stored: SeparatedMatrix,
    error: float,
    goal: float | None,
) -> Status:
    """Judge a solver's status by the measured error of the stored terms and, if missed, their γ."""
    if goal is None or status is Status.undetermined:
        return status
    if error <= goal * (1.0 + 1e-12):
        return Status.converged
    if status not in (Status.converged, Status.ill_conditioned, Status.rank_reached):
        return status
    # Only here, since γ costs three QR factorizations.
    is_ill_conditioned = stored.condition > LARGE_CONDITION
    return Status.ill_conditioned if is_ill_conditioned else Status.precision_exhausted


def fewest_terms(problem: StorageProblem, goal: float, storage: str | None) -> Decomposition:
    """Return the fewest terms found whose stored error is at most ``goal``.

    Else the nearest record, with the reason. Where the first answer is lost to rounding, one term
    more is tried, then less truncation; terms that are not nested are fitted anew for each number
    of them, since a sum that was grown term by term may cancel where another does not.
    """
    # Stored 1: as few terms as reach the goal before rounding; mostly they do after it too.
    first = problem.solve(atol=goal)
    best = problem.measure(first, storage, goal)
    if best.status.met:
        return best
    # Stored 2: where rounding took too much, other terms may bear it, unless it took far too much.
    rounding = _rounding_error(first, best)
    if rounding > 100.0 * goal:
        return best
    if problem.is_nested:
        return _with_less_truncation(problem, goal, storage, best)
    return _with_fresh_fits(problem, goal, storage, best)


def _rounding_error(solution: Solution, record: Decomposition) -> float:
    """Return ‖M̂ − stored M̂‖_F."""
    if record.approximation is solution.approximation:
        return 0.0
    return (solution.approximation - record.approximation).norm


def _with_less_truncation(
    problem: StorageProblem, goal: float, storage: str | None, best: Decomposition
) -> Decomposition:
    """Take one more term, then tighter tolerances, until truncation and rounding meet the goal."""
    if best.status is Status.rank_exhausted or best.separation_rank >= problem.last_rank:
        return best
    one_more = problem.solve(rank=best.separation_rank + 1)
    trial = problem.measure(one_more, storage, goal)
    allowed = goal
    for _ in range(8):
        if trial.status.met:
            return trial
        if trial.error > 0.999 * best.error:
            return best if best.error <= trial.error else trial
        best = trial
        allowed *= min(0.9, goal / trial.error)
        if allowed == 0.0 or best.separation_rank >= problem.last_rank:
            break
        solution = problem.solve(atol=allowed)
        if solution.approximation.separation_rank <= best.separation_rank:
            # Near the goal less truncation may mean the terms of before
            solution = problem.solve(rank=best.separation_rank + 1)
        trial = problem.measure(solution, storage, goal)
    return trial if trial.error <= best.error else best


def _with_fresh_fits(
    problem: StorageProblem, goal: float, storage: str | None, best: Decomposition
) -> Decomposition:
    """Fit each number of terms afresh, while the stored error falls."""
    n_without_progress = 0
    for rank in range(max(best.separation_rank, 1), problem.last_rank + 1):
        trial = problem.measure(problem.solve(rank=rank), storage, goal)
        if trial.status.met:
            return trial
        if trial.error < 0.7 * best.error:
            n_without_progress = 0
        else:
            n_without_progress += 1
        best = min(best, trial, key=lambda record: record.error)
        if n_without_progress == PATIENCE:
            break
    return best


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A solution and its smallest stored form, or the reason why there is none."""

    solution: Solution
    stored: StoredMatrix | None
    refusal: str = ""

    def is_smaller(self, other: _Candidate) -> bool:
        if self.stored is None:
            return False
        return other.stored is None or self.stored.bytes < other.stored.bytes


def fewest_bytes(problem: StorageProblem, budget: ErrorBudget, throw: bool) -> Decomposition:
    """Return the record with the fewest bytes whose certified error keeps the budget.

    Raises `ConvergenceError` with ``throw`` if none does; else returns the record in one type, the
    finest that was allowed, without ``stored``.
    """
    target = problem.target
    goal = budget.allowed(target.norm)
    formats = None if budget.storage is None else (budget.storage,)
    # Bytes 1: terms that leave room for rounding. Of nested ones one accurate solve serves; others
    # are few, then one more at a time.
    share = 0.25 if problem.is_nested else 0.8
    first = _candidate(target, problem.solve(atol=share * goal), goal, formats)
    is_rounding_in_the_way = first.stored is None and first.solution.status.met
    if problem.is_nested and is_rounding_in_the_way:
        accurate = problem.solve(atol=0.01 * goal)
        first = _candidate(target, accurate, goal, formats)
    best = first
    # Bytes 2: a sum in this very shape may be stored as it is.
    matrix = getattr(target, "matrix", None)
    if isinstance(matrix, SeparatedMatrix) and matrix.kronecker_shape == problem.shape:
        exact = Solution(matrix.truncate(problem.last_rank), Status.converged)
        candidate = _candidate(target, exact, goal, formats)
        if candidate.is_smaller(best):
            best = candidate
    # Bytes 3: terms that are not nested may be rounded more coarsely where they are nearer or more.
    refusal = first.refusal
    if not problem.is_nested:
        best, refusal = _among_more_terms(problem, first, best, goal, formats)
    if best.stored is not None:
        return _record(target, best.solution, best.stored, budget)
    record = problem.measure(best.solution, _closest_storage(budget), goal)
    if throw:
        raise ConvergenceError(refusal, record)
    return record


def _among_more_terms(
    problem: StorageProblem,
    first: _Candidate,
    best: _Candidate,
    goal: float,
    formats: tuple[str, ...] | None,
) -> tuple[_Candidate, str]:
    """Return the candidate of fewest bytes with the first number of terms or more.

    And the reason of the last one that was refused. Each number of terms is fitted from one fewer,
    until more of them cannot have fewer bytes.
    """
    refusal = first.refusal
    # A truncation this small leaves all of the budget to rounding: terms are fitted no further, and
    # more of them could not be rounded more coarsely.
    atol: float | None = 0.1 * goal
    init: SeparatedMatrix | None = first.solution.approximation
    rank = max(first.solution.approximation.separation_rank, 1)
    n_without_progress = 0
    while n_without_progress < PATIENCE and rank <= problem.last_rank:
        min_bytes = least_bytes(problem.shape, rank, formats or SMALL_FORMATS)
        if best.stored is not None and min_bytes >= best.stored.bytes:
            break
        solution = problem.solve(rank=rank, atol=atol, init=init)
        candidate = _candidate(problem.target, solution, goal, formats)
        if candidate.is_smaller(best):
            best = candidate
            n_without_progress = 0
        else:
            refusal = candidate.refusal or refusal
            n_without_progress += 1
        if atol is not None and solution.status.met:
            if best.stored is not None:
                break
            # Terms so near to the matrix that no type holds cancel: others, fitted anew, may not.
            atol = None
            init = None
        elif atol is not None:
            init = solution.approximation
        rank += 1
    return best, refusal


def _closest_storage(budget: ErrorBudget) -> str:
    """Return the type that comes nearest to a budget that is not kept."""
    return budget.storage or "float64"


def _candidate(
    target: Target, solution: Solution, goal: float, formats: tuple[str, ...] | None
) -> _Candidate:
    """Store a solution in the fewest bytes that keep the goal."""
    try:
        stored = smallest(target, solution.approximation, atol=goal, formats=formats)
    except BudgetError as error:
        return _Candidate(solution, None, str(error))
    return _Candidate(solution, stored)


def _record(
    target: Target, solution: Solution, stored: StoredMatrix, budget: ErrorBudget
) -> Decomposition:
    """Return the record of a stored matrix; its status says if computing with it loses too much."""
    norm = target.norm
    approximation = stored.approximation
    rounding = approximation.condition * unit_roundoff(budget.compute) * norm
    is_enough = rounding <= budget.allowed(norm) or math.isclose(norm, 0.0)
    return Decomposition(
        approximation=approximation,
        relative_error=stored.relative_error,
        status=Status.converged if is_enough else Status.ill_conditioned,
        storage=budget.storage or "mixed",
        target_norm=norm,
        error_kind=ErrorKind.bounded,
        sweeps=solution.sweeps,
        optimality_gap=solution.optimality_gap,
        gap_kind=solution.gap_kind,
        stored=stored,
    )
