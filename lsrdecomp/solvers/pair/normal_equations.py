"""The normal matrix of one block in a weighted norm, formed where it is small: one solve instead of many steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lsrdecomp.arrays import Array, device, namespace
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.batched_terms import Stacks, other_columns
from lsrdecomp.targets.weights import Dense, Diagonal, LowRankPlusIdentity, Weight

LARGEST_BLOCK = 192
"""Unknowns of a block up to which its normal matrix is formed and solved."""

LARGEST_SPECTRAL = 80
"""The same where the weight has few eigenpairs: steps with them are so cheap that only small solves are cheaper."""

LARGEST_DENSE = 1024
"""Rows up to which a dense weight is contracted with the other factors."""


def is_small(weight: Weight, shape: KroneckerShape, i: int, terms: int) -> bool:
    """Whether block i has few enough unknowns, and a weight that can be contracted."""
    m, r = shape.factors[i]
    if m * r * terms > (LARGEST_SPECTRAL if isinstance(weight, LowRankPlusIdentity) else LARGEST_BLOCK):
        return False
    if isinstance(weight, Dense):
        return weight.size <= LARGEST_DENSE
    return isinstance(weight, (Diagonal, LowRankPlusIdentity))


def normal_matrix(weight: Weight, shape: KroneckerShape, stacks: Stacks, i: int, gram: Array) -> Array:
    """N[(p,a,k),(q,b,l)] = Σ_{c,d} (K_kᵀ W_pq K_l)_{cd} H[(a,c),(b,d)], shape (L, m_i·r_i·s, m_i·r_i·s).

    K_k is the Kronecker product of the other factors of term k, W_pq the block of W at rows p and q of factor i.

    Parameters
    ----------
    weight : Weight
        Dense or diagonal, reordered by `moved_first`; low rank + identity is `SpectralBlock.matrix`.
    shape : KroneckerShape
    stacks : list of Array, shapes (L, m_j·r_j, s)
    i : int
    gram : Array, shape (L, r, r)
        H.
    """
    xp, batch = namespace(gram), gram.shape[0]
    (m, r), s = shape.factors[i], int(stacks[0].shape[2])
    others = [j for j in range(shape.order) if j != i]
    columns = other_columns(stacks, shape, others)  # (L, o, c·s)
    c = math.prod(shape.columns[j] for j in others)
    middle = _contracted(weight, m, columns)  # (L, m, c·s, m, c·s)
    middle = xp.permute_dims(xp.reshape(middle, (batch, m, c, s, m, c, s)), (0, 1, 3, 4, 6, 2, 5))
    order = (0, i + 1, *(j + 1 for j in others))
    both = (*order, *(axis + shape.order for axis in order[1:]))
    inner = xp.permute_dims(xp.reshape(gram, (batch, *shape.columns, *shape.columns)), both)
    inner = xp.permute_dims(xp.reshape(inner, (batch, r, c, r, c)), (0, 2, 4, 1, 3))
    normal = xp.reshape(middle, (batch, m * s * m * s, c * c)) @ xp.reshape(inner, (batch, c * c, r * r))
    normal = xp.permute_dims(xp.reshape(normal, (batch, m, s, m, s, r, r)), (0, 1, 5, 2, 3, 6, 4))
    return xp.reshape(normal, (batch, m * r * s, m * r * s))


def moved_first(weight: Weight, sizes: Sequence[int], i: int) -> Weight:
    """The weight with its rows and columns reordered so that index i of the Kronecker split is the outermost."""
    d = len(sizes)
    first = (0, i + 1, *(j + 1 for j in range(d) if j != i))
    if isinstance(weight, Diagonal):
        return Diagonal(_permuted(weight.values, sizes, first))
    if isinstance(weight, Dense):
        both = (*first, *(axis + d for axis in first[1:]))
        return Dense(_permuted(weight.matrix, (*sizes, *sizes), both))
    return weight


def _permuted(array: Array, sizes: Sequence[int], axes: Sequence[int]) -> Array:
    xp = namespace(array)
    moved = xp.permute_dims(xp.reshape(array, (-1, *sizes)), tuple(axes))
    return xp.reshape(moved, array.shape)


def _contracted(weight: Weight, m: int, columns: Array) -> Array:
    """Kᵀ W_pq K for all p, q < m: (L, m, f, m, f) with K = ``columns`` (L, o, f) and a weight of size m·o."""
    xp, (batch, o, f) = namespace(columns), columns.shape
    rows = xp.eye(m, dtype=columns.dtype, device=device(columns))[None, :, None, :, None]
    if isinstance(weight, Diagonal):
        values = xp.reshape(weight.values, (-1, m, o, 1))
        blocks = xp.matrix_transpose(columns)[:, None, :, :] @ (values * columns[:, None, :, :])  # (L, m, f, f)
        return rows * blocks[:, :, :, None, :]
    assert isinstance(weight, Dense)
    half = xp.reshape(weight.matrix, (-1, m * o * m, o)) @ columns  # (L, m·o·m, f)
    whole = xp.matrix_transpose(columns)[:, None, :, :] @ xp.reshape(half, (batch, m, o, m * f))
    return xp.reshape(whole, (batch, m, f, m, f))
