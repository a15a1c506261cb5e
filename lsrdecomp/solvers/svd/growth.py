"""A Krylov space while it grows: when its certificate is computed, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, adjoint
from lsrdecomp.solvers.iteration import IterationStep
from lsrdecomp.solvers.solver import ErrorKind, Solution, Status
from lsrdecomp.solvers.svd.certificate import Certificate
from lsrdecomp.solvers.svd.dense import as_separated

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from lsrdecomp.kronecker.separated import SeparatedMatrix
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.matrix import MatrixProblem
    from lsrdecomp.solvers.svd.bidiagonal import Bidiagonal
    from lsrdecomp.targets.target import Target


@dataclass(frozen=True, slots=True)
class Projection:
    """The terms that a space holds at one check, their error and its excess over the optimum."""

    approximation: SeparatedMatrix
    error: float  # relative
    is_measured: bool
    excess: float
    kind: ErrorKind


@dataclass(slots=True)
class Growth:
    """One space while it grows, and the request that it is to meet."""

    space: Bidiagonal
    problem: MatrixProblem
    tolerance: float  # allowed excess of the error over the optimum, relative
    captured: list[np.ndarray] = field(default_factory=list)  # of each certificate so far
    last_certificate: Certificate | None = None
    terms_in_doubt: int | None = None  # ended at so many, whose values may have further copies

    @property
    def target(self) -> Target:
        """The matrix."""
        return self.problem.target

    @property
    def max_terms(self) -> int:
        """Terms that may be used."""
        return self.problem.max_terms

    @property
    def goal(self) -> float | None:
        """Allowed relative error."""
        return self.problem.relative_goal

    def steps(self) -> Iterator[IterationStep[Projection | None]]:
        """Grow the space; end without a state where it would fill too much of the smaller side."""
        side = min(self.space.operator.shape)
        next_check = 1 if self.problem.rank is None else self.max_terms
        # A space of more than a third of the side would cost more than the Gram matrix. By hand, as
        # are the other numbers here.
        while 3 * (self.space.size + self.space.block) <= side:
            # BGK 1: one block more, U and V orthogonal to all before.
            self.space.step()
            if self.space.size < next_check:
                yield IterationStep(None, None)
                continue
            # BGK 2: the certificate says what the space holds, and what it may lack of the optimum;
            # again when the space has grown by an eighth.
            next_check = self.space.size + self.space.size // 8
            certificate = self._new_certificate()
            rank = self._terms(certificate)
            if self._is_hopeless(certificate, rank, side):
                return
            if self._may_lack_copies(certificate, rank):
                self.terms_in_doubt = rank
                return
            # BGK 3: where the certificate sees no further, the residual is formed and measured.
            projection = None
            error = certificate.error(rank)
            if self._has_converged(certificate, rank):
                projection = self._projection(certificate, rank)
                if self._is_accepted(certificate, rank, projection):
                    error = projection.error
                else:
                    projection = None
                    next_check = self.space.size + self.space.size // 4
            yield IterationStep(
                state=projection,
                relative_error=error,
                objective=self.objective,
                converged=projection is not None,
            )

    def solution(self, projection: Projection, converged: bool) -> Solution:
        """Return a projection as a solution, of a space that has converged or was stopped."""
        status = Status.sweep_limit
        if self.goal is not None and projection.error <= self.goal:
            status = Status.converged
        elif converged:
            status = Status.rank_reached if self.goal is None else Status.rank_exhausted
        relative_error = projection.error if projection.is_measured else None
        solution = Solution(projection.approximation, status, relative_error=relative_error)
        if projection.excess < math.inf:
            return replace(solution, optimality_gap=projection.excess, gap_kind=projection.kind)
        return solution

    def current_projection(self) -> Projection:
        """Return the terms that the space holds, converged or not."""
        certificate = self.last_certificate
        if certificate is None or certificate.size != self.space.size:
            certificate = self._new_certificate()
        return self._projection(certificate, self._terms(certificate))

    def _is_hopeless(self, certificate: Certificate, rank: int, side: int) -> bool:
        """Return whether the space would grow too large before it met the goal."""
        if self.goal is None or not rank == self.space.size < self.max_terms:
            return False
        return certificate.columns_needed(self.goal) > side / 2

    def _may_lack_copies(self, certificate: Certificate, rank: int) -> bool:
        """Return whether only copies of values, which may have been missed, are in the way."""
        if not certificate.are_copies_in_doubt(rank):
            return False
        excess, _ = certificate.excess(rank, self.tolerance)
        return excess > self.tolerance

    def _new_certificate(self) -> Certificate:
        certificate = Certificate.of(self.space, self.captured)
        self.last_certificate = certificate
        self.captured.append(certificate.captured)
        return certificate

    def _terms(self, certificate: Certificate) -> int:
        max_terms = min(self.max_terms, self.space.size)
        if self.goal is None:
            return max_terms
        return certificate.smallest_rank(self.goal, max_terms)

    @property
    def objective(self) -> float:
        """The squared error for the most terms, at the last check."""
        if self.last_certificate is None:
            return 1.0
        max_terms = min(self.max_terms, self.space.size)
        return float(self.last_certificate.squared_errors[max_terms])

    def _has_converged(self, certificate: Certificate, rank: int) -> bool:
        """Return whether more steps would change neither the number of terms nor their error.

        The error not beyond the tolerance.
        """
        goal = self.goal
        tolerance = self.tolerance
        if goal is not None and certificate.error(rank) <= goal:
            if rank == 0:
                return True
            excess, _ = certificate.excess(rank - 1, tolerance)
            fewer_would_fail = certificate.error(rank - 1) > goal * (1.0 + excess)
            return excess <= tolerance or fewer_would_fail
        if goal is not None and rank != self.max_terms:
            return False
        is_exhausted = rank < certificate.size and certificate.is_exact(certificate.error(rank))
        return is_exhausted or self._is_near_optimum(certificate, rank)

    def _is_near_optimum(self, certificate: Certificate, rank: int) -> bool:
        """Return whether the excess is within the tolerance, and can be trusted."""
        excess, kind = certificate.excess(rank, self.tolerance)
        if excess > self.tolerance:
            return False
        if kind is ErrorKind.bounded or not certificate.resolves(rank):
            return True
        return certificate.has_trend(rank) or self.space.is_continued

    def _projection(self, certificate: Certificate, rank: int) -> Projection:
        approximation = self._separated(*self.space.triples(rank), rank)
        if not certificate.resolves(rank, self.goal):
            error = self.target.residual_norm(approximation) / self.target.norm
            excess = certificate.measured_excess(rank, error)
            return Projection(approximation, error, True, excess, ErrorKind.bounded)
        error = certificate.error(rank)
        excess, kind = certificate.excess(rank, self.tolerance)
        return Projection(approximation, error, False, excess, kind)

    def _separated(self, u: Array, sigma: Array, vh: Array, rank: int) -> SeparatedMatrix:
        shape = self.problem.shape
        if is_swapped(shape):
            return as_separated(adjoint(vh), sigma, adjoint(u), shape, rank)
        return as_separated(u, sigma, vh, shape, rank)

    def _is_accepted(self, certificate: Certificate, rank: int, projection: Projection) -> bool:
        """Return whether a projection meets the request, where its error had to be measured."""
        if certificate.resolves(rank, self.goal):
            return True
        error = projection.error
        if self.goal is not None and (error <= self.goal or rank < self.max_terms):
            return error <= self.goal
        is_near = projection.excess <= self.tolerance
        return is_near or certificate.is_within_rounding(rank, error)


def is_swapped(shape: KroneckerShape) -> bool:
    """Return whether a space is of R(M)ᴴ.

    V, whose space fills first, lies on the smaller side: then nothing of R is left when it is full.
    """
    return shape.sizes[0] < shape.sizes[1]
