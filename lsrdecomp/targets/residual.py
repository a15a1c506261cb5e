"""‖M − M̂‖_F in double precision: from residual entries, a block of rows at a time; of pairs from inner products too."""

from __future__ import annotations

import math
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

ROW_BLOCK = 512
"""Most rows of a residual formed at a time."""

BLOCK_ENTRIES = 2**22
"""Most entries of a residual formed at a time: 32 MiB in double precision."""

CACHED = 2**15
"""The same of a matrix in memory: 256 KiB, which stay in a processor's cache and need no fresh
pages."""

WIDEST = 32.0
"""Sizes of the terms in units of their distance up to which inner products give it to twelve
digits."""


class Approximation(Protocol):
    """What can be measured against a target: a `SeparatedMatrix`, a `SeparatedProduct`."""

    @property
    def shape(self) -> tuple[int, int]: ...
    def to_matrix(self) -> Array: ...


def block_height(columns: int, entries: int = BLOCK_ENTRIES) -> int:
    """Rows of a block of a matrix with so many columns."""
    return max(1, min(ROW_BLOCK, entries // columns))


def row_blocks(rows: int, columns: int, entries: int = BLOCK_ENTRIES) -> Iterator[slice]:
    """Slices that cover ``rows`` in blocks."""
    height = block_height(columns, entries)
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows))


def residual_norm(
    shape: tuple[int, int], rows: Callable[[slice], Array], approximation: Approximation
) -> float:
    """‖M − M̂‖_F for a matrix M known by its blocks of rows.

    Raises `ShapeError` if the sizes disagree. A sum of Kronecker products is formed block by block
    from its factors; other approximations are formed whole.
    """
    check_sizes(shape, approximation.shape)
    block = rows_of(approximation)
    return math.hypot(
        *(norm(as_double(rows(part)) - block(part)) for part in row_blocks(*shape, CACHED))
    )


def pair_core(lefts: Sequence[Array], rights: Sequence[Array]) -> Array:
    """A small matrix with the singular values of B Aᴴ − B̂ Âᴴ for ``lefts`` (B, B̂), ``rights`` (A, Â); or of B Aᴴ alone.

    Shapes (…, m, r), (…, m, r̂) and (…, n, r), (…, n, r̂); cost O((m + n)(r + r̂)²), without a copy
    of any of them.
    """
    columns, rows, r = triangular_factor(*lefts), triangular_factor(*rights), lefts[0].shape[-1]
    core = columns[..., :, :r] @ adjoint(rows[..., :, :r])
    return core if len(lefts) == 1 else core - columns[..., :, r:] @ adjoint(rows[..., :, r:])


def pair_distance(left: Array, right: Array, other_left: Array, other_right: Array) -> float:
    """‖B Aᴴ − B̂ Âᴴ‖_F for B (m, r), A (n, r), B̂ (m, r̂) and Â (n, r̂) in double precision; see `pair_distances`."""
    distance = inner_distances(left, right, other_left, other_right)
    if distance is None:
        return norm(pair_core([left, other_left], [right, other_right]))
    return float(distance)


def pair_distances(left: Array, right: Array, other_left: Array, other_right: Array) -> Array:
    """‖B Aᴴ − B̂ Âᴴ‖_F of pairs (…, m, r), (…, n, r) and (…, m, r̂), (…, n, r̂), shape (…).

    Let N = ‖B‖‖A‖ + ‖B̂‖‖Â‖. Inner products give the distance with a relative error of about
    2⁻⁵³(N/distance)², entries of `pair_core` with 2⁻⁵³ N/distance: both to twelve digits while the
    distance is above N / `WIDEST`, and there inner products take a quarter of the time for sides
    4096 long. Elsewhere the residual's entries are formed.
    """
    distances = inner_distances(left, right, other_left, other_right)
    if distances is None:
        return namespace(left).linalg.matrix_norm(
            pair_core([left, other_left], [right, other_right])
        )
    return distances


def inner_distances(
    left: Array, right: Array, other_left: Array, other_right: Array
) -> Array | None:
    """`pair_distances` from inner products, or None unless all of them are exact that way."""
    xp = namespace(left, right)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        first, second = _inner(left, right), _inner(other_left, other_right)
        mixed = _inner_product(adjoint(left) @ other_left, adjoint(right) @ other_right)
        squared, size = first[0] - 2.0 * mixed + second[0], first[1] + second[1]
        exact = bool(xp.all(squared * WIDEST**2 > size * size))
    return xp.sqrt(squared) if exact else None


