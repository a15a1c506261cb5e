"""Two factors through the Gram matrix of the smaller side: a symmetric eigenproblem instead of an SVD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy.linalg

from lsrdecomp.arrays import Array, adjoint, as_double, is_differentiated, namespace, tail_norms, to_numpy
from lsrdecomp.arrays import norm as norm_of
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import ErrorKind, Solution, Status
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.svd.dense import ROUNDING, SVD, as_separated, chosen_rank, least_error


@dataclass(frozen=True, slots=True)
class Gram(MatrixSolver):
    """Eigenvectors of R Rᴴ (or Rᴴ R, the smaller) in double precision, then one Rayleigh–Ritz step with R itself.

    Squaring costs half the digits: the captured energy ‖R‖² − error² is exact to about s·u·‖R‖². Where that is more
    than ``tolerance`` × error², and the terms do not stand apart from the rest either, by what couples them to a
    residual that is measured, the SVD is taken instead; an error of 64 u‖R‖ is rounding. Cost O(p·q·min(p, q)) in
    matrix products and O(min(p, q)³) in the eigenproblem, of which LAPACK computes the leading vectors alone where few
    terms are asked for: several times less than the SVD.

    Parameters
    ----------
    tolerance : float
        Allowed excess of the error over the optimum, relative.

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

    def _solve(self, problem: MatrixProblem) -> Solution:
        """The first singular triples of R(M) by its Gram matrix; the contract is `Solver.solve`.

        Unlike an SVD by ``eigh`` of R Rᴴ alone it knows when squaring has cost the digits that were asked for, and
        hands over to `SVD` then.

        Returns
        -------
        Solution
            In double precision. ``optimality_gap`` bounds what squaring may have cost, zero after `SVD`;
            ``relative_error`` is measured; ``sweeps`` is one record.
        """
        target, shape, progress, goal = problem.target, problem.shape, problem.progress, problem.goal
        norm = target.norm
        finest = math.inf if goal is None else goal
        if norm == 0.0 or self._loss(1) > 2.0 * self.tolerance * finest**2:
            return problem.delegate_to(SVD())
        # Gram 1: eigenvectors of R Rᴴ, on the smaller side, for ‖R‖ = 1; with a goal, all values, to count the terms.
        operator = target.rearranged(shape)
        wide = operator.shape[0] <= operator.shape[1]
        matrix = as_double(operator.formed()) / norm
        rows = matrix if wide else adjoint(matrix)
        s, status = problem.most, Status.rank_reached
        values, vectors = eigenpairs(rows @ adjoint(rows), s if goal is None else rows.shape[0])
        if goal is not None:
            s, status = chosen_rank(tail_norms(np.sqrt(np.maximum(to_numpy(values)[::-1], 0.0))), s, goal)
        loss, xp = self._loss(s), namespace(rows)
        if loss > 2.0 * self.tolerance * finest**2:
            return problem.delegate_to(SVD())
        basis, followed = xp.flip(vectors, axis=1)[:, :s], is_differentiated(rows)
        for _ in range(2):
            # Gram 2: Rayleigh–Ritz with R itself gives singular values to full accuracy; the error is measured.
            u, sigma, vh = xp.linalg.svd(adjoint(basis) @ rows, full_matrices=False)
            left = basis @ u
            rest = rows - (left * xp.astype(sigma, left.dtype)) @ vh
            error = norm_of(rest)
            # Gram 3: the optimum is known by what squaring may have lost, or by the couplings.
            last = float(to_numpy(sigma)[-1]) if s else 2.0  # without terms nothing couples
            least = float(least_error(last, error, norm_of(rest @ adjoint(vh))))
            # Gradients of directions that are rounding have no meaning: `SVD` refuses them by name.
            apart = not followed and error <= least * (1.0 + self.tolerance) + ROUNDING
            if apart or loss <= 2.0 * (1e-6 if followed else self.tolerance) * error**2:
                triple = (left, sigma * norm, vh) if wide else (adjoint(vh), sigma * norm, adjoint(left))
                progress.note(error)
                gap = min(0.5 * loss / error**2, error / least - 1.0 if least else math.inf) if error else math.inf
                bound, kind = (gap, ErrorKind.bounded) if gap <= self.tolerance else (None, ErrorKind.estimated)
                return Solution(as_separated(*triple, shape, s), status, progress.sweeps, bound, kind, error)
            # Gram 4: squares that sink in rounding mix directions, which one more product with R and Rᴴ sorts.
            basis, _ = xp.linalg.qr(rows @ adjoint(vh))
        return problem.delegate_to(SVD())

    def _loss(self, rank: int) -> float:
        """Captured energy that rounding may misplace, for ‖R‖ = 1."""
        return 8.0 * max(rank, 1) * unit_roundoff("float64")


def eigenpairs(matrix: Array, count: int) -> tuple[Array, Array]:
    """The ``count`` largest eigenvalues of a Hermitian matrix, ascending, with vectors; at least so many of them."""
    size = int(matrix.shape[0])
    if isinstance(matrix, np.ndarray) and 2 * count <= size:  # LAPACK leaves the others out
        values, vectors = scipy.linalg.eigh(matrix, subset_by_index=(size - count, size - 1), check_finite=False)
        return values, vectors
    values, vectors = namespace(matrix).linalg.eigh(matrix)
    return values, vectors
