"""Two factors of a matrix in memory: eigenvectors of the smaller Gram matrix instead of an SVD."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import scipy.linalg

from lsrdecomp.arrays import (
    OVERSAMPLING,
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
from lsrdecomp.solvers.solver import ErrorKind, Solution, Status
from lsrdecomp.solvers.svd.dense import (
    ROUNDING,
    SVD,
    as_separated,
    least_error,
    required_rank,
    residual_blocks,
    svd_of_tall,
)
from lsrdecomp.solvers.svd.lanczos import orthonormal_matrix
from lsrdecomp.targets.residual import has_twelve_digits

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.kronecker.shape import KroneckerShape


SINGLE_ROUNDOFF = unit_roundoff("float32")

MIN_SKETCH_TOLERANCE = 1e-5
"""The smallest tolerance for which random columns are drawn: finer ones request the digits of
LAPACK, the same in every library. By hand, as are all numbers of the random columns;
``benchmarks/solvers/two_factors.py`` times the result."""


@dataclass(frozen=True, slots=True)
class Gram(MatrixSolver):
    """Eigenvectors of R Rᴴ or Rᴴ R, the smaller, then one Rayleigh–Ritz step with R itself.

    Terms and errors are in double precision. A few terms, to a ``tolerance`` of 1e-5 or more, are
    sought in the range of R times random columns [1]_ where its size falls fast from column to
    column: a few products with blocks. Of a NumPy array they are else sought in the span of
    eigenvectors that LAPACK finds in single precision, in half the time, whose rounding is squared
    and part of the bound. All others, and those that it leaves open, cost O(p·q·min(p, q)) in
    matrix products and O(min(p, q)³) in the eigenproblem, of which LAPACK computes the leading
    vectors alone where few terms are asked for: several times less than the SVD.

    The error and what couples the terms to the residual are measured, and bound how far the error
    may be above the optimum: however small it is, where the terms stand apart from the rest.
    Elsewhere squaring has cost half the digits; where ``tolerance`` asks for more, the SVD is taken
    instead. An error of 64 u‖R‖ is rounding.

    Parameters
    ----------
    tolerance : float
        Allowed excess of the error over the optimum, relative.
    seed : int
        Of the random columns, drawn by NumPy whatever the library of the target.

    References
    ----------
    .. [1] N. Halko, P. G. Martinsson and J. A. Tropp, Finding structure with randomness, SIAM Rev.
       53 (2011). doi:10.1137/090771806

    Examples
    --------
    >>> import numpy as np
    >>> import lsrdecomp as lsr
    >>> matrix = np.kron(np.eye(4), np.ones((3, 3)))
    >>> result = lsr.decompose(matrix, "4x4, 3x3", rank=1, solver=lsr.solvers.Gram())
    >>> bool(result.relative_error < 1e-6)
    True
    """

    order: ClassVar[int] = 2
    tolerance: float = 1e-6
    seed: int = 0

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Find the first singular triples of R(M) by its Gram matrix; see `Solver.solve`.

        Unlike an SVD by ``eigh`` of R Rᴴ alone it knows when squaring has cost the digits that were
        asked for, and hands over to `SVD` then.

        Returns
        -------
        Solution
            In double precision. ``optimality_gap`` is a bound, zero after `SVD`; ``relative_error``
            is measured; ``sweeps`` is one record.
        """
        target, shape, progress = problem.target, problem.shape, problem.progress
        goal = problem.relative_goal
        rank = problem.max_terms
        status = Status.rank_reached
        if target.norm == 0.0 or self._loses_too_much(1, goal):
            return problem.delegate_to(SVD())
        formed = target.rearranged(shape).formed()
        matrix = Rearrangement.of(formed, target.norm, shape)
        side = int(matrix.rows.shape[0])
        solution = None
        # Gram 1: a few terms from random columns, where LAPACK is not as fast.
        is_coarse = goal is None and self.tolerance >= MIN_SKETCH_TOLERANCE
        has_few_columns = 8 * (rank + OVERSAMPLING) <= side
        if is_coarse and has_few_columns:
            solution = matrix.from_random_columns(rank, self.tolerance, self.seed)
        # Gram 2: or from eigenvectors in single precision, which the singular triples of R take to
        # double.
        if solution is None and is_coarse:
            solution = matrix.from_single_precision(rank, self.tolerance)
        # Gram 3: else from the eigenvectors; with a tolerance from all, to count the terms.
        if solution is None:
            values, vectors = eigenpairs(matrix.rows, rank if goal is None else side)
            if goal is not None:
                lengths = np.sqrt(np.maximum(to_numpy(values), 0.0)) / matrix.norm
                rank, status = required_rank(tail_norms(lengths), rank, goal)
            if not self._loses_too_much(rank, goal):
                basis = vectors[:, :rank]
                solution = matrix.solution(basis, rank, self.tolerance, certain=True)
        # Gram 4: the SVD where squaring has cost too much.
        if solution is None or solution.relative_error is None:
            return problem.delegate_to(SVD())
        progress.record(solution.relative_error)
        return replace(solution, status=status, sweeps=progress.sweeps)

    def _loses_too_much(self, rank: int, goal: float | None) -> bool:
        """Return whether squaring costs so many digits that the SVD is needed at this goal."""
        error = math.inf if goal is None else goal
        return squaring_loss(rank) > 2.0 * self.tolerance * error**2


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """R(M) in double precision with its shorter side first, and terms in the span of a basis."""

    rows: Array  # R(M), or its adjoint where that has fewer rows
    is_adjoint: bool
    norm: float  # of these rows: ‖M‖, or 1 where its square would overflow or vanish
    scale: float  # ‖M‖ over that
    shape: KroneckerShape

    @classmethod
    def of(cls, matrix: Array, size: float, shape: KroneckerShape) -> Rearrangement:
        """Take R(M) of norm ``size``, turned and scaled where necessary."""
        is_adjoint = matrix.shape[0] > matrix.shape[1]
        return cls.of_rows(adjoint(matrix) if is_adjoint else matrix, size, shape)

    @classmethod
    def of_rows(cls, rows: Array, size: float, shape: KroneckerShape) -> Rearrangement:
        """Take R(M), or its adjoint where that has fewer rows, scaled where necessary."""
        rows = as_double(rows)
        scale = 1.0
        if not 1e-100 < size < 1e100:
            rows = rows / size
            scale = size
            size = 1.0
        is_adjoint = shape.sizes[0] > shape.sizes[1]
        return cls(rows, is_adjoint, size, scale, shape)

    def from_random_columns(self, rank: int, tolerance: float, seed: int) -> Solution | None:
        """Find a few terms in the range of R times random columns.

        None where the size of R outside that range does not fall fast from column to column, and
        where R has less than three rows a column.
        """
        rows = self.rows
        n_columns = rank + OVERSAMPLING
        if 3 * n_columns > rows.shape[0] or is_differentiated(rows):
            return None
        xp = namespace(rows)
        random = np.random.default_rng(seed).standard_normal((rows.shape[1], n_columns))
        basis, triangle = xp.linalg.qr(rows @ like(random, rows))
        sizes = np.abs(np.diagonal(to_numpy(triangle)))  # about ‖R‖ at first
        if not falls_fast(sizes, rank):
            return None
        if is_flat(sizes):
            images, _, _ = xp.linalg.svd(adjoint(rows) @ basis, full_matrices=False)
            basis, _ = xp.linalg.qr(rows @ images)
        return self.solution(basis, rank, tolerance, certain=False)

    def from_single_precision(self, rank: int, tolerance: float) -> Solution | None:
        """Find a few terms of NumPy's R from eigenvectors of R Rᴴ in single precision.

        None where what single precision may have missed leaves the optimum open, and for many
        terms or other libraries. Half the time of eigenvectors in double precision.
        """
        rows = self.rows
        is_small_part = 2 * rank <= int(rows.shape[0])
        if not (isinstance(rows, np.ndarray) and is_small_part and 1e-15 < self.norm < 1e15):
            return None
        # Single 1: a basis from single precision, orthonormal in double.
        leading = leading_by_single_precision(rows, rank)
        if leading is None:
            return None
        basis, max_sum = leading
        # Single 2: singular triples of R in their span.
        triples, _ = self._triples(basis, rank)
        theta = to_numpy(triples[1]) / self.norm
        captured = float(theta @ theta)
        squared_error = 1.0 - captured
        max_gain = max(max_sum / self.norm**2 - captured, 0.0)
        is_near = max_gain <= 2.0 * tolerance * squared_error
        if is_near and has_twelve_digits(squared_error, 2.0):
            gap = 0.5 * max_gain / squared_error
            left, weights, right = triples
            scaled = left, weights * self.scale, right
            return self._solution(scaled, rank, math.sqrt(squared_error), gap, tolerance)
        # Single 3: of small errors the couplings of the terms know more.
        left, weights, right = triples
        error, couplings = self._measured(left, weights, right)
        bound = least_error(float(theta[-1]), error, float(np.linalg.norm(couplings)))
        if error > bound * (1.0 + tolerance) + ROUNDING:
            return None
        gap = error / bound - 1.0 if bound else math.inf
        return self._solution((left, weights * self.scale, right), rank, error, gap, tolerance)

    def _triples(self, basis: Array, rank: int) -> tuple[tuple[Array, Array, Array], Array]:
        """Return the first singular triples of Q Qᴴ R for an orthonormal Q, and a basis of RᴴQ."""
        # LAPACK is faster on tall matrices than on wide ones.
        images, sigma, uh = svd_of_tall(adjoint(self.rows) @ basis)
        left = basis @ adjoint(uh[:rank, :])
        return (left, sigma[:rank], adjoint(images[:, :rank])), images

    def solution(
        self, basis: Array, rank: int, tolerance: float, *, certain: bool
    ) -> Solution | None:
        """Return the leading terms in the span of a basis, or of a better one.

        None unless a bound says that they are near the optimum. ``certain`` says that no larger
        terms can have been missed: then these need not stand apart from the rest.
        """
        rows = self.rows
        xp = namespace(rows)
        is_followed = is_differentiated(rows)
        for _ in range(2):
            # Terms 1: Rayleigh–Ritz with R itself gives singular values to full accuracy; the error
            # is measured, and how each term couples to the residual.
            (left, weights, right), images = self._triples(basis, rank)
            if certain and not is_followed:
                solution = self._of_eigenvectors((left, weights, right), rank, tolerance)
                if solution is not None:
                    return solution
            error, couplings = self._measured(left, weights, right)
            # Terms 2: the optimum is known by the couplings, or by what they and squaring may have
            # lost.
            theta = to_numpy(weights) / self.norm
            last = float(theta[-1]) if rank else 2.0  # without terms nothing couples
            bound = least_error(last, error, float(np.linalg.norm(couplings)))
            max_gain = squaring_loss(rank) + float(couplings @ theta)
            # Gradients of directions that are rounding have no meaning: `SVD` refuses them by name.
            is_near = not is_followed and error <= bound * (1.0 + tolerance) + ROUNDING
            allowed = 1e-6 if is_followed else tolerance
            is_certain = certain and max_gain <= 2.0 * allowed * error**2
            if is_near or is_certain:
                gap = error / bound - 1.0 if bound else math.inf
                if certain and error:
                    gap = min(gap, 0.5 * max_gain / error**2)
                triples = left, weights * self.scale, right
                return self._solution(triples, rank, error, gap, tolerance)
            # Terms 3: squares that sink in rounding mix directions, which one more product with R
            # and Rᴴ sorts.
            basis, _ = xp.linalg.qr(rows @ images)
        return None

    def _of_eigenvectors(
        self, triples: tuple[Array, Array, Array], rank: int, tolerance: float
    ) -> Solution | None:
        """Return terms of LAPACK's eigenvectors where ‖R‖² − Σσ² measures their error.

        These couple to the residual by rounding alone, which is then nothing beside the error.
        """
        _, weights, _ = triples
        theta = to_numpy(weights) / self.norm
        squared_error = 1.0 - float(theta @ theta)
        if not has_twelve_digits(squared_error, 2.0):
            return None
        gap = 0.5 * (squaring_loss(rank) + rank * ROUNDING) / squared_error
        left, _, right = triples
        triples = left, weights * self.scale, right
        return self._solution(triples, rank, math.sqrt(squared_error), gap, tolerance)

    def _measured(self, left: Array, weights: Array, right: Array) -> tuple[float, np.ndarray]:
        """Measure the error of some terms, and the norm of the residual along each right vector."""
        block_norms = []
        squares = np.zeros(int(weights.shape[0]))
        for residual in residual_blocks(self.rows, left, weights, right):
            block_norms.append(norm(residual))
            squares += np.sum(np.abs(to_numpy(residual @ adjoint(right))) ** 2, axis=0)
        return math.hypot(*block_norms) / self.norm, np.sqrt(squares) / self.norm

    def _solution(
        self,
        triples: tuple[Array, Array, Array],
        rank: int,
        error: float,
        gap: float,
        tolerance: float,
    ) -> Solution:
        left, weights, right = triples
        if self.is_adjoint:
            terms = as_separated(adjoint(right), weights, adjoint(left), self.shape, rank)
        else:
            terms = as_separated(left, weights, right, self.shape, rank)
        if gap <= tolerance:
            return Solution(terms, Status.rank_reached, (), gap, ErrorKind.bounded, error)
        return Solution(terms, Status.rank_reached, relative_error=error)


