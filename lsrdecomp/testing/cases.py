"""Cases: what the identities are tried on, drawn in the array library and element type that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from lsrdecomp.arrays import Array, Namespace, to_numpy
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.testing.strategies import (
    graded_matrices,
    invertible_matrices,
    kronecker_shapes,
    matrices,
    small_matrices,
)

Draw = Callable[[Any], Any]


class Cases:
    """Draws the matrices an identity needs, in the array library that is asked for."""

    def __init__(self, draw: Draw, xp: Namespace, complex_values: bool, dtype: str = "float64") -> None:
        self.draw = draw
        self._xp = xp
        self._complex = dtype.startswith("complex") or (complex_values and draw(st.booleans()))
        half = dtype in ("float32", "complex64")
        self._dtype = {(True, True): "complex64", (True, False): "complex128"}.get((self._complex, half), dtype)

    def shape(self, order: int | None, square: bool = False) -> KroneckerShape:
        shape: KroneckerShape = self.draw(kronecker_shapes(order=order, max_entries=400, square=square))
        return shape

    def matrix(self, shape: tuple[int, int]) -> Array:
        integers = small_matrices(shape, complex_values=self._complex)
        return self.moved(self.draw(integers | matrices(shape, scale=1.0, complex_values=self._complex)))

    def of_shape(self, shape: KroneckerShape) -> tuple[Array, ...]:
        return tuple(self.matrix(pair) for pair in shape.factors)

    def pair(self) -> tuple[Array, ...]:
        return self.of_shape(self.shape(2))

    def with_sum(self) -> tuple[Array, ...]:
        a, b = self.pair()
        return a, b, self.matrix(a.shape)

    def with_middle(self) -> tuple[Array, ...]:
        a, b = self.pair()
        return a, b, self.matrix((int(b.shape[1]), int(a.shape[1])))

    def chain(self) -> tuple[Array, ...]:
        a, b = self.pair()
        columns = self.shape(2).columns
        return a, b, *(self.matrix((int(x.shape[1]), n)) for x, n in zip((a, b), columns, strict=True))

    def invertible(self) -> tuple[Array, ...]:
        rows = self.shape(2, square=True).rows
        return tuple(self.moved(self.draw(invertible_matrices(m, self._complex))) for m in rows)

    def partial_isometries(self) -> tuple[Array, ...]:
        """Matrices whose singular values are one or zero."""
        cut = []
        for m, n in self.shape(2).factors:
            r = self.draw(st.integers(0, min(m, n)))
            u, v = (np.linalg.qr(to_numpy(self.draw(matrices((size, size), scale=1.0))))[0] for size in (m, n))
            cut.append(self.moved(u[:, :r] @ v[:, :r].T))
        return tuple(cut)

    def graded(self, shape: KroneckerShape) -> Array:
        """A matrix whose rearrangement has singular values from one down to rounding, evenly on a logarithmic scale."""
        return self.moved(self.draw(graded_matrices(shape, complex_values=self._complex)))

    def invertible_terms(self, shape: KroneckerShape) -> tuple[Array, tuple[Array, ...]]:
        """One term of well conditioned square factors."""
        stacks = [self.moved(self.draw(invertible_matrices(m, self._complex, 5.0))[None]) for m in shape.rows]
        return self._xp.asarray(np.ones(1, dtype=to_numpy(stacks[0]).real.dtype)), tuple(stacks)

    def numbered(self, order: int | None) -> tuple[Array, KroneckerShape]:
        """A matrix whose entries are 1, 2, 3, …: a permutation has nowhere to hide."""
        shape = self.shape(order)
        rows, columns = shape.matrix_shape
        return self.moved(np.arange(1.0, rows * columns + 1).reshape(rows, columns)), shape

    def terms(self, shape: KroneckerShape) -> tuple[Array, tuple[Array, ...]]:
        s = self.draw(st.integers(1, 4))
        real = "float32" if self._dtype in ("float32", "complex64") else "float64"
        weights = self._xp.asarray(np.arange(s, 0.0, -1.0, dtype=real))
        stacks = []
        for pair in shape.factors:
            stacks.append(self.moved(np.stack([to_numpy(self.matrix(pair)) for _ in range(s)])))
        return weights, tuple(stacks)

    def moved(self, matrix: Any, dtype: str | None = None) -> Array:
        """A NumPy matrix in the array library and element type of the cases, or in ``dtype``."""
        return self._xp.asarray(np.array(matrix, dtype=dtype or self._dtype))
