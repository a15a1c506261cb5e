"""Sums of Kronecker products held as stacked factors: form the matrix, or apply it without forming it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor

from lsrdecomp.errors import ShapeError

NOTHING = nullcontext()


def is_traced() -> bool:
    """Whether the compiler records operations or torch.func transforms them: both want plain ones that they know."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """A context without autocast on a kind of device; nothing where it is off, since entering takes microseconds."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else NOTHING


def expand(factors: Sequence[Tensor]) -> Tensor:
    """Form ``Σ_k F1[k] ⊗ F2[k] ⊗ … ⊗ Fd[k]``.

    Rearranged, the sum is one matrix product (Van Loan and Pitsianis): the first half of the factors against the
    second half, contracted over the terms. Differentiable in every factor.

    Parameters
    ----------
    factors : sequence of Tensor
        Factor ``i`` of shape (s, m_i, n_i); the first is the outermost, as in ``numpy.kron``.

    Returns
    -------
    Tensor
        Shape (m_1···m_d, n_1···n_d), dtype of the factors. About 2 s m n operations, where m × n is that shape.

    Raises
    ------
    ShapeError
        If a factor has not three dimensions, or the numbers of terms differ.
    """
    _term_count(factors)
    return expand_stack([factor.unsqueeze(0) for factor in factors]).squeeze(0)


