"""Rank-one terms of a tensor: unit columns and weights, and their condition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import (
    Array,
    as_double,
    dtype_name,
    like,
    namespace,
    tail_norms,
    to_numpy,
)
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import tolerance
from lsrdecomp.solvers.cp.mttkrp import assemble

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.kronecker.shape import KroneckerShape


@dataclass(frozen=True, eq=False)
class CPTerms:
    """A sum Σ_k λ_k f_k⁽¹⁾ ∘ … ∘ f_k⁽ᵈ⁾ with unit columns f."""

    weights: Array  # (s,), real, not negative
    columns: tuple[Array, ...]  # (p_i, s)

    @classmethod
    def of(cls, columns: Sequence[Array]) -> CPTerms:
        """Normalise columns of any length; a zero column stays zero, with weight zero."""
        units, lengths = zip(*map(unit_columns, columns), strict=True)
        return cls(math.prod(lengths), units)

    @classmethod
    def fibres(cls, tensor: Array) -> CPTerms:
        """Write a tensor as Σ e_i ∘ e_j ∘ t_ij, the sum of its fibres.

        They lie along the longest mode; zero ones are left out. The sum is exact and its
        terms are orthogonal.
        """
        xp = namespace(tensor)
        longest, occupied = _occupied_fibres(tensor)
        others = [mode for mode in range(tensor.ndim) if mode != longest]
        columns = []
        for mode, index in zip(others, np.argwhere(to_numpy(occupied)).T, strict=True):
            columns.append(like(np.eye(int(tensor.shape[mode]))[:, index], tensor))
        front = xp.permute_dims(tensor, (longest, *others))
        fibres = xp.reshape(front, (int(tensor.shape[longest]), -1))
        positions = xp.nonzero(xp.reshape(occupied, (-1,)))[0]
        columns.insert(longest, xp.take(fibres, positions, axis=1))
        return cls.of(columns)

    @staticmethod
    def number_of_fibres(tensor: Array) -> int:
        """Count the terms of ``fibres`` without making them."""
        _, occupied = _occupied_fibres(tensor)
        return int(np.count_nonzero(to_numpy(occupied)))

    @property
    def rank(self) -> int:
        """Number of terms."""
        return int(self.weights.shape[0])

    def balanced(self) -> tuple[Array, ...]:
        """Return columns that share λ_k equally.

        In that scaling all modes are alike to a Newton step.
        """
        xp = namespace(*self.columns)
        share = self.weights ** (1.0 / len(self.columns))
        share = xp.astype(share, self.columns[0].dtype)
        return tuple(column * share for column in self.columns)

    def to_tensor(self) -> Array:
        """Form the sum."""
        xp = namespace(*self.columns)
        return assemble(self.columns, xp.astype(self.weights, self.columns[0].dtype))

    def with_term(self, columns: Sequence[Array], weight: Array) -> CPTerms:
        """Add a term: unit vectors (p_i,) and their weight, shape (1,)."""
        xp = namespace(*self.columns)
        joined = []
        for present, new in zip(self.columns, columns, strict=True):
            joined.append(xp.concat((present, new[:, None]), axis=1))
        return CPTerms(xp.concat((self.weights, weight)), tuple(joined))

    def merged(self) -> CPTerms:
        """Return the same sum with terms of one direction, to rounding, added up.

        A fit of more terms than an exact sum has may end with one of them in two halves.
        """
        columns = [to_numpy(as_double(column)) for column in self.columns]
        cosines = math.prod(column.conj().T @ column for column in columns)
        rounding = tolerance(dtype_name(self.columns[0]), max(c.shape[0] for c in columns))
        is_same = np.abs(cosines) >= 1.0 - rounding
        np.fill_diagonal(is_same, True)
        first = np.argmax(is_same, axis=0)  # of the terms of the same direction
        if np.array_equal(first, np.arange(self.rank)):
            return self
        # A term of phase φ relative to the first of its direction adds φ λ to its weight.
        shares = to_numpy(self.weights) * cosines[first, np.arange(self.rank)]
        kept = np.unique(first)
        sums = np.array([shares[first == k].sum() for k in kept])
        chosen = [like(column[:, kept], self.columns[0]) for column in columns]
        return CPTerms.of((chosen[0] * like(sums, self.columns[0]), *chosen[1:]))

    def to_separated(self, shape: KroneckerShape, scale: float) -> SeparatedMatrix:
        """Return the matrix whose rearrangement, over ``scale``, these terms are."""
        xp = namespace(*self.columns)
        factors = []
        for column, (m, n) in zip(self.columns, shape.factors, strict=True):
            factors.append(xp.reshape(xp.matrix_transpose(column), (self.rank, m, n)))
        return SeparatedMatrix.from_factors(factors, self.weights * scale)


def unit_columns(columns: Array) -> tuple[Array, Array]:
    """Return columns of length one, and their lengths; zero columns stay zero."""
    xp = namespace(columns)
    length = xp.sqrt(xp.sum(xp.abs(columns) ** 2, axis=0))
    divisor = xp.where(length > 0, length, xp.ones_like(length))
    return columns / divisor, length


def min_number_of_terms(tensor: Array, error: float) -> int:
    """Return a number of terms below which no sum is within ``error`` of a tensor of norm one.

    The unfolding along the longest mode, a matrix, has as many directions as the sum has terms, or
    fewer: by Eckart and Young its singular values say how many are needed. Those at rounding do not
    count.
    """
    xp = namespace(tensor)
    longest, _ = _occupied_fibres(tensor)
    front = xp.moveaxis(as_double(tensor), longest, 0)
    unfolded = xp.reshape(front, (int(tensor.shape[longest]), -1))
    tails = tail_norms(xp.linalg.svdvals(unfolded))
    error = max(error, tolerance(dtype_name(tensor), max(tensor.shape)))
    return next(s for s, tail in enumerate(tails) if tail <= error)


def _occupied_fibres(tensor: Array) -> tuple[int, Array]:
    """Return the longest mode, and which fibres along it are not zero."""
    longest = max(range(tensor.ndim), key=lambda mode: int(tensor.shape[mode]))
    return longest, namespace(tensor).any(tensor != 0, axis=longest)
