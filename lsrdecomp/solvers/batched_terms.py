"""Tensor operations on a batch of separated matrices of one shape, in the array API standard (which has no einsum).

Factors are held as stacks (L, m_i·n_i, s): L problems, the entries of a factor row by row, the
terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

from lsrdecomp.arrays import NUMPY, Array, device, namespace
from lsrdecomp.kronecker.rearrange import inverse_rearrange, khatri_rao, pairs_of_rows, rearrange

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape

Stacks: TypeAlias = list[Array]
Operator: TypeAlias = Callable[[Array], Array]


def summed(stacks: Stacks, shape: KroneckerShape) -> Array:
    """Σ_k of the Kronecker products of each problem, formed: (L, m, n).

    Of two factors as the transpose of an array (L, n, m), which needs no copy in another order of
    its entries.
    """
    xp, d, batch = namespace(*stacks), shape.order, stacks[0].shape[0]
    if d == 2:
        return xp.matrix_transpose(pairs_of_rows(*_split_columns(stacks, shape)))
    tensor = stacks[0] @ xp.matrix_transpose(reduce(khatri_rao, stacks[1:]))
    return inverse_rearrange(xp.reshape(tensor, (batch, *shape.sizes)), shape)


def mttkrp(tensor: Array, stacks: Stacks, skip: int) -> Array:
    """Each rearranged matrix contracted with all stacks but one: (L, p_1, …, p_d) to (L, p_skip, s)."""
    xp, d = namespace(tensor), tensor.ndim - 1
    others = [j for j in range(d) if j != skip]
    flat = xp.permute_dims(tensor, (0, skip + 1, *(j + 1 for j in others)))
    sizes = tensor.shape[1:]
    flat = xp.reshape(flat, (tensor.shape[0], sizes[skip], math.prod(sizes[j] for j in others)))
    return flat @ reduce(khatri_rao, [stacks[j] for j in others])


def contraction(matrices: Array, shape: KroneckerShape) -> Callable[[Stacks, int], Array]:
    """`mttkrp` of the rearranged matrices (L, m, n), a function of stacks and the one left out.

    For two factors the matrices are not rearranged, but contracted slice by slice of their
    transpose.
    """
    if shape.order != 2:
        tensor = rearrange(matrices, shape)
        return lambda stacks, skip: mttkrp(tensor, stacks, skip)
    xp, batch = namespace(matrices), matrices.shape[0]
    slices = xp.reshape(xp.matrix_transpose(matrices), (batch, *shape.columns, *shape.rows))

    def contracted(stacks: Stacks, skip: int) -> Array:
        other = _split_columns(stacks, shape)[1 - skip]  # (L, n_j, m_j, s)
        total: Array = 0.0
        for k in range(shape.columns[1 - skip]):
            part = (
                slices[:, :, k, :, :] if skip == 0 else xp.matrix_transpose(slices[:, k, :, :, :])
            )
            total = total + part @ other[:, k, None, :, :]  # (L, n_i, m_i, s)
        return xp.reshape(
            xp.permute_dims(total, (0, 2, 1, 3)), (*stacks[skip].shape[:2], total.shape[3])
        )

    return contracted


def _split_columns(stacks: Stacks, shape: KroneckerShape) -> list[Array]:
    """Stacks (L, m_i·n_i, s) as (L, n_i, m_i, s), views where the library allows."""
    xp = namespace(*stacks)
    split = (
        xp.reshape(x, (x.shape[0], *pair, x.shape[2]))
        for x, pair in zip(stacks, shape.factors, strict=True)
    )
    return [xp.permute_dims(x, (0, 2, 1, 3)) for x in split]


def other_columns(stacks: Stacks, shape: KroneckerShape, others: Sequence[int]) -> Array:
    """Kronecker products of the other factors of each term, side by side: (L, Π m_j, Π r_j · s)."""
    xp, (batch, _, s) = namespace(*stacks), stacks[0].shape
    product, rows, columns = None, 1, 1
    for j in others:
        m, r = shape.factors[j]
        factor = xp.reshape(stacks[j], (batch, 1, m, 1, r, s))
        product = (
            factor
            if product is None
            else xp.reshape(product, (batch, rows, 1, columns, 1, s)) * factor
        )
        rows, columns = rows * m, columns * r
    return xp.reshape(product, (batch, rows, columns * s))


def term_norms(stacks: Stacks) -> Array:
    """λ, the norm of each term: shape (L, s)."""
    xp = namespace(*stacks)
    return math.prod(xp.linalg.vector_norm(stack, axis=1) for stack in stacks)


def balanced_terms(stacks: Stacks) -> Stacks:
    """The same sums with equal norms of the factors within each term; a term with a zero factor becomes zero."""
    xp, order = namespace(*stacks), len(stacks)
    norms = [xp.linalg.vector_norm(stack, axis=1) for stack in stacks]
    common = math.prod(norms) ** (1.0 / order)
    return [
        stack * safe_ratio(common, length)[:, None, :]
        for stack, length in zip(stacks, norms, strict=True)
    ]


def scaled(stacks: Stacks, factor: Array) -> Stacks:
    """Each problem's sum multiplied by its positive factor (L,), spread evenly over the stacks."""
    share = factor ** (1.0 / len(stacks))
    return [stack * share[:, None, None] for stack in stacks]


