"""Two factors, dense: the truncated SVD of the rearrangement, by LAPACK or from its Gram matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import scipy.linalg

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    is_complex,
    is_differentiated,
    like,
    namespace,
    norm,
    tail_norms,
    to_numpy,
)
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.solver import ErrorKind, Solution, Status, Sweep
from lsrdecomp.solvers.svd.batch import BatchRequest, truncated_svds
from lsrdecomp.solvers.svd.certificate import ROUNDING, least_error
from lsrdecomp.solvers.svd.crossings import takes_gram, takes_range
from lsrdecomp.solvers.svd.krylov_space import orthonormal
from lsrdecomp.solvers.svd.singular_terms import (
    Triples,
    as_separated,
    required_rank,
    residual_blocks,
    svd_of_tall,
)
from lsrdecomp.targets.residual import has_twelve_digits
from lsrdecomp.targets.target import Dense

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.kronecker.shape import KroneckerShape


@dataclass(frozen=True, slots=True)
class SVD(MatrixSolver):
    """Singular value decomposition of the rearranged matrix, in double precision [1]_.

    By Eckart and Young the first s terms are the best approximation of separation rank s; they are
    orthogonal, so γ = 1. Cost O(p·q·min(p, q)) for a rearrangement of shape (p, q).

    With a ``tolerance`` the leading eigenvectors of R Rᴴ or Rᴴ R, the smaller, are found instead,
    several times sooner, and one Rayleigh–Ritz step with R itself follows. Squaring costs half the
    digits, LAPACK's single precision, which is tried first, the other half of these: the error and
    what couples the terms to the residual are measured, and bound how far the error may be above
    the optimum. Where the bound does not allow the tolerance, LAPACK's SVD is taken. An error of
    64 u‖R‖ is rounding.

    Parameters
    ----------
    tolerance : float
        Allowed excess of the error over the optimum, relative; 0: all digits.

    References
    ----------
    .. [1] C. F. Van Loan and N. Pitsianis, Approximation with Kronecker products, 1993, section 2.
       doi:10.1007/978-94-015-8196-7_17

    Examples
    --------
    >>> import numpy as np
    >>> import lsrdecomp as lsr
    >>> matrix = np.kron(np.eye(4), np.ones((3, 3)))
    >>> result = lsr.decompose(matrix, "4x4, 3x3", rank=1, solver=lsr.SVD())
    >>> bool(result.relative_error < 1e-12)
    True
    """

    order: ClassVar[int] = 2
    tolerance: float = 0.0

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Find the first singular triples of R(M), formed; the contract is `Solver.solve`.

        Unlike ``scipy.sparse.linalg.svds`` it computes in double precision whatever the target's
        type, and knows how near the optimum it is: with ``atol`` the least number of terms is
        taken.

        Returns
        -------
        Solution
            In double precision. ``optimality_gap`` is zero, or a bound with a ``tolerance``, always
            `ErrorKind.bounded`; ``sweeps`` is one record; ``relative_error`` is measured where the
            target is held as an array.
        """
        return self.of_matrix(problem.target.rearranged(problem.shape).formed(), problem)

    def of_matrix(self, matrix: Array, problem: MatrixProblem) -> Solution:
        """Solve a problem whose R(M) is at hand."""
        matrix = as_double(matrix)
        if self.tolerance > 0.0 and not is_differentiated(matrix):
            solution = _GramRoute.of(matrix, problem, self.tolerance).solution()
            if solution is not None:
                return solution
        return _by_lapack(matrix, problem)

    def solve_batch(
        self,
        matrices: Any,
        shape: KroneckerShape,
        *,
        rank: int | None = None,
        atol: float | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> tuple[Solution, ...]:
        """Find the leading singular triples of the rearrangement of each matrix.

        Small matrices, and those of other libraries, go through one batched SVD, in the precision
        of the input and without terms that are rounding; larger ones of NumPy's, and
        differentiated ones, one by one.

        Parameters
        ----------
        matrices, shape, rank, atol, on_sweep
            As for `Krylov.solve_batch`.

        Returns
        -------
        tuple of Solution, one a matrix

        Raises
        ------
        ShapeError, PrecisionError, BudgetError
            For sizes that differ or do not tile, entries that are not finite, and a missing goal.
        """
        request = BatchRequest.of(matrices, shape, rank, atol, on_sweep)
        batch = request.batch
        is_large = takes_gram(min(request.shape.sizes), request.max_terms)
        if (is_large and isinstance(batch, np.ndarray)) or is_differentiated(batch):
            positions = range(int(batch.shape[0]))
            return tuple(request.solve_alone(i, self) for i in positions)
        return tuple(truncated_svds(request))


def _by_lapack(matrix: Array, problem: MatrixProblem) -> Solution:
    """Truncate the SVD."""
    target, progress = problem.target, problem.progress
    # SVD 1: all singular triples of R(M) in double precision, and with them the error of every
    # number of terms.
    u, sigma, vh = full_svd(matrix)
    tails = tail_norms(sigma)
    rank, status = required_rank(tails, problem.max_terms, problem.atol)
    if rank and is_differentiated(matrix):
        from lsrdecomp.solvers.svd.torch_truncation import differentiable_triples

        u, sigma, vh = differentiable_triples(matrix, u, sigma, vh, rank)
    # SVD 2: those requested, as Kronecker terms.
    if tails[0] > 0.0:
        progress.record(tails[rank] / tails[0])
    terms = as_separated(u, sigma, vh, problem.shape, rank)
    # SVD 3: the error from entries, rounding included; R(M) is at hand, so that it costs one
    # product.
    error = None
    if isinstance(target, Dense):
        blocks = residual_blocks(matrix, u[:, :rank], sigma[:rank], vh[:rank, :])
        error = math.hypot(*map(norm, blocks)) / (target.norm or 1.0)
    return Solution(terms, status, progress.sweeps, 0.0, ErrorKind.bounded, error)


def full_svd(matrix: Array) -> Triples:
    """Return the thin SVD of a matrix; of NumPy's by LAPACK, without what NumPy does around it."""
    if type(matrix) is np.ndarray:
        # Rows as they lie are the columns of the transposed matrix, which LAPACK reads.
        solve, work = _lapack_svd(matrix.dtype.char, matrix.shape[1], matrix.shape[0])
        v, sigma, uh, failed = solve(matrix.T, full_matrices=False, lwork=work)
        if not failed:
            return uh.T, sigma, v.T
    u, sigma, vh = namespace(matrix).linalg.svd(matrix, full_matrices=False)
    return u, sigma, vh


@cache
def _lapack_svd(type_code: str, rows: int, columns: int) -> tuple[Callable[..., Any], int]:
    """Return LAPACK's function and the size of its workspace."""
    solve, measure = scipy.linalg.get_lapack_funcs(
        ("gesdd", "gesdd_lwork"), dtype=np.dtype(type_code)
    )
    work, _ = measure(rows, columns, full_matrices=False)
    return solve, int(np.real(work))


SPARE_COLUMNS = 16
"""Random columns beside those for the terms: of e^(−k/4) these leave 3e-4 of the squared error of
the terms outside, which is less than a thousandth of the error."""


@dataclass(frozen=True, slots=True)
class _GramRoute:
    """The way through the Gram matrix of R(M), its shorter side first, and the request."""

    rows: Array  # R(M), or its adjoint where that has fewer rows
    is_adjoint: bool
    problem: MatrixProblem
    tolerance: float

    @classmethod
    def of(cls, matrix: Array, problem: MatrixProblem, tolerance: float) -> _GramRoute:
        is_adjoint = matrix.shape[0] > matrix.shape[1]
        rows = adjoint(matrix) if is_adjoint else matrix
        return cls(rows, is_adjoint, problem, tolerance)

    @property
    def norm(self) -> float:
        return self.problem.target.norm

    def solution(self) -> Solution | None:
        """Return terms near the optimum; None where squares cannot tell, or take longer."""
        side = int(self.rows.shape[0])
        goal = self.problem.relative_goal
        rank = self.problem.max_terms
        is_faster = takes_gram(side, rank if goal is None else 1)
        if not is_faster or not 1e-100 < self.norm < 1e100 or self._loses_too_much(1, goal):
            return None
        gram = self.rows @ adjoint(self.rows)
        if goal is not None:
            # Gram 1: with a tolerance all eigenvalues, to count the terms.
            values, vectors = eigenpairs(gram, side)
            lengths = np.sqrt(np.maximum(to_numpy(values), 0.0)) / self.norm
            rank, status = required_rank(tail_norms(lengths), rank, goal)
            if rank == 0 or self._loses_too_much(rank, goal):
                return None
            return self._of_span(vectors[:, :rank], squaring_loss(rank), status)
        # Gram 2: a few terms from eigenvectors in single precision, else in double.
        is_range = isinstance(gram, np.ndarray) and takes_range(side, rank, is_single=True)
        if is_range and 1e-15 < self.norm < 1e15:
            solution = self._from_single_precision(gram, rank)
            if solution is not None:
                return solution
        _, vectors = eigenpairs(gram, rank)
        return self._of_span(vectors[:, :rank], squaring_loss(rank), Status.rank_reached)

    def _from_single_precision(self, gram: np.ndarray, rank: int) -> Solution | None:
        """Return terms from eigenvectors that LAPACK finds in less time; None where these blur."""
        narrow = gram.astype(np.complex64 if is_complex(gram) else np.float32)
        values, vectors = leading_eigenpairs(narrow, rank)
        if vectors.shape[1] < rank:
            return None
        # At least the sum of the largest eigenvalues is that of those found and, by Ky Fan, √s
        # times the norm of their rounding: 64 μ‖G‖_F, of which 22 were seen in 1,200 matrices.
        shares = values.astype(np.float64) / self.norm**2
        rounding = 64.0 * unit_roundoff("float32") * math.sqrt(rank) * norm(gram) / self.norm**2
        seen = float(shares.sum())
        # Where all that is left sinks in that, a span of a few columns more holds it.
        has_room = 2 * (rank + SPARE_COLUMNS) <= len(gram)
        if has_room and 1.0 - seen <= rounding:
            return self._from_random_columns(rank)
        # Where it hides the tolerance, only a last term above all that is left helps.
        stands_apart = float(shares[0]) > 1.0 - seen
        if not stands_apart and rounding > 2.0 * self.tolerance * (1.0 - seen):
            return None
        basis, _ = orthonormal(vectors[:, ::-1].astype(gram.dtype))
        return self._of_span(basis, None, Status.rank_reached, seen + rounding)

    def _from_random_columns(self, rank: int) -> Solution | None:
        """Return the leading terms of R in the range of R Rᴴ R Ω, with random columns Ω.

        None where what is outside of the range, measured, may be more than the tolerance allows.
        """
        rows = self.rows
        # Columns 1: the range, a power step further than that of R Ω.
        rng = np.random.default_rng(0)
        start = rng.standard_normal((int(rows.shape[1]), rank + SPARE_COLUMNS))
        basis, _ = orthonormal(rows @ like(start, rows))
        basis, _ = orthonormal(rows @ (adjoint(rows) @ basis))
        # Columns 2: Rayleigh–Ritz, and the error of the leading terms from entries.
        images, sigma, uh = svd_of_tall(adjoint(rows) @ basis)
        left = (basis @ adjoint(uh))[:, :rank]
        right = adjoint(images)[:rank, :]
        triples = left, sigma[:rank], right
        error = math.hypot(*map(norm, residual_blocks(rows, *triples))) / self.norm
        # Columns 3: by Ky Fan other terms capture no more than these and all that is outside.
        spare = to_numpy(sigma)[rank:] / self.norm
        outside = max(error**2 - float(spare @ spare), 0.0) + ROUNDING * error
        least = math.sqrt(max(error**2 - outside, 0.0))
        gap = error / least - 1.0 if least else math.inf
        if gap > self.tolerance and error > ROUNDING:
            return None
        return self._solution(triples, error, gap, Status.rank_reached)

    def _of_span(
        self, basis: Array, loss: float | None, status: Status, max_sum: float = math.inf
    ) -> Solution | None:
        """Return the leading terms in the span of a basis, or of a better one.

        None unless a bound says that they are near the optimum: other terms can capture no more
        than ``max_sum`` altogether, or these are eigenvectors but for a ``loss`` of energy.
        """
        rows = self.rows
        rank = int(basis.shape[1])
        for _ in range(2):
            # Terms 1: Rayleigh–Ritz with R itself gives singular values to full accuracy.
            images, sigma, uh = svd_of_tall(adjoint(rows) @ basis)
            left = basis @ adjoint(uh)
            right = adjoint(images)
            theta = to_numpy(sigma) / self.norm
            captured = float(theta @ theta)
            squared_error = 1.0 - captured
            # Terms 2: where ‖R‖² − Σσ² measures the error, what may have been missed is known too.
            if has_twelve_digits(squared_error, 2.0):
                max_gain = max(max_sum - captured, 0.0)
                if loss is not None:
                    max_gain = min(max_gain, loss + rank * ROUNDING)
                gap = 0.5 * max_gain / squared_error
                if gap <= self.tolerance:
                    error = math.sqrt(squared_error)
                    return self._solution((left, sigma, right), error, gap, status)
            # Terms 3: elsewhere the error is measured, and how each term couples to the residual.
            error, couplings = self._measured(left, sigma, right)
            bound = least_error(float(theta[-1]), error, float(np.linalg.norm(couplings)))
            gap = error / bound - 1.0 if bound else math.inf
            if loss is not None and error:
                gap = min(gap, 0.5 * (loss + float(couplings @ theta)) / error**2)
            if gap <= self.tolerance or error <= bound * (1.0 + self.tolerance) + ROUNDING:
                return self._solution((left, sigma, right), error, gap, status)
            # Terms 4: squares that sink in rounding mix directions, which one more product with R
            # and Rᴴ sorts.
            basis, _ = namespace(rows).linalg.qr(rows @ images)
        return None

    def _loses_too_much(self, rank: int, goal: float | None) -> bool:
        """Return whether squaring costs so many digits that the SVD is needed at this goal."""
        return goal is not None and squaring_loss(rank) > 2.0 * self.tolerance * goal**2

    def _measured(self, left: Array, sigma: Array, right: Array) -> tuple[float, np.ndarray]:
        """Measure the error of some terms, and the norm of the residual along each right vector."""
        block_norms = []
        squares = np.zeros(int(sigma.shape[0]))
        for residual in residual_blocks(self.rows, left, sigma, right):
            block_norms.append(norm(residual))
            squares += np.sum(np.abs(to_numpy(residual @ adjoint(right))) ** 2, axis=0)
        return math.hypot(*block_norms) / self.norm, np.sqrt(squares) / self.norm

    def _solution(self, triples: Triples, error: float, gap: float, status: Status) -> Solution:
        left, sigma, right = triples
        if self.is_adjoint:
            left, right = adjoint(right), adjoint(left)
        terms = as_separated(left, sigma, right, self.problem.shape, int(sigma.shape[0]))
        progress = self.problem.progress
        progress.record(error)
        if gap <= self.tolerance:
            return Solution(terms, status, progress.sweeps, gap, ErrorKind.bounded, error)
        # The error is rounding, and nothing is left to compare.
        return Solution(terms, status, progress.sweeps, relative_error=error)


def squaring_loss(rank: int) -> float:
    """Return the captured energy that rounding may misplace, for ‖R‖ = 1."""
    return 0.125 * ROUNDING * max(rank, 1)


def eigenpairs(gram: Array, count: int) -> tuple[Array, Array]:
    """Return the ``count`` largest eigenvalues of a Gram matrix or more, the largest first."""
    xp = namespace(gram)
    values = None
    vectors = gram[:, :0]
    if isinstance(gram, np.ndarray) and takes_range(len(gram), count, is_single=False):
        values, vectors = leading_eigenpairs(gram, count)
    if vectors.shape[1] < count:  # of equal values it has been seen to leave out more
        values, vectors = xp.linalg.eigh(gram)
    return xp.flip(values), xp.flip(vectors, axis=1)


def leading_eigenpairs(matrix: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ``count`` largest eigenvalues of a Hermitian matrix, in ascending order.

    With their vectors, or fewer of both where LAPACK finds no more. It leaves the other vectors
    out, and SciPy's function takes as long again to call it at 64 × 64.
    """
    side = len(matrix)
    solve = _lapack_eigenpairs(matrix.dtype.char)
    values, vectors, found, _, failed = solve(
        matrix, range="I", il=side - count + 1, iu=side, overwrite_a=False
    )
    found = 0 if failed else int(found)
    return values[:found], vectors[:, :found]


@cache
def _lapack_eigenpairs(type_code: str) -> Callable[..., Any]:
    name = "heevr" if type_code in "FD" else "syevr"
    (solve,) = scipy.linalg.get_lapack_funcs((name,), dtype=np.dtype(type_code))
    return solve  # type: ignore[no-any-return]
