"""Small matrices for a block in a weighted norm: partial traces that stand for a weight, and the normal matrix itself.

The first precondition steps and make starts; the second, where it is small, takes one solve in place of many steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lsrdecomp.arrays import Array, device, namespace
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.batched_terms import Stacks, damped, diagonal_matrix, identity_like, other_columns
from lsrdecomp.targets.weights import Dense, Diagonal, Identity, LowRankPlusIdentity, Weight

LARGEST = 1024
"""Partial traces above this size are taken as isotropic: their roots would cost more than they save."""

FLOOR = 1e-6
"""Damping of a partial trace, in units of its mean eigenvalue, so that it has an inverse."""


@dataclass(frozen=True, eq=False)
class PartialTraces:
    """W ≈ mean · W_1 ⊗ … ⊗ W_d with W_i the trace of W over the other indices, of mean eigenvalue one.

    Exact where W is such a product. Used where an approximation costs only speed: preconditioners and starts.
    """

    mean: Array  # tr W / size, (L,)
    parts: tuple[Array | None, ...]  # (L, m_i, m_i); None: the identity

    @classmethod
    def of(cls, weight: Weight, sizes: Sequence[int], like: Array) -> PartialTraces:
        """Of a weight of size Π sizes, for a batch as long as ``like`` and in its library."""
        xp, batch = namespace(like), like.shape[0]
        trace = xp.broadcast_to(xp.asarray(weight.trace, dtype=like.dtype, device=device(like)), (batch,))
        parts: list[Array | None] = []
        for i, size in enumerate(sizes):
            if isinstance(weight, Identity) or size == 1 or size > LARGEST:
                parts.append(None)
                continue
            part = _partial_trace(weight, sizes, i, like)
            safe = xp.where(trace > 0, trace, xp.ones_like(trace))
            part = xp.broadcast_to(part * (size / safe)[..., None, None], (batch, size, size))
            parts.append(damped(part, FLOOR))
        return cls(trace / math.prod(sizes), tuple(parts))

    def apply(self, i: int, rows: Array) -> Array:
        """W_i times (L, m_i, b)."""
        part = self.parts[i]
        return rows if part is None else part @ rows

    def inverse(self, i: int) -> Array | None:
        """W_i⁻¹, made when it is first asked for; None for the identity."""
        part = self.parts[i]
        if part is not None and i not in self._inverses:
            self._inverses[i] = inverse(part)
        return self._inverses.get(i)

    @cached_property
    def _inverses(self) -> dict[int, Array]:
        return {}

    @cached_property
    def roots(self) -> tuple[list[Array | None], list[Array | None]]:
        """W_i^½ and W_i^-½ of every part."""
        roots: list[Array | None] = []
        inverses: list[Array | None] = []
        for part in self.parts:
            if part is None:
                roots.append(None)
                inverses.append(None)
                continue
            xp = namespace(part)
            values, vectors = xp.linalg.eigh(part)
            half = xp.sqrt(xp.where(values > 0, values, xp.min(xp.abs(values)) + xp.zeros_like(values)))
            roots.append((vectors * half[:, None, :]) @ xp.matrix_transpose(vectors))
            inverses.append((vectors / half[:, None, :]) @ xp.matrix_transpose(vectors))
        return roots, inverses


def inverse(matrices: Array) -> Array:
    """Of positive definite matrices (L, n, n), symmetric; slightly damped."""
    xp = namespace(matrices)
    inverses = xp.linalg.inv(damped(matrices, 1e-8))
    return 0.5 * (inverses + xp.matrix_transpose(inverses))


def along_rows(stacks: Stacks, matrices: Sequence[Array | None]) -> Stacks:
    """Each factor of each term multiplied from the left: stacks (L, m_i·r_i, s) by matrices (L, m_i, m_i)."""
    return [
        stack if matrix is None else _on_rows(matrix, stack) for stack, matrix in zip(stacks, matrices, strict=True)
    ]


def kron_apply(matrices: Sequence[Array | None], x: Array, sizes: Sequence[int]) -> Array:
    """(M_1 ⊗ … ⊗ M_d) x for x (L, Π sizes, b)."""
    xp, (batch, rows, columns), before = namespace(x), x.shape, 1
    for matrix, size in zip(matrices, sizes, strict=True):
        after = rows * columns // (before * size)
        if matrix is not None:
            x = xp.reshape(x, (batch, before, size, after))
            x = matrix[:, None, :, :] @ x
        before *= size
    return xp.reshape(x, (batch, rows, columns))


def _on_rows(matrix: Array, stack: Array) -> Array:
    xp, m = namespace(stack), matrix.shape[-1]
    rows = xp.reshape(stack, (stack.shape[0], m, stack.shape[1] // m * stack.shape[2]))
    return xp.reshape(matrix @ rows, stack.shape)


def _partial_trace(weight: Weight, sizes: Sequence[int], i: int, like: Array) -> Array:
    """Trace over all indices but the i-th; shape (…, m_i, m_i) with the weight's batch axes."""
    before, size, after = math.prod(sizes[:i]), sizes[i], math.prod(sizes[i + 1 :])
    xp = namespace(like)
    if isinstance(weight, Diagonal):
        values = xp.reshape(weight.values, (-1, before, size, after))
        return diagonal_matrix(xp.sum(values, axis=(1, 3)))
    if isinstance(weight, LowRankPlusIdentity):
        q = weight.basis.shape[-1]
        excess = xp.reshape(weight.values - weight.rest[..., None], (-1, 1, 1, q))
        scaled = xp.reshape(weight.basis, (-1, before * size, after, q)) * excess
        slices = (xp.reshape(b, (-1, before, size, after * q)) for b in (scaled, weight.basis))  # as they lie, no copy
        part = xp.sum(next(slices) @ xp.matrix_transpose(next(slices)), axis=1)
        return part + xp.reshape(weight.rest * (before * after), (-1, 1, 1)) * identity_like(part)
    assert isinstance(weight, Dense)  # `stack_weights` lets no other kind through
    pairs = xp.reshape(weight.matrix, (-1, before, size, after, before, size, after))
    pairs = xp.reshape(xp.permute_dims(pairs, (0, 2, 5, 1, 3, 4, 6)), (-1, size, size, before * after, before * after))
    return xp.linalg.trace(pairs)


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
    # Normal 1: W between the other factors of all pairs of terms.
    middle = _contracted(weight, m, columns)  # (L, m, c·s, m, c·s)
    middle = xp.permute_dims(xp.reshape(middle, (batch, m, c, s, m, c, s)), (0, 1, 3, 4, 6, 2, 5))
    # Normal 2: H with index i of both sides outermost.
    order = (0, i + 1, *(j + 1 for j in others))
    both = (*order, *(axis + shape.order for axis in order[1:]))
    inner = xp.permute_dims(xp.reshape(gram, (batch, *shape.columns, *shape.columns)), both)
    inner = xp.permute_dims(xp.reshape(inner, (batch, r, c, r, c)), (0, 2, 4, 1, 3))
    # Normal 3: both summed over the other inner indices c and d, one product of matrices.
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