def _inner(left: Array, right: Array) -> tuple[Array, Array]:
    """‖B Aᴴ‖² and ‖B‖‖A‖."""
    xp, grams = namespace(left, right), [adjoint(side) @ side for side in (left, right)]
    traces = [real_part(xp.linalg.trace(gram)) for gram in grams]
    return _inner_product(*grams), xp.sqrt(traces[0] * traces[1])


def _inner_product(left: Array, right: Array) -> Array:
    """Re Σ of the entries of BᴴB̂ times the conjugates of those of AᴴÂ."""
    return namespace(left, right).sum(real_part(left * conjugate(right)), axis=(-2, -1))


def separated_distance(
    rearranged: Any, norm_of: float, size: float, approximation: Any
) -> float | None:
    """‖R − Σ λ u vᵀ‖ as the root of ‖R‖² − 2 Re Σ λ ūᵀ R v̄ + ‖M̂‖², or None where that loses digits.

    For two factors, R an operator in double precision with norm ``norm_of``: s products with it.
    Twelve digits are left while the distance is above 1/`WIDEST` of ``size`` and ‖λ‖, the sizes of
    what is subtracted.
    """
    factors, weights = approximation.factors, as_double(approximation.weights)
    xp, s = namespace(*factors), int(factors[0].shape[0])
    if s == 0:
        return None
    rows, columns = (
        xp.reshape(as_double(factor), (s, factor.shape[1] * factor.shape[2])) for factor in factors
    )
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        length, whole, size = (
            np.float64(approximation.norm),
            np.float64(norm_of),
            np.float64(size) + norm(weights),
        )
        # Orthogonal to what is left, as a projection is: then the rest is known beforehand, and
        # often too small.
        if (whole - length) * (whole + length) * WIDEST**2 < size**2:
            return None
        products = to_numpy(
            xp.sum(
                conjugate(rows) * xp.matrix_transpose(rearranged.matmat(adjoint(columns))), axis=1
            )
        )
        squared = whole**2 - 2.0 * (np.real(products) @ to_numpy(weights)) + length**2
        exact = size**2 < squared * WIDEST**2 < math.inf
    return math.sqrt(squared) if exact else None


def check_sizes(target: tuple[int, int], other: tuple[int, int]) -> None:
    if tuple(target) != tuple(other):
        raise ShapeError(
            f"the target is {target[0]}×{target[1]}, the approximation {other[0]}×{other[1]}"
        )


def rows_of(approximation: Any) -> Callable[[slice], Array]:
    """A function from a slice of rows to those rows of the approximation, in double precision."""
    if not hasattr(approximation, "factors") or len(approximation.factors) < 2:
        formed = approximation.to_matrix()
        return lambda rows: as_double(formed[rows, :])
    first, *others = (as_double(factor) for factor in approximation.factors)
    xp = namespace(first)
    s, _, n = first.shape
    inner = kron(*others)  # (s, Π m_i, Π n_i), term by term
    p, q = inner.shape[1:]
    outer = xp.permute_dims(
        first * as_double(xp.astype(approximation.weights, first.dtype))[:, None, None], (1, 2, 0)
    )

    def slab(first_outer: int, last_outer: int, first_inner: int, last_inner: int) -> Array:
        """Rows (i, k) with i and k in two ranges: one matrix product, entries (i, j, k, l) to rows (i, k)."""
        a, b = last_outer - first_outer, last_inner - first_inner
        left = xp.reshape(outer[first_outer:last_outer, :, :], (a * n, s))
        right = xp.reshape(inner[:, first_inner:last_inner, :], (s, b * q))
        entries = xp.reshape(left @ right, (a, n, b, q))
        return xp.reshape(xp.permute_dims(entries, (0, 2, 1, 3)), (a * b, n * q))

    def block(rows: slice) -> Array:
        parts = [slab(*part) for part in whole_blocks(rows.start, rows.stop, p)]
        return parts[0] if len(parts) == 1 else xp.concat(parts, axis=0)

    return block


def whole_blocks(start: int, stop: int, height: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut rows start…stop of a grid of blocks of ``height`` rows into a head, whole blocks and a tail.

    Yields ranges (i_0, i_1, k_0, k_1) of row numbers i·height + k.

    >>> list(whole_blocks(3, 14, 4))
    [(0, 1, 3, 4), (1, 3, 0, 4), (3, 4, 0, 2)]
    """
    while start < stop:
        i, k = divmod(start, height)
        if k == 0 and stop - start >= height:
            last = stop // height
            yield i, last, 0, height
            start = last * height
        else:
            end = min(height, k + stop - start)
            yield i, i + 1, k, end
            start += end - k