def falls_fast(sizes: np.ndarray, rank: int) -> bool:
    """Return whether the sizes of columns, in their order, fall so fast that these suffice."""
    return bool(sizes[-1] <= 0.25 * sizes[rank - 1])


def is_flat(sizes: np.ndarray) -> bool:
    """Return whether the last five columns hold a flat remainder, or rounding.

    One more product takes it out.
    """
    return bool(sizes[-1] > 0.05 * sizes[-6])


def squaring_loss(rank: int) -> float:
    """Return the captured energy that rounding may misplace, for ‖R‖ = 1."""
    return 0.125 * ROUNDING * max(rank, 1)


def eigenpairs(rows: Array, count: int) -> tuple[Array, Array]:
    """Return the ``count`` largest eigenvalues of R Rᴴ or more, largest first, with vectors."""
    xp = namespace(rows)
    side = int(rows.shape[0])
    matrix = rows @ adjoint(rows)
    values = None
    vectors = matrix[:, :0]
    if isinstance(matrix, np.ndarray) and 2 * count <= side:
        values, vectors = leading_eigenpairs(matrix, count)
    if vectors.shape[1] < count:  # of equal values it has been seen to leave out more
        values, vectors = xp.linalg.eigh(matrix)
    return xp.flip(values), xp.flip(vectors, axis=1)


def leading_by_single_precision(rows: np.ndarray, count: int) -> tuple[np.ndarray, float] | None:
    """Return leading eigenvectors of R Rᴴ as single precision sees them, and a bound.

    Returns
    -------
    basis : ndarray, shape (n, count)
        Orthonormal in the precision of R (n, q).
    max_sum : float
        At least the sum of the ``count`` largest eigenvalues: that of those found and, by Ky Fan,
        √count times the norm of their rounding: 64 μ‖G‖_F, of which 22 were seen in 1,200 matrices.

    None where LAPACK finds fewer.
    """
    gram = rows @ adjoint(rows)
    narrow = gram.astype(np.complex64 if is_complex(rows) else np.float32)
    values, vectors = leading_eigenpairs(narrow, count)
    if vectors.shape[1] != count:
        return None
    basis, _ = orthonormal_matrix(vectors[:, ::-1].astype(rows.dtype))
    rounding = 64.0 * SINGLE_ROUNDOFF * math.sqrt(count) * norm(gram)
    return basis, float(values.sum(dtype=np.float64)) + rounding


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
