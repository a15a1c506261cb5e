"""The choice of a solver: the usual one for a target, one by its name, one with another seed."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from lsrdecomp.arrays import is_differentiated
from lsrdecomp.errors import BudgetError, ShapeError, unknown
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import PRECISIONS
from lsrdecomp.solvers.cp.als import ALS
from lsrdecomp.solvers.cp.weighted_als import WeightedALS
from lsrdecomp.solvers.matrix import MatrixSolver
from lsrdecomp.solvers.svd.batched import BatchedKrylov
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.solvers.svd.golub_kahan import BlockGolubKahan
from lsrdecomp.solvers.svd.gram import Gram
from lsrdecomp.solvers.svd.greedy import Greedy
from lsrdecomp.targets.known_entries import KnownEntries
from lsrdecomp.targets.target import Dense, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.solver import Solver

SOLVERS: dict[str, Callable[[], Solver]] = {
    "svd": SVD,
    "gram": Gram,
    "golub_kahan": BlockGolubKahan,
    "krylov": BlockGolubKahan,
    "als": ALS,
}
"""Solvers by name, with their usual settings; "krylov" is another word for block Golub–Kahan."""


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
        name = solver.lower().replace("-", "_").replace("blockgolubkahan", "golub_kahan")
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

    For so many terms, or for a tolerance if ``rank`` is None.

    Two factors: the full SVD while the smaller side of the rearrangement is at most 32, the Gram
    matrix of an array of up to 2²² entries up to a side of 192, `BatchedKrylov` for up to a
    sixteenth of all terms of a larger one; else block Golub–Kahan, which never forms a low-rank
    target and turns to the Gram matrix where that is cheaper. The sizes are set by hand on the
    timings of ``benchmarks/solvers/two_factors.py``, whose records are
    ``benchmarks/results/solvers-*.json``. The error may exceed the optimum by a thousandth; the
    record states by how much. Any other number of factors: alternating least squares, with the
    penalty of the storage type. Factors of 1×1 do not count. `KnownEntries`: `WeightedALS`, which
    fits those alone.
    """
    if isinstance(target, KnownEntries):
        return WeightedALS()
    shape = shape.essential
    if shape.order != 2:
        is_precision = storage is None or storage in PRECISIONS
        return ALS(storage=storage if is_precision else "float32")
    # The sizes at which one solver becomes faster than the next are by hand, on the timings of
    # ``benchmarks/solvers/two_factors.py``, recorded in ``benchmarks/results/solvers-*.json``.
    tolerance = 1e-3
    side = min(shape.sizes)
    if side <= 32:
        return _usual(SVD)
    tolerance = 1e-3
    if isinstance(target, Dense) and math.prod(shape.sizes) <= 2**22:
        if side <= 192:
            return _usual(Gram, tolerance)
        has_few_terms = rank is not None and 16 * rank <= side
        if has_few_terms and not is_differentiated(target.matrix):
            return _usual(BatchedKrylov, tolerance)
    return BlockGolubKahan(tolerance=tolerance)


@cache
def _usual(solver: Callable[..., Solver], tolerance: float | None = None) -> Solver:
    """Return a solver with its usual settings; made once, for a small matrix is solved as soon."""
    return solver() if tolerance is None else solver(tolerance=tolerance)


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
