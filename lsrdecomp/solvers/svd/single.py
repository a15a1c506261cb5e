"""Two factors of a float64 matrix: a Krylov space grown in single precision, its answer finished in double."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import numpy as np

from lsrdecomp.arrays import (
    adjoint,
    as_double,
    dtype_name,
    is_complex,
    is_differentiated,
    namespace,
)
from lsrdecomp.solvers.base import ErrorKind
from lsrdecomp.solvers.svd.bidiagonal import Adjoint
from lsrdecomp.solvers.svd.growth import Growth, Projection
from lsrdecomp.targets.base import Dense, LowRank, Rearranged, RearrangedDense, Target
from lsrdecomp.targets.row_stream import RearrangedRows, RowStream
from lsrdecomp.targets.separated import Separated
from lsrdecomp.targets.sparse import Sparse

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.svd.certificate import Certificate

FINEST = 1e-7
"""The least excess over the optimum that a certificate in single precision is asked for."""

BOTH_PRECISIONS = 2**22
"""Entries of a matrix up to which its rearrangement in double precision is held beside that in
single: 32 MiB."""

SMALLEST = 2**20
"""Entries of a matrix from which on products are what a solve takes; smaller ones agree from
machine to machine."""

LARGEST_NORM = 1e15
"""Norms up to which, and down to whose inverse, single precision holds entries and their
squares."""


def fits_single(
    target: Target, rank: int | None, goal: float | None, tolerance: float
) -> TypeGuard[Dense]:
    """Whether a solve may begin in single precision: a float64 matrix in memory, its terms counted."""
    if rank is None or goal is not None or tolerance < FINEST or not isinstance(target, Dense):
        return False
    double = dtype_name(target.matrix) in ("float64", "complex128") and not is_differentiated(
        target.matrix
    )
    return (
        double
        and math.prod(target.shape) >= SMALLEST
        and 1.0 / LARGEST_NORM < target.norm < LARGEST_NORM
    )


Widened: TypeAlias = Dense | LowRank | RowStream | Separated | Sparse
"""Targets whose entries can be had in double precision."""


def in_double(target: Widened, shape: KroneckerShape) -> Rearranged:
    """R(M) in double precision, held or from factors; of a stream or a large dense matrix read by blocks of rows."""
    if isinstance(target, RowStream):
        rows = target.rearranged(shape)
        parts = lambda: ((start, as_double(part)) for start, part in target.parts())  # noqa: E731
        return RearrangedRows(parts, shape, as_double(rows.prototype))
    if isinstance(target, Sparse):
        return Sparse(
            target.matrix.astype(np.result_type(target.matrix.dtype, np.float64))
        ).rearranged(shape)
    if isinstance(target, LowRank):
        return LowRank(as_double(target.left), as_double(target.right)).rearranged(shape)
    if isinstance(target, Separated):
        return Separated(target.matrix.in_double()).rearranged(shape)
    if math.prod(target.shape) > BOTH_PRECISIONS:
        return target.streamed(shape)
    return RearrangedDense(as_double(target.rearranged(shape).matrix))


def in_single(target: Dense, shape: KroneckerShape, rows: Rearranged) -> RearrangedDense:
    """R(M) in single precision, of what `in_double` gives."""
    xp = namespace(target.matrix)
    kind = xp.complex64 if is_complex(target.matrix) else xp.float32
    if isinstance(rows, RearrangedDense):
        return RearrangedDense(xp.astype(rows.matrix, kind))
    return RearrangedDense(target.streamed(shape, kind).formed())


@dataclass(slots=True)
class SingleGrowth(Growth):
    """A space in single precision; products take half the time, and what they cost in accuracy is its square.

    The leading right vectors of the space are multiplied by R once more in double precision: error
    and terms are those of that projection, half a step further than the certificate. Where gains
    have been falling fourfold a step or faster, what that half step gains is an estimate of what is
    left, so that one step less is taken.
    """

    rows: Rearranged = field(kw_only=True)  # R(M) in double precision
    blind: bool = False  # single precision sees no further, though more may be gained

    def _hopeless(self, certificate: Certificate, rank: int, side: int) -> bool:
        if self._seen(certificate, rank):
            return False
        past = [each for each in certificate.earlier if each.size > rank]
        gain = float(certificate.captured[rank] - past[-1][rank]) if past else math.inf
        still = gain <= 4.0 * certificate.noise and not certificate.couples(rank)
        self.blind = still or not certificate.resolves(rank)
        return self.blind

    def _settled(self, certificate: Certificate, rank: int) -> bool:
        # The next gain is twice the excess that it would leave; it is mostly several times smaller
        # than expected.
        falls = self._seen(certificate, rank) and certificate.falls_to(rank) <= 6.0 * self.tolerance
        return falls or Growth._settled(self, certificate, rank)

    def _seen(self, certificate: Certificate, rank: int) -> bool:
        """Whether an excess of ``tolerance`` shows in squared errors."""
        return certificate.noise <= self.tolerance * float(certificate.squared_errors[rank])

    def _enough(self, certificate: Certificate, rank: int, projection: Projection) -> bool:
        return projection.excess <= self.tolerance

    def _projection(self, certificate: Certificate, rank: int) -> Projection:
        # Double 1: R V for the leading right vectors V of the space, and the singular triples of R
        # V Vᴴ.
        xp, v = namespace(self.space.right), self.space.leading(rank)
        q, triangle = xp.linalg.qr((Adjoint(self.rows) if self.swapped else self.rows).matmat(v))
        turn, sigma, right = xp.linalg.svd(triangle, full_matrices=False)
        approximation = self._separated(q @ turn, sigma, right @ adjoint(v), rank)
        # Double 2: how much nearer that came.
        captured = float(xp.sum(sigma * sigma)) / self.target.norm**2
        excess, kind = certificate.excess(rank, self.tolerance)
        error = math.sqrt(max(1.0 - captured, 0.0))
        gain = captured - float(certificate.captured[rank]) + certificate.roundoff
        if certificate.falls_to(rank) < math.inf and excess > self.tolerance and gain < error**2:
            excess, kind = 1.0 / math.sqrt(1.0 - gain / error**2) - 1.0, ErrorKind.estimated
        excess += (certificate.roundoff / error) ** 2  # vectors in single precision cost its square
        return Projection(approximation, error, False, excess, kind)
