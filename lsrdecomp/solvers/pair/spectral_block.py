"""One block's problem in a weight of few eigenpairs, contracted with the other factors: small, whatever the width.

With V diag(λ) Vᵀ + ρ(I − VVᵀ) as weight all that block i needs of V is S = V contracted with the
Kronecker products of the other factors of each term. One pass over V makes it; then the normal
matrix is formed from it, or conjugate gradient steps are taken with it, as many times cheaper than
with V as the other factors have rows for a term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, device, namespace
from lsrdecomp.solvers.batched_terms import Stacks, other_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.weights import LowRankPlusIdentity


@dataclass(frozen=True, slots=True)
class SpectralBlock:
    """The operator N of block i, m·r·s unknowns (p, a, k), in a batch of L problems; c is the other factors' width."""

    seen: Array  # S, (L, m·s, c·q), rows (p, k), columns (inner index of the others, eigenpair)
    excess: Array  # λ − ρ, (L, q)
    alike: (
        Array  # ρ times the normal matrix without a weight, the same for every row p: (L, s·r, s·r)
    )
    inner: Array  # H, (L, c·r, c·r), inner index of the others outermost
    sizes: tuple[int, int, int, int]  # m, r, s, c
    index: int  # i
    others: tuple[int, ...]  # inner sizes of the other factors

    @classmethod
    def of(
        cls,
        weight: LowRankPlusIdentity,
        basis: Array,
        shape: KroneckerShape,
        stacks: Stacks,
        i: int,
        gram: Array,
    ) -> SpectralBlock:
        """Of the weight, its `basis_for` block i, the factors held fixed and H (L, r, r) of the other side."""
        xp, batch = namespace(gram), int(gram.shape[0])
        (m, r), s = shape.factors[i], int(stacks[i].shape[2])
        others = [j for j in range(shape.order) if j != i]
        c, q = math.prod(shape.columns[j] for j in others), int(weight.basis.shape[-1])
        # Spectral 1: S, the one pass over V.
        columns = other_columns(stacks, shape, others)  # (L, o, c·s)
        seen = xp.reshape(xp.matrix_transpose(columns) @ basis, (batch, c, s, m, q))
        seen = xp.reshape(xp.permute_dims(seen, (0, 3, 2, 1, 4)), (batch, m * s, c * q))
        # Spectral 2: H with the inner index of the others outermost.
        order = (*(j + 1 for j in others), i + 1)
        both = (0, *order, *(axis + shape.order for axis in order))
        inner = xp.permute_dims(xp.reshape(gram, (batch, *shape.columns, *shape.columns)), both)
        inner = xp.reshape(inner, (batch, c, r, c, r))
        # Spectral 3: ρ times what no weight would give; what λ exceeds ρ by acts along V alone.
        grams = xp.reshape(xp.matrix_transpose(columns) @ columns, (batch, c, s, c, s))
        alike = xp.sum(
            grams[:, :, :, None, :, :, None] * inner[:, :, None, :, :, None, :], axis=(1, 4)
        )
        rest = xp.reshape(weight.rest, (-1, 1, 1))
        alike = rest * xp.reshape(alike, (batch, s * r, s * r))
        excess = xp.reshape(weight.values - weight.rest[..., None], (-1, q))
        inner = xp.reshape(inner, (batch, c * r, c * r))
        return cls(
            seen, excess, alike, inner, (m, r, s, c), i, tuple(shape.columns[j] for j in others)
        )

    def inside(self, x: Array) -> Array:
        """VᵀX, (L, q, inner rank), of the side X whose block i is x (L, m·r, s)."""
        xp, (_, r, _, _), batch = namespace(x), self.sizes, int(x.shape[0])
        image = xp.reshape(self._products(self._rows(x)), (batch, *self.others, -1, r))
        d, i = len(self.others) + 1, self.index
        order = (0, d, *(1 + j for j in range(i)), d + 1, *(1 + j for j in range(i, d - 1)))
        return xp.reshape(xp.permute_dims(image, order), (batch, -1, r * math.prod(self.others)))

    def _rows(self, x: Array) -> Array:
        """A block (L, m·r, s) as (L, m, s·r)."""
        xp, (m, r, s, _), batch = namespace(x), self.sizes, int(x.shape[0])
        return xp.reshape(
            xp.permute_dims(xp.reshape(x, (batch, m, r, s)), (0, 1, 3, 2)), (batch, m, s * r)
        )

    def _products(self, rows: Array) -> Array:
        """Of V and the side whose block has these `_rows`: (L, c·q, r)."""
        xp, (m, r, s, _) = namespace(rows), self.sizes
        return xp.matrix_transpose(self.seen) @ xp.reshape(rows, (rows.shape[0], m * s, r))

    def apply(self, x: Array) -> Array:
        """N x for a block (L, m·r, s)."""
        xp, (m, r, s, c), batch = namespace(x), self.sizes, int(x.shape[0])
        rows = self._rows(x)
        image = self._products(rows)
        image = xp.reshape(
            xp.permute_dims(xp.reshape(image, (batch, c, -1, r)), (0, 2, 1, 3)), (batch, -1, c * r)
        )
        image = self.excess[..., None] * (image @ self.inner)
        image = xp.reshape(
            xp.permute_dims(xp.reshape(image, (batch, -1, c, r)), (0, 2, 1, 3)), (batch, -1, r)
        )
        image = xp.reshape(self.seen @ image, (batch, m, s, r)) + xp.reshape(
            rows @ self.alike, (batch, m, s, r)
        )
        return xp.reshape(xp.permute_dims(image, (0, 1, 3, 2)), x.shape)

    def matrix(self) -> Array:
        """N formed, (L, m·r·s, m·r·s)."""
        xp, (m, r, s, c), batch = namespace(self.seen), self.sizes, int(self.seen.shape[0])
        seen = xp.reshape(self.seen, (batch, m * s * c, -1))
        middle = (seen * self.excess[:, None, :]) @ xp.matrix_transpose(seen)
        if c == 1:
            low = (
                xp.reshape(middle, (batch, m, 1, s, m, 1, s))
                * self.inner[:, None, :, None, None, :, None]
            )
        else:
            middle = xp.permute_dims(
                xp.reshape(middle, (batch, m, s, c, m, s, c)), (0, 1, 2, 4, 5, 3, 6)
            )
            inner = xp.permute_dims(xp.reshape(self.inner, (batch, c, r, c, r)), (0, 1, 3, 2, 4))
            low = xp.reshape(middle, (batch, -1, c * c)) @ xp.reshape(inner, (batch, c * c, r * r))
            low = xp.permute_dims(xp.reshape(low, (batch, m, s, m, s, r, r)), (0, 1, 5, 2, 3, 6, 4))
        alike = xp.permute_dims(xp.reshape(self.alike, (batch, s, r, s, r)), (0, 2, 1, 4, 3))
        rows = xp.eye(m, dtype=low.dtype, device=device(low))[None, :, None, None, :, None, None]
        return xp.reshape(
            low + rows * alike[:, None, :, :, None, :, :], (batch, m * r * s, m * r * s)
        )


