"""Two factors through the Gram matrix of the smaller side: a symmetric eigenproblem instead of an SVD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lsrdecomp.arrays import adjoint, as_double, namespace, to_numpy
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import ErrorKind, Solution
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.svd.dense import SVD, as_separated, chosen_rank, tail_norms


@dataclass(frozen=True, slots=True)
class Gram(MatrixSolver):
    """Eigenvectors of R Rᴴ (or Rᴴ R, the smaller) in double precision, then one Rayleigh–Ritz step with R itself.

    Squaring costs half the digits: the captured energy ‖R‖² − error² is exact to about s·u·‖R‖². Where that is more
    than ``tolerance`` × error², the SVD is taken instead, so errors down to about √(s·u/tolerance)·‖R‖ come from here.
    Cost O(p·q·min(p, q)) in matrix products and O(min(p, q)³) in the eigenproblem: several times less than the SVD.

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
            In double precision. ``optimality_gap`` bounds what squaring may have cost, zero after `SVD`; ``sweeps`` is
            one record with the error from the spectrum.
        """
        target, shape, progress, goal = problem.target, problem.shape, problem.progress, problem.goal
        norm = target.norm
        finest = math.inf if goal is None else goal
        if norm == 0.0 or self._loss(1) > 2.0 * self.tolerance * finest**2:
            return problem.delegate_to(SVD())
        # Gram 1: eigenvalues of R Rᴴ, on the smaller side, for ‖R‖ = 1.
        operator = target.rearranged(shape)
        wide = operator.shape[0] <= operator.shape[1]
        matrix = as_double(operator.formed()) / norm
        rows = matrix if wide else adjoint(matrix)
        xp = namespace(rows)
        values, vectors = xp.linalg.eigh(rows @ adjoint(rows))
        # Gram 2: how many terms, and whether rounding of the squares leaves their error the digits asked for.
        tails = tail_norms(np.sqrt(np.maximum(to_numpy(values)[::-1], 0.0)))
        s, status = chosen_rank(tails, problem.most, goal)
        if self._loss(s) > 2.0 * self.tolerance * min(tails[s], finest) ** 2:
            return problem.delegate_to(SVD())
        # Gram 3: Rayleigh–Ritz with R itself gives singular values to full accuracy.
        basis = xp.flip(vectors, axis=1)[:, :s]
        u, sigma, vh = xp.linalg.svd(adjoint(basis) @ rows, full_matrices=False)
        left = basis @ u
        triple = (left, sigma * norm, vh) if wide else (adjoint(vh), sigma * norm, adjoint(left))
        progress.note(tails[s])
        gap = self._loss(s) / (2.0 * tails[s] ** 2)
        return Solution(as_separated(*triple, shape, s), status, progress.sweeps, gap, ErrorKind.bounded)

    def _loss(self, rank: int) -> float:
        """Captured energy that rounding may misplace, for ‖R‖ = 1."""
        return 8.0 * max(rank, 1) * unit_roundoff("float64")
