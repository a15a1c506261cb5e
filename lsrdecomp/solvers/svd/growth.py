"""A Krylov space while it grows: when its certificate is looked at, and what a look finds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, adjoint
from lsrdecomp.solvers.base import ErrorKind, Solution, Status
from lsrdecomp.solvers.progress import IterationStep
from lsrdecomp.solvers.svd.certificate import Certificate
from lsrdecomp.solvers.svd.dense import as_separated

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from lsrdecomp.kronecker.separated import SeparatedMatrix
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.svd.bidiagonal import Bidiagonal
    from lsrdecomp.targets.base import Target


@dataclass(frozen=True, slots=True)
class Projection:
    """What one look at a space has found."""

    approximation: SeparatedMatrix
    error: float  # relative
    measured: bool
    excess: float
    kind: ErrorKind


@dataclass(slots=True)
class Growth:
    """One space while it grows: when to look at it, and what a look tells."""

    space: Bidiagonal
    tolerance: float  # allowed excess of the error over the optimum, relative
    target: Target
    shape: KroneckerShape
    swapped: bool  # whether the space is of R(M)ᴴ
    rank: int | None
    most: int
    goal: float | None
    captured: list[np.ndarray] = field(default_factory=list)
    last: Certificate | None = None

    def steps(self) -> Iterator[IterationStep[Projection | None]]:
        """Steps of the space; ends without a state where it would grow to a third of the smaller side."""
        side = min(self.space.operator.shape)
        due = 1 if self.rank is None else self.most
        while 3 * (self.space.size + self.space.block) <= side:
            # BGK 1: one block more, U and V orthogonal to all before.
            self.space.step()
            if self.space.size < due:
                yield IterationStep(None, None)
                continue
            # BGK 2: the certificate says what the space holds, and what it may lack of the optimum.
            due = self.space.size + self.space.size // 8
            certificate = self._certificate()
            s = self._terms(certificate)
            if self._hopeless(certificate, s, side):
                return
            # BGK 3: where the certificate sees no further, the residual is formed and measured.
            projection = None
            if self._settled(certificate, s):
                projection = self._projection(certificate, s)
                if not self._enough(certificate, s, projection):
                    projection, due = None, self.space.size + self.space.size // 4
            error = certificate.error(s) if projection is None else projection.error
            yield IterationStep(
                projection, error, objective=self.objective, converged=projection is not None
            )

    def solution(self, projection: Projection, settled: bool) -> Solution:
        """What a projection is, of a space that has settled or was stopped."""
        status = Status.sweep_limit
        if self.goal is not None and projection.error <= self.goal:
            status = Status.converged
        elif settled:
            status = Status.rank_reached if self.goal is None else Status.rank_exhausted
        finite = projection.excess < math.inf
        gap, kind = (projection.excess, projection.kind) if finite else (None, ErrorKind.estimated)
        relative_error = projection.error if projection.measured else None
        return Solution(projection.approximation, status, (), gap, kind, relative_error)

    def look(self) -> Projection:
        """What the space has come to, settled or not."""
        seen = self.last is not None and self.last.size == self.space.size
        certificate = self.last if seen and self.last is not None else self._certificate()
        return self._projection(certificate, self._terms(certificate))

    def _hopeless(self, certificate: Certificate, rank: int, side: int) -> bool:
        """Whether the space would grow to half the side before it met the goal."""
        if self.goal is None or not rank == self.space.size < self.most:
            return False
        return certificate.columns_needed(self.goal) > side / 2

    def _certificate(self) -> Certificate:
        self.last = certificate = Certificate.of(self.space, self.captured)
        self.captured.append(certificate.captured)
        return certificate

    def _terms(self, certificate: Certificate) -> int:
        s = min(self.most, self.space.size)
        return s if self.goal is None else certificate.smallest_rank(self.goal, s)

    @property
    def objective(self) -> float:
        """The squared error for the most terms, at the last look."""
        return (
            float(self.last.squared_errors[min(self.most, self.space.size)]) if self.last else 1.0
        )

    def _settled(self, certificate: Certificate, rank: int) -> bool:
        """Whether more steps would change neither the number of terms nor, beyond the tolerance, the error."""
        goal, tolerance = self.goal, self.tolerance
        if goal is not None and certificate.error(rank) <= goal:
            excess, _ = certificate.excess(max(rank - 1, 0), tolerance)
            return (
                rank == 0
                or excess <= tolerance
                or certificate.error(rank - 1) > goal * (1.0 + excess)
            )
        excess, _ = certificate.excess(rank, tolerance)
        exhausted = rank < certificate.size and certificate.exact(certificate.error(rank))
        return (goal is None or rank == self.most) and (excess <= tolerance or exhausted)

    def _projection(self, certificate: Certificate, rank: int) -> Projection:
        approximation = self._separated(*self.space.triples(rank), rank)
        error, (excess, kind) = certificate.error(rank), certificate.excess(rank, self.tolerance)
        measured = not certificate.resolves(rank, self.goal)
        if measured:
            error = self.target.residual_norm(approximation) / self.target.norm
            excess, kind = certificate.measured_excess(rank, error), ErrorKind.bounded
        return Projection(approximation, error, measured, excess, kind)

    def _separated(self, u: Array, sigma: Array, vh: Array, rank: int) -> SeparatedMatrix:
        triples = (adjoint(vh), sigma, adjoint(u)) if self.swapped else (u, sigma, vh)
        return as_separated(*triples, self.shape, rank)

    def _enough(self, certificate: Certificate, rank: int, projection: Projection) -> bool:
        if certificate.resolves(rank, self.goal):
            return True
        if self.goal is not None and (projection.error <= self.goal or rank < self.most):
            return projection.error <= self.goal
        return projection.excess <= self.tolerance or certificate.within_rounding(
            rank, projection.error
        )
