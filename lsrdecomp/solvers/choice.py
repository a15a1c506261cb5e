"""The choice of a solver: the usual one for a target, one by its name, one with another seed."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from lsrdecomp.errors import BudgetError, ShapeError, unknown
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import PRECISIONS
from lsrdecomp.solvers.cp.als import ALS
from lsrdecomp.solvers.cp.weighted_als import WeightedALS
from lsrdecomp.solvers.matrix import MatrixSolver
from lsrdecomp.solvers.svd.block_krylov import Krylov
from lsrdecomp.solvers.svd.crossings import MIN_GRAM_SIDE, krylov_side
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.solvers.svd.greedy import Greedy
from lsrdecomp.targets.known_entries import KnownEntries
from lsrdecomp.targets.target import Dense, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.solver import Solver

SOLVERS: dict[str, Callable[[], Solver]] = {"svd": SVD, "krylov": Krylov, "als": ALS}
"""Solvers by name, with their usual settings."""

ALL_DIGITS = SVD()
GRAM = SVD(tolerance=1e-3)
PRODUCTS = Krylov(tolerance=1e-3)

GOAL_TERMS = 16
"""Terms that a tolerance is taken to need, where none are given."""


def named_solver(solver: Any) -> Solver:
    """Return a solver by its name or its class; a value stays as it is.

    Raises `BudgetError` for anything without ``solve``, with the names there are, and for solvers
    whose answer is no sum of one shape or whose target is no matrix.
    """
    if isinstance(solver, MatrixSolver):
        return solver
    if isinstance(solver, type) and hasattr(solver, "solve"):
        return named_solver(solver())
    if isinstance(solver, str):
        name = solver.lower()
        if name not in SOLVERS:
            raise BudgetError(
                f"solver: no solver {unknown(solver, SOLVERS)}, or a value of lsrdecomp.solvers"
            )
        return SOLVERS[name]()
    if not callable(getattr(solver, "solve", None)):
        raise BudgetError(
            f"solver: {type(solver).__name__} has no method solve; "
            "see lsrdecomp.solvers.solver.Solver"
        )
    if isinstance(solver, Greedy):
        raise BudgetError(
            "solver: Greedy finds terms of several shapes, and decompose returns terms of one; "
            "call its solve: Greedy(shapes).solve(matrix, shape, rank=...)"
        )
    if "ranks" in inspect.signature(solver.solve).parameters:
        raise BudgetError(
            f"solver: {type(solver).__name__} solves for both sides of a low-rank pair, and "
            "decompose for one matrix; call its solve with LowRank(B, A), a ProductShape and ranks"
        )
    return solver  # type: ignore[no-any-return]


def choose_solver(
    target: Target,
    shape: KroneckerShape,
    storage: str | None = None,
    *,
    rank: int | None = None,
) -> Solver:
    """Return the solver that `decompose` takes when none is given.

    For a number of terms, or for a tolerance if ``rank`` is None.

    Two factors: `choose_svd`. Any other number of factors: alternating least squares, with the
    penalty of the storage type. Factors of 1×1 do not count. `KnownEntries`: `WeightedALS`, which
    fits those alone.
    """
    if isinstance(target, KnownEntries):
        return WeightedALS()
    shape = shape.essential
    if shape.order != 2:
        is_precision = storage is None or storage in PRECISIONS
        return ALS(storage=storage if is_precision else "float32")
    return choose_svd(shape, rank, is_held=isinstance(target, Dense))


def choose_svd(
    shape: KroneckerShape, rank: int | None, *, is_held: bool = True, is_batch: bool = False
) -> SVD | Krylov:
    """Return the solver of two factors, for a number of terms or, if ``rank`` is None, a tolerance.

    All digits of LAPACK's SVD while the smaller side of the rearrangement is at most 32. Beyond,
    its error may exceed the optimum by a thousandth, and the record states by how much: `Krylov`
    from the side on that `krylov_side` says, as measured by ``benchmarks/solvers/crossings.py``,
    and at any side where the matrix is not held as an array, since it never forms it; else `SVD` by
    the Gram matrix. `Krylov` itself hands over to that where values hardly fall.
    """
    side = min(shape.sizes)
    if side <= MIN_GRAM_SIDE:
        return ALL_DIGITS
    terms = GOAL_TERMS if rank is None else rank
    is_large = side >= krylov_side(terms, is_batch=is_batch)
    return PRODUCTS if is_large or not is_held else GRAM


def with_start(
    solver: Solver, seed: int | None, init: SeparatedMatrix | None, shape: KroneckerShape
) -> Solver:
    """Return the solver with another seed and start, where it has such settings."""
    if init is not None and not isinstance(init, SeparatedMatrix):
        raise ShapeError(
            f"init: expected a SeparatedMatrix or a Decomposition, got {type(init).__name__}"
        )
    if init is not None and init.kronecker_shape != shape:
        raise ShapeError(f"init has the shape {init.kronecker_shape}, but the factors are {shape}")
    changes: dict[str, Any] = {}
    if seed is not None and hasattr(solver, "seed"):
        changes["seed"] = seed
    if init is not None and hasattr(solver, "init"):
        changes["init"] = init
    return replace(cast("Any", solver), **changes) if changes else solver
