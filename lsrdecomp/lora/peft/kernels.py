"""Sums of Kronecker products as stacked factors: form the matrix, or apply it without."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lsrdecomp.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_CONTEXT = nullcontext()
"""One for all passes: to make a context takes longer than to enter this one."""


def is_traced() -> bool:
    """Return whether the compiler records operations, or torch.func transforms them.

    Both want plain operations that they know.
    """
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context without autocast; an empty one where it is off, for entering takes time."""
    # Autocast knows no meta device, on which models are loaded with little memory.
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return NO_CONTEXT


def expand(factors: Sequence[Tensor]) -> Tensor:
    """Form ``Σ_k F1[k] ⊗ F2[k] ⊗ … ⊗ Fd[k]``, in the factors' own precision even under autocast.

    Rearranged, the sum is one matrix product (Van Loan and Pitsianis): the first half of the
    factors against the second half, contracted over the terms. Differentiable in every factor.

    Parameters
    ----------
    factors : sequence of Tensor
        Factor ``i`` of shape (s, m_i, n_i); the first is the outermost, as in ``numpy.kron``.

    Returns
    -------
    Tensor
        Shape (m_1···m_d, n_1···n_d), the longer side contiguous; dtype of the factors. About 2 s m
        n operations, where m × n is that shape.

    Raises
    ------
    ShapeError
        If a factor has not three dimensions, or the numbers of terms differ.
    """
    _check_terms(factors)
    if len(factors) == 2:
        return _expand_two(*factors)
    # 1. Multiply: one row per entry of the outer factors' product, one column per entry of the
    #    inner factors'.
    flat = [factor.flatten(1) for factor in factors]
    half = max(1, len(flat) // 2)
    outer = reduce(_khatri_rao, flat[:half])
    inner = flat[half:]
    with without_autocast(outer.device.type):
        rearranged = outer.transpose(-1, -2) @ reduce(_khatri_rao, inner) if inner else outer.sum(0)
    # 2. Bring the axes m_1, n_1, m_2, n_2, … of rows together, and those of columns.
    sizes = [size for factor in factors for size in factor.shape[1:]]
    m, n = math.prod(sizes[0::2]), math.prod(sizes[1::2])
    row_axes, column_axes = range(0, len(sizes), 2), range(1, len(sizes), 2)
    axes = rearranged.reshape(sizes)
    if m > n:
        return axes.permute(*column_axes, *row_axes).reshape(n, m).transpose(-1, -2)
    return axes.permute(*row_axes, *column_axes).reshape(m, n)


def _expand_two(outer: Tensor, inner: Tensor) -> Tensor:
    """Form the sum of two factors as `expand` does, in fewer calls of Python.

    On a few tokens these calls are a quarter of what an LSR layer takes.
    """
    _, a, b = outer.shape
    _, c, d = inner.shape
    with without_autocast(outer.device.type):
        rearranged = outer.flatten(1).t() @ inner.flatten(1)
    blocks = rearranged.view(a, b, c, d)
    if a * c > b * d:
        return blocks.permute(1, 3, 0, 2).reshape(b * d, a * c).t()
    return blocks.transpose(1, 2).reshape(a * c, b * d)


def apply(factors: Sequence[Tensor], x: Tensor) -> Tensor:
    """Apply ``Σ_k F1[k] ⊗ F2[k]`` to the last axis of ``x`` without forming the matrix.

    Parameters
    ----------
    factors : sequence of Tensor
        As for `expand`, two of them: (s, m_1, n_1) and (s, m_2, n_2).
    x : Tensor
        Shape (..., n_1 n_2).

    Returns
    -------
    Tensor
        Shape (..., m_1 m_2). Two matrix products for all terms and tokens, in the order that costs
        less: 2 s n_1 m_2 (n_2 + m_1) operations a token, or 2 s m_1 n_2 (n_1 + m_2).

    Raises
    ------
    ShapeError
        If the sizes do not fit together.
    """
    terms = _check_terms(factors)
    first, second = factors  # (terms, a, b) and (terms, c, d)
    _, a, b = first.shape
    _, c, d = second.shape
    if x.shape[-1] != b * d:
        raise ShapeError(f"{b} x {d} = {b * d} columns, but the input has {x.shape[-1]} entries")
    blocks = x.reshape(-1, b, d)
    n = len(blocks)
    # X of one token is b × d, and its result is Σ_k F1[k] X F2[k]ᵀ; nothing is moved between the
    # two products.
    second_first = b * c * (d + a)
    first_first = a * d * (b + c)
    if second_first <= first_first:
        # Z = X [F2]ᵀ for all terms, rows ordered (b, k); then Y = [F1] Z with columns ordered
        # alike.
        columns = second.reshape(terms * c, d).transpose(-1, -2)
        half = (blocks.reshape(n * b, d) @ columns).view(n, b * terms, c)
        y = first.permute(1, 2, 0).flatten(1) @ half
    else:
        # U = [F1] X for all terms, rows ordered (a, k); then Y = U [F2]ᵀ with columns ordered
        # alike.
        half = (first.transpose(0, 1).flatten(0, 1) @ blocks).view(n * a, terms * d)
        y = (half @ second.transpose(-1, -2).flatten(0, 1)).view(n, a, c)
    return y.reshape(*x.shape[:-1], a * c)


def kronecker_pays(terms: int, rows: Sequence[int], columns: Sequence[int]) -> bool:
    """Return whether `apply` takes fewer operations than the formed matrix of the same sum.

    Parameters
    ----------
    terms : int
        Number of terms.
    rows, columns : sequence of int
        (m_1, …, m_d) and (n_1, …, n_d); more than two factors are always formed.
    """
    if len(rows) != 2:
        return False
    a, c = rows
    b, d = columns
    applied = terms * min(b * c * (d + a), a * d * (b + c))
    formed = a * b * c * d
    return applied < formed


def _khatri_rao(left: Tensor, right: Tensor) -> Tensor:
    """Return the row-wise Kronecker product: (s, p), (s, q) -> (s, p q)."""
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


def _check_terms(factors: Sequence[Tensor]) -> int:
    """Return the number of terms, which all factors share."""
    if not factors:
        raise ShapeError("a Kronecker product has at least one factor")
    terms = factors[0].shape[0]
    if any(factor.ndim != 3 or factor.shape[0] != terms for factor in factors):
        shapes = ", ".join(str(tuple(factor.shape)) for factor in factors)
        raise ShapeError(f"factors must have shapes (s, m_i, n_i) with one s, got {shapes}")
    return terms
