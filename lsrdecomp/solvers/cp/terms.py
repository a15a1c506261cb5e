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
    norm,
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
    """Σ_k λ_k f_k⁽¹⁾ ∘ … ∘ f_k⁽ᵈ⁾ with unit columns f."""

    weights: Array  # (s,), real, not negative
    columns: tuple[Array, ...]  # (p_i, s)

    @classmethod
    def of(cls, columns: Sequence[Array]) -> CPTerms:
        """Normalise columns of any length; a zero column stays zero, with weight zero."""
        units, lengths = zip(*map(unit_columns, columns), strict=True)
        return cls(math.prod(lengths), units)

    @classmethod
    def fibres(cls, tensor: Array) -> CPTerms:
        """A tensor as Σ e_i ∘ e_j ∘ t_ij, its fibres along the longest mode that are not zero: exact and orthogonal."""
        xp, (longest, occupied) = namespace(tensor), _occupied_fibres(tensor)
        others = [mode for mode in range(tensor.ndim) if mode != longest]
        rows = xp.reshape(
            xp.permute_dims(tensor, (longest, *others)), (int(tensor.shape[longest]), -1)
        )
        indices = np.argwhere(to_numpy(occupied)).T
        columns = [
            like(np.eye(int(tensor.shape[m]))[:, i], tensor)
            for m, i in zip(others, indices, strict=True)
        ]
        columns.insert(longest, xp.take(rows, xp.nonzero(xp.reshape(occupied, (-1,)))[0], axis=1))
        return cls.of(columns)

    @staticmethod
    def number_of_fibres(tensor: Array) -> int:
        """Terms of ``fibres``, without making them."""
        return int(np.count_nonzero(to_numpy(_occupied_fibres(tensor)[1])))

    @property
    def rank(self) -> int:
        return int(self.weights.shape[0])

    def condition(self, size: float = 1.0) -> float:
        """γ = ‖λ‖/size for a sum of Frobenius norm ``size``."""
        return norm(self.weights) / size if size > 0.0 else float("inf")

    def balanced(self) -> tuple[Array, ...]:
        """Columns that share λ_k equally: the scaling in which all modes are alike to a Newton step."""
        xp, d = namespace(*self.columns), len(self.columns)
        root = xp.astype(self.weights ** (1.0 / d), self.columns[0].dtype)
        return tuple(c * root for c in self.columns)

    def to_tensor(self) -> Array:
        xp = namespace(*self.columns)
        return assemble(self.columns, xp.astype(self.weights, self.columns[0].dtype))

    def with_term(self, columns: Sequence[Array], weight: Array) -> CPTerms:
        """One more term: unit vectors (p_i,) and their weight, shape (1,)."""
        xp = namespace(*self.columns)
        joined = tuple(
            xp.concat((c, v[:, None]), axis=1) for c, v in zip(self.columns, columns, strict=True)
        )
        return CPTerms(xp.concat((self.weights, weight)), joined)

    def to_separated(self, shape: KroneckerShape, scale: float = 1.0) -> SeparatedMatrix:
        """The matrix whose rearrangement, over ``scale``, these terms are."""
        xp = namespace(*self.columns)
        factors = [
            xp.reshape(xp.matrix_transpose(c), (self.rank, m, n))
            for c, (m, n) in zip(self.columns, shape.factors, strict=True)
        ]
        return SeparatedMatrix.from_factors(factors, self.weights * scale)


def unit_columns(columns: Array) -> tuple[Array, Array]:
    """Columns of length one, and their lengths; zero columns stay zero."""
    xp = namespace(columns)
    length = xp.sqrt(xp.sum(xp.abs(columns) ** 2, axis=0))
    safe = xp.where(length > 0, length, xp.ones_like(length))
    return columns / safe, length


def fewest_terms(tensor: Array, error: float) -> int:
    """A number of terms below which no sum is within ``error`` of a tensor of norm one; rounding does not count.

    The unfolding along the longest mode, a matrix, has as many directions as the sum has terms, or
    fewer: by Eckart and Young its singular values say how many are needed.
    """
    xp, (longest, _) = namespace(tensor), _occupied_fibres(tensor)
    unfolded = xp.reshape(
        xp.moveaxis(as_double(tensor), longest, 0), (int(tensor.shape[longest]), -1)
    )
    tails = tail_norms(xp.linalg.svdvals(unfolded))
    error = max(error, tolerance(dtype_name(tensor), max(tensor.shape)))
    return next(s for s, tail in enumerate(tails) if tail <= error)


def _occupied_fibres(tensor: Array) -> tuple[int, Array]:
    """The longest mode, and which fibres along it are not zero."""
    longest = max(range(tensor.ndim), key=lambda mode: int(tensor.shape[mode]))
    return longest, namespace(tensor).any(tensor != 0, axis=longest)
