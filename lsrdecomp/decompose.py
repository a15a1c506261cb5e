"""decompose: one matrix in, a separated matrix of the asked rank or error out, with its error measured as stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from lsrdecomp.errors import BudgetError, ConvergenceError, ShapeError
from lsrdecomp.formats.mixed_precision import StoredMatrix, smallest
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import ErrorBudget, precision, unit_roundoff
from lsrdecomp.shape_search import ShapeSearch, best_shape
from lsrdecomp.solvers.base import Decomposition, ErrorKind, Event, Solution, Solver, Status, Sweep
from lsrdecomp.solvers.cp.als import ALS
from lsrdecomp.solvers.progress import SolveProgress
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.solvers.svd.golub_kahan import BlockGolubKahan
from lsrdecomp.targets.base import Target
from lsrdecomp.targets.operator import Separated, as_target

DENSE_SVD_LIMIT = 64
"""Up to this many rows or columns of the rearrangement the full SVD is the fastest solver."""


def decompose(
    matrix: Any,
    shape: KroneckerShape | Literal["balanced", "search"] = "balanced",
    *,
    rank: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    budget: ErrorBudget | None = None,
    storage: str | None = None,
    solver: Solver | None = None,
    throw: bool = False,
    on_sweep: Callable[[Sweep], Any] | None = None,
) -> Decomposition:
    """Approximate a matrix by a short sum of Kronecker products.

    Parameters
    ----------
    matrix : array_like, shape (m, n), or Target
        Real or complex, of any array library; it stays where it is.
    shape : KroneckerShape, "balanced" or "search"
        Sizes of the factors; "balanced" splits both sides into two factors as evenly as their divisors allow; "search"
        takes the two-factor shape, low rank and dense among them, with the fewest parameters at the tolerance, or with
        a budget the fewest bytes of the best few (`best_shape`, which costs tens of solves).
    rank : int, optional
        Number of terms s, or, beside a tolerance, the most that may be used. More than the shape can need is clipped.
    rtol, atol : float, optional
        Allowed ‖M − M̂‖_F, relative to ‖M‖_F or absolute; the fewest terms that keep it *as stored* are used.
    budget : ErrorBudget, optional
        Instead of a tolerance: the fewest *bytes* whose stored error is certified to keep it, each factor of each term
        in its own number format; what is written is the record's ``stored``. See docs/error-budget.md.
    storage : str, optional
        Element type of the stored factors, ``"float32"``, ``"float16"``, ``"bfloat16"``, …; absent, the matrix's own.
    solver : Solver, optional
        Any solver value, see `lsrdecomp.solvers`; absent, one is chosen by order, size and kind of target.
    throw : bool
        Raise `ConvergenceError`, which holds the record, when the tolerance was not met.
    on_sweep : callable, optional
        Called with each `Sweep`, those of solvers that take over or solve again included.

    Returns
    -------
    Decomposition
        The approximation as stored, its measured error, condition γ and a status.

    Raises
    ------
    ShapeError, PrecisionError, BudgetError
        For sizes that do not tile, entries that are not finite, and contradictory or missing goals.

    Examples
    --------
    >>> import numpy as np
    >>> i = np.arange(64.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> result = decompose(hilbert, KroneckerShape(((8, 8), (8, 8))), rtol=1e-6)
    >>> result.separation_rank, result.relative_error < 1e-6
    (6, True)

    References
    ----------
    C. F. Van Loan and N. Pitsianis (1993), doi:10.1007/978-94-015-8196-7_17; G. Beylkin and M. J. Mohlenkamp (2005),
    doi:10.1137/040604959.
    """
    target = as_target(matrix)
    if budget is not None:
        _refuse_two_goals(rtol, atol, storage)
        atol = budget.allowed(target.norm)
    goal = _absolute_goal(target, rank, rtol, atol)
    if shape == "search":
        if goal is None:
            raise BudgetError("a search over shapes is for a tolerance: give rtol=, atol= or budget= as well")
        again = partial(decompose, target, rank=rank, storage=storage, solver=solver, on_sweep=on_sweep)
        if budget is None:
            return again(best_shape(target, atol=goal).best.shape, atol=goal, throw=throw)
        return _smallest_of(partial(again, budget=budget), best_shape(target, atol=goal), throw)
    if shape == "balanced":
        shape = KroneckerShape.balanced(target.shape)
    shape.check(target.shape)
    solver = solver if solver is not None else choose_solver(target, shape, storage)
    most = None if rank is None else min(rank, shape.max_separation_rank)
    if budget is not None:
        return _fewest_bytes(target, shape, solver, most, budget, throw, SolveProgress(on_sweep))
    progress = SolveProgress(on_sweep)  # of all solves together, if rounding asks for more than one
    solution = progress.solve(solver, target, shape, rank=most, atol=goal, event=Event.start)
    record = _measure(target, solution, storage, goal)
    if goal is not None and storage is not None:
        record = _pay_for_rounding(target, shape, solver, most, goal, storage, record, progress)
    if throw and not record.status.met:
        raise ConvergenceError(record.summary, record)
    return record


def choose_solver(target: Target, shape: KroneckerShape, storage: str | None = None) -> Solver:
    """The solver that `decompose` takes when none is given.

    Two factors: the full SVD while the smaller side of the rearrangement is at most `DENSE_SVD_LIMIT`, above that block
    Golub–Kahan, which never forms a low-rank target and turns to the Gram matrix where that is cheaper. Its error may
    exceed the optimum by a thousandth; the record states by how much. Any other number of factors: alternating least
    squares, with the penalty of the storage type.
    """
    if shape.order != 2:
        return ALS(storage=storage or "float32")
    return SVD() if min(shape.sizes) <= DENSE_SVD_LIMIT else BlockGolubKahan()


SHAPES_STORED = 3
"""Shapes of a search that are stored and weighed: bytes mostly follow parameters, which order them."""


def _smallest_of(run: Callable[..., Decomposition], found: ShapeSearch, throw: bool) -> Decomposition:
    """Of the shapes with the fewest parameters the record with the fewest bytes."""
    shapes = [choice.shape for choice in sorted(found.choices, key=lambda choice: choice.parameters)]
    records = [run(shape) for shape in shapes[:SHAPES_STORED]]
    kept = [record for record in records if record.stored is not None]
    return min(kept, key=lambda record: int(record.stored.bytes)) if kept else run(shapes[0], throw=throw)


def _absolute_goal(target: Target, rank: int | None, rtol: float | None, atol: float | None) -> float | None:
    if rank is None and rtol is None and atol is None:
        raise BudgetError("say what is wanted: rank=, rtol= or atol=")
    if rtol is not None and atol is not None:
        raise BudgetError(f"one goal has one meaning: give rtol ({rtol}) or atol ({atol}), not both")
    if rank is not None and (isinstance(rank, bool) or rank != int(rank) or rank < 1):
        raise ShapeError(f"a separation rank is a positive integer, got {rank}")
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise BudgetError(f"{name} must be finite and not negative, got {value}")
    return rtol * target.norm if rtol is not None else atol


def _measure(target: Target, solution: Solution, storage: str | None, goal: float | None) -> Decomposition:
    approximation: SeparatedMatrix = solution.approximation
    stored = approximation if storage is None else approximation.round_to(storage)
    norm = target.norm
    if storage is None and solution.relative_error is not None:  # measured already, and nothing rounded since
        error = solution.relative_error * norm
    else:
        error = target.residual_norm(stored)
    status = solution.status
    if goal is not None and error > goal * (1.0 + 1e-12) and status is Status.converged:
        status = Status.precision_exhausted
    return Decomposition(
        approximation=stored,
        relative_error=error / norm if norm > 0.0 else error,
        condition=stored.condition,
        status=status,
        storage=storage or precision(stored.dtype).name,
        norm=norm,
        sweeps=solution.sweeps,
        optimality_gap=solution.optimality_gap,
        gap_kind=solution.gap_kind,
    )


def _pay_for_rounding(
    target: Target,
    shape: KroneckerShape,
    solver: Solver,
    rank: int | None,
    goal: float,
    storage: str,
    record: Decomposition,
    progress: SolveProgress,
) -> Decomposition:
    """Tighten the truncation until truncation and rounding together meet the goal, if rounding alone can."""
    allowed = goal
    for _ in range(8):
        if record.status is not Status.precision_exhausted:
            break
        allowed *= min(0.9, goal / record.error)
        if allowed == 0.0:
            break
        solution = progress.solve(solver, target, shape, rank=rank, atol=allowed, event=Event.start)
        tried = _measure(target, solution, storage, goal)
        if tried.error <= goal:
            return tried
        if tried.error > 0.999 * record.error:
            return record if record.error <= tried.error else tried
        record = tried
    return record


TRUNCATION_SHARES = {2: (0.25,), 3: (0.8, 0.5, 0.25)}
"""Shares of the budget that candidates may use before rounding. Orthogonal terms are nested, so one solve serves; with
three and more factors every share is another solve, tried until one can be stored."""


def _fewest_bytes(
    target: Target,
    shape: KroneckerShape,
    solver: Solver,
    rank: int | None,
    budget: ErrorBudget,
    throw: bool,
    progress: SolveProgress,
) -> Decomposition:
    goal = budget.allowed(target.norm)
    refusal: BudgetError | None = None
    for share in TRUNCATION_SHARES[min(max(shape.order, 2), 3)]:
        solution = progress.solve(solver, target, shape, rank=rank, atol=share * goal, event=Event.start)
        try:
            stored = smallest(target, solution.approximation, atol=goal)
        except BudgetError as error:
            refusal = error
            continue
        return _record_of(target, solution, stored, budget)
    record = _measure(target, solution, "float32", goal)
    if throw:
        raise ConvergenceError(str(refusal), record)
    return record


def _record_of(target: Target, solution: Solution, stored: StoredMatrix, budget: ErrorBudget) -> Decomposition:
    approximation = stored.approximation
    computed = approximation.condition * unit_roundoff(budget.compute) * target.norm
    return Decomposition(
        approximation=approximation,
        relative_error=stored.relative_error,
        condition=approximation.condition,
        status=Status.converged if computed <= budget.allowed(target.norm) else Status.ill_conditioned,
        storage="mixed",
        norm=target.norm,
        error_kind=ErrorKind.bounded,
        sweeps=solution.sweeps,
        optimality_gap=solution.optimality_gap,
        gap_kind=solution.gap_kind,
        stored=stored,
    )


def _refuse_two_goals(rtol: float | None, atol: float | None, storage: str | None) -> None:
    for name, value in (("rtol", rtol), ("atol", atol), ("storage", storage)):
        if value is not None:
            raise BudgetError(f"a budget holds the goal and chooses the number formats: leave out {name} ({value})")


def recompress(
    matrix: SeparatedMatrix, *, rtol: float | None = None, rank: int | None = None, solver: Solver | None = None
) -> SeparatedMatrix:
    """The fewest terms within ``rtol``, or the best ``rank`` terms; the matrix is not formed.

    Two factors: the SVD of the rearrangement from QR factors of the terms, exact in O((p + q)·s²). More factors:
    `ALS` on the core that the terms span, whose error is measured from QR factors of the difference.

    Raises
    ------
    BudgetError
        If neither goal is given.
    ConvergenceError
        If ``rtol`` is not met.
    """
    if (rtol is None) == (rank is None):
        raise BudgetError(f"give one of rtol and rank, got rtol={rtol} and rank={rank}")
    if matrix.separation_rank == 0:
        return matrix
    if matrix.order != 2 or solver is not None:
        target = Separated(matrix)
        return decompose(
            target, matrix.kronecker_shape, rtol=rtol, rank=rank, solver=solver, throw=rtol is not None
        ).approximation
    orthogonal = matrix.canonical()
    if rank is not None:
        return orthogonal.truncate(rank)
    allowed, kept, dropped = (rtol or 0.0) * matrix.norm, orthogonal.separation_rank, 0.0
    while kept and (dropped + float(orthogonal.weights[kept - 1]) ** 2) ** 0.5 <= allowed:
        dropped += float(orthogonal.weights[kept - 1]) ** 2
        kept -= 1
    return orthogonal.truncate(kept)
