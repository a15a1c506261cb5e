"""Tensor operations on a batch of separated matrices of one shape, in the array API standard.

The standard has no einsum. Factors are held as stacks (L, m_i·n_i, s): L problems, the entries of a
factor row by row, the terms.
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


def to_matrices(stacks: Stacks, shape: KroneckerShape) -> Array:
    """Form Σ_k of the Kronecker products of each problem: (L, m, n).

    With two factors the result is the transpose of an array (L, n, m), which needs no copy in
    another order of its entries.
    """
    xp = namespace(*stacks)
    if shape.order == 2:
        return xp.matrix_transpose(pairs_of_rows(*_split_columns(stacks, shape)))
    batch = stacks[0].shape[0]
    tensor = stacks[0] @ xp.matrix_transpose(reduce(khatri_rao, stacks[1:]))
    return inverse_rearrange(xp.reshape(tensor, (batch, *shape.sizes)), shape)


def mttkrp(tensor: Array, stacks: Stacks, skip: int) -> Array:
    """Contract rearranged matrices (L, p_1, …, p_d) with all stacks but one: (L, p_skip, s)."""
    xp = namespace(tensor)
    others = [j for j in range(tensor.ndim - 1) if j != skip]
    flat = xp.permute_dims(tensor, (0, skip + 1, *(j + 1 for j in others)))
    sizes = tensor.shape[1:]
    width = math.prod(sizes[j] for j in others)
    flat = xp.reshape(flat, (tensor.shape[0], sizes[skip], width))
    return flat @ reduce(khatri_rao, [stacks[j] for j in others])


def contraction(matrices: Array, shape: KroneckerShape) -> Callable[[Stacks, int], Array]:
    """Return `mttkrp` of the rearranged matrices (L, m, n), as a function of stacks and ``skip``.

    With two factors the matrices are not rearranged, but contracted slice by slice of their
    transpose.
    """
    if shape.order != 2:
        tensor = rearrange(matrices, shape)
        return lambda stacks, skip: mttkrp(tensor, stacks, skip)
    xp = namespace(matrices)
    batch = matrices.shape[0]
    slices = xp.reshape(xp.matrix_transpose(matrices), (batch, *shape.columns, *shape.rows))

    def contract(stacks: Stacks, skip: int) -> Array:
        other = _split_columns(stacks, shape)[1 - skip]  # (L, n_j, m_j, s)
        total: Array = 0.0
        for k in range(shape.columns[1 - skip]):
            if skip == 0:
                part = slices[:, :, k, :, :]
            else:
                part = xp.matrix_transpose(slices[:, k, :, :, :])
            total = total + part @ other[:, k, None, :, :]  # (L, n_i, m_i, s)
        stack_shape = (*stacks[skip].shape[:2], total.shape[3])
        return xp.reshape(xp.permute_dims(total, (0, 2, 1, 3)), stack_shape)

    return contract


def _split_columns(stacks: Stacks, shape: KroneckerShape) -> list[Array]:
    """Return stacks (L, m_i·n_i, s) as (L, n_i, m_i, s), views where the library allows."""
    xp = namespace(*stacks)
    split = []
    for stack, (m, n) in zip(stacks, shape.factors, strict=True):
        entries = xp.reshape(stack, (stack.shape[0], m, n, stack.shape[2]))
        split.append(xp.permute_dims(entries, (0, 2, 1, 3)))
    return split


def other_columns(stacks: Stacks, shape: KroneckerShape, others: Sequence[int]) -> Array:
    """Form the Kronecker products of the other factors of each term, side by side.

    The result has the shape (L, Π m_j, Π r_j · s).
    """
    xp = namespace(*stacks)
    batch, _, s = stacks[0].shape
    product = None
    rows = 1
    columns = 1
    for j in others:
        m, r = shape.factors[j]
        factor = xp.reshape(stacks[j], (batch, 1, m, 1, r, s))
        if product is None:
            product = factor
        else:
            product = xp.reshape(product, (batch, rows, 1, columns, 1, s)) * factor
        rows *= m
        columns *= r
    return xp.reshape(product, (batch, rows, columns * s))


def term_norms(stacks: Stacks) -> Array:
    """Return λ, the norm of each term: shape (L, s)."""
    xp = namespace(*stacks)
    return math.prod(xp.linalg.vector_norm(stack, axis=1) for stack in stacks)


def balanced_terms(stacks: Stacks) -> Stacks:
    """Return the same sums with equal norms of the factors within each term.

    A term with a zero factor becomes zero.
    """
    xp = namespace(*stacks)
    lengths = [xp.linalg.vector_norm(stack, axis=1) for stack in stacks]
    common = math.prod(lengths) ** (1.0 / len(stacks))
    balanced = []
    for stack, length in zip(stacks, lengths, strict=True):
        balanced.append(stack * safe_ratio(common, length)[:, None, :])
    return balanced


def scaled(stacks: Stacks, factor: Array) -> Stacks:
    """Multiply each problem's sum by its positive factor (L,), spread evenly over the stacks."""
    share = factor ** (1.0 / len(stacks))
    return [stack * share[:, None, None] for stack in stacks]


