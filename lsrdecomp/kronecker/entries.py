"""Entries: rows, columns, single entries, the diagonal and the trace of a separated matrix, never formed."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import Array, as_double, device, namespace
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.rearrange import khatri_rao, pairs_of_rows
from lsrdecomp.kronecker.terms import Terms

if TYPE_CHECKING:
    from collections.abc import Sequence


class Entries(Terms):
    """Entries: ``A[i, j]``, rows, columns, diagonal, trace."""

    def __getitem__(self, key: Any) -> Array:
        """Rows, columns, blocks and entries as for a NumPy array, as an array.

        ``A[i]``, ``A[:, j]``, ``A[2:5, ::3]``, ``A[rows]``, ``A[i, j]``; two lists name entries one
        by one. A row costs s·n, a block (rows, columns) s·d operations an entry.

        Raises
        ------
        IndexError
            For an index outside the matrix, or more than two.
        """
        pair = key if isinstance(key, tuple) else (key,)
        if len(pair) > 2:
            raise IndexError(f"a matrix has two indices, got {len(pair)}")
        rows, columns = (*pair, slice(None), slice(None))[:2]
        i, j = _indices(rows, self.shape[0], "row"), _indices(columns, self.shape[1], "column")
        if not isinstance(rows, slice) and not isinstance(columns, slice):
            return self._at(*np.broadcast_arrays(i, j))
        if j.size == self.shape[1] and isinstance(columns, slice) and columns.step in (None, 1):
            block = self._rows(np.atleast_1d(i))
        else:
            block = self._at(np.atleast_1d(i)[:, None], np.atleast_1d(j)[None, :])
        return block[0, :] if i.ndim == 0 else block[:, 0] if j.ndim == 0 else block

    def diagonal(self) -> Array:
        """The entries A[i, i], shape (min(m, n),); for square factors Σ_k λ_k ⊗_i diag M_k⁽ⁱ⁾."""
        if any(m != n for m, n in self.kronecker_shape.factors):
            places = np.arange(min(self.shape))
            return self._at(places, places)
        xp = namespace(*self.factors)
        columns = (xp.matrix_transpose(xp.linalg.diagonal(factor)) for factor in self.factors)
        return xp.sum(reduce(khatri_rao, columns) * self._weights(), axis=1)

    def trace(self) -> Any:
        """tr A = Σ_k λ_k Π_i tr M_k⁽ⁱ⁾ for square factors, a number in double precision.

        Raises `ShapeError` unless the matrix is square.
        """
        if self.shape[0] != self.shape[1]:
            raise ShapeError(f"a matrix of {self.shape[0]} × {self.shape[1]} has no trace")
        xp = namespace(*self.factors)
        if any(m != n for m, n in self.kronecker_shape.factors):
            return xp.sum(as_double(self.diagonal()))
        total = as_double(self._weights())
        for factor in self.factors:
            total = total * xp.linalg.trace(as_double(factor))
        return xp.sum(total)

    def _rows(self, rows: np.ndarray) -> Array:
        """Whole rows, shape (len(rows), n): a row of a Kronecker product is the product of rows."""
        xp, s = namespace(*self.factors), self.separation_rank
        picked = [
            _taken(f, digit) for f, digit in zip(self.factors, self._digits(rows, 0), strict=True)
        ]
        if s == 0:
            return xp.zeros(
                (len(rows), self.shape[1]), dtype=self.dtype, device=device(self.weights)
            )
        columns = [xp.permute_dims(factor, (1, 2, 0)) for factor in picked]  # (rows, n_i, s)
        columns[0] = columns[0] * self._weights()
        if len(columns) == 1:
            return xp.sum(columns[0], axis=2)
        first, last = reduce(khatri_rao, columns[:-1]), columns[-1]
        return xp.reshape(
            pairs_of_rows(first[:, None, :, :], last[:, None, :, :]), (len(rows), self.shape[1])
        )

    def _at(self, rows: np.ndarray, columns: np.ndarray) -> Array:
        """Entries at broadcast places."""
        xp = namespace(*self.factors)
        rows, columns = np.broadcast_arrays(rows, columns)
        state = self._weights()[:, None]
        for factor, i, j in zip(
            self.factors, self._digits(rows, 0), self._digits(columns, 1), strict=True
        ):
            s, m, n = factor.shape
            state = state * _taken(xp.reshape(factor, (s, m * n)), (i * n + j).reshape(-1))
        total = (
            xp.sum(state, axis=0) if self.separation_rank else xp.zeros(rows.size, dtype=self.dtype)
        )
        return xp.reshape(total, rows.shape)

    def _digits(self, places: np.ndarray, axis: int) -> Sequence[np.ndarray]:
        sizes = (self.kronecker_shape.rows, self.kronecker_shape.columns)[axis]
        return np.unravel_index(places, sizes)


def _taken(array: Array, places: np.ndarray) -> Array:
    """Rows of each of the factors (s, …) by their number."""
    xp = namespace(array)
    return xp.take(array, xp.asarray(places, dtype=xp.int64, device=device(array)), axis=1)


def _indices(key: Any, size: int, name: str) -> np.ndarray:
    """The places that a key names, as an integer array; of no dimension for a single one."""
    if isinstance(key, slice):
        return np.arange(size)[key]
    places = np.asarray(key)
    if places.dtype == bool and places.shape == (size,):
        return np.flatnonzero(places)
    if places.ndim > 1 or not (np.issubdtype(places.dtype, np.integer) or places.size == 0):
        raise IndexError(f"a {name} index is an integer, a slice, or one list of them; got {key!r}")
    places = places.astype(np.int64)
    wrong = (
        places[(places < -size) | (places >= size)]
        if places.ndim
        else places[None][abs(places[None] + 0.5) > size]
    )
    if wrong.size:
        raise IndexError(f"{name} {int(wrong[0])} is out of bounds: the matrix has {size} {name}s")
    return np.where(places < 0, places + size, places)
