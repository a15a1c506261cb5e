"""Two factors through the Gram matrix of the smaller side: a symmetric eigenproblem instead of an SVD."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lsrdecomp.arrays import adjoint, as_double, namespace, to_numpy
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import ErrorKind, Solution, Sweep
from lsrdecomp.solvers.svd.dense import SVD, as_separated, chosen_rank, tail_norms
from lsrdecomp.targets.base import Target


@dataclass(frozen=True, slots=True)
class Gram:
    """Eigenvectors of R Rᴴ (or Rᴴ R, the smaller) in double precision, then one Rayleigh–Ritz step with R itself.

    Squaring costs half the digits: the captured energy ‖R‖² − error² is exact to about s·u·‖R‖². Where that is more
    than ``tolerance`` × error², the SVD is taken instead, so errors down to about √(s·u/tolerance)·‖R‖ come from here.
    Cost O(p·q·min(p, q)) in matrix products and O(min(p, q)³) in the eigenproblem: several times less than the SVD.

    Parameters
    ----------
    tolerance : float
        Allowed excess of the error over the optimum, relative.
    """

    tolerance: float = 1e-6

    def solve(
        self,
        target: Target,
        shape: KroneckerShape,
        *,
        rank: int | None = None,
        atol: float | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> Solution:
        if shape.order != 2:
            raise ShapeError(f"the Gram matrix of a rearrangement is for two factors; {shape} has {shape.order}")
        norm = target.norm
        goal = None if atol is None or norm == 0.0 else atol / norm
        finest = math.inf if goal is None else goal
        if norm == 0.0 or self._loss(1) > 2.0 * self.tolerance * finest**2:
            return SVD().solve(target, shape, rank=rank, atol=atol)
        operator = target.rearranged(shape)
        wide = operator.shape[0] <= operator.shape[1]
        matrix = as_double(operator.formed()) / norm
        rows = matrix if wide else adjoint(matrix)
        xp = namespace(rows)
        values, vectors = xp.linalg.eigh(rows @ adjoint(rows))
        tails = tail_norms(np.sqrt(np.maximum(to_numpy(values)[::-1], 0.0)))
        s, status = chosen_rank(tails, rank, goal)
        if self._loss(s) > 2.0 * self.tolerance * min(tails[s], finest) ** 2:
            return SVD().solve(target, shape, rank=rank, atol=atol)
        basis = xp.flip(vectors, axis=1)[:, :s]
        u, sigma, vh = xp.linalg.svd(adjoint(basis) @ rows, full_matrices=False)
        left = basis @ u
        triple = (left, sigma * norm, vh) if wide else (adjoint(vh), sigma * norm, adjoint(left))
        gap = self._loss(s) / (2.0 * tails[s] ** 2)
        return Solution(as_separated(*triple, shape, s), status, (), gap, ErrorKind.bounded)

    def _loss(self, rank: int) -> float:
        """Captured energy that rounding may misplace, for ‖R‖ = 1."""
        return 8.0 * max(rank, 1) * unit_roundoff("float64")