def select(condition: Array, first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
    """Take arrays of ``first`` for problems where ``condition`` (L,) holds, else of ``second``."""
    xp = namespace(condition)
    selected = []
    for a, b in zip(first, second, strict=True):
        per_problem = xp.reshape(condition, (-1, *[1] * (a.ndim - 1)))
        selected.append(xp.where(per_problem, a, b))
    return selected


def dot(a: Array, b: Array) -> Array:
    """Return the inner product of each problem, shaped (L, 1, …, 1) to multiply it."""
    xp = namespace(a, b)
    batch = a.shape[0]
    products = xp.reshape(a, (batch, 1, -1)) @ xp.reshape(b, (batch, -1, 1))
    return xp.reshape(products, (batch, *[1] * (a.ndim - 1)))


def safe_ratio(a: Array, b: Array) -> Array:
    """Return a / b, and zero where b is not positive."""
    xp = namespace(a, b)
    positive = b > 0
    if xp is NUMPY and xp.all(positive):  # elsewhere the answer would have to be waited for
        return a / b
    divisor = xp.where(positive, b, xp.ones_like(b))
    return xp.where(positive, a / divisor, xp.zeros_like(b))


def identity_like(matrices: Array) -> Array:
    """Return the identity (1, n, n) in the library, precision and place of matrices (L, n, n)."""
    xp = namespace(matrices)
    return xp.eye(matrices.shape[1], dtype=matrices.dtype, device=device(matrices))[None, :, :]


def damped(matrices: Array, fraction: float) -> Array:
    """Add ``fraction`` of its mean eigenvalue to each positive semidefinite matrix.

    To a zero matrix one is added.
    """
    xp = namespace(matrices)
    mean = xp.linalg.trace(matrices) / matrices.shape[1]
    shift = xp.where(mean > 0, fraction * mean, xp.ones_like(mean))
    return matrices + shift[:, None, None] * identity_like(matrices)


def conjugate_gradients(
    apply: Operator, precondition: Operator, right_hand: Array, steps: int
) -> Array:
    """Take preconditioned conjugate gradient steps from zero, for every problem of the batch.

    A problem whose search direction has no curvature stays where it is.
    """
    xp = namespace(right_hand)
    x = xp.zeros_like(right_hand)
    residual = right_hand
    direction = precondition(residual)
    square = dot(residual, direction)
    for _ in range(steps):
        image = apply(direction)
        length = safe_ratio(square, dot(direction, image))
        x = x + length * direction
        residual = residual - length * image
        preconditioned = precondition(residual)
        new_square = dot(residual, preconditioned)
        direction = preconditioned + safe_ratio(new_square, square) * direction
        square = new_square
    return x
