"""Terms: λ and the stacks of factors, normalised; what every chapter of `SeparatedMatrix` builds on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from lsrdecomp.arrays import (
    Array,
    as_double,
    as_floating,
    device,
    dtype_name,
    is_complex,
    like,
    namespace,
    norm,
    real_part,
    to_numpy,
    triangular_factor,
)
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.rearrange import factor_shape, khatri_rao, sum_of_kroneckers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lsrdecomp.kronecker.shape import KroneckerShape


@dataclass(frozen=True, eq=False, repr=False)
class Terms:
    """Terms: what is held, its sizes, its norm and its condition γ."""

    weights: Array
    factors: tuple[Array, ...]

    def __post_init__(self) -> None:
        shape, terms = self.kronecker_shape, self.factors[0].shape[0]
        if tuple(self.weights.shape) != (terms,):
            raise ShapeError(f"{terms} terms of {shape}, but weights {tuple(self.weights.shape)}")

    @classmethod
    def _of(cls, weights: Array, factors: tuple[Array, ...]) -> Self:
        """What every operation here returns: a matrix of these terms, without what a subclass knows of another."""
        return cls(weights, factors)

    @classmethod
    def from_factors(cls, factors: Sequence[Array], weights: Array | None = None) -> Self:
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
        factors = alike(*(as_floating(f, f"factor {i}") for i, f in enumerate(factors, 1)))
        factor_shape(factors)
        xp = namespace(*factors)
        if (
            weights is not None
            and is_complex(as_floating(weights, "weights"))
            and not is_complex(factors[0])
        ):
            factors = [xp.astype(f, xp.result_type(f.dtype, xp.complex64)) for f in factors]
        units, scale, exponent = [], None, np.zeros(factors[0].shape[0], dtype=np.int64)
        for i, factor in enumerate(factors, 1):
            unit, size = _unit(factor)
            if not bool(xp.all(xp.isfinite(size))):
                raise PrecisionError(f"factor {i}: entries are not finite")
            units.append(unit)
            size, power = _split(size)
            scale, exponent = size if scale is None else scale * size, exponent + power
        assert scale is not None
        if weights is not None:
            signed = xp.astype(as_floating(weights, "weights"), units[0].dtype)
            real = xp.abs(signed)
            phase = signed / xp.where(real > 0, real, xp.ones_like(real))
            units[0] = units[0] * phase[:, None, None]
            size, power = _split(xp.astype(real, scale.dtype))
            scale, exponent = scale * size, exponent + power
        scale = _times_power(scale, exponent)
        if not bool(xp.all(xp.isfinite(scale))):
            raise PrecisionError(
                "the product of the norms of a term's factors exceeds the largest number of its type"
            )
        sizes = to_numpy(scale)
        positive = [int(k) for k in np.argsort(-sizes, kind="stable") if sizes[k] > 0.0]
        if positive == list(range(int(scale.shape[0]))):
            return cls._of(scale, tuple(units))
        order = xp.asarray(positive, dtype=xp.int64, device=device(scale))
        return cls._of(xp.take(scale, order), tuple(xp.take(unit, order, axis=0) for unit in units))

    @cached_property
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
        core, weights = alike(self._core(), as_double(self.weights) / scale)
        return scale * norm(core @ weights)

    @property
    def condition(self) -> float:
        """γ = (Σλ²)^½ / ‖M̂‖_F: how much larger the terms are than their sum [1]_. One for orthogonal terms.

        .. [1] G. Beylkin and M. J. Mohlenkamp, SIAM J. Sci. Comput. 26 (2005), eq. (3.11).
               doi:10.1137/040604959
        """
        if self.separation_rank == 0:
            return 1.0
        return norm(self.weights) / self.norm if self.norm > 0.0 else math.inf

    def in_double(self) -> Self:
        """The same terms in float64 or complex128."""
        return self._of(
            as_double(self.weights), tuple(alike(*(as_double(f) for f in self.factors)))
        )

    def to_matrix(self) -> Array:
        """The matrix, formed; shape (rows, columns)."""
        return sum_of_kroneckers(self.factors, self._weights())

    def _every_pair(self, other: Terms, operation: Callable[[Array, Array], Array]) -> Self:
        """Σ_k Σ_l of ``operation`` on the factors of term k of this and term l of the other."""
        xp = namespace(*self.factors, *other.factors)
        s, t = self.separation_rank, other.separation_rank
        factors = []
        for f, g in zip(self.factors, other.factors, strict=True):
            a, b = alike(f, g)
            paired = operation(a[:, None, :, :], b[None, :, :, :])
            factors.append(xp.reshape(paired, (s * t, *paired.shape[2:])))
        return self.from_factors(
            factors, xp.reshape(self.weights[:, None] * other.weights[None, :], (s * t,))
        )

    def _weights(self) -> Array:
        xp = namespace(*self.factors)
        return xp.astype(self.weights, self.dtype) if is_complex(self.factors[0]) else self.weights

    def _columns(self) -> list[Array]:
        """Each stack of factors as a matrix (m_i·n_i, s)."""
        xp = namespace(*self.factors)
        return [
            xp.matrix_transpose(xp.reshape(f, (f.shape[0], f.shape[1] * f.shape[2])))
            for f in self.factors
        ]

    def _core(self) -> Array:
        """A matrix C, at most s × s, with ‖C λ‖ = ‖M̂‖_F: R factors folded together one Kronecker factor at a time."""
        xp = namespace(*self.factors)
        core = None
        for column in self._columns():
            triangle = _triangle(as_double(column))
            core = triangle if core is None else _triangle(khatri_rao(core, triangle))
        weights = self._weights()
        return core if not is_complex(weights) else xp.astype(core, xp.complex128)


def alike(*arrays: Array) -> list[Array]:
    """The arrays in the one element type that holds all of them."""
    if len({array.dtype for array in arrays}) <= 1:
        return list(arrays)
    xp = namespace(*arrays)
    common = xp.result_type(*(array.dtype for array in arrays))
    return [xp.astype(array, common) for array in arrays]


def _triangle(columns: Array) -> Array:
    if columns.shape[0] <= columns.shape[1]:
        return columns
    return triangular_factor(columns)


def _split(size: Array) -> tuple[Array, np.ndarray]:
    """Positive numbers as mantissas in [1, 2) and exponents, so that products of many neither overflow nor vanish."""
    exponent = np.frexp(to_numpy(size).astype(np.float64))[1].astype(np.int64) - 1
    return _times_power(size, -exponent), exponent


def _times_power(value: Array, exponent: np.ndarray) -> Array:
    """value · 2^exponent, in steps that the type can hold; what is too large becomes infinite, too small zero."""
    step = 100 if dtype_name(value) == "float32" else 1000
    while np.any(exponent):
        part = np.clip(exponent, -step, step)
        with np.errstate(over="ignore", under="ignore"):
            value, exponent = value * like(np.exp2(part.astype(np.float64)), value), exponent - part
    return value


def _unit(factor: Array) -> tuple[Array, Array]:
    """Each of s matrices divided by its Frobenius norm, and the norms; zero matrices stay zero."""
    xp = namespace(factor)
    s, m, n = factor.shape
    if s == 0:
        return factor, real_part(factor[:, 0, 0])
    flat = xp.reshape(factor, (s, m * n))
    peak = xp.max(xp.abs(flat), axis=1)
    safe = xp.where(peak > 0, peak, xp.ones_like(peak))
    scaled = flat / safe[:, None]
    squares = xp.abs(scaled) ** 2 if is_complex(scaled) else scaled * scaled
    length = xp.sqrt(xp.sum(squares, axis=1))
    del squares
    length = xp.where(peak > 0, length, xp.ones_like(length))
    return xp.reshape(scaled / length[:, None], (s, m, n)), peak * length
