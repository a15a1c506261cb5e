"""The arithmetic of one linear layer with a low-rank pair beside it, forward and backward, on plain tensors.

Shapes throughout: x (n, w2), weight (w1, w2), right Â (r, w2), left B̂ (w1, r); y = x Wᵀ + b + α (x Âᵀ) B̂ᵀ. Whatever has
r and n as its sides is held (r, n): rows of length n suit every matrix product, rows of length r almost none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

WIDE_RESULT = "dtype" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]
"""Whether this torch, from 2.8 on, multiplies 16-bit matrices into a float32 one on a GPU."""


class Wanted(NamedTuple):
    """Which gradients a backward pass is asked for: of the input, of what the adapter saw instead, of Â and of B̂."""

    x: bool
    dropped: bool
    right: bool
    left: bool


def forward(
    x: Tensor,
    dropped: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    right: Tensor,
    left: Tensor,
    scaling: float,
    at_once: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``y`` and the inner activations ``Â xᵀ`` (r, n); the adapter is added inside the second matrix product.

    With more than ``at_once`` rows they go block by block: a block is still in the cache when its pair is added.
    """
    y, inner = x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(right.shape[0], x.shape[0])
    for rows in blocks(x.shape[0], at_once):
        part = y[rows]
        if bias is None:
            torch.mm(x[rows], weight.mT, out=part)
        else:
            torch.addmm(bias, x[rows], weight.mT, out=part)
        torch.mm(right, dropped[rows].mT, out=inner[:, rows])
        part.addmm_(inner[:, rows].mT, left.mT, alpha=scaling)
    return y, inner


def backward(
    dy: Tensor,
    seen: Tensor,
    inner: Tensor,
    weight: Tensor,
    right: Tensor,
    left: Tensor,
    scaling: float,
    wanted: Wanted,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    split: bool = False,
    at_once: int | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, of what the adapter saw where that is ``split`` from x, of Â and of B̂.

    Those of Â and B̂ come in ``dtypes``. Blocks of rows are taken as in `forward`.
    """
    dx = dy.new_empty(dy.shape[0], weight.shape[1]) if wanted.x else None
    d_dropped = torch.empty_like(dx if dx is not None else seen) if wanted.dropped else None
    d_right = d_left = None
    for rows in blocks(dy.shape[0], at_once):
        block, t = dy[rows], None
        # t = α B̂ᵀ dyᵀ, what reaches the inner activations: with α in it, no later product but B̂'s needs the scale.
        if wanted.dropped or wanted.right or (wanted.x and not split):
            t = inner_gradient(block, left, scaling)
        # dx = dy W + tᵀ Â, the second term added inside its product; with dropout it belongs to the other input.
        if dx is not None:
            torch.mm(block, weight, out=dx[rows])
            if t is not None and not split:
                dx[rows].addmm_(t.mT, right)
        if d_dropped is not None and t is not None:
            torch.mm(t.mT, right, out=d_dropped[rows])
        # dÂ = t x and dB̂ = α dyᵀ (x Âᵀ), summed over the blocks.
        if wanted.right and t is not None:
            part = wide_product(t, seen[rows], dtypes[0])
            d_right = part if d_right is None else d_right.add_(part)
        if wanted.left:
            part = left_gradient(block, inner[:, rows], scaling, dtypes[1])
            d_left = part if d_left is None else d_left.add_(part)
    return dx, d_dropped, d_right, d_left


def blocks(rows: int, at_once: int | None) -> Iterator[slice]:
    """Cuts of so many rows into blocks of nearly equal size, at most ``at_once`` each; one block if that is None."""
    count = 1 if at_once is None else max(1, -(-rows // at_once))
    return (slice(rows * index // count, rows * (index + 1) // count) for index in range(count))


def inner_gradient(dy: Tensor, left: Tensor, scaling: float) -> Tensor:
    """``α B̂ᵀ dyᵀ`` (r, n)."""
    # beta = 0: the first argument is not read.
    return torch.addmm(dy.new_empty(()), left.mT, dy.mT, beta=0, alpha=scaling)


def left_gradient(dy: Tensor, inner: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """``α dyᵀ (x Âᵀ)`` (w1, r), as the transpose of a wide matrix."""
    if inner.dtype == dtype:
        return torch.addmm(dy.new_empty(()), inner, dy, beta=0, alpha=scaling).mT
    return wide_product(inner, dy, dtype).mul_(scaling).mT


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` with the result in ``dtype``, without rounding to the inputs' precision where the device can."""
    if a.dtype == dtype:
        return a @ b
    if WIDE_RESULT and a.is_cuda and a.dtype.itemsize == 2 and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)