def expand_stack(factors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Form the sums of many layers of one shape class at once: one matrix product and one copy for all of them.

    Parameters
    ----------
    factors : sequence of Tensor
        Factor ``i`` of all layers, shape (layers, s, m_i, n_i).
    dtype : torch.dtype, optional
        Of the result, by default that of the factors; the copy rounds, at no further cost.

    Returns
    -------
    Tensor
        Shape (layers, m_1···m_d, n_1···n_d); the longer side is the contiguous one.
    """
    if _is_tall(factors):
        return expand_stack([factor.mT for factor in factors], dtype).mT
    layers, terms = factors[0].shape[:2]
    flat = [factor.reshape(layers, terms, -1) for factor in factors]
    half = max(1, len(flat) // 2)
    outer, inner = reduce(_khatri_rao, flat[:half]), flat[half:]
    rearranged = outer.mT @ reduce(_khatri_rao, inner) if inner else outer.sum(1)
    order = len(factors)
    sizes = [size for factor in factors for size in factor.shape[2:]]
    interleaved = rearranged.reshape(layers, *sizes)  # (layers, m_1, n_1, m_2, n_2, ...)
    rows, columns = math.prod(sizes[0::2]), math.prod(sizes[1::2])
    separated = interleaved.permute(0, *range(1, 2 * order, 2), *range(2, 2 * order + 1, 2))
    return _contiguous(separated, dtype or rearranged.dtype).reshape(layers, rows, columns)


def contract_stack(gradient: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The adjoint of `expand_stack`: gradients of the factors from gradients of the formed matrices.

    Parameters
    ----------
    gradient : Tensor
        Shape (layers, m_1···m_d, n_1···n_d).
    factors : sequence of Tensor
        As for `expand_stack`.

    Returns
    -------
    tuple of Tensor
        One per factor, in its shape. About 4 s m n operations a layer for two factors.
    """
    if len(factors) != 2:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = [factor.view_as(factor) if again else factor.detach() for factor in factors]
            leaves = [leaf if leaf.requires_grad else leaf.requires_grad_() for leaf in leaves]
            formed = expand_stack(leaves)
        return torch.autograd.grad(formed, leaves, gradient.to(formed.dtype), create_graph=again)
    if _is_tall(factors):
        turned = contract_stack(gradient.mT, [factor.mT for factor in factors])
        return tuple(part.mT.contiguous() for part in turned)
    first, second = factors
    layers, terms, m1, n1 = first.shape
    m2, n2 = second.shape[2:]
    blocks = gradient.reshape(layers, m1, m2, n1, n2).transpose(2, 3)
    rearranged = _contiguous(blocks, first.dtype).reshape(layers, m1 * n1, m2 * n2)
    outer = second.reshape(layers, terms, -1) @ rearranged.mT
    inner = first.reshape(layers, terms, -1) @ rearranged
    return outer.view(first.shape), inner.view(second.shape)


def apply(factors: Sequence[Tensor], x: Tensor) -> Tensor:
    """Apply ``Σ_k F1[k] ⊗ … ⊗ Fd[k]`` to the last axis of ``x`` without forming the matrix.

    Parameters
    ----------
    factors : sequence of Tensor
        As for `expand`.
    x : Tensor
        Shape (..., n_1···n_d).

    Returns
    -------
    Tensor
        Shape (..., m_1···m_d). Two factors take two matrix products for all terms and tokens, in the order that costs
        less: 2 s n_1 m_2 (n_2 + m_1) operations a token, or 2 s m_1 n_2 (n_1 + m_2). More take one small product per
        factor and term.

    Raises
    ------
    ShapeError
        If the sizes do not fit together.
    """
    terms = _term_count(factors)
    columns = [factor.shape[2] for factor in factors]
    if x.shape[-1] != math.prod(columns):
        sizes = " x ".join(map(str, columns))
        raise ShapeError(f"{sizes} = {math.prod(columns)} columns, but the input has {x.shape[-1]} entries")
    if len(factors) == 2:
        y = _apply_two(factors[0], factors[1], x.reshape(-1, *columns))
        return y.reshape(*x.shape[:-1], y.shape[1] * y.shape[2])
    y = x.reshape(-1, 1, *columns).expand(-1, terms, *columns)  # (batch, s, n_1, ..., n_d)
    for axis, factor in enumerate(factors, start=2):
        last = y.movedim(axis, -1)
        product = last.flatten(2, -2) if last.ndim > 3 else last.unsqueeze(2)
        product = product @ factor.transpose(1, 2)  # (batch, s, rest, n_i) @ (s, n_i, m_i)
        y = product.reshape(*last.shape[:-1], factor.shape[1]).movedim(-1, axis)
    return y.sum(1).reshape(*x.shape[:-1], math.prod(factor.shape[1] for factor in factors))


def kronecker_pays(terms: int, rows: Sequence[int], columns: Sequence[int]) -> bool:
    """Whether a sum of Kronecker products costs fewer operations applied, as `apply` does, than its formed matrix.

    Parameters
    ----------
    terms : int
        Number of terms.
    rows, columns : sequence of int
        (m_1, …, m_d) and (n_1, …, n_d).
    """
    if len(rows) == 2:
        (a, c), (b, d) = rows, columns
        applied = min(b * c * d + a * b * c, a * b * d + a * c * d)
    else:
        sizes, applied = list(columns), 0
        for index, height in enumerate(rows):
            applied += math.prod(sizes) * height
            sizes[index] = height
    return terms * applied < math.prod(rows) * math.prod(columns)


def _apply_two(first: Tensor, second: Tensor, blocks: Tensor) -> Tensor:
    """``Σ_k F1[k] X F2[k]ᵀ`` of blocks X (batch, b, d), shape (batch, a, c); nothing is moved between the products."""
    (terms, a, b), (_, c, d) = first.shape, second.shape
    n = len(blocks)
    if b * c * (d + a) <= a * d * (b + c):
        # Z = X [F2]ᵀ for all terms, rows ordered (b, k); then Y = [F1] Z with columns ordered alike.
        half = (blocks.reshape(n * b, d) @ second.reshape(terms * c, d).mT).view(n, b * terms, c)
        return first.permute(1, 2, 0).flatten(1) @ half
    # U = [F1] X for all terms, rows ordered (a, k); then Y = U [F2]ᵀ with columns ordered alike.
    half = (first.transpose(0, 1).flatten(0, 1) @ blocks).view(n * a, terms * d)
    return (half @ second.mT.flatten(0, 1)).view(n, a, c)


def _is_tall(factors: Sequence[Tensor]) -> bool:
    rows, columns = [factor.shape[2] for factor in factors], [factor.shape[3] for factor in factors]
    return math.prod(rows) > math.prod(columns)


def _contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded and laid out anew in one pass, where either is needed."""
    return tensor.to(dtype, memory_format=torch.contiguous_format)


def _khatri_rao(left: Tensor, right: Tensor) -> Tensor:
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)  # (..., s, p), (..., s, q) -> (..., s, p q)


def _term_count(factors: Sequence[Tensor]) -> int:
    if not factors:
        raise ShapeError("a Kronecker product has at least one factor")
    shapes = [tuple(factor.shape) for factor in factors]
    if any(len(shape) != 3 for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ShapeError(f"factors must have shapes (s, m_i, n_i) with one s, got {', '.join(map(str, shapes))}")
    return shapes[0][0]