def chosen(condition: Array, first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
    """Arrays of ``first`` for the problems where ``condition`` (L,) holds, of ``second`` elsewhere."""
    xp = namespace(condition)
    pairs = zip(first, second, strict=True)
    return [xp.where(xp.reshape(condition, (-1, *[1] * (a.ndim - 1))), a, b) for a, b in pairs]


def dot(a: Array, b: Array) -> Array:
    """Inner product of each problem, shaped (L, 1, …, 1) to multiply it."""
    xp, batch = namespace(a, b), a.shape[0]
    return xp.reshape(
        xp.reshape(a, (batch, 1, -1)) @ xp.reshape(b, (batch, -1, 1)), (batch, *[1] * (a.ndim - 1))
    )


def safe_ratio(a: Array, b: Array) -> Array:
    """a / b, and zero where b is not positive."""
    xp = namespace(a, b)
    positive = b > 0
    if xp is NUMPY and xp.all(positive):  # elsewhere the answer would have to be waited for
        return a / b
    return xp.where(positive, a / xp.where(positive, b, xp.ones_like(b)), xp.zeros_like(b))


def identity_like(matrices: Array) -> Array:
    """The identity (1, n, n) in the library, precision and place of square matrices (L, n, n)."""
    xp = namespace(matrices)
    return xp.eye(matrices.shape[1], dtype=matrices.dtype, device=device(matrices))[None, :, :]


def damped(matrices: Array, fraction: float) -> Array:
    """Each positive semidefinite matrix plus ``fraction`` of its mean eigenvalue (one for a zero matrix)."""
    xp, n = namespace(matrices), matrices.shape[1]
    mean = xp.linalg.trace(matrices) / n
    shift = xp.where(mean > 0, fraction * mean, xp.ones_like(mean))
    return matrices + shift[:, None, None] * identity_like(matrices)


def conjugate_gradients(
    apply: Operator, precondition: Operator, right_hand: Array, steps: int
) -> Array:
    """``steps`` preconditioned conjugate gradient steps from zero, for every problem of the batch (first axis).

    A problem whose search direction has no curvature stays where it is.
    """
    xp = namespace(right_hand)
    x, residual = xp.zeros_like(right_hand), right_hand
    direction = precondition(residual)
    size = dot(residual, direction)
    for _ in range(steps):
        image = apply(direction)
        length = safe_ratio(size, dot(direction, image))
        x = x + length * direction
        residual = residual - length * image
        preconditioned = precondition(residual)
        new_size = dot(residual, preconditioned)
        direction = preconditioned + safe_ratio(new_size, size) * direction
        size = new_size
    return x
