"""Two factors, many small matrices: the terms of each from its Gram matrix, all steps in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import Array, adjoint, is_double, require_finite
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import ErrorKind, Solution, Status
from lsrdecomp.solvers.svd.batch import as_sums
from lsrdecomp.solvers.svd.dense import least_errors
from lsrdecomp.solvers.svd.gram import eigenpairs, squaring_loss
from lsrdecomp.solvers.svd.subspace import leading_subspaces, squared_norms

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.progress import SolveProgress
    from lsrdecomp.solvers.svd.options import SubspaceOptions
    from lsrdecomp.solvers.svd.subspace import Workspace


def is_double_array(batch: Array) -> bool:
    """Return whether a batch is NumPy's, in double precision."""
    return isinstance(batch, np.ndarray) and is_double(batch)


def gram_solutions(
    batch: np.ndarray,
    shape: KroneckerShape,
    max_terms: int,
    progress: SolveProgress,
    *,
    tolerance: float,
    seed: int,
    subspace: SubspaceOptions,
    workspace: Workspace,
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
    # Gram 1: norms whose squares neither overflow nor vanish; R of norm one, the shorter side
    # first.
    norms = np.sqrt(squared_norms(batch))
    if not np.all(np.isfinite(norms)):
        require_finite(batch, "batch")
    usable = np.flatnonzero((norms > 1e-100) & (norms < 1e100))
    if not usable.size:
        return {}
    norms = norms[usable]
    part = batch if usable.size == len(batch) else batch[usable]
    operators = workspace.array("operators", (usable.size, *shape.sizes), batch.dtype)
    np.divide(rearrange(part, shape), norms[:, None, None], out=operators)
    is_adjoint = operators.shape[1] > operators.shape[2]
    rows = adjoint(operators) if is_adjoint else operators
    # Gram 2: terms by powers of R Rᴴ, where these are faster.
    n_matrices, side = rows.shape[:2]
    excesses = np.full(n_matrices, np.inf)
    if side <= subspace.max_side:
        basis, max_sums = leading_subspaces(rows, max_terms, seed, subspace, workspace)
        terms = _Terms.of(rows, basis, workspace)
        max_gains = max_sums - np.sum(terms.sigma**2, axis=1)
        excesses = terms.least_excesses(max_gains)
    # Gram 3: those that these leave open by LAPACK's eigenvectors, which miss nothing but what the
    # terms couple to.
    is_open = excesses > tolerance
    if np.any(is_open):
        leading = [eigenpairs(matrix, max_terms)[1][:, :max_terms] for matrix in rows[is_open]]
        by_lapack = _Terms.of(rows[is_open], np.stack(leading), workspace)
        max_gains = np.sum(by_lapack.couplings * by_lapack.sigma, axis=1)
        excesses[is_open] = by_lapack.least_excesses(max_gains)
        terms = by_lapack if np.all(is_open) else terms.replaced(is_open, by_lapack)
    # Gram 4: the solutions that are certain.
    floor = max(operators.shape[1:]) * unit_roundoff("float64")
    is_solved = (excesses <= tolerance) & (terms.sigma[:, -1] > floor * terms.sigma[:, 0])
    if not np.any(is_solved):
        return {}
    largest_error = float(np.max(terms.errors[is_solved]))
    progress.record(largest_error, objective=largest_error**2)
    record = progress.sweeps[-1:]
    left, right = terms.left, terms.right
    if is_adjoint:
        left, right = adjoint(right), adjoint(left)
    sums = as_sums(left, terms.sigma * norms[:, None], right, shape)
    solutions = {}
    for i in np.flatnonzero(is_solved):
        solutions[int(usable[i])] = Solution(
            sums[i],
            Status.rank_reached,
            record,
            float(excesses[i]),
            ErrorKind.bounded,
            float(terms.errors[i]),
        )
    return solutions


@dataclass(frozen=True, slots=True)
class _Terms:
    """Leading terms of matrices R of norm one in the spans of bases, with their measured errors."""

    left: np.ndarray  # (L, n, s)
    sigma: np.ndarray  # (L, s)
    right: np.ndarray  # (L, s, q)
    errors: np.ndarray  # (L,)
    couplings: np.ndarray  # (L, s), of each term to the residual

    @classmethod
    def of(cls, rows: np.ndarray, basis: np.ndarray, workspace: Workspace) -> _Terms:
        """Take a Rayleigh–Ritz step with R itself, and measure what it leaves."""
        u, sigma, right = np.linalg.svd(adjoint(basis) @ rows, full_matrices=False)
        left = basis @ u
        residual = workspace.array("residual", rows.shape, rows.dtype)
        np.matmul(left * sigma[:, None, :], right, out=residual)
        np.subtract(rows, residual, out=residual)
        errors = np.sqrt(squared_norms(residual))
        couplings = np.linalg.norm(residual @ adjoint(right), axis=1)
        return cls(left, sigma, right, errors, couplings)

    def replaced(self, where: np.ndarray, others: _Terms) -> _Terms:
        """Return these with others at some places."""
        arrays = []
        for name in ("left", "sigma", "right", "errors", "couplings"):
            array = getattr(self, name).copy()
            array[where] = getattr(others, name)
            arrays.append(array)
        return _Terms(*arrays)

    def least_excesses(self, max_gains: np.ndarray) -> np.ndarray:
        """Return the smaller of two bounds on error/optimum − 1, infinite where neither holds.

        One compares with a bound below the optimum; the other says that other terms can capture at
        most ``max_gains``, and what squaring may lose, of the squared norm more.
        """
        coupled = np.linalg.norm(self.couplings, axis=1)
        bounds = least_errors(self.sigma[:, -1], self.errors, coupled)
        max_gains = np.maximum(max_gains, 0.0) + squaring_loss(self.sigma.shape[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            by_bound = np.where(bounds > 0.0, self.errors / bounds - 1.0, np.inf)
            by_gain = np.where(self.errors > 0.0, 0.5 * max_gains / self.errors**2, np.inf)
        excesses: np.ndarray = np.minimum(by_bound, by_gain)
        return excesses
