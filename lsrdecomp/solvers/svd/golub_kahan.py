"""Two factors, matrix-free: block Golub–Kahan on the rearranged target, with a certificate of its optimality."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lsrdecomp.arrays import adjoint
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.base import ErrorKind, Solution, Status, Sweep
from lsrdecomp.solvers.svd.bidiagonal import Adjoint, Bidiagonal
from lsrdecomp.solvers.svd.certificate import Certificate
from lsrdecomp.solvers.svd.dense import as_separated
from lsrdecomp.solvers.svd.gram import Gram
from lsrdecomp.targets.base import RearrangedDense, Target


@dataclass(frozen=True, slots=True)
class BlockGolubKahan:
    """Leading singular triples of R(M) from products with R(M) and R(M)ᴴ only.

    Stops when the error is within ``tolerance`` of the optimum by its certificate (see `Certificate`); with ``atol``,
    when besides the number of terms found is known to be the least. Where the Krylov space would grow to a third of the
    smaller side of R(M), `Gram` takes over, which is cheaper there. Terms are orthogonal, γ = 1.

    Cost: 2·b products a step, O((p + q)·k²) for orthogonality in a space of k columns, memory O((p + q)·k).

    Parameters
    ----------
    block : int, optional
        Columns b of a block; absent, 8 to 16 by the number of terms asked for, and 8 where R(M) is not stored: one
        reading of a stored matrix serves a whole block, an unformed product is paid for by the column.
    seed : int
        Of the random start, drawn by NumPy whatever the library of the target.
    tolerance : float
        Allowed excess of the error over the optimum, relative.
    max_steps : int
        Most steps taken; then the status is `Status.sweep_limit` and the gap says how far the result may be off.

    References
    ----------
    .. [1] G. H. Golub, F. T. Luk and M. L. Overton (1981), doi:10.1145/355945.355946
    .. [2] C. Musco and C. Musco, Randomized block Krylov methods for stronger and faster approximate singular value
       decomposition, NIPS 2015. arXiv:1504.05477
    """

    block: int | None = None
    seed: int = 0
    tolerance: float = 1e-3
    max_steps: int = 128

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
            raise ShapeError(f"block Golub–Kahan is for two factors; {shape} has {shape.order}")
        norm, most = target.norm, min(rank or shape.max_separation_rank, shape.max_separation_rank)
        operator = target.rearranged(shape)
        widest = 16 if isinstance(operator, RearrangedDense) else 8
        block = self.block or (widest if rank is None else min(widest, max(8, rank)))
        # V, whose space fills first, lies on the smaller side: then nothing of R is left when it is full.
        swapped = operator.shape[0] < operator.shape[1]
        side = min(operator.shape)
        if norm == 0.0 or (rank is not None and 4 * most >= side):
            return Gram().solve(target, shape, rank=rank, atol=atol)
        goal = None if atol is None else atol / norm
        space = Bidiagonal(Adjoint(operator) if swapped else operator, norm, min(block, side), self.seed)
        sweeps: list[Sweep] = []
        captured: list[np.ndarray] = []
        due = 1 if rank is None else most
        for index in range(self.max_steps):
            if 3 * (space.size + block) > side:
                return Gram().solve(target, shape, rank=rank, atol=atol)
            space.step()
            last = index + 1 == self.max_steps
            if space.size < due and not last:
                continue
            due = space.size + space.size // 8
            certificate = Certificate.of(space, captured)
            captured.append(certificate.captured)
            s = min(most, space.size)
            s = s if goal is None else certificate.smallest_rank(goal, s)
            sweeps.append(Sweep(index, certificate.error(s)))
            if on_sweep is not None:
                on_sweep(sweeps[-1])
            if goal is not None and certificate.columns_needed(goal) > side / 2 and s == space.size < most:
                return Gram().solve(target, shape, rank=rank, atol=atol)
            settled = self._settled(certificate, s, most, goal)
            if not (settled or last):
                continue
            approximation = _approximation(space, s, shape, swapped)
            error, (excess, kind) = certificate.error(s), certificate.excess(s, self.tolerance)
            if not certificate.resolves(s, goal):
                error = target.residual_norm(approximation) / norm
                excess, kind = certificate.measured_excess(s, error), ErrorKind.bounded
                if goal is not None and (error <= goal or s < most):
                    settled = settled and error <= goal
                else:
                    settled = settled and (excess <= self.tolerance or certificate.exact(error))
            if settled or last:
                status = _status(error, goal) if settled else Status.sweep_limit
                known = excess < math.inf
                gap, kind = (excess, kind) if known else (None, ErrorKind.estimated)
                return Solution(approximation, status, tuple(sweeps), gap, kind)
            due = space.size + space.size // 4
        raise ShapeError(f"block Golub–Kahan needs at least one step, got max_steps={self.max_steps}")

    def _settled(self, certificate: Certificate, rank: int, most: int, goal: float | None) -> bool:
        """Whether more steps would change neither the number of terms nor, beyond the tolerance, the error."""
        if goal is not None and certificate.error(rank) <= goal:
            excess, _ = certificate.excess(max(rank - 1, 0), self.tolerance)
            return rank == 0 or excess <= self.tolerance or certificate.error(rank - 1) > goal * (1.0 + excess)
        excess, _ = certificate.excess(rank, self.tolerance)
        exhausted = rank < certificate.ritz.size and certificate.exact(certificate.error(rank))
        return (goal is None or rank == most) and (excess <= self.tolerance or exhausted)


def _status(error: float, goal: float | None) -> Status:
    if goal is None:
        return Status.rank_reached
    return Status.converged if error <= goal else Status.rank_exhausted


def _approximation(space: Bidiagonal, rank: int, shape: KroneckerShape, swapped: bool) -> SeparatedMatrix:
    u, sigma, vh = space.triples(rank)
    return as_separated(*((adjoint(vh), sigma, adjoint(u)) if swapped else (u, sigma, vh)), shape, rank)
