"""decompose: one matrix in, a short sum of Kronecker products out, and the measured error of its stored factors."""

from __future__ import annotations

import math
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from lsrdecomp.errors import ArgumentError, BudgetError, ConvergenceError
from lsrdecomp.fields import accepts_settings
from lsrdecomp.formats.number_formats import storage_format
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import ErrorBudget
from lsrdecomp.shape_search import ShapeSearch, best_shape
from lsrdecomp.solvers.base import Solver, Sweep, validate_rank
from lsrdecomp.solvers.choice import choose_solver as choose_solver
from lsrdecomp.solvers.choice import named_solver, with_start
from lsrdecomp.solvers.decomposition import Decomposition
from lsrdecomp.solvers.progress import SolveProgress
from lsrdecomp.solvers.stored import Problem, fewest_bytes, measured, within
from lsrdecomp.solvers.svd.batched import BatchedKrylov
from lsrdecomp.targets.base import Dense, Target
from lsrdecomp.targets.convert import as_target
from lsrdecomp.targets.separated import Separated
from lsrdecomp.targets.threads import threads_for
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@accepts_settings()
def decompose(
    matrix: Any,
    shape: KroneckerShape | Sequence[Sequence[int]] | str = "balanced",
    *,
    rank: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    budget: ErrorBudget | None = None,
    storage: Any = None,
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
        Sizes of the factors, also as ``((16, 16), (8, 8))`` or ``"16x16, 8x8"``. "balanced" splits
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
        factor of each term in its own number format; what is written is the record's ``stored``.
        See docs/error-budget.md.
    storage : str or dtype, optional
        Number format of the stored factors: ``"float32"``, ``"float16"``, ``"bfloat16"``,
        ``"float8_e4m3fn"``, ``"int8"``, …, or a dtype. Factors are scaled to its range and λ is
        kept beside them. Absent, nothing is rounded: the factors stay in the type the solver
        computed in, mostly float64; `Decomposition.storage` names it.
    solver : Solver or str, optional
        Any solver value, see `lsrdecomp.solvers`, or ``"svd"``, ``"gram"``, ``"golub_kahan"``,
        ``"als"``; absent, one is chosen by order, size and kind of target.
    seed : int, optional
        Of the solver's random starts; absent, the solver's own, so that equal calls give equal
        answers.
    init : SeparatedMatrix, optional
        Where to start, for instance the result for a similar matrix or a lower rank. Three and more
        factors take its terms (`ALS`); two factors need no start, for they reach the optimum from
        any.
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
    C. F. Van Loan and N. Pitsianis (1993), doi:10.1007/978-94-015-8196-7_17; G. Beylkin and M. J.
    Mohlenkamp (2005), doi:10.1137/040604959.
    """
    target = as_target(matrix)
    with threads_for(target):
        return _decompose(
            target, shape, rank, rtol, atol, budget, storage, solver, seed, init, throw, on_sweep
        )


def _decompose(
    target: Target,
    shape: KroneckerShape | Sequence[Sequence[int]] | str,
    rank: int | None,
    rtol: float | None,
    atol: float | None,
    budget: ErrorBudget | None,
    storage: Any,
    solver: Solver | str | None,
    seed: int | None,
    init: SeparatedMatrix | None,
    throw: bool,
    on_sweep: Callable[[Sweep], Any] | None,
) -> Decomposition:
    target.norm  # noqa: B018 - refuses a matrix that is not finite, or whose norm is not, before anything is solved
    rank, goal, storage = _goals(target, rank, rtol, atol, budget, storage)
    solver = None if solver is None else named_solver(solver)
    if isinstance(shape, str) and shape == "search":
        if goal is None:
            raise BudgetError(
                "a search over shapes is for a tolerance: give rtol=, atol= or budget= as well"
            )
        again = partial(
            decompose,
            target,
            rank=rank,
            storage=storage,
            solver=solver,
            seed=seed,
            on_sweep=on_sweep,
        )
        if budget is None:
            return again(best_shape(target, atol=goal).best.shape, atol=goal, throw=throw)
        return _smallest_of(partial(again, budget=budget), best_shape(target, atol=goal), throw)
    if isinstance(shape, str) and shape == "balanced":
        sizes = KroneckerShape.balanced(target.shape)
    else:
        sizes = KroneckerShape.parse(shape, ("balanced", "search"))
    sizes.check(target.shape)
    solver = (
        solver
        if solver is not None
        else choose_solver(target, sizes, storage, rank=rank if goal is None else None)
    )
    solver = with_start(solver, seed, init, sizes)
    most = None if rank is None else min(rank, sizes.max_separation_rank)
    problem = Problem(target, sizes, solver, most, SolveProgress(on_sweep))
    if budget is not None:
        return fewest_bytes(problem, budget, throw)
    if goal is not None:
        record = within(problem, goal, storage)
    else:
        record = measured(target, problem.solve(rank=most), storage, None)
    if throw and not record.status.met:
        raise ConvergenceError(record.summary, record)
    return record


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
        (`BatchedKrylov`).
    **goals
        Any other argument of `decompose`; matrices are then solved one after the other.

    Returns
    -------
    tuple of Decomposition
        One a matrix, each with its own measured error.

    Examples
    --------
    >>> import numpy as np
    >>> layers = np.random.default_rng(0).standard_normal((5, 16, 16))
    >>> [result.separation_rank for result in decompose_each(layers, rank=8)]
    [8, 8, 8, 8, 8]
    """
    targets = [as_target(matrix) for matrix in matrices]
    if not targets:
        return ()
    with threads_for(targets[0]):
        return _decompose_each(targets, shape, rank, goals)


def _decompose_each(
    targets: Sequence[Target],
    shape: KroneckerShape | Sequence[Sequence[int]] | str,
    rank: int | None,
    goals: dict[str, Any],
) -> tuple[Decomposition, ...]:
    same = len({target.shape for target in targets}) == 1 and all(
        isinstance(target, Dense) for target in targets
    )
    if (
        not same
        or rank is None
        or any(goals.get(name) is not None for name in goals.keys() - {"storage"})
    ):
        return tuple(decompose(target, shape, rank=rank, **goals) for target in targets)
    sizes = (
        KroneckerShape.balanced(targets[0].shape)
        if shape == "balanced"
        else KroneckerShape.parse(shape)
    )
    if sizes.order != 2:
        return tuple(decompose(target, sizes, rank=rank, **goals) for target in targets)
    terms, _, storage = _goals(targets[0], rank, None, None, None, goals.get("storage"))
    solutions = BatchedKrylov(tolerance=1e-3).solve_batch(
        [cast("Dense", target).matrix for target in targets], sizes, rank=terms
    )
    return tuple(
        measured(target, result, storage, None)
        for target, result in zip(targets, solutions, strict=True)
    )


SHAPES_STORED = 3
"""Shapes of a search that are stored and weighed: bytes mostly follow parameters, which order
them."""


def _smallest_of(
    run: Callable[..., Decomposition], search: ShapeSearch, throw: bool
) -> Decomposition:
    """Of the shapes with the fewest parameters the record with the fewest bytes."""
    shapes = [
        choice.shape for choice in sorted(search.choices, key=lambda choice: choice.parameters)
    ]
    records = [run(shape) for shape in shapes[:SHAPES_STORED]]
    within = [record for record in records if record.stored is not None]
    return (
        min(within, key=lambda record: int(record.stored.bytes))
        if within
        else run(shapes[0], throw=throw)
    )


def _goals(
    target: Target,
    rank: Any,
    rtol: float | None,
    atol: float | None,
    budget: ErrorBudget | None,
    storage: Any,
) -> tuple[int | None, float | None, str | None]:
    """Rank, absolute error and name of the storage format, checked against each other."""
    if budget is not None:
        if not isinstance(budget, ErrorBudget):
            raise BudgetError(
                f"a budget is an ErrorBudget, got {budget!r}: for a relative error write rtol={budget!r}"
            )
        for name, value in (("rtol", rtol), ("atol", atol), ("storage", storage)):
            if value is not None:
                raise BudgetError(
                    f"a budget holds the goal and chooses the number formats: leave out {name} ({value})"
                )
        atol = budget.allowed(target.norm)
    if rank is None and rtol is None and atol is None:
        raise BudgetError("say what is wanted: rank=, rtol= or atol=")
    if rtol is not None and atol is not None:
        raise BudgetError(
            f"one goal has one meaning: give rtol ({rtol}) or atol ({atol}), not both"
        )
    if rank is not None:
        rank = validate_rank(rank)
    tolerances: dict[str, Any] = {"rtol": rtol, "atol": atol}  # unchecked, whatever a caller wrote
    for name, value in tolerances.items():
        if value is None:
            continue
        if not isinstance(value, Real) or not math.isfinite(value) or float(value) < 0.0:
            raise BudgetError(f"{name} must be a number, finite and not negative, got {value!r}")
    goal = rtol * target.norm if rtol is not None else atol
    return rank, goal, None if storage is None else storage_format(storage).name


@accepts_settings()
@one_blas_thread
def recompress(
    matrix: SeparatedMatrix,
    *,
    rtol: float | None = None,
    rank: int | None = None,
    solver: Solver | None = None,
) -> SeparatedMatrix:
    """The fewest terms within ``rtol``, or the best ``rank`` terms; the matrix is not formed.

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
    >>> matrix = decompose(np.kron(np.diag([1.0, 2.0]), np.diag([3.0, 5.0])), "2x2, 2x2", rank=1).approximation
    >>> recompress(matrix, rtol=1e-6).separation_rank
    1
    """
    if (rtol is None) == (rank is None):
        raise BudgetError(f"give one of rtol and rank, got rtol={rtol} and rank={rank}")
    if not isinstance(matrix, SeparatedMatrix | Decomposition):
        raise ArgumentError(
            f"recompress takes a sum of Kronecker products, not {type(matrix).__name__}; an array is decomposed by "
            "decompose(matrix, shape, rtol=...)"
        )
    if matrix.separation_rank == 0:
        return matrix
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
    allowed, terms, dropped = (rtol or 0.0) * matrix.norm, orthogonal.separation_rank, 0.0
    while terms and (dropped + float(orthogonal.weights[terms - 1]) ** 2) ** 0.5 <= allowed:
        dropped += float(orthogonal.weights[terms - 1]) ** 2
        terms -= 1
    return orthogonal.truncate(terms)
