"""Cases that identities are tried on: matrices that are drawn, and corner cases that draws seldom meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from hypothesis import strategies as st

from lsrdecomp.arrays import Array, Namespace, to_numpy
from lsrdecomp.testing.agreement import Identities, IdentityError
from lsrdecomp.testing.strategies import (
    SIZES,
    graded_matrices,
    invertible_matrices,
    kronecker_shapes,
    matrices,
    small_matrices,
)

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape


class Options(TypedDict, total=False):
    """What every check takes beside your function.

    Attributes
    ----------
    xp : namespace
        Array library in which the cases are handed over: ``numpy``, ``torch``, any of the array API
        standard.
    complex_values : bool
        Also draw complex matrices, of the precision of ``dtype``; true if absent.
    dtype : str
        Element type of the cases: ``"float64"`` if absent, ``"float32"``, ``"complex128"``,
        ``"complex64"``.
    tolerance : float, optional
        Relative difference to let pass where rounding explains less: for code that computes in a
        coarser type.
    max_examples : int
        Cases drawn for each identity, 25 if absent; they are the same in each run.

    Examples
    --------
    >>> from lsrdecomp.testing import check_kron
    >>> check_kron(np.kron, dtype="float32", complex_values=False, max_examples=5)
    """

    xp: Namespace
    complex_values: bool
    dtype: str
    tolerance: float | None
    max_examples: int


class Cases:
    """Draws what an identity needs, in the array library and the element type that a check was called with."""

    def __init__(
        self,
        draw: Callable[[Any], Any],
        xp: Namespace,
        complex_values: bool,
        dtype: str,
        order: int | None,
    ) -> None:
        self.draw = draw
        self._order = order
        self._xp = xp
        self._complex = dtype.startswith("complex") or (complex_values and draw(st.booleans()))
        self._real = "float32" if dtype in ("float32", "complex64") else "float64"
        self._dtype = (
            {"float32": "complex64", "float64": "complex128"}[self._real]
            if self._complex
            else dtype
        )

    def array(self, values: Any, dtype: str | None = None) -> Array:
        """NumPy values in the array library and element type of the cases, or in ``dtype``."""
        return self._xp.asarray(np.array(values, dtype=dtype or self._dtype))

    def shape(self, square: bool = False) -> KroneckerShape:
        shape: KroneckerShape = self.draw(
            kronecker_shapes(order=self._order, max_entries=400, square=square)
        )
        return shape

    def sides(self, count: int, among: Sequence[int] = SIZES) -> list[int]:
        return [self.draw(st.sampled_from(among)) for _ in range(count)]

    def matrix(self, shape: tuple[int, int]) -> Array:
        return self.array(self.draw(_entries(shape, self._complex)))

    def matrices(self, *layouts: str, among: Sequence[int] = SIZES) -> tuple[Array, ...]:
        """Matrices with a letter for each side, as in `numpy.einsum`: ``"mn", "np"`` for a product; ``1`` is one."""
        letters = sorted({*"".join(layouts)} - {"1"})
        sides = {"1": 1, **dict(zip(letters, self.sides(len(letters), among), strict=True))}
        return tuple(self.matrix((sides[layout[0]], sides[layout[1]])) for layout in layouts)

    def factors(self, shape: KroneckerShape) -> tuple[Array, ...]:
        return tuple(self.matrix(pair) for pair in shape.factors)

    def invertible(self) -> tuple[Array, ...]:
        rows = self.shape(square=True).rows
        return tuple(self.array(self.draw(invertible_matrices(m, self._complex))) for m in rows)

    def partial_isometries(self) -> tuple[Array, ...]:
        """Matrices whose singular values are one or zero."""
        isometries = []
        for m, n in self.shape().factors:
            r = self.draw(st.integers(0, min(m, n)))
            u, v = (
                np.linalg.qr(to_numpy(self.draw(matrices((size, size), scale=1.0))))[0]
                for size in (m, n)
            )
            isometries.append(self.array(u[:, :r] @ v[:, :r].T))
        return tuple(isometries)

    def numbered(self) -> tuple[Array, KroneckerShape]:
        """A matrix whose entries are 1, 2, 3, …: a permutation has nowhere to hide."""
        shape = self.shape()
        return self.array(_counted(shape.matrix_shape)), shape

    def graded(self, shape: KroneckerShape) -> Array:
        """A matrix whose rearrangement has singular values from one down to rounding, evenly on a logarithmic scale."""
        return self.array(self.draw(graded_matrices(shape, complex_values=self._complex)))

    def terms(self, square: bool = False) -> tuple[Array, tuple[Array, ...]]:
        """Weights s, s − 1, …, 1 and a stack of s factors for each position."""
        shape = self.shape(square)
        s = self.draw(st.integers(1, 4))
        stacks = [
            np.stack([to_numpy(self.matrix(pair)) for _ in range(s)]) for pair in shape.factors
        ]
        return self.array(np.arange(s, 0.0, -1.0), self._real), tuple(map(self.array, stacks))

    def invertible_term(self) -> tuple[Array, tuple[Array, ...]]:
        """One term of well conditioned square factors."""
        factors = [
            self.draw(invertible_matrices(m, self._complex, 5.0))
            for m in self.shape(square=True).rows
        ]
        return self.array(np.ones(1), self._real), tuple(
            self.array(factor[None]) for factor in factors
        )

    def small_term(self) -> tuple[Array, tuple[Array, ...]]:
        """Two terms, the second with 1e-4 of the weight of the first and a minus sign."""
        stacks = [
            self.array(np.stack([_counted((2, 3)), _counted((2, 3))[::-1]]))
            for _ in range(self._order or 2)
        ]
        return self.array([1.0, -1e-4], self._real), tuple(stacks)


@cache
def _entries(shape: tuple[int, int], complex_values: bool) -> st.SearchStrategy[Any]:
    """Small integers or Gaussian numbers; made once, for hypothesis checks every new strategy."""
    integers = small_matrices(shape, complex_values=complex_values)
    return integers | matrices(shape, scale=1.0, complex_values=complex_values)


@dataclass(frozen=True)
class Corner:
    """A check of given arrays, of which nothing is drawn but whether they are complex."""

    name: str
    check: Callable[..., None]
    arrays: Sequence[tuple[np.ndarray, str | None]]

    def __call__(self, d: Cases) -> None:
        try:
            self.check(*(d.array(values, dtype) for values, dtype in self.arrays))
        except IdentityError as error:
            error.identity = f"{self.name}, {error.identity.partition(', ')[2]}"
            raise


Trial = tuple[str, Callable[[Cases], None]]
"""A name, and what draws a case and checks it."""


def trials(
    identities: Identities,
    function: Callable[..., Any],
    options: Options,
    corners: Mapping[str, tuple[tuple[int, ...], ...]] = MappingProxyType({}),
    on_corners: Callable[..., None] | None = None,
) -> list[Trial]:
    """Each identity on drawn cases, and ``on_corners`` (absent, the first identity) on corner cases.

    ``corners`` names shapes of arrays: sides that are equal, long or empty. Arrays of the first of
    them also carry NaN, entries that a coarser type loses, and, where there are two, arrays of two
    element types.
    """
    first = partial(on_corners or identities.checks[0][0], function)

    def on_drawn(check: Callable[..., None], cases: Any, d: Cases) -> None:
        check(function, *(d.matrices(*cases.split()) if isinstance(cases, str) else cases(d)))

    drawn = [
        (check.__name__.replace("_", " "), partial(on_drawn, check, cases))
        for check, cases in identities.checks
    ]
    fixed = _corner_arrays(corners, options) if corners else {}
    return [*drawn, *((name, Corner(name, first, arrays)) for name, arrays in fixed.items())]


def _corner_arrays(
    corners: Mapping[str, tuple[tuple[int, ...], ...]], options: Options
) -> dict[str, list[tuple[np.ndarray, str | None]]]:
    """The arrays of each corner case with their element types, None for that of the drawn cases."""
    # Small integers: exact in half precision; turned on, so that arrays of equal shape differ.
    arrays = {
        name: [np.roll(_counted(q), -i) for i, q in enumerate(shapes)]
        for name, shapes in corners.items()
    }
    ordinary = next(iter(arrays.values()))
    arrays["not a number"] = [np.where(array == 1.0, np.nan, array) for array in ordinary]
    arrays["stored by columns"] = [np.asfortranarray(array) for array in ordinary]
    if options.get("tolerance") is None:
        arrays["tiny entries"] = [1e-12 * array for array in ordinary]
    typed: dict[str, list[tuple[np.ndarray, str | None]]] = {
        name: [(values, None) for values in group] for name, group in arrays.items()
    }
    real_and_complex = (
        options.get("complex_values", True) and options.get("dtype", "float64") == "float64"
    )
    if real_and_complex and len(ordinary) == 2:
        a, b = ordinary
        typed |= {
            "real ⊗ complex": [(a, "float64"), (b / 3 + 1j, "complex128")],
            "complex ⊗ real": [(a / 3 + 1j, "complex128"), (b, "float64")],
            "float32 ⊗ float64": [(a, "float32"), (b / 3, "float64")],
            "float64 ⊗ float32": [(a / 3, "float64"), (b, "float32")],
        }
    return typed


def _counted(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(1.0, math.prod(shape) + 1).reshape(shape)
