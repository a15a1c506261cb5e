"""‖M − M̂‖_F in double precision: from residual entries in blocks of rows, or from inner products.

Inner products are used only where the difference keeps twelve digits.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    conjugate,
    namespace,
    norm,
    real_part,
    to_numpy,
    triangular_factor,
)
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.rearrange import kron

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Approximation(Protocol):
    """What can be measured against a target: a `SeparatedMatrix`, a `SeparatedProduct`."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        ...

    def to_matrix(self) -> Array:
        """Return the matrix, formed."""
        ...


def check_sizes(target: tuple[int, int], approximation: tuple[int, int]) -> None:
    """Raise `ShapeError` unless a target and its approximation have the same sizes."""
    if tuple(target) != tuple(approximation):
        m, n = target
        other_m, other_n = approximation
        raise ShapeError(f"the target is {m}×{n}, the approximation {other_m}×{other_n}")


# --- Blocks of rows ----------------------------------------------------------------------------


def block_height(columns: int, max_entries: int = 2**22) -> int:
    """Return the rows of a block of a matrix, by its columns.

    Parameters
    ----------
    columns : int
    max_entries : int
        Entries of a block; by hand, 32 MiB in double precision.
    """
    max_rows = 512  # by hand
    return max(1, min(max_rows, max_entries // columns))


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Return slices that cover ``rows`` in blocks of `block_height`."""
    return _slices(rows, block_height(columns))


@lru_cache(maxsize=2**6)
def cached_row_blocks(rows: int, columns: int) -> tuple[slice, ...]:
    """Return slices that cover the rows of a matrix in memory in blocks that stay in a cache.

    At most 256 KiB in double precision: such a block needs no fresh pages either.
    """
    return tuple(_slices(rows, block_height(columns, 2**15)))


@lru_cache(maxsize=2**6)
def thin_row_blocks(rows: int, columns: int) -> tuple[slice, ...]:
    """Return slices of at most 256 KiB in double precision that cover the rows of a thin matrix."""
    return tuple(_slices(rows, max(1, 2**15 // max(1, columns))))


def _slices(rows: int, height: int) -> list[slice]:
    return [slice(start, min(start + height, rows)) for start in range(0, rows, height)]


def whole_blocks(start: int, stop: int, height: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut rows of a grid of blocks of ``height`` rows into a head, whole blocks and a tail.

    Yields ranges (i_0, i_1, k_0, k_1) of row numbers i·height + k.

    >>> list(whole_blocks(3, 14, 4))
    [(0, 1, 3, 4), (1, 3, 0, 4), (3, 4, 0, 2)]
    """
    while start < stop:
        block, offset = divmod(start, height)
        if offset == 0 and stop - start >= height:
            last = stop // height
            yield block, last, 0, height
            start = last * height
        else:
            end = min(height, offset + stop - start)
            yield block, block + 1, offset, end
            start += end - offset


# --- From the entries of a residual ------------------------------------------------------------


def residual_norm(
    shape: tuple[int, int], rows: Callable[[slice], Array], approximation: Approximation
) -> float:
    """Return ‖M − M̂‖_F for a matrix M known by its blocks of rows.

    Raises `ShapeError` if the sizes disagree. A sum of Kronecker products is formed block by block
    from its factors; other approximations are formed in full.
    """
    check_sizes(shape, approximation.shape)
    approximate_rows = rows_of(approximation)

    def residual(part: slice) -> Array:
        return as_double(rows(part)) - approximate_rows(part)

    return math.hypot(*(norm(residual(part)) for part in cached_row_blocks(*shape)))


def rows_of(approximation: Any) -> Callable[[slice], Array]:
    """Return a function from a slice of rows to those rows of M̂ in double precision."""
    if not hasattr(approximation, "factors") or len(approximation.factors) < 2:
        formed = approximation.to_matrix()
        return lambda rows: as_double(formed[rows, :])

    first, *others = (as_double(factor) for factor in approximation.factors)
    xp = namespace(first)
    terms, _, n = first.shape
    inner = kron(*others)  # (s, Π m_i, Π n_i), term by term
    p, q = inner.shape[1:]
    weights = as_double(xp.astype(approximation.weights, first.dtype))
    outer = xp.permute_dims(first * weights[:, None, None], (1, 2, 0))

    def rectangle(i_start: int, i_stop: int, k_start: int, k_stop: int) -> Array:
        """Return the rows (i, k) with i and k in two ranges, by one matrix product."""
        n_outer = i_stop - i_start
        n_inner = k_stop - k_start
        left = xp.reshape(outer[i_start:i_stop, :, :], (n_outer * n, terms))
        right = xp.reshape(inner[:, k_start:k_stop, :], (terms, n_inner * q))
        entries = xp.reshape(left @ right, (n_outer, n, n_inner, q))
        by_rows = xp.permute_dims(entries, (0, 2, 1, 3))  # (i, j, k, l) to (i, k, j, l)
        return xp.reshape(by_rows, (n_outer * n_inner, n * q))

    def block(rows: slice) -> Array:
        parts = [rectangle(*ranges) for ranges in whole_blocks(rows.start, rows.stop, p)]
        return parts[0] if len(parts) == 1 else xp.concat(parts, axis=0)

    return block


# --- From inner products, and of low-rank pairs ------------------------------------------------


def has_twelve_digits(squared: Array, size: Array) -> Array:
    """Return whether a squared distance that is a difference of inner products has twelve digits.

    Its relative error is about 2⁻⁵³(size/distance)², so that a ratio of 32 leaves 1e-13.

    Parameters
    ----------
    squared : Array or float
        Square of the distance.
    size : Array or float
        Root of what was subtracted.
    """
    return squared * 32.0**2 > size * size


def gram_of(array: np.ndarray) -> np.ndarray:
    """Return Aᵀ A of a real matrix (m, r) of NumPy in double precision.

    Numbers in single precision are widened block by block, in a cache.
    """
    if array.dtype == np.float64:
        return np.asarray(array.T @ array)
    gram = np.zeros((array.shape[1], array.shape[1]))
    for part in thin_row_blocks(*array.shape):
        block = array[part].astype(np.float64)
        gram += block.T @ block
    return gram


def pair_distance(left: Array, right: Array, other_left: Array, other_right: Array) -> float:
    """Return ‖B Aᴴ − B̂ Âᴴ‖_F in double precision, as `pair_distances` does.

    For B (m, r), A (n, r), B̂ (m, r̂) and Â (n, r̂).
    """
    distance = inner_distances(left, right, other_left, other_right)
    if distance is None:
        return norm(pair_core([left, other_left], [right, other_right]))
    return float(distance)


def pair_distances(left: Array, right: Array, other_left: Array, other_right: Array) -> Array:
    """Return ‖B Aᴴ − B̂ Âᴴ‖_F of pairs (…, m, r), (…, n, r) and (…, m, r̂), (…, n, r̂), shape (…).

    Let N = ‖B‖‖A‖ + ‖B̂‖‖Â‖. Inner products give the distance with a relative error of about
    2⁻⁵³(N/distance)², entries of `pair_core` with 2⁻⁵³ N/distance: both to twelve digits while
    N is at most 32 distances, and there inner products take a quarter of the time for sides 4096
    long. Elsewhere the residual's entries are formed.
    """
    distances = inner_distances(left, right, other_left, other_right)
    if distances is not None:
        return distances
    core = pair_core([left, other_left], [right, other_right])
    return namespace(left).linalg.matrix_norm(core)


def inner_distances(
    left: Array, right: Array, other_left: Array, other_right: Array
) -> Array | None:
    """Return `pair_distances` from inner products; None unless all of them are exact that way."""
    xp = namespace(left, right)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        first_squared, first_size = _squared_norm_and_size(left, right)
        second_squared, second_size = _squared_norm_and_size(other_left, other_right)
        mixed = _inner_product(adjoint(left) @ other_left, adjoint(right) @ other_right)
        squared = first_squared - 2.0 * mixed + second_squared
        exact = bool(xp.all(has_twelve_digits(squared, first_size + second_size)))
    return xp.sqrt(squared) if exact else None


def _squared_norm_and_size(left: Array, right: Array) -> tuple[Array, Array]:
    """Return ‖B Aᴴ‖² and ‖B‖‖A‖."""
    xp = namespace(left, right)
    left_gram = adjoint(left) @ left
    right_gram = adjoint(right) @ right
    left_trace = real_part(xp.linalg.trace(left_gram))
    right_trace = real_part(xp.linalg.trace(right_gram))
    return _inner_product(left_gram, right_gram), xp.sqrt(left_trace * right_trace)


def _inner_product(left: Array, right: Array) -> Array:
    """Return Re Σ of the entries of BᴴB̂ times the conjugates of those of AᴴÂ."""
    return namespace(left, right).sum(real_part(left * conjugate(right)), axis=(-2, -1))


def pair_core(lefts: Sequence[Array], rights: Sequence[Array]) -> Array:
    """Return a small matrix with the singular values of B Aᴴ − B̂ Âᴴ, or of B Aᴴ alone.

    Parameters
    ----------
    lefts : sequence of one or two Arrays, shapes (…, m, r) and (…, m, r̂)
        B, and B̂.
    rights : sequence of as many Arrays, shapes (…, n, r) and (…, n, r̂)
        A, and Â.

    Returns
    -------
    Array
        At a cost of O((m + n)(r + r̂)²), without a copy of any of them.
    """
    columns = triangular_factor(*lefts)
    rows = triangular_factor(*rights)
    r = lefts[0].shape[-1]
    core = columns[..., :, :r] @ adjoint(rows[..., :, :r])
    if len(lefts) == 1:
        return core
    return core - columns[..., :, r:] @ adjoint(rows[..., :, r:])


def separated_distance(
    rearranged: Any, target_norm: float, target_size: float, approximation: Any
) -> float | None:
    """Return ‖R − Σ λ u vᵀ‖ as the root of ‖R‖² − 2 Re Σ λ ūᵀ R v̄ + ‖M̂‖², for two factors.

    Parameters
    ----------
    rearranged : Rearranged
        R as an operator in double precision; s products are made with it.
    target_norm : float
        ‖R‖.
    target_size : float
        Size of the numbers whose rounding enters ‖R‖: ‖B‖‖A‖ for a pair.
    approximation : SeparatedMatrix

    Returns
    -------
    float or None
        None where `has_twelve_digits` does not hold for the sizes of the two matrices,
        ``target_size`` and ‖λ‖.
    """
    factors = approximation.factors
    weights = as_double(approximation.weights)
    xp = namespace(*factors)
    terms = int(factors[0].shape[0])
    if terms == 0:
        return None
    rows, columns = (
        xp.reshape(as_double(factor), (terms, factor.shape[1] * factor.shape[2]))
        for factor in factors
    )
    # NumPy's numbers become infinite where Python's raise an error.
    length = np.float64(approximation.norm)
    whole = np.float64(target_norm)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        size = np.float64(target_size) + norm(weights)
        # M̂ is nearly orthogonal to M − M̂, as a projection is: then the distance is known
        # beforehand, and often too small to be measured this way.
        if not has_twelve_digits((whole - length) * (whole + length), size):
            return None
        images = xp.matrix_transpose(rearranged.matmat(adjoint(columns)))
        products = to_numpy(xp.sum(conjugate(rows) * images, axis=1))
        squared = whole**2 - 2.0 * (np.real(products) @ to_numpy(weights)) + length**2
        exact = has_twelve_digits(squared, size) and math.isfinite(squared)
    return math.sqrt(squared) if exact else None
