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
    # Autocast knows no meta device, on which models are loaded with little memory.
    return torch.autocast(kind, enabled=False) if kind != "meta" and torch.is_autocast_enabled(kind) else NOTHING


def expand(factors: Sequence[Tensor]) -> Tensor:
    """Form ``Σ_k F1[k] ⊗ F2[k] ⊗ … ⊗ Fd[k]``, in the factors' own precision even under autocast.

    Rearranged, the sum is one matrix product (Van Loan and Pitsianis): the first half of the factors against the
    second half, contracted over the terms. Differentiable in every factor.

    Parameters
    ----------
    factors : sequence of Tensor
        Factor ``i`` of shape (s, m_i, n_i); the first is the outermost, as in ``numpy.kron``.

    Returns
    -------
    Tensor
        Shape (m_1···m_d, n_1···n_d), the longer side contiguous; dtype of the factors. About 2 s m n operations, where
        m × n is that shape.

    Raises
    ------
    ShapeError
        If a factor has not three dimensions, or the numbers of terms differ.
    """
    _check_terms(factors)
    # 1. One row per entry of the outer factors' product, one column per entry of the inner factors'.
    flat = [factor.flatten(1) for factor in factors]
    half = max(1, len(flat) // 2)
    outer, inner = reduce(_khatri_rao, flat[:half]), flat[half:]
    with without_autocast(outer.device.type):
        rearranged = outer.mT @ reduce(_khatri_rao, inner) if inner else outer.sum(0)
    # 2. Its axes are m_1, n_1, m_2, n_2, …: the rows' are brought together, and the columns'.
    sizes = [size for factor in factors for size in factor.shape[1:]]
    rows, columns = range(0, len(sizes), 2), range(1, len(sizes), 2)
    m, n = math.prod(sizes[0::2]), math.prod(sizes[1::2])
    axes = rearranged.reshape(sizes)
    return axes.permute(*columns, *rows).reshape(n, m).mT if m > n else axes.permute(*rows, *columns).reshape(m, n)


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
    terms = _check_terms(factors)
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


def _khatri_rao(left: Tensor, right: Tensor) -> Tensor:
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)  # (s, p), (s, q) -> (s, p q)


def _check_terms(factors: Sequence[Tensor]) -> int:
    """The number of terms, which all factors share."""
    if not factors:
        raise ShapeError("a Kronecker product has at least one factor")
    terms = factors[0].shape[0]
    if any(factor.ndim != 3 or factor.shape[0] != terms for factor in factors):
        shapes = ", ".join(str(tuple(factor.shape)) for factor in factors)
        raise ShapeError(f"factors must have shapes (s, m_i, n_i) with one s, got {shapes}")
    return terms
