"""Two factors of a matrix in memory: leading eigenvectors of the Gram matrix of the smaller side instead of an SVD."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import scipy.linalg

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    is_differentiated,
    like,
    namespace,
    norm,
    tail_norms,
    to_numpy,
)
from lsrdecomp.solvers.base import ErrorKind, Solution, Status
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.svd.dense import (
    ROUNDING,
    SVD,
    as_separated,
    chosen_rank,
    least_error,
    residual_blocks,
)

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape

OVERSAMPLED = 8
"""Random columns beside as many as there are terms."""

QUICK = 1e-5
"""The least tolerance for which they are drawn: finer ones ask for the digits of LAPACK, the same
in every library."""


@dataclass(frozen=True, slots=True)
class Gram(MatrixSolver):
    """Eigenvectors of R Rᴴ (or Rᴴ R, the smaller) in double precision, then one Rayleigh–Ritz step with R itself.

    A few terms, to a ``tolerance`` of 1e-5 or more, are sought in the range of R times random
    columns [1]_ where its size falls fast from column to column: a few products with blocks. All
    others, and what that leaves open, cost O(p·q·min(p, q)) in matrix products and O(min(p, q)³) in
    the eigenproblem, of which LAPACK computes the leading vectors alone where few terms are asked
    for: several times less than the SVD.

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
    >>> result = lsr.decompose(np.kron(np.eye(4), np.ones((3, 3))), "4x4, 3x3", rank=1, solver=lsr.solvers.Gram())
    >>> bool(result.relative_error < 1e-6)
    True
    """

    order: ClassVar[int] = 2
    tolerance: float = 1e-6
    seed: int = 0

    def _solve(self, problem: MatrixProblem) -> Solution:
        """The first singular triples of R(M) by its Gram matrix; the contract is `Solver.solve`.

        Unlike an SVD by ``eigh`` of R Rᴴ alone it knows when squaring has cost the digits that were
        asked for, and hands over to `SVD` then.

        Returns
        -------
        Solution
            In double precision. ``optimality_gap`` is a bound, zero after `SVD`; ``relative_error``
            is measured; ``sweeps`` is one record.
        """
        target, shape, progress, goal = (
            problem.target,
            problem.shape,
            problem.progress,
            problem.relative_goal,
        )
        finest, s, status = (
            math.inf if goal is None else goal,
            problem.max_terms,
            Status.rank_reached,
        )
        if target.norm == 0.0 or loss(1) > 2.0 * self.tolerance * finest**2:
            return problem.delegate_to(SVD())
        matrix, solution = (
            Rearrangement.of(target.rearranged(shape).formed(), target.norm, shape),
            None,
        )
        few = 8 * (s + OVERSAMPLED) <= matrix.rows.shape[0]  # else LAPACK is as fast
        if goal is None and self.tolerance >= QUICK and few:
            solution = matrix.from_random_columns(s, self.tolerance, self.seed)
        if solution is None:
            values, vectors = eigenpairs(matrix.rows, s if goal is None else matrix.rows.shape[0])
            if goal is not None:  # all eigenvalues, to count the terms
                lengths = np.sqrt(np.maximum(to_numpy(values), 0.0)) / matrix.norm
                s, status = chosen_rank(tail_norms(lengths), s, goal)
            if loss(s) <= 2.0 * self.tolerance * finest**2:
                solution = matrix.solution(vectors[:, :s], s, self.tolerance, certain=True)
        if solution is None or solution.relative_error is None:
            return problem.delegate_to(SVD())
        progress.record(solution.relative_error)
        return replace(solution, status=status, sweeps=progress.sweeps)


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """R(M) in double precision with its shorter side first, and what can be said of terms in the span of a basis."""

    rows: Array  # R(M), or its adjoint where that has fewer rows
    turned: bool
    norm: float  # of these rows: ‖M‖, or 1 where its square would overflow or vanish
    scale: float  # ‖M‖ over that
    shape: KroneckerShape

    @classmethod
    def of(cls, matrix: Array, size: float, shape: KroneckerShape) -> Rearrangement:
        rows, scale = as_double(matrix), 1.0
        if not 1e-100 < size < 1e100:
            rows, size, scale = rows / size, 1.0, size
        turned = rows.shape[0] > rows.shape[1]
        return cls(adjoint(rows) if turned else rows, turned, size, scale, shape)

    def from_random_columns(self, rank: int, tolerance: float, seed: int) -> Solution | None:
        """A few terms from the range of R times random columns, where what these leave of R falls fast; else None."""
        rows, columns = self.rows, rank + OVERSAMPLED
        if 3 * columns > rows.shape[0] or is_differentiated(rows):
            return None
        xp, random = (
            namespace(rows),
            np.random.default_rng(seed).standard_normal((rows.shape[1], columns)),
        )
        basis, triangle = xp.linalg.qr(rows @ like(random, rows))
        left = np.abs(np.diagonal(to_numpy(triangle)))  # about ‖R‖ at first
        if left[-1] > 0.25 * left[rank - 1]:
            return None
        if (
            left[-1] > 0.05 * left[-6]
        ):  # a flat remainder, or rounding, which one more product takes out
            _, _, vh = xp.linalg.svd(adjoint(basis) @ rows, full_matrices=False)
            basis, _ = xp.linalg.qr(rows @ adjoint(vh))
        return self.solution(basis, rank, tolerance, certain=False)

    def solution(
        self, basis: Array, rank: int, tolerance: float, *, certain: bool
    ) -> Solution | None:
        """The leading terms in the span of a basis, or of a better one; None unless a bound says that they are near.

        ``certain`` says that nothing larger than these can have been missed: then they need not
        stand apart.
        """
        rows, xp, followed = self.rows, namespace(self.rows), is_differentiated(self.rows)
        for _ in range(2):
            # Gram 1: Rayleigh–Ritz with R itself gives singular values to full accuracy; the error
            # is measured.
            u, sigma, vh = xp.linalg.svd(adjoint(basis) @ rows, full_matrices=False)
            left, weights, right = basis @ u[:, :rank], sigma[:rank], vh[:rank, :]
            errors, squares = [], np.zeros(rank)
            for rest in residual_blocks(rows, left, weights, right):
                errors.append(norm(rest))
                squares += np.sum(np.abs(to_numpy(rest @ adjoint(right))) ** 2, axis=0)
            error, coupled = math.hypot(*errors) / self.norm, np.sqrt(squares) / self.norm
            # Gram 2: the optimum is known by the couplings, or by what they and squaring may have
            # lost.
            theta = to_numpy(weights) / self.norm
            last = float(theta[-1]) if rank else 2.0  # without terms nothing couples
            least = float(least_error(last, error, float(np.linalg.norm(coupled))))
            gain = loss(rank) + float(coupled @ theta)
            # Gradients of directions that are rounding have no meaning: `SVD` refuses them by name.
            apart = not followed and error <= least * (1.0 + tolerance) + ROUNDING
            if apart or (certain and gain <= 2.0 * (1e-6 if followed else tolerance) * error**2):
                gap = error / least - 1.0 if least else math.inf
                gap = min(gap, 0.5 * gain / error**2) if certain and error else gap
                known, kind = (
                    (gap, ErrorKind.bounded) if gap <= tolerance else (None, ErrorKind.estimated)
                )
                weights = weights * self.scale
                triple = (
                    (adjoint(right), weights, adjoint(left))
                    if self.turned
                    else (left, weights, right)
                )
                terms = as_separated(*triple, self.shape, rank)
                return Solution(terms, Status.rank_reached, (), known, kind, error)
            # Gram 3: squares that sink in rounding mix directions, which one more product with R
            # and Rᴴ sorts.
            basis, _ = xp.linalg.qr(rows @ adjoint(vh))
        return None


def loss(rank: int) -> float:
    """Captured energy that rounding may misplace, for ‖R‖ = 1."""
    return 0.125 * ROUNDING * max(rank, 1)


def eigenpairs(rows: Array, count: int) -> tuple[Array, Array]:
    """The ``count`` largest eigenvalues of R Rᴴ, largest first, with vectors; at least so many of them."""
    xp, side = namespace(rows), int(rows.shape[0])
    matrix = rows @ adjoint(rows)
    values, vectors = None, matrix[:, :0]
    if isinstance(matrix, np.ndarray) and 2 * count <= side:  # LAPACK leaves the others out
        values, vectors = scipy.linalg.eigh(
            matrix, subset_by_index=(side - count, side - 1), check_finite=False
        )
    if vectors.shape[1] < count:  # of values that are all alike it has been seen to leave out more
        values, vectors = xp.linalg.eigh(matrix)
    return xp.flip(values), xp.flip(vectors, axis=1)