def basis_for(weight: LowRankPlusIdentity, sizes: Sequence[int], i: int) -> Array:
    """V (…, n, q) as (L, o, m_i·q): rows of the other factors, then of factor i and the eigenpairs; the last a view."""
    xp, d, q = namespace(weight.basis), len(sizes), int(weight.basis.shape[-1])
    rows = xp.reshape(weight.basis, (-1, *sizes, q))
    moved = xp.permute_dims(rows, (0, *(j + 1 for j in range(d) if j != i), i + 1, d + 1))
    return xp.reshape(moved, (rows.shape[0], math.prod(sizes) // sizes[i], sizes[i] * q))


LARGEST = 80
"""Unknowns of a block up to which its normal matrix is formed and solved; steps with S are cheaper
from there on."""


def is_small(shape: KroneckerShape, i: int, terms: int) -> bool:
    """Whether block i has few enough unknowns to be solved by its normal matrix."""
    m, r = shape.factors[i]
    return m * r * terms <= LARGEST


def pays(shape: KroneckerShape, i: int, terms: int, steps: int) -> bool:
    """Whether so many products with N cost less through S, by a count of multiplications, than with V itself."""
    rest, each = shape.matrix_shape[0] // shape.rows[i], 2 * (steps + 1) * shape.columns[i]
    return terms * (rest + each) < each * rest
