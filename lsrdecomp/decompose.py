"""decompose: one matrix in, a short sum of Kronecker products out.

Its error is that of the stored factors, measured.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard

from lsrdecomp.arrays import as_floating, is_traced_by_jax, require_matrix
from lsrdecomp.errors import (
    ArgumentError,
    BudgetError,
    ConvergenceError,
    ConvergenceWarning,
    LsrError,
    PrecisionError,
    ShapeError,
)
from lsrdecomp.fields import refuses_unknown
from lsrdecomp.formats.number_formats import storage_format
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import ErrorBudget
from lsrdecomp.shape_search import best_shape
from lsrdecomp.solvers.choice import choose_solver as choose_solver
from lsrdecomp.solvers.choice import choose_svd, named_solver, with_start
from lsrdecomp.solvers.cp.weighted_als import WeightedALS
from lsrdecomp.solvers.decomposition import Decomposition
from lsrdecomp.solvers.iteration import SolveProgress
from lsrdecomp.solvers.solver import validate_rank
from lsrdecomp.solvers.stored_solve import StorageProblem, fewest_bytes, fewest_terms, measure
from lsrdecomp.solvers.svd.singular_terms import traced_terms
from lsrdecomp.targets.convert import as_target
from lsrdecomp.targets.known_entries import KnownEntries
from lsrdecomp.targets.separated_target import Separated
from lsrdecomp.targets.target import Dense, Target
from lsrdecomp.targets.target_threads import threads_for
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lsrdecomp.solvers.solver import Solver, Sweep


@refuses_unknown
def decompose(
    matrix: Any,
    shape: KroneckerShape | Sequence[Sequence[int]] | str = "balanced",
    *,
    rank: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    budget: ErrorBudget | None = None,
    storage: Any = None,
    known: Any = None,
    non_negative: bool | tuple[int, ...] = False,
    solver: Solver | str | None = None,
    seed: int | None = None,
    init: SeparatedMatrix | None = None,
    throw: bool = False,
    on_sweep: Callable[[Sweep], Any] | None = None,
) -> Decomposition:
    """Approximate a matrix by a short sum of Kronecker products.

    Parameters
    ----------
    matrix : array_like, shape (m, n), or Target
        Real or complex, of any array library; it stays where it is.
    shape : KroneckerShape, "balanced", "search", or sizes
        Sizes of the factors, also as ``((16, 16), (8, 8))`` or ``"16x16, 8x8"``; of one factor
        alone, ``(16, 16)`` or ``"16x16"``, the other follows. "balanced" splits
        both sides into two factors as evenly as their divisors allow; "search" takes the two-factor
        shape, low rank and dense among them, with the fewest parameters at the tolerance, or with a
        budget the fewest bytes of the best few (`best_shape`, which costs tens of solves).
    rank : int, optional
        Number of terms s, or, beside a tolerance, the most that may be used. More than the shape
        can need is clipped.
    rtol, atol : float, optional
        Allowed ‖M − M̂‖_F, relative to ‖M‖_F or absolute; the fewest terms that keep it *as stored*
        are used.
    budget : ErrorBudget, optional
        Instead of a tolerance: the fewest *bytes* whose stored error is certified to keep it, each
        factor of each term in its own number format; files hold the record's ``stored``.
        See docs/reference/error-budget.md.
    storage : str or dtype, optional
        Number format of the stored factors: ``"float32"``, ``"float16"``, ``"bfloat16"``,
        ``"float8_e4m3fn"``, ``"int8"``, …, or a dtype. Factors are scaled to its range and λ is
        kept beside them. Absent, nothing is rounded: the factors stay in the type the solver
        computed in, mostly float64; `Decomposition.storage` names it.
    known : array_like of bool, shape (m, n), optional
        Which entries of an array are known: the terms are fitted to those alone, and the error is
        that of those. Others are not read. See `KnownEntries`, which has weights too.
    non_negative : bool or tuple of int
        Whether the entries of the factors, and with them of the sum, may not be negative; or the
        indices of the factors that may not (`WeightedALS`).
    solver : Solver or str, optional
        Any solver value, see `lsrdecomp.solvers`, or ``"svd"``, ``"krylov"``,
        ``"als"``; absent, one is chosen by order, size and kind of target.
    seed : int, optional
        Of the solver's random starts; absent, the solver's own, so that equal calls give equal
        answers.
    init : SeparatedMatrix, optional
        Where to start, for instance the result for a similar matrix or a lower rank. Three and more
        factors take its terms (`ALS`); two factors need no start, for they reach the optimum from
        any.
    throw : bool
        Raise `ConvergenceError`, which holds the record, when the tolerance was not met, or met by
        three and more factors with more numbers than the array has; else that is a
        `ConvergenceWarning`.
    on_sweep : callable, optional
        Called with each `Sweep`, those of solvers that take over or solve again included.

    Returns
    -------
    Decomposition
        The approximation as stored, its measured error, condition γ and a status. Within
        ``jax.jit``, by ``rank`` alone and in two factors, a `SeparatedMatrix` of that many terms:
        errors are not known when a function is compiled, nor is a term that is zero.

    Raises
    ------
    LsrError
        Within ``jax.jit`` for anything but a rank in two factors.
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
    C. F. Van Loan and N. Pitsianis (1993), doi:10.1007/978-94-015-8196-7_17; G. Beylkin and M. J.
    Mohlenkamp (2005), doi:10.1137/040604959.
    """
    if is_traced_by_jax(matrix):
        others = {"rtol": rtol, "atol": atol, "budget": budget, "storage": storage}
        others |= {"solver": solver, "init": init, "on_sweep": on_sweep}
        others |= {"known": known, "non_negative": non_negative or None}
        return _traced(matrix, shape, rank, others)  # type: ignore[return-value]
    target = as_target(matrix) if known is None else _known_entries(matrix, known)
    with threads_for(target):
        # 1. What is asked for; a norm that is not finite is refused before anything is solved.
        goal = _goal(target.norm, rank, rtol, atol, budget, storage)
        chosen = None if solver is None else named_solver(solver)
        if non_negative:
            chosen = _non_negative_solver(non_negative, chosen, shape)
        solving = _Solving(chosen, seed, init, on_sweep)
        # 2. The shape, or the search for one.
        if isinstance(shape, str) and shape == "search":
            _refuse_start_of_search(init)
            record = _in_best_shape(target, goal, solving, throw=throw)
        else:
            if _is_balanced(shape):
                sizes = KroneckerShape.balanced(target.shape)
            else:
                sizes = KroneckerShape.parse(shape, ("balanced", "search"), target.shape)
            # 3. The terms in it.
            record = _in_shape(target, sizes, goal, solving, throw=throw)
    message = ""
    if not record.status.met:
        message = _shortfall(record, goal.atol)
    elif _is_longer_than_matrix(record, target, goal):
        message = _excess_numbers(record)
        if throw:
            raise ConvergenceError(message, record)
    elif _is_balanced(shape) and 1 in record.kronecker_shape.sizes and min(record.shape) > 1:
        message = (
            f"{record.kronecker_shape} is the whole matrix: {record.parameters:,} numbers for "
            f"{math.prod(record.shape):,}; where sides are prime see best_shape(matrix, pad=True)"
        )
    if message:
        # Tell the caller of `decompose`, which is wrapped once.
        warnings.warn(message, ConvergenceWarning, stacklevel=3)
    return record


def _is_balanced(shape: Any) -> bool:
    return isinstance(shape, str) and shape == "balanced"


def _known_entries(matrix: Any, known: Any) -> KnownEntries:
    """Return an array of which some entries are known as a target."""
    if isinstance(matrix, KnownEntries):
        raise ArgumentError("known: the target is a KnownEntries already, which has its own")
    return KnownEntries(matrix, known)


def _non_negative_solver(
    non_negative: bool | tuple[int, ...], solver: Solver | None, shape: Any
) -> Solver:
    """Return the solver that keeps factors non-negative; refuse what cannot."""
    if isinstance(shape, str) and shape == "search":
        raise BudgetError(
            'shape="search" compares shapes by their nearest sums, which may be negative: name a '
            "shape beside non_negative"
        )
    if solver is None:
        return WeightedALS(non_negative=non_negative)
    if isinstance(solver, WeightedALS):
        return replace(solver, non_negative=non_negative)
    raise BudgetError(
        f"non_negative: {type(solver).__name__} has factors of any sign; leave out solver=, or "
        "pass solver=WeightedALS(non_negative=True)"
    )


def _shortfall(record: Decomposition, atol: float | None) -> str:
    """Return by how much a record missed its goal, why, and what to try."""
    request = ""
    if atol is not None:
        goal = atol / record.target_norm if record.target_norm > 0.0 else atol
        request = f" where {goal:.3g} was asked for"
    return (
        f"the relative error of {record.separation_rank} terms of {record.kronecker_shape} is "
        f"{record.relative_error:.3g}{request}. {record.status.value}"
        f"{' ' if record.note else ''}{record.note}"
    )


def _traced(
    matrix: Any,
    shape: KroneckerShape | Sequence[Sequence[int]] | str,
    rank: int | None,
    others: dict[str, Any],
) -> SeparatedMatrix:
    """Return the first terms of the SVD of a matrix within ``jax.jit``, which sees no numbers."""
    require_matrix(matrix)
    if shape == "balanced":
        sizes = KroneckerShape.balanced(matrix.shape)
    else:
        sizes = KroneckerShape.parse(shape, ("balanced",), matrix.shape)
    given = [name for name, value in others.items() if value is not None]
    if rank is None or given or sizes.order != 2:
        reason = f"{given[0]}=" if given else f"{sizes.order} factors"
        raise LsrError(
            "within jax.jit a matrix is decomposed by rank= alone, in two factors, since how far "
            f"others go depends on its values, which are not known yet: got "
            f"{reason if rank is not None else 'no rank='}; call decompose outside, and pass the "
            "SeparatedMatrix that comes of it to the compiled function"
        )
    sizes.check(matrix.shape)
    n_terms = min(validate_rank(rank), sizes.max_separation_rank)
    return traced_terms(as_floating(matrix), sizes, n_terms)


def _is_longer_than_matrix(record: Decomposition, target: Target, goal: _Goal) -> bool:
    """Return whether three and more factors met a tolerance with more numbers than an array has.

    Two factors go on to the SVD of the whole matrix, as one expects; a number of terms, or of
    bytes, was the caller's own choice.
    """
    is_tolerance = goal.atol is not None and goal.max_terms is None and goal.budget is None
    if not (is_tolerance and isinstance(target, Dense)):
        return False
    has_many_factors = record.kronecker_shape.essential.order > 2
    return has_many_factors and record.parameters > math.prod(target.shape)


def _excess_numbers(record: Decomposition) -> str:
    """Return by how many numbers a record is longer than its matrix, and what to try."""
    rows, columns = record.shape
    return (
        f"{record.separation_rank} terms of {record.kronecker_shape} keep the tolerance with "
        f"{record.parameters:,} numbers where the matrix has {rows * columns:,}: keep the matrix, "
        'loosen the tolerance, or take two factors (shape="search" compares them with the matrix)'
    )


def _refuse_start_of_search(init: SeparatedMatrix | None) -> None:
    """Raise `ShapeError` for a start, which has one shape, where many are searched."""
    if init is not None:
        raise ShapeError(
            'init has a shape of its own, and shape="search" tries many: pass '
            "shape=init.kronecker_shape, or leave out init"
        )


@dataclass(frozen=True, slots=True)
class _Goal:
    """A goal of a decomposition, as `_goal` checked it."""

    max_terms: int | None  # None: as many as the tolerance needs
    atol: float | None  # ‖M − M̂‖_F as stored; None: ``max_terms`` terms, whatever their error
    storage: str | None  # number format of the factors; None: as computed
    budget: ErrorBudget | None  # of the same ``atol``: the fewest bytes that keep it


@dataclass(frozen=True, slots=True)
class _Solving:
    """The solver of a decomposition, with its seed and its start."""

    solver: Solver | None  # None: the usual one for a target
    seed: int | None
    init: SeparatedMatrix | None
    on_sweep: Callable[[Sweep], Any] | None

    def solver_for(self, target: Target, shape: KroneckerShape, goal: _Goal) -> Solver:
        """Return the solver with the seed and the start that were asked for."""
        solver = self.solver
        if solver is None:
            rank = goal.max_terms if goal.atol is None else None
            solver = choose_solver(target, shape, goal.storage, rank=rank)
        if self.init is not None and isinstance(solver, WeightedALS):
            raise BudgetError("init: WeightedALS draws all its starts; give another seed instead")
        return with_start(solver, self.seed, self.init, shape)


def _in_shape(
    target: Target, shape: KroneckerShape, goal: _Goal, solving: _Solving, *, throw: bool
) -> Decomposition:
    """Return the record of a decomposition in one shape."""
    shape.check(target.shape)
    solver = solving.solver_for(target, shape, goal)
    max_terms = goal.max_terms
    if max_terms is not None:
        max_terms = min(max_terms, shape.max_separation_rank)
    if goal.atol is None:
        solution = solver.solve(target, shape, rank=max_terms, on_sweep=solving.on_sweep)
        record = measure(target, solution, goal.storage)
    else:
        problem = StorageProblem(target, shape, solver, max_terms, SolveProgress(solving.on_sweep))
        if goal.budget is not None:
            return fewest_bytes(problem, goal.budget, throw)
        record = fewest_terms(problem, goal.atol, goal.storage)
    if throw and not record.status.met:
        raise ConvergenceError(record.summary, record)
    return record


def _in_best_shape(target: Target, goal: _Goal, solving: _Solving, *, throw: bool) -> Decomposition:
    """Return the record in the two-factor shape of fewest parameters, or of fewest bytes.

    For a budget the three shapes with the fewest parameters are stored and weighed; three by hand,
    since bytes mostly follow parameters.
    """
    if goal.atol is None:
        raise BudgetError(
            "a search over shapes is for a tolerance: give rtol=, atol= or budget= as well"
        )
    search = best_shape(target, atol=goal.atol)
    if goal.budget is None:
        return _in_shape(target, search.best.shape, goal, solving, throw=throw)
    choices = sorted(search.choices, key=lambda choice: choice.parameters)
    shapes = [choice.shape for choice in choices[:3]]
    records = [_in_shape(target, shape, goal, solving, throw=False) for shape in shapes]
    stored = [record for record in records if record.stored is not None]
    if stored:
        return min(stored, key=lambda record: int(record.stored.bytes))
    return _in_shape(target, shapes[0], goal, solving, throw=throw)


def decompose_each(
    matrices: Any,
    shape: KroneckerShape | Sequence[Sequence[int]] | str = "balanced",
    *,
    rank: int | None = None,
    **goals: Any,
) -> tuple[Decomposition, ...]:
    """`decompose` for every matrix of a stack, in one shape.

    Parameters
    ----------
    matrices : array_like, shape (b, m, n), or a sequence of matrices
    shape : KroneckerShape, sizes or "balanced"
    rank : int, optional
        Terms of each. Given alone, two factors are solved together, by batched products
        (`Krylov.solve_batch`).
    **goals
        Any other argument of `decompose`; matrices are then solved one after the other, and one
        warning tells how many missed their goal.

    Returns
    -------
    tuple of Decomposition
        One a matrix, each with its own measured error.

    Raises
    ------
    PrecisionError
        For entries that are not finite, with the index of their matrix.

    Examples
    --------
    >>> import numpy as np
    >>> layers = np.random.default_rng(0).standard_normal((5, 16, 16))
    >>> [result.separation_rank for result in decompose_each(layers, rank=8)]
    [8, 8, 8, 8, 8]
    """
    with one_blas_thread:  # entered once, for the norms of all
        targets = _as_targets(matrices)
    if not targets:
        return ()
    with threads_for(targets[0]):
        given = {name for name, value in goals.items() if value is not None}
        if rank is not None and given <= {"storage"} and _are_arrays_of_one_size(targets):
            if shape == "balanced":
                sizes = KroneckerShape.balanced(targets[0].shape)
            else:
                sizes = KroneckerShape.parse(shape, whole=targets[0].shape)
            if sizes.order == 2:
                is_stacked = getattr(matrices, "ndim", 0) == 3
                batch = matrices if is_stacked else [target.matrix for target in targets]
                return _together(targets, batch, sizes, rank, goals.get("storage"))
        records, misses = _one_by_one(targets, shape, rank, goals)
    if misses:
        message = f"{len(misses)} of {len(records)} matrices missed their goal; {misses[0]}"
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
    return records


def _one_by_one(
    targets: Sequence[Target],
    shape: KroneckerShape | Sequence[Sequence[int]] | str,
    rank: int | None,
    goals: dict[str, Any],
) -> tuple[tuple[Decomposition, ...], list[str]]:
    """Return the records of matrices that are solved alone, and a sentence for each missed goal."""
    records = []
    misses = []
    for i, target in enumerate(targets):
        try:
            records.append(decompose(target, shape, rank=rank, **goals | {"throw": True}))
        except ConvergenceError as missed:
            if goals.get("throw") or missed.record is None:
                raise
            records.append(missed.record)
            misses.append(f"matrix {i}: {missed}")
    return tuple(records), misses


def _as_targets(matrices: Any) -> list[Target]:
    """Return the targets of a stack; an error of one matrix names its place."""
    targets = []
    for i, matrix in enumerate(matrices):
        try:
            targets.append(as_target(matrix))
        except PrecisionError as error:
            raise PrecisionError(f"matrix {i}: {str(error).removeprefix('matrix: ')}") from error
    return targets


def _are_arrays_of_one_size(targets: Sequence[Target]) -> TypeGuard[Sequence[Dense]]:
    sizes = {target.shape for target in targets}
    return len(sizes) == 1 and all(isinstance(target, Dense) for target in targets)


def _together(
    targets: Sequence[Dense], batch: Any, shape: KroneckerShape, rank: int, storage: Any
) -> tuple[Decomposition, ...]:
    """Return records of the arrays of a batch, solved together by batched products."""
    goal = _goal(targets[0].norm, rank, None, None, None, storage)
    solver = choose_svd(shape, rank, is_batch=True)
    solutions = solver.solve_batch(batch, shape, rank=goal.max_terms)
    return tuple(
        measure(target, solution, goal.storage)
        for target, solution in zip(targets, solutions, strict=True)
    )


def _goal(
    norm: float,
    rank: Any,
    rtol: float | None,
    atol: float | None,
    budget: ErrorBudget | None,
    storage: Any,
) -> _Goal:
    """Check what is asked for against each other, for a matrix of this norm."""
    if budget is not None:
        _check_budget(budget, {"rtol": rtol, "atol": atol, "storage": storage})
        atol = budget.allowed(norm)
    if rank is None and rtol is None and atol is None:
        raise BudgetError("say what is wanted: rank=, rtol= or atol=")
    if rtol is not None and atol is not None:
        raise BudgetError(
            f"one goal has one meaning: give rtol ({rtol}) or atol ({atol}), not both"
        )
    max_terms = None if rank is None else validate_rank(rank)
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not _is_tolerance(value):
            raise BudgetError(f"{name} must be a number, finite and not negative, got {value!r}")
    if rtol is not None:
        atol = rtol * norm
    format_name = None if storage is None else storage_format(storage).name
    return _Goal(max_terms, atol, format_name, budget)


def _check_budget(budget: Any, others: dict[str, Any]) -> None:
    """Raise `BudgetError` unless a budget is one, and stands alone."""
    if not isinstance(budget, ErrorBudget):
        raise BudgetError(
            f"a budget is an ErrorBudget, got {budget!r}: "
            f"for a relative error write rtol={budget!r}"
        )
    for name, value in others.items():
        if value is not None:
            raise BudgetError(
                "a budget holds the goal and chooses the number formats: "
                f"leave out {name} ({value})"
            )


def _is_tolerance(value: Any) -> bool:
    return isinstance(value, Real) and 0.0 <= float(value) < math.inf


@refuses_unknown
@one_blas_thread
def recompress(
    matrix: SeparatedMatrix,
    *,
    rtol: float | None = None,
    rank: int | None = None,
    solver: Solver | None = None,
) -> SeparatedMatrix:
    """Find fewer terms: the fewest within ``rtol``, or the best ``rank``.

    The matrix is not formed.

    Two factors: the SVD of the rearrangement from QR factors of the terms, exact in O((p + q)·s²).
    More factors: `ALS` on the core that the terms span, whose error is measured from QR factors of
    the difference.

    Parameters
    ----------
    matrix : SeparatedMatrix
    rtol : float, optional
        Allowed ‖M − M̂‖_F / ‖M‖_F.
    rank : int, optional
        Number of terms; one of the two goals is given.
    solver : Solver, optional
        Instead of those named above.

    Returns
    -------
    SeparatedMatrix
        In the same Kronecker shape.

    Raises
    ------
    ArgumentError
        If ``matrix`` is an array; `decompose` takes those.
    BudgetError
        If neither goal is given.
    ConvergenceError
        If ``rtol`` is not met.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import decompose, recompress
    >>> product = np.kron(np.diag([1.0, 2.0]), np.diag([3.0, 5.0]))
    >>> matrix = decompose(product, "2x2, 2x2", rank=1).approximation
    >>> recompress(matrix, rtol=1e-6).separation_rank
    1
    """
    if (rtol is None) == (rank is None):
        raise BudgetError(f"give one of rtol and rank, got rtol={rtol} and rank={rank}")
    if not isinstance(matrix, SeparatedMatrix | Decomposition):
        raise ArgumentError(
            f"recompress takes a sum of Kronecker products, not {type(matrix).__name__}; "
            "an array is decomposed by decompose(matrix, shape, rtol=...)"
        )
    if matrix.order != 2 or solver is not None:
        target = Separated(matrix)
        return decompose(
            target,
            matrix.kronecker_shape,
            rtol=rtol,
            rank=rank,
            solver=solver,
            throw=rtol is not None,
        ).approximation
    orthogonal = matrix.canonical()
    if rank is not None:
        return orthogonal.truncate(rank)
    # Terms are orthogonal: what is left out adds up as squares, the smallest first.
    allowed = (rtol or 0.0) * matrix.norm
    squares = [float(weight) ** 2 for weight in orthogonal.weights]
    terms = orthogonal.separation_rank
    dropped = 0.0
    while terms and (dropped + squares[terms - 1]) ** 0.5 <= allowed:
        dropped += squares[terms - 1]
        terms -= 1
    return orthogonal.truncate(terms)
