"""Two factors of a float64 matrix: a Krylov space in single precision, finished in double."""

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
from lsrdecomp.solvers.solver import ErrorKind
from lsrdecomp.solvers.svd.bidiagonal import AdjointOperator
from lsrdecomp.solvers.svd.growth import Growth, Projection, is_swapped
from lsrdecomp.targets.row_stream import RearrangedRows, RowStream
from lsrdecomp.targets.separated_target import Separated
from lsrdecomp.targets.sparse import Sparse
from lsrdecomp.targets.target import Dense, LowRank, Rearranged, RearrangedDense, Target

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.svd.certificate import Certificate


def fits_single(
    target: Target,
    rank: int | None,
    goal: float | None,
    tolerance: float,
    single: bool | None,
) -> TypeGuard[Dense]:
    """Return whether a solve may begin in single precision.

    It may for a float64 matrix in memory, with a request for a number of terms and a tolerance that
    a certificate in single precision can show. ``single`` is the field of `BlockGolubKahan`.
    """
    if rank is None or goal is not None or tolerance < 1e-7:
        return False
    if not isinstance(target, Dense) or is_differentiated(target.matrix):
        return False
    is_double = dtype_name(target.matrix) in ("float64", "complex128")
    # From so many entries on products are what a solve takes. By hand.
    is_large = math.prod(target.shape) >= 2**20
    if not is_double or not (is_large if single is None else single):
        return False
    # Single precision holds such entries and their squares.
    return 1e-15 < target.norm < 1e15


Widened: TypeAlias = Dense | LowRank | RowStream | Separated | Sparse
"""Targets whose entries can be had in double precision."""


def in_double(target: Widened, shape: KroneckerShape) -> Rearranged:
    """Return R(M) in double precision, held or from factors.

    Of a stream or a large dense matrix it is read by blocks of rows.
    """
    if isinstance(target, RowStream):
        rows = target.rearranged(shape)
        parts = lambda: ((start, as_double(part)) for start, part in target.parts())  # noqa: E731
        return RearrangedRows(parts, shape, as_double(rows.prototype))
    if isinstance(target, Sparse):
        dtype = np.result_type(target.matrix.dtype, np.float64)
        return Sparse(target.matrix.astype(dtype)).rearranged(shape)
    if isinstance(target, LowRank):
        return LowRank(as_double(target.left), as_double(target.right)).rearranged(shape)
    if isinstance(target, Separated):
        return Separated(target.matrix.in_double()).rearranged(shape)
    # Up to 32 MiB are held beside the rearrangement in single precision. By hand.
    if math.prod(target.shape) > 2**22:
        return target.streamed(shape)
    return RearrangedDense(as_double(target.rearranged(shape).matrix))


def in_single(target: Dense, shape: KroneckerShape, rows: Rearranged) -> RearrangedDense:
    """Return R(M) in single precision, given that of `in_double`."""
    xp = namespace(target.matrix)
    dtype = xp.complex64 if is_complex(target.matrix) else xp.float32
    if isinstance(rows, RearrangedDense):
        return RearrangedDense(xp.astype(rows.matrix, dtype))
    return RearrangedDense(target.streamed(shape, dtype).formed())


@dataclass(slots=True)
class SingleGrowth(Growth):
    """A space in single precision, whose rounding costs the answer no more than its square.

    Products take half the time. The leading right vectors of the space are multiplied by R once
    more in double precision: error and terms are those of that projection, half a step further than
    the certificate. Where gains have been falling fourfold a step or faster, the gain of that half
    step is an estimate of all that is missing, so that one step less is taken.
    """

    rows: Rearranged = field(kw_only=True)  # R(M) in double precision
    is_blind: bool = False  # single precision sees no further, though more may be gained

    def _is_hopeless(self, certificate: Certificate, rank: int, side: int) -> bool:
        del side  # the limit here is what single precision can see
        if self._sees_tolerance(certificate, rank):
            return False
        earlier = [captured for captured in certificate.earlier if captured.size > rank]
        gain = float(certificate.captured[rank] - earlier[-1][rank]) if earlier else math.inf
        stands_still = gain <= 4.0 * certificate.noise
        is_at_rest = stands_still and not certificate.has_visible_couplings(rank)
        self.is_blind = is_at_rest or not certificate.resolves(rank)
        return self.is_blind

    def _has_converged(self, certificate: Certificate, rank: int) -> bool:
        # The next gain is twice the excess that it would leave; it is mostly several times smaller
        # than predicted.
        is_visible = self._sees_tolerance(certificate, rank)
        if is_visible and certificate.predicted_gain(rank) <= 6.0 * self.tolerance:
            return True
        return Growth._has_converged(self, certificate, rank)

    def _sees_tolerance(self, certificate: Certificate, rank: int) -> bool:
        """Return whether an excess of ``tolerance`` shows in squared errors."""
        return certificate.noise <= self.tolerance * float(certificate.squared_errors[rank])

    def _is_accepted(self, certificate: Certificate, rank: int, projection: Projection) -> bool:
        del certificate, rank  # the projection comes from double precision
        return projection.excess <= self.tolerance

    def _projection(self, certificate: Certificate, rank: int) -> Projection:
        # Double 1: R V for the leading right vectors V of the space, and the singular triples of R
        # V Vᴴ.
        xp = namespace(self.space.right)
        swapped = is_swapped(self.problem.shape)
        rows = AdjointOperator(self.rows) if swapped else self.rows
        v = self.space.leading(rank)
        q, triangle = xp.linalg.qr(rows.matmat(v))
        rotation, sigma, right = xp.linalg.svd(triangle, full_matrices=False)
        approximation = self._separated(q @ rotation, sigma, right @ adjoint(v), rank)
        captured = float(xp.sum(sigma * sigma)) / self.target.norm**2
        error = math.sqrt(max(1.0 - captured, 0.0))
        # Double 2: how much nearer that came, as an estimate of what is still missing.
        excess, kind = certificate.excess(rank, self.tolerance)
        gain = captured - float(certificate.captured[rank]) + certificate.roundoff
        gain += certificate.gain_of_copies(rank)
        falls_fast = certificate.predicted_gain(rank) < math.inf
        if falls_fast and excess > self.tolerance and gain < error**2:
            excess = 1.0 / math.sqrt(1.0 - gain / error**2) - 1.0
            kind = ErrorKind.estimated
        excess += (certificate.roundoff / error) ** 2  # vectors in single precision cost its square
        return Projection(approximation, error, False, excess, kind)
