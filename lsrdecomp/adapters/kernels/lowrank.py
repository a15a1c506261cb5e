"""The arithmetic of one linear layer with a low-rank pair beside it, forward and backward, on plain tensors.

Shapes throughout: x (n, w2), weight (w1, w2), right Â (r, w2), left B̂ (w1, r); y = x Wᵀ + b + α (x Âᵀ) B̂ᵀ. Whatever has
r and n as its sides is held (r, n): rows of length n suit every matrix product, rows of length r almost none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

WIDE_RESULT = "dtype" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]
"""Whether this torch, from 2.8 on, multiplies 16-bit matrices into a float32 one on a GPU."""


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
    if at_once is None or x.shape[0] <= at_once:
        y = x @ weight.mT if bias is None else torch.addmm(bias, x, weight.mT)
        inner = right @ dropped.mT
        return y.addmm_(inner.mT, left.mT, alpha=scaling), inner
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
    x: Tensor,
    inner: Tensor,
    weight: Tensor,
    right: Tensor,
    left: Tensor,
    scaling: float,
    dtypes: tuple[torch.dtype, torch.dtype],
    at_once: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, Â and B̂, the last two in ``dtypes``, block by block of rows."""
    dx = dy.new_empty(dy.shape[0], weight.shape[1])
    d_right = d_left = None
    for rows in blocks(dy.shape[0], at_once):
        torch.mm(dy[rows], weight, out=dx[rows])
        t = inner_gradient(dy[rows], left, scaling)
        dx[rows].addmm_(t.mT, right)
        of_right = wide_product(t, x[rows], dtypes[0])
        of_left = left_gradient(dy[rows], inner[:, rows], scaling, dtypes[1])
        d_right = of_right if d_right is None else d_right.add_(of_right)
        d_left = of_left if d_left is None else d_left.add_(of_left)
    assert d_right is not None
    assert d_left is not None
    return dx, d_right, d_left


def blocks(rows: int, at_once: int) -> Iterator[slice]:
    """Cuts of so many rows into blocks of nearly equal size, at most ``at_once`` each."""
    count = -(-rows // at_once)
    return (slice(rows * index // count, rows * (index + 1) // count) for index in range(count))


def inner_gradient(dy: Tensor, left: Tensor, scaling: float) -> Tensor:
    """``α B̂ᵀ dyᵀ`` (r, n): with α in it, no later product needs the scale, but for the gradient of B̂."""
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


def input_gradient(dy: Tensor, weight: Tensor, inner_gradient: Tensor | None, right: Tensor) -> Tensor:
    """``dy W``, and the adapter's part added inside a second matrix product if the two share their input."""
    dx = dy @ weight
    return dx if inner_gradient is None else dx.addmm_(inner_gradient.mT, right)


def merged_weight(weight: Tensor, right: Tensor, left: Tensor, scaling: float) -> Tensor:
    """``W + α B̂ Â`` in the precision of W."""
    return torch.addmm(weight, left.to(weight.dtype), right.to(weight.dtype), alpha=scaling)
