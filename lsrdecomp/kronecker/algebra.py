"""Algebra: sums, products, quotients and inner products of separated matrices, with numbers and arrays too."""

from __future__ import annotations

from typing import Any, Self, overload

import numpy as np

from lsrdecomp.arrays import Array, as_double, conjugate, device, namespace
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.action import Action
from lsrdecomp.kronecker.terms import Terms, alike


class Algebra(Action):
    """Algebra: ``+ - * /`` entry by entry, as for arrays; Kronecker products; inner products.

    With numbers and separated matrices the result is separated; with an array it is an array, and
    the matrix is formed (see `FORMED_ENTRIES`).
    """

    @overload
    def __add__(self, other: Terms | complex) -> Self: ...
    @overload
    def __add__(self, other: Any) -> Any: ...
    def __add__(self, other: Any) -> Any:
        """Entrywise sum: the terms of both; a number adds one term of ones. Cost of moving the factors."""
        if isinstance(other, Terms):
            self._same_shape(other, "add")
            xp = namespace(*self.factors, *other.factors)
            pairs = zip(self.factors, other.factors, strict=True)
            stacked = [xp.concat(alike(f, g), axis=0) for f, g in pairs]
            return self.from_factors(stacked, xp.concat(alike(self.weights, other.weights)))
        if _is_number(other):
            return self if _is_zero(other) else self + self._ones() * other
        return self._formed("adding an array") + self._operand(other)

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __neg__(self) -> Self:
        return self._of(self.weights, (-self.factors[0], *self.factors[1:]))

    def __pos__(self) -> Self:
        return self

    @overload
    def __sub__(self, other: Terms | complex) -> Self: ...
    @overload
    def __sub__(self, other: Any) -> Any: ...
    def __sub__(self, other: Any) -> Any:
        return self + (-other if not hasattr(other, "toarray") else -other.toarray())

    def __rsub__(self, other: Any) -> Any:
        return (-self) + other

    @overload
    def __mul__(self, other: Terms | complex) -> Self: ...
    @overload
    def __mul__(self, other: Any) -> Any: ...
    def __mul__(self, other: Any) -> Any:
        """Entrywise product: by (A ⊗ B) ∘ (C ⊗ D) = (A ∘ C) ⊗ (B ∘ D) at most s·t terms."""
        if isinstance(other, Terms):
            self._same_shape(other, "multiply")
            return self._every_pair(other, lambda a, b: a * b)
        if _is_number(other):
            return self.from_factors((self.factors[0] * other, *self.factors[1:]), self.weights)
        return self._formed("multiplying by an array") * self._operand(other)

    @overload
    def __rmul__(self, other: complex) -> Self: ...
    @overload
    def __rmul__(self, other: Any) -> Any: ...
    def __rmul__(self, other: Any) -> Any:
        return self * other

    @overload
    def __truediv__(self, other: Terms | complex) -> Self: ...
    @overload
    def __truediv__(self, other: Any) -> Any: ...
    def __truediv__(self, other: Any) -> Any:
        """Entrywise quotient: by a number, an array, or a separated matrix of one term without zero entries."""
        if isinstance(other, Terms):
            self._same_shape(other, "divide")
            if other.separation_rank != 1:
                raise ShapeError(
                    f"an entrywise quotient is a sum of Kronecker products for a divisor of one term; this one has "
                    f"{other.separation_rank}. Divide formed matrices: A / B.to_matrix()"
                )
            _no_zeros(other)
            return self * self.from_factors([1.0 / f for f in other.factors], 1.0 / other.weights)
        if _is_number(other):
            if _is_zero(other):
                raise ZeroDivisionError("a separated matrix divided by zero")
            return self * (1.0 / other)
        return self._formed("dividing by an array") / self._operand(other)

    def __rtruediv__(self, other: Any) -> Any:
        """``c / A`` entry by entry; separated for a number over one term, else an array."""
        if _is_number(other) and self.separation_rank == 1:
            _no_zeros(self)
            return self.from_factors([1.0 / f for f in self.factors], 1.0 / self.weights) * other
        return (other if _is_number(other) else self._operand(other)) / self._formed(
            "dividing by a separated matrix"
        )

    def kron(self, other: Terms) -> Self:
        """A ⊗ B: the factors of both one after the other, s·t terms."""
        s, t = self.separation_rank, other.separation_rank
        xp = namespace(*self.factors, *other.factors)
        left = [_spread(f[:, None, :, :], s, t) for f in self.factors]
        right = [_spread(g[None, :, :, :], s, t) for g in other.factors]
        weights = xp.reshape(self.weights[:, None] * other.weights[None, :], (s * t,))
        return self.from_factors((*left, *right), weights)

    def inner(self, other: Terms) -> Any:
        """⟨A, B⟩ = tr(Aᴴ B) = Σ_k Σ_l λ_k κ_l Π_i ⟨A_k⁽ⁱ⁾, B_l⁽ⁱ⁾⟩, a number in double precision; cost s·t·Σ m_i n_i.

        Rounding errors are of the size γ_A γ_B 2⁻⁵³‖A‖‖B‖; for a norm use ``norm``, which loses
        only γ.
        """
        self._same_shape(other, "multiply")
        xp = namespace(*self.factors, *other.factors)
        gram: Array = 1.0
        for f, g in zip(self.factors, other.factors, strict=True):
            a, b = alike(*(as_double(q) for q in (f, g)))
            rows, columns = (xp.reshape(q, (q.shape[0], q.shape[1] * q.shape[2])) for q in (a, b))
            gram = gram * (conjugate(rows) @ xp.matrix_transpose(columns))
        weights = as_double(self.weights)[:, None] * as_double(other.weights)[None, :]
        return xp.sum(gram * weights)

    def _same_shape(self, other: Terms, verb: str) -> None:
        if self.kronecker_shape != other.kronecker_shape:
            raise ShapeError(
                f"cannot {verb} {self.kronecker_shape} and {other.kronecker_shape}: the factor sizes differ"
            )

    def _ones(self) -> Self:
        xp = namespace(*self.factors)
        make = [xp.ones((1, *f.shape[1:]), dtype=f.dtype, device=device(f)) for f in self.factors]
        return self.from_factors(make)


def _spread(factor: Array, s: int, t: int) -> Array:
    xp, sizes = namespace(factor), factor.shape[2:]
    return xp.reshape(xp.broadcast_to(factor, (s, t, *sizes)), (s * t, *sizes))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex | np.number) or getattr(value, "ndim", None) == 0


def _is_zero(value: Any) -> bool:
    return bool(value == 0)


def _no_zeros(matrix: Terms) -> None:
    for i, factor in enumerate(matrix.factors, 1):
        xp = namespace(factor)
        if bool(xp.any(factor == 0)):
            raise PrecisionError(
                f"factor {i} of the divisor has zero entries: the quotient is not finite"
            )
