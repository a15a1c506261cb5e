"""SeparatedMatrix: Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾ with unit factors, its norm, its condition, its rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lsrdecomp.arrays import (
    Array,
    as_double,
    as_floating,
    device,
    is_complex,
    namespace,
    norm,
    to_numpy,
    triangular_factor,
)
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.rearrange import apply_sum_of_kroneckers, factor_shape, khatri_rao, sum_of_kroneckers
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import round_to


@dataclass(frozen=True, eq=False, repr=False)
class SeparatedMatrix:
    """A matrix as a sum of s Kronecker products of d factors.

    Parameters
    ----------
    weights : Array, shape (s,)
        λ, not negative, descending.
    factors : tuple of Array, shapes (s, m_i, n_i)
        Each factor of each term has Frobenius norm one.

    Use `from_factors` to build one from factors of any norm. With no terms (s = 0) it is the zero matrix.
    """

    weights: Array
    factors: tuple[Array, ...]

    def __post_init__(self) -> None:
        shape = factor_shape(self.factors)
        if tuple(self.weights.shape) != (self.factors[0].shape[0],):
            raise ShapeError(f"{self.factors[0].shape[0]} terms of {shape}, but weights {tuple(self.weights.shape)}")

    @classmethod
    def from_factors(cls, factors: Sequence[Array], weights: Array | None = None) -> SeparatedMatrix:
        """Normalise: unit factors, norms and signs gathered in λ, terms in descending order, zero terms dropped.

        Parameters
        ----------
        factors : sequence of Array, shapes (s, m_i, n_i)
        weights : Array, shape (s,), optional
            Multiplies the terms; may have any sign.

        Raises
        ------
        PrecisionError
            If a factor or weight is not finite.
        """
        factors = [as_floating(f, f"factor {i}") for i, f in enumerate(factors, 1)]
        factor_shape(factors)
        xp = namespace(*factors)
        units, scale = [], None
        for i, factor in enumerate(factors, 1):
            unit, size = _unit(factor)
            if not bool(xp.all(xp.isfinite(size))):
                raise PrecisionError(f"factor {i}: entries are not finite")
            units.append(unit)
            scale = size if scale is None else scale * size
        assert scale is not None
        if weights is not None:
            signed = xp.astype(as_floating(weights, "weights"), units[0].dtype)
            real = xp.abs(signed)
            phase = signed / xp.where(real > 0, real, xp.ones_like(real))
            units[0] = units[0] * phase[:, None, None]
            scale = scale * xp.astype(real, scale.dtype)
        kept = [int(k) for k in to_numpy(xp.argsort(scale, descending=True, stable=True)) if float(scale[int(k)]) > 0.0]
        if kept == list(range(int(scale.shape[0]))):
            return cls(scale, tuple(units))
        order = xp.asarray(kept, dtype=xp.int64, device=device(scale))
        return cls(xp.take(scale, order), tuple(xp.take(unit, order, axis=0) for unit in units))

    @property
    def kronecker_shape(self) -> KroneckerShape:
        return factor_shape(self.factors)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix."""
        return self.kronecker_shape.matrix_shape

    @property
    def order(self) -> int:
        """d, the number of Kronecker factors of a term."""
        return len(self.factors)

    @property
    def separation_rank(self) -> int:
        """s, the number of terms."""
        return int(self.factors[0].shape[0])

    @property
    def dtype(self) -> Any:
        return self.factors[0].dtype

    @property
    def parameters(self) -> int:
        """Numbers in the factors; the weights are folded in when stored."""
        return self.kronecker_shape.parameters(self.separation_rank)

    @cached_property
    def norm(self) -> float:
        """‖M̂‖_F in double precision, from QR factors, so cancellation between terms costs γ·2⁻⁵³ and not γ²·2⁻⁵³."""
        scale = norm(self.weights)
        if scale == 0.0:
            return 0.0
        return scale * norm(self._core() @ (as_double(self.weights) / scale))

    @property
    def condition(self) -> float:
        """γ = (Σλ²)^½ / ‖M̂‖_F: how much larger the terms are than their sum [1]_. One for orthogonal terms.

        .. [1] G. Beylkin and M. J. Mohlenkamp, SIAM J. Sci. Comput. 26 (2005), eq. (3.11). doi:10.1137/040604959
        """
        if self.separation_rank == 0:
            return 1.0
        return norm(self.weights) / self.norm if self.norm > 0.0 else math.inf

    def to_matrix(self) -> Array:
        """The matrix, formed; shape (rows, columns)."""
        return sum_of_kroneckers(self.factors, self._weights())

    def __matmul__(self, x: Array) -> Array:
        """The action on a vector (n,) or columns (n, b), never forming the matrix."""
        return apply_sum_of_kroneckers(self.factors, self._weights(), x)

    @property
    def mT(self) -> SeparatedMatrix:  # noqa: N802 - the array API's name
        """Transpose, term by term."""
        xp = namespace(*self.factors)
        return SeparatedMatrix(self.weights, tuple(xp.matrix_transpose(f) for f in self.factors))

    def __mul__(self, scalar: complex) -> SeparatedMatrix:
        return SeparatedMatrix.from_factors((self.factors[0] * scalar, *self.factors[1:]), self.weights)

    __rmul__ = __mul__

    def __neg__(self) -> SeparatedMatrix:
        return SeparatedMatrix(self.weights, (-self.factors[0], *self.factors[1:]))

    def __add__(self, other: SeparatedMatrix) -> SeparatedMatrix:
        """The terms of both; `canonical` finds how few of them are needed."""
        if self.kronecker_shape != other.kronecker_shape:
            raise ShapeError(f"cannot add {self.kronecker_shape} and {other.kronecker_shape}: the factor sizes differ")
        xp = namespace(*self.factors, *other.factors)
        pairs = zip(self.factors, other.factors, strict=True)
        stacked = [xp.concat((f, g), axis=0) for f, g in pairs]
        return SeparatedMatrix.from_factors(stacked, xp.concat((self.weights, other.weights)))

    def __sub__(self, other: SeparatedMatrix) -> SeparatedMatrix:
        return self + (-other)

    def truncate(self, rank: int) -> SeparatedMatrix:
        """The first ``rank`` terms; the best ones where terms are orthogonal (`canonical`)."""
        if rank < 0:
            raise ShapeError(f"a separation rank cannot be negative, got {rank}")
        kept = min(rank, self.separation_rank)
        return SeparatedMatrix(self.weights[:kept], tuple(f[:kept, :, :] for f in self.factors))

    def canonical(self) -> SeparatedMatrix:
        """The same matrix with orthogonal terms, γ = 1, for two factors: the SVD of the rearrangement from QR factors.

        Cost O((p + q)·s²) for factors of p and q entries. Raises `ShapeError` for another number of factors, where no
        such form exists.
        """
        if self.order != 2:
            raise ShapeError(f"orthogonal terms exist for two factors; this matrix has {self.order}")
        xp = namespace(*self.factors)
        (left, r_left), (right, r_right) = (xp.linalg.qr(as_double(c)) for c in self._columns())
        core = (r_left * as_double(self.weights)) @ xp.matrix_transpose(r_right)
        u, sigma, vh = xp.linalg.svd(core, full_matrices=False)
        (m, n), (p, q) = self.kronecker_shape.factors
        s = sigma.shape[0]
        first = xp.reshape(xp.matrix_transpose(left @ u), (s, m, n))
        second = xp.reshape(vh @ xp.matrix_transpose(right), (s, p, q))
        return SeparatedMatrix.from_factors(
            (xp.astype(first, self.dtype), xp.astype(second, self.dtype)), xp.astype(sigma, self.weights.dtype)
        )

    def folded(self) -> tuple[Array, ...]:
        """Factors with λ_k^{1/d} folded into each: what is stored and trained."""
        root = self._weights() ** (1.0 / self.order)
        return tuple(f * root[:, None, None] for f in self.factors)

    def round_to(self, storage: str) -> SeparatedMatrix:
        """The matrix whose folded factors are rounded to ``storage``: what a reader of the stored factors gets."""
        return SeparatedMatrix.from_factors([round_to(f, storage) for f in self.folded()])

    def astype(self, name: str) -> SeparatedMatrix:
        """The same terms held in ``float32``, ``float64``, ``complex64`` or ``complex128`` for computing."""
        xp = namespace(*self.factors)
        kind = getattr(xp, name)
        real = getattr(xp, name.replace("complex64", "float32").replace("complex128", "float64"))
        return SeparatedMatrix(xp.astype(self.weights, real), tuple(xp.astype(f, kind) for f in self.factors))

    def __repr__(self) -> str:
        rows, columns = self.shape
        return (
            f"SeparatedMatrix({rows}×{columns} as {self.separation_rank} × [{self.kronecker_shape}], "
            f"{self.parameters:,} parameters, γ = {self.condition:.3g})"
        )

    def _weights(self) -> Array:
        xp = namespace(*self.factors)
        return xp.astype(self.weights, self.dtype) if is_complex(self.factors[0]) else self.weights

    def _columns(self) -> list[Array]:
        """Each stack of factors as a matrix (m_i·n_i, s)."""
        xp = namespace(*self.factors)
        return [xp.matrix_transpose(xp.reshape(f, (f.shape[0], f.shape[1] * f.shape[2]))) for f in self.factors]

    def _core(self) -> Array:
        """A matrix C, at most s × s, with ‖C λ‖ = ‖M̂‖_F: R factors folded together one Kronecker factor at a time."""
        xp = namespace(*self.factors)
        core = None
        for column in self._columns():
            triangle = _triangle(as_double(column))
            core = triangle if core is None else _triangle(khatri_rao(core, triangle))
        weights = self._weights()
        return core if not is_complex(weights) else xp.astype(core, xp.complex128)


def _triangle(columns: Array) -> Array:
    if columns.shape[0] <= columns.shape[1]:
        return columns
    return triangular_factor(columns)


def _unit(factor: Array) -> tuple[Array, Array]:
    """Each of s matrices divided by its Frobenius norm, and the norms; zero matrices stay zero."""
    xp = namespace(factor)
    s, m, n = factor.shape
    if s == 0:
        return factor, xp.real(factor[:, 0, 0]) if is_complex(factor) else factor[:, 0, 0]
    flat = xp.reshape(factor, (s, m * n))
    peak = xp.max(xp.abs(flat), axis=1)
    safe = xp.where(peak > 0, peak, xp.ones_like(peak))
    scaled = flat / safe[:, None]
    squares = xp.abs(scaled) ** 2 if is_complex(scaled) else scaled * scaled
    length = xp.sqrt(xp.sum(squares, axis=1))
    del squares
    length = xp.where(peak > 0, length, xp.ones_like(length))
    return xp.reshape(scaled / length[:, None], (s, m, n)), peak * length
