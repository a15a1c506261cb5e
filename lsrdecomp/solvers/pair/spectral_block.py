"""One block's problem in a weight of few eigenpairs, contracted with the other factors.

It is small, whatever the width. With V diag(λ) Vᵀ + ρ(I − VVᵀ) as weight all that block i needs of
V is S = V contracted with the Kronecker products of the other factors of each term. One pass over V
makes it; then the normal matrix is formed from it, or conjugate gradient steps are taken with it,
as many times cheaper than with V as the other factors have rows for a term.
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
    """The operator N of block i, m·r·s unknowns (p, a, k), in a batch of L problems.

    Letters: q eigenpairs, s terms, m × r the size of the block's factor, c the product of the other
    factors' columns.
    """

    # S, (L, m·s, c·q): rows (p, k), columns (inner index of the other factors, eigenpair)
    contracted: Array
    # λ − ρ, (L, q)
    excess: Array
    # ρ times the normal matrix without a weight, the same for every row p: (L, s·r, s·r)
    isotropic: Array
    # H, (L, c·r, c·r), inner index of the other factors outermost
    gram: Array
    # m, r, s, c
    sizes: tuple[int, int, int, int]
    # i
    index: int
    # Columns of each of the other factors
    columns_of_others: tuple[int, ...]

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
        """Contract a weight with the factors that are held fixed.

        Parameters
        ----------
        weight : LowRankPlusIdentity
        basis : Array
            The weight's `basis_for` block i.
        stacks : list of Array, shapes (L, m_j·r_j, s)
        gram : Array, shape (L, r, r)
            H of the other side.
        """
        xp = namespace(gram)
        batch = int(gram.shape[0])
        m, r = shape.factors[i]
        s = int(stacks[i].shape[2])
        q = int(weight.basis.shape[-1])
        others = [j for j in range(shape.order) if j != i]
        columns_of_others = tuple(shape.columns[j] for j in others)
        c = math.prod(columns_of_others)
        # Spectral 1: S, the one pass over V.
        columns = other_columns(stacks, shape, others)  # (L, o, c·s)
        contracted = xp.reshape(xp.matrix_transpose(columns) @ basis, (batch, c, s, m, q))
        contracted = xp.reshape(xp.permute_dims(contracted, (0, 3, 2, 1, 4)), (batch, m * s, c * q))
        # Spectral 2: H with the inner index of the others outermost.
        order = (*(j + 1 for j in others), i + 1)
        row_and_column_axes = (0, *order, *(axis + shape.order for axis in order))
        gram_tensor = xp.reshape(gram, (batch, *shape.columns, *shape.columns))
        gram_tensor = xp.permute_dims(gram_tensor, row_and_column_axes)
        gram_tensor = xp.reshape(gram_tensor, (batch, c, r, c, r))
        # Spectral 3: ρ times what no weight would give; what λ exceeds ρ by acts along V alone.
        column_grams = xp.matrix_transpose(columns) @ columns
        column_grams = xp.reshape(column_grams, (batch, c, s, c, s))
        isotropic = xp.sum(
            column_grams[:, :, :, None, :, :, None] * gram_tensor[:, :, None, :, :, None, :],
            axis=(1, 4),
        )
        rest = xp.reshape(weight.rest, (-1, 1, 1))
        isotropic = rest * xp.reshape(isotropic, (batch, s * r, s * r))
        excess = xp.reshape(weight.values - weight.rest[..., None], (-1, q))
        return cls(
            contracted=contracted,
            excess=excess,
            isotropic=isotropic,
            gram=xp.reshape(gram_tensor, (batch, c * r, c * r)),
            sizes=(m, r, s, c),
            index=i,
            columns_of_others=columns_of_others,
        )

    def projection(self, x: Array) -> Array:
        """Return VᵀX, (L, q, inner rank), of the side X whose block i is x (L, m·r, s)."""
        xp = namespace(x)
        r = self.sizes[1]
        batch = int(x.shape[0])
        image = self._products(self._by_rows(x))
        image = xp.reshape(image, (batch, *self.columns_of_others, -1, r))
        # Axes: the eigenpair first, then the inner indices with that of block i in its place.
        n_others = len(self.columns_of_others)
        before = range(1, 1 + self.index)
        after = range(1 + self.index, 1 + n_others)
        image = xp.permute_dims(image, (0, n_others + 1, *before, n_others + 2, *after))
        return xp.reshape(image, (batch, -1, r * math.prod(self.columns_of_others)))

    def _by_rows(self, x: Array) -> Array:
        """Reorder a block (L, m·r, s) as (L, m, s·r)."""
        xp = namespace(x)
        m, r, s, _ = self.sizes
        batch = int(x.shape[0])
        swapped = xp.permute_dims(xp.reshape(x, (batch, m, r, s)), (0, 1, 3, 2))
        return xp.reshape(swapped, (batch, m, s * r))

    def _products(self, rows: Array) -> Array:
        """Multiply Vᵀ by the side whose block has these `_by_rows`: (L, c·q, r)."""
        xp = namespace(rows)
        m, r, s, _ = self.sizes
        block = xp.reshape(rows, (rows.shape[0], m * s, r))
        return xp.matrix_transpose(self.contracted) @ block

    def apply(self, x: Array) -> Array:
        """Return N x for a block (L, m·r, s)."""
        xp = namespace(x)
        m, r, s, c = self.sizes
        batch = int(x.shape[0])
        rows = self._by_rows(x)
        # Apply 1: into the eigenpairs, times H and λ − ρ.
        image = xp.reshape(self._products(rows), (batch, c, -1, r))
        image = xp.reshape(xp.permute_dims(image, (0, 2, 1, 3)), (batch, -1, c * r))
        image = self.excess[..., None] * (image @ self.gram)
        # Apply 2: back to the block, and the isotropic part.
        image = xp.reshape(image, (batch, -1, c, r))
        image = xp.reshape(xp.permute_dims(image, (0, 2, 1, 3)), (batch, -1, r))
        along_basis = xp.reshape(self.contracted @ image, (batch, m, s, r))
        isotropic = xp.reshape(rows @ self.isotropic, (batch, m, s, r))
        image = along_basis + isotropic
        return xp.reshape(xp.permute_dims(image, (0, 1, 3, 2)), x.shape)

    def matrix(self) -> Array:
        """Form N, (L, m·r·s, m·r·s)."""
        xp = namespace(self.contracted)
        m, r, s, c = self.sizes
        batch = int(self.contracted.shape[0])
        # Matrix 1: S diag(λ − ρ) Sᵀ times H, entry by entry: (L, p, a, k, p', a', k').
        contracted = xp.reshape(self.contracted, (batch, m * s * c, -1))
        middle = (contracted * self.excess[:, None, :]) @ xp.matrix_transpose(contracted)
        if c == 1:
            middle = xp.reshape(middle, (batch, m, 1, s, m, 1, s))
            along_basis = middle * self.gram[:, None, :, None, None, :, None]
        else:
            middle = xp.reshape(middle, (batch, m, s, c, m, s, c))
            middle = xp.permute_dims(middle, (0, 1, 2, 4, 5, 3, 6))
            gram = xp.permute_dims(xp.reshape(self.gram, (batch, c, r, c, r)), (0, 1, 3, 2, 4))
            gram = xp.reshape(gram, (batch, c * c, r * r))
            along_basis = xp.reshape(middle, (batch, -1, c * c)) @ gram
            along_basis = xp.reshape(along_basis, (batch, m, s, m, s, r, r))
            along_basis = xp.permute_dims(along_basis, (0, 1, 5, 2, 3, 6, 4))
        # Matrix 2: the isotropic part, the same for every row of the block.
        isotropic = xp.reshape(self.isotropic, (batch, s, r, s, r))
        isotropic = xp.permute_dims(isotropic, (0, 2, 1, 4, 3))
        same_row = xp.eye(m, dtype=along_basis.dtype, device=device(along_basis))
        same_row = same_row[None, :, None, None, :, None, None]
        total = along_basis + same_row * isotropic[:, None, :, :, None, :, :]
        return xp.reshape(total, (batch, m * r * s, m * r * s))


def basis_for(weight: LowRankPlusIdentity, sizes: Sequence[int], i: int) -> Array:
    """Return V (…, n, q) as (L, o, m_i·q), rows of the other factors first.

    For the last factor it is a view.
    """
    xp = namespace(weight.basis)
    d = len(sizes)
    q = int(weight.basis.shape[-1])
    rows = xp.reshape(weight.basis, (-1, *sizes, q))
    other_axes = [j + 1 for j in range(d) if j != i]
    moved = xp.permute_dims(rows, (0, *other_axes, i + 1, d + 1))
    return xp.reshape(moved, (rows.shape[0], math.prod(sizes) // sizes[i], sizes[i] * q))


def is_spectral_cheaper(shape: KroneckerShape, i: int, terms: int, cg_steps: int) -> bool:
    """Return whether a block's products with N cost fewer multiplications through S than with V."""
    rows_of_others = shape.matrix_shape[0] // shape.rows[i]
    products = 2 * (cg_steps + 1) * shape.columns[i]
    return terms * (rows_of_others + products) < products * rows_of_others
