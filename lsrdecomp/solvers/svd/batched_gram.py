"""Two factors, many small matrices: the terms of each from its Gram matrix, all steps in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import Array, adjoint, require_finite
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import ErrorKind, Solution, Status
from lsrdecomp.solvers.svd.batch import as_sums
from lsrdecomp.solvers.svd.dense import least_error
from lsrdecomp.solvers.svd.gram import eigenpairs, squaring_loss

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.progress import SolveProgress


def is_double_array(batch: Array) -> bool:
    """Return whether a batch is NumPy's, in double precision."""
    return isinstance(batch, np.ndarray) and batch.dtype in (np.float64, np.complex128)


def gram_solutions(
    batch: np.ndarray,
    shape: KroneckerShape,
    max_terms: int,
    tolerance: float,
    progress: SolveProgress,
) -> dict[int, Solution]:
    """Find the leading terms of matrices (L, m, n) in double precision, as `Gram` does of one.

    Returns
    -------
    dict of Solution
        By position, of the matrices whose measured error is certain to be within ``tolerance`` of
        the optimum and none of whose terms is rounding. The others need their SVD.

    Raises
    ------
    PrecisionError
        For entries that are not finite.
    """
    # Gram 1: norms whose squares neither overflow nor vanish.
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.linalg.norm(batch, axis=(1, 2))
    if not np.all(np.isfinite(norms)):
        require_finite(batch, "batch")
    usable = np.flatnonzero((norms > 1e-100) & (norms < 1e100))
    if not usable.size:
        return {}
    norms = norms[usable]
    operators = rearrange(batch[usable], shape)
    is_adjoint = operators.shape[1] > operators.shape[2]
    rows = adjoint(operators) if is_adjoint else operators  # the shorter side first
    # Gram 2: Rayleigh–Ritz with R itself in the span of the leading eigenvectors of R Rᴴ.
    basis = np.stack([eigenpairs(matrix, max_terms)[1][:, :max_terms] for matrix in rows])
    u, sigma, right = np.linalg.svd(adjoint(basis) @ rows, full_matrices=False)
    left = basis @ u
    # Gram 3: the error, measured, and how each term couples to the residual.
    residual = rows - (left * sigma[:, None, :]) @ right
    errors = np.linalg.norm(residual, axis=(1, 2)) / norms
    couplings = np.linalg.norm(residual @ adjoint(right), axis=1) / norms[:, None]
    # Gram 4: how far each error may be above the optimum.
    theta = sigma / norms[:, None]
    bounds = least_error(theta[:, -1], errors, np.linalg.norm(couplings, axis=1))
    max_gains = squaring_loss(max_terms) + np.sum(couplings * theta, axis=1)
    excesses = _least_excess(errors, bounds, max_gains)
    floors = max(operators.shape[1:]) * unit_roundoff("float64") * sigma[:, 0]
    is_solved = (excesses <= tolerance) & (sigma[:, -1] > floors)
    if not np.any(is_solved):
        return {}
    largest_error = float(np.max(errors[is_solved]))
    progress.record(largest_error, objective=largest_error**2)
    record = progress.sweeps[-1:]
    if is_adjoint:
        left, right = adjoint(right), adjoint(left)
    sums = as_sums(left, sigma, right, shape)
    solutions = {}
    for i in np.flatnonzero(is_solved):
        solutions[int(usable[i])] = Solution(
            sums[i],
            Status.rank_reached,
            record,
            float(excesses[i]),
            ErrorKind.bounded,
            float(errors[i]),
        )
    return solutions


def _least_excess(errors: np.ndarray, bounds: np.ndarray, max_gains: np.ndarray) -> np.ndarray:
    """Return the smaller of two bounds on error/optimum − 1, infinite where neither holds.

    One compares with ``bounds`` below the optimum; the other says that other terms can capture at
    most ``max_gains`` of the squared norm more, for the leading eigenvectors were taken.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        by_bound = np.where(bounds > 0.0, errors / bounds - 1.0, np.inf)
        by_gain = np.where(errors > 0.0, 0.5 * max_gains / errors**2, np.inf)
    excess: np.ndarray = np.minimum(by_bound, by_gain)
    return excess
