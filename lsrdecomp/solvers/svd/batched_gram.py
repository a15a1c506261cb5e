"""Two factors, many small matrices: the terms of each from its Gram matrix, all steps in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import OVERSAMPLING, Array, adjoint, is_double, require_finite
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.solver import ErrorKind, Solution, Status
from lsrdecomp.solvers.svd.batch import as_sums
from lsrdecomp.solvers.svd.dense import ROUNDING, least_errors
from lsrdecomp.solvers.svd.gram import (
    eigenpairs,
    falls_fast,
    is_flat,
    leading_by_single_precision,
    squaring_loss,
)
from lsrdecomp.solvers.svd.subspace import (
    MAX_SIDE,
    leading_subspaces,
    random_vectors,
    squared_norms,
)

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.iteration import SolveProgress
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
    # Gram 2: terms of each by the first way that is certain of them. A stack is mostly of one kind,
    # so its first matrix tells where to begin.
    search = _Search(max_terms, tolerance, seed, workspace)
    found = search.terms(rows)
    terms = found.terms
    # Gram 3: the solutions that are certain.
    floor = max(operators.shape[1:]) * unit_roundoff("float64")
    is_solved = found.is_near & (terms.sigma[:, -1] > floor * terms.sigma[:, 0])
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
        solution = Solution(
            sums[i], Status.rank_reached, record, relative_error=float(terms.errors[i])
        )
        excess = float(found.excesses[i])
        if excess <= tolerance:  # else the error is rounding, and nothing is left to compare
            solution = replace(solution, optimality_gap=excess, gap_kind=ErrorKind.bounded)
        solutions[int(usable[i])] = solution
    return solutions


@dataclass(frozen=True, slots=True)
class _Found:
    """Terms of some matrices, and how far their errors may be above the optima."""

    terms: _Terms
    excesses: np.ndarray  # (L,): bounds on error/optimum − 1
    is_near: np.ndarray  # (L,): within the tolerance, or within rounding, of the optimum

    def replaced(self, where: np.ndarray, others: _Found) -> _Found:
        """Return these with others at some places."""
        excesses = self.excesses.copy()
        excesses[where] = others.excesses
        is_near = self.is_near.copy()
        is_near[where] = others.is_near
        return _Found(self.terms.replaced(where, others.terms), excesses, is_near)


@dataclass(frozen=True, slots=True)
class _Search:
    """The ways to leading terms of many small matrices, and when each is certain of them."""

    count: int
    tolerance: float
    seed: int
    workspace: Workspace

    def terms(self, rows: np.ndarray) -> _Found:
        """Return terms of matrices R of norm one (L, n, q), of each by the first way that is sure.

        Where none is, terms that are not near.
        """
        is_small = rows.shape[1] <= MAX_SIDE
        ways = [self._by_powers if is_small else self._by_single_precision, self._by_lapack]
        first_falls_fast = bool(self._random_range(rows[:1])[1][0])
        ways.insert(0 if first_falls_fast else 1, self._by_random_columns)
        found: _Found | None = None
        for way in ways:
            if found is None:
                found = way(rows)
                continue
            is_open = ~found.is_near
            if not np.any(is_open):
                break
            found = found.replaced(is_open, way(rows[is_open]))
        assert found is not None  # there are two ways at least
        return found

    def _by_powers(self, rows: np.ndarray) -> _Found:
        """Find terms by powers of R Rᴴ, which say what they may have missed."""
        basis, max_sums = leading_subspaces(rows, self.count, self.seed, self.workspace)
        terms = _Terms.of(rows, basis, self.count, self.workspace)
        return self._judged(terms, max_sums - np.sum(terms.sigma**2, axis=1))

    def _by_random_columns(self, rows: np.ndarray) -> _Found:
        """Find terms in the range of R times random columns, where sizes fall fast."""
        basis, are_fast, are_flat = self._random_range(rows)
        if np.any(are_fast & are_flat):  # rounding, or a flat remainder, is taken out
            images = np.linalg.qr(adjoint(rows) @ basis)[0]
            basis = np.linalg.qr(rows @ images)[0]
        terms = _Terms.of(rows, basis, self.count, self.workspace)
        return self._judged(terms, np.full(len(rows), np.inf), are_fast)

    def _random_range(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return bases of R times random columns, and whether sizes fall fast, and to a floor."""
        side, columns = rows.shape[1:]
        width = min(self.count + OVERSAMPLING, side)
        basis, triangles = np.linalg.qr(rows @ random_vectors(self.seed, columns, width))
        sizes = np.abs(np.diagonal(triangles, axis1=1, axis2=2))
        are_fast = np.asarray([falls_fast(each, self.count) for each in sizes])
        are_flat = np.asarray([is_flat(each) for each in sizes])
        return basis, are_fast, are_flat

    def _by_single_precision(self, rows: np.ndarray) -> _Found:
        """Find terms by LAPACK's eigenvectors in single precision, in half the time."""
        bases = np.zeros((*rows.shape[:2], self.count), rows.dtype)
        max_sums = np.full(len(rows), np.inf)
        for i, matrix in enumerate(rows):
            leading = leading_by_single_precision(matrix, self.count)
            if leading is not None:
                bases[i], max_sums[i] = leading
        terms = _Terms.of(rows, bases, self.count, self.workspace)
        return self._judged(terms, max_sums - np.sum(terms.sigma**2, axis=1))

    def _by_lapack(self, rows: np.ndarray) -> _Found:
        """Find terms by LAPACK's eigenvectors: these miss nothing but what they couple to."""
        leading = [eigenpairs(matrix, self.count)[1][:, : self.count] for matrix in rows]
        terms = _Terms.of(rows, np.stack(leading), self.count, self.workspace)
        return self._judged(terms, np.sum(terms.couplings * terms.sigma, axis=1))

    def _judged(
        self, terms: _Terms, max_gains: np.ndarray, is_trusted: np.ndarray | bool = True
    ) -> _Found:
        """Return terms with the smaller of two bounds on their excess over the optimum.

        One compares with a bound below the optimum; the other says that other terms can capture at
        most ``max_gains``, and what squaring may lose, of the squared norm more.
        """
        coupled = np.linalg.norm(terms.couplings, axis=1)
        bounds = least_errors(terms.sigma[:, -1], terms.errors, coupled)
        max_gains = np.maximum(max_gains, 0.0) + squaring_loss(self.count)
        with np.errstate(divide="ignore", invalid="ignore"):
            by_bound = np.where(bounds > 0.0, terms.errors / bounds - 1.0, np.inf)
            by_gain = np.where(terms.errors > 0.0, 0.5 * max_gains / terms.errors**2, np.inf)
        excesses = np.minimum(by_bound, by_gain)
        is_rounding = terms.errors <= bounds * (1.0 + self.tolerance) + ROUNDING
        return _Found(terms, excesses, ((excesses <= self.tolerance) | is_rounding) & is_trusted)


@dataclass(frozen=True, slots=True)
class _Terms:
    """Leading terms of matrices R of norm one in the spans of bases, with their measured errors."""

    left: np.ndarray  # (L, n, s)
    sigma: np.ndarray  # (L, s)
    right: np.ndarray  # (L, s, q)
    errors: np.ndarray  # (L,)
    couplings: np.ndarray  # (L, s), of each term to the residual

    @classmethod
    def of(cls, rows: np.ndarray, basis: np.ndarray, count: int, workspace: Workspace) -> _Terms:
        """Take a Rayleigh–Ritz step with R itself, and measure what ``count`` terms leave."""
        u, sigma, right = np.linalg.svd(adjoint(basis) @ rows, full_matrices=False)
        left = basis @ u[:, :, :count]
        sigma = sigma[:, :count]
        right = right[:, :count, :]
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
