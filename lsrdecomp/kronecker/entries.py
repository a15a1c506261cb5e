"""Rows, single entries and the diagonal of a sum of Kronecker products, without forming it.

λ is passed in the element type of the factors.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import Array, device, namespace
from lsrdecomp.kronecker.rearrange import khatri_rao, pairs_of_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.kronecker.shape import KroneckerShape


def get_entries(shape: KroneckerShape, factors: Sequence[Array], weights: Array, key: Any) -> Array:
    """Return what ``A[key]`` of the matrix is, by NumPy's rules for one or two indices.

    Raises
    ------
    IndexError
        For an index outside the matrix, or more than two.
    """
    height, width = shape.matrix_shape
    indices = key if isinstance(key, tuple) else (key,)
    if len(indices) > 2:
        raise IndexError(f"a matrix has two indices, got {len(indices)}")
    row_key = indices[0] if indices else slice(None)
    column_key = indices[1] if len(indices) == 2 else slice(None)
    rows = _positions(row_key, height, "row")
    columns = _positions(column_key, width, "column")

    if not isinstance(row_key, slice) and not isinstance(column_key, slice):
        return entries_at(shape, factors, weights, rows, columns)
    whole_rows = (
        isinstance(column_key, slice) and column_key.step in (None, 1) and columns.size == width
    )
    if whole_rows:
        block = _rows_at(shape, factors, weights, np.atleast_1d(rows))
    else:
        row_grid = np.atleast_1d(rows)[:, None]
        column_grid = np.atleast_1d(columns)[None, :]
        block = entries_at(shape, factors, weights, row_grid, column_grid)
    if rows.ndim == 0:
        return block[0, :]
    if columns.ndim == 0:
        return block[:, 0]
    return block


def entries_at(
    shape: KroneckerShape,
    factors: Sequence[Array],
    weights: Array,
    rows: np.ndarray,
    columns: np.ndarray,
) -> Array:
    """Return entries at positions, broadcast against each other; s·d operations an entry."""
    xp = namespace(*factors)
    rows, columns = np.broadcast_arrays(rows, columns)
    if weights.shape[0] == 0:
        return xp.zeros(rows.shape, dtype=factors[0].dtype, device=device(weights))
    terms = weights[:, None]
    row_digits = np.unravel_index(rows, shape.rows)
    column_digits = np.unravel_index(columns, shape.columns)
    for factor, i, j in zip(factors, row_digits, column_digits, strict=True):
        s, m, n = factor.shape
        entries = xp.reshape(factor, (s, m * n))
        terms = terms * _take(entries, (i * n + j).reshape(-1))
    return xp.reshape(xp.sum(terms, axis=0), rows.shape)


def _rows_at(
    shape: KroneckerShape, factors: Sequence[Array], weights: Array, rows: np.ndarray
) -> Array:
    """Return whole rows, shape (len(rows), n): a row of a Kronecker product is one of rows."""
    xp = namespace(*factors)
    block_shape = len(rows), shape.matrix_shape[1]
    digits = np.unravel_index(rows, shape.rows)
    if weights.shape[0] == 0:
        return xp.zeros(block_shape, dtype=factors[0].dtype, device=device(weights))
    taken = []
    for factor, digit in zip(factors, digits, strict=True):
        taken.append(xp.permute_dims(_take(factor, digit), (1, 2, 0)))  # (rows, n_i, s)
    taken[0] = taken[0] * weights
    if len(taken) == 1:
        return xp.sum(taken[0], axis=2)
    outer = reduce(khatri_rao, taken[:-1])
    inner = taken[-1]
    pairs = pairs_of_rows(outer[:, None, :, :], inner[:, None, :, :])
    return xp.reshape(pairs, block_shape)


def diagonal_entries(shape: KroneckerShape, factors: Sequence[Array], weights: Array) -> Array:
    """Return A[i, i], shape (min(m, n),); for square factors Σ_k λ_k ⊗_i diag M_k⁽ⁱ⁾."""
    if any(m != n for m, n in shape.factors):
        positions = np.arange(min(shape.matrix_shape))
        return entries_at(shape, factors, weights, positions, positions)
    xp = namespace(*factors)
    diagonals = [xp.matrix_transpose(xp.linalg.diagonal(factor)) for factor in factors]
    return xp.sum(reduce(khatri_rao, diagonals) * weights, axis=1)


def _take(array: Array, positions: np.ndarray) -> Array:
    """Return the entries of the second axis at these positions."""
    xp = namespace(array)
    return xp.take(array, xp.asarray(positions, dtype=xp.int64, device=device(array)), axis=1)


def _positions(key: Any, size: int, name: str) -> np.ndarray:
    """Return the positions that a key names as integers, without dimension for a single one."""
    if isinstance(key, slice):
        return np.arange(size)[key]
    positions = np.asarray(key)
    if positions.dtype == bool and positions.shape == (size,):
        return np.flatnonzero(positions)
    is_integer = np.issubdtype(positions.dtype, np.integer) or positions.size == 0
    if positions.ndim > 1 or not is_integer:
        raise IndexError(f"a {name} index is an integer, a slice, or one list of them; got {key!r}")
    positions = positions.astype(np.int64)
    outside = positions[(positions < -size) | (positions >= size)]
    if outside.size:
        raise IndexError(
            f"{name} {int(outside.reshape(-1)[0])} is out of bounds: the matrix has {size} {name}s"
        )
    return np.where(positions < 0, positions + size, positions)
