"""Normal form of a sum of terms: unit factors, their norms in λ, without overflow on the way."""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING

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
    real_part,
    refuse_traced,
    to_numpy,
    triangular_factor,
    with_common_dtype,
)
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.rearrange import factor_columns, factor_shape, khatri_rao

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.kronecker.shape import KroneckerShape


def check_weights(shape: KroneckerShape, factors: Sequence[Array], weights: Array) -> None:
    """Raise `ShapeError` unless there is one λ for each term of the factors."""
    terms = factors[0].shape[0]
    if tuple(weights.shape) != (terms,):
        raise ShapeError(f"{terms} terms of {shape}, but weights {tuple(weights.shape)}")


def normalized_terms(
    factors: Sequence[Array], weights: Array | None
) -> tuple[Array, tuple[Array, ...]]:
    """Return λ and unit factors: terms in descending order, zero terms dropped.

    Parameters
    ----------
    factors : sequence of Array, shapes (s, m_i, n_i)
        Of any norm and sign.
    weights : Array, shape (s,), or None
        Multiplies the terms; may have any sign or phase.

    Raises
    ------
    PrecisionError
        If a factor or weight is not finite, or a λ overflows.
    """
    stacks = with_common_dtype(*(as_floating(f, f"factor {i}") for i, f in enumerate(factors, 1)))
    factor_shape(stacks)  # raises where the stacks are not of one sum
    refuse_traced(stacks[0], "the order and number of terms")
    xp = namespace(*stacks)
    if weights is not None:
        weights = as_floating(weights, "weights")
        if is_complex(weights) and not is_complex(stacks[0]):
            complex_dtype = xp.result_type(stacks[0].dtype, xp.complex64)
            stacks = [xp.astype(stack, complex_dtype) for stack in stacks]

    units: list[Array] = []
    sizes: list[Array] = []
    for i, stack in enumerate(stacks, 1):
        unit, size = _unit_matrices(stack)
        if not bool(xp.all(xp.isfinite(size))):
            raise PrecisionError(f"factor {i}: entries are not finite")
        units.append(unit)
        sizes.append(size)
    if weights is not None:
        if is_complex(weights) or not is_complex(units[0]):
            weights = xp.astype(weights, units[0].dtype)
        magnitude = xp.abs(weights)
        phase = weights / xp.where(magnitude > 0, magnitude, xp.ones_like(magnitude))
        units[0] = units[0] * xp.astype(phase, units[0].dtype)[:, None, None]
        sizes.append(xp.astype(magnitude, sizes[0].dtype))

    scale = _product(sizes)
    if not bool(xp.all(xp.isfinite(scale))):
        raise PrecisionError(
            "the product of the norms of a term's factors exceeds the largest number of its type"
        )
    return _descending(scale, units)


def _descending(scale: Array, units: list[Array]) -> tuple[Array, tuple[Array, ...]]:
    """Return the terms in descending order of λ, without those of zero."""
    values = to_numpy(scale)
    descending = np.argsort(-values, kind="stable")
    order = [int(k) for k in descending if values[k] > 0.0]
    if order == list(range(len(values))):
        return scale, tuple(units)
    xp = namespace(scale)
    places = xp.asarray(order, dtype=xp.int64, device=device(scale))
    return xp.take(scale, places), tuple(xp.take(unit, places, axis=0) for unit in units)


def triangular_core(factors: Sequence[Array]) -> Array:
    """Return a matrix C, at most s × s, with ‖C λ‖ = ‖M̂‖_F for every λ, in double precision.

    The triangular factor of the Khatri–Rao product of all factors, folded together one Kronecker
    factor at a time.
    """
    columns = factor_columns(factors)
    core = _triangle(as_double(columns[0]))
    for column in columns[1:]:
        core = _triangle(khatri_rao(core, _triangle(as_double(column))))
    return core


def _triangle(columns: Array) -> Array:
    """Return R of a QR decomposition; a matrix that is not tall serves as it is."""
    rows, width = columns.shape
    return columns if rows <= width else triangular_factor(columns)


def _unit_matrices(stack: Array) -> tuple[Array, Array]:
    """Return s matrices of Frobenius norm one, and their norms; zero matrices stay zero."""
    xp = namespace(stack)
    s, m, n = stack.shape
    if s == 0:
        return stack, real_part(stack[:, 0, 0])
    entries = xp.reshape(stack, (s, m * n))
    # Divided by the largest entry first, so that no square overflows or vanishes.
    peak = xp.max(xp.abs(entries), axis=1)
    divisor = xp.where(peak > 0, peak, xp.ones_like(peak))
    scaled = entries / divisor[:, None]
    squares = xp.abs(scaled) ** 2 if is_complex(scaled) else scaled * scaled
    length = xp.sqrt(xp.sum(squares, axis=1))
    del squares  # as large as the stack
    length = xp.where(peak > 0, length, xp.ones_like(length))
    return xp.reshape(scaled / length[:, None], (s, m, n)), peak * length


def _product(sizes: Sequence[Array]) -> Array:
    """Return the product of positive arrays; it overflows only where the result is too large.

    Mantissas and powers of two are multiplied apart, unless no step can leave the range.
    """
    if _are_moderate(sizes):
        return reduce(operator.mul, sizes)
    product, exponent = _mantissa_and_exponent(sizes[0])
    for size in sizes[1:]:
        mantissa, power = _mantissa_and_exponent(size)
        product = product * mantissa
        exponent = exponent + power
    return _times_power_of_two(product, exponent)


def _are_moderate(sizes: Sequence[Array]) -> bool:
    """Return whether arrays of NumPy are so near one that all their products are normal numbers."""
    for size in sizes:
        if not isinstance(size, np.ndarray) or size.size == 0:
            return False
        limit = float(np.finfo(size.dtype).max) ** (0.5 / len(sizes))
        if not (size.min() > 1.0 / limit and size.max() < limit):
            return False
    return True


def _mantissa_and_exponent(size: Array) -> tuple[Array, np.ndarray]:
    """Return positive numbers as mantissas in [1, 2) and powers of two."""
    exponent = np.frexp(to_numpy(size).astype(np.float64))[1].astype(np.int64) - 1
    return _times_power_of_two(size, -exponent), exponent


def _times_power_of_two(value: Array, exponent: np.ndarray) -> Array:
    """Return value · 2^exponent; what is too large becomes infinite, too small zero."""
    # One power may be out of range where the product is not: multiply in steps.
    step = 100 if dtype_name(value) == "float32" else 1000
    while np.any(exponent):
        part = np.clip(exponent, -step, step)
        with np.errstate(over="ignore", under="ignore"):
            value = value * like(np.exp2(part.astype(np.float64)), value)
        exponent = exponent - part
    return value
