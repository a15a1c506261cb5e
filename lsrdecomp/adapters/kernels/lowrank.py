"""The arithmetic of one linear layer with a low-rank pair beside it, forward and backward, on plain tensors.

Shapes throughout: x (n, w2), weight (w1, w2), right Â (r, w2), left B̂ (w1, r); y = x Wᵀ + b + α (x Âᵀ) B̂ᵀ. Whatever has
r and n as its sides is held (r, n): rows of length n suit every matrix product, rows of length r almost none.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(
    x: Tensor, dropped: Tensor, weight: Tensor, bias: Tensor | None, right: Tensor, left: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """``y`` and the inner activations ``Â xᵀ`` (r, n); the adapter is added inside the second matrix product."""
    y = x @ weight.mT if bias is None else torch.addmm(bias, x, weight.mT)
    inner = right @ dropped.mT
    return y.addmm_(inner.mT, left.mT, alpha=scaling), inner


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
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def input_gradient(dy: Tensor, weight: Tensor, inner_gradient: Tensor | None, right: Tensor) -> Tensor:
    """``dy W``, and the adapter's part added inside a second matrix product if the two share their input."""
    dx = dy @ weight
    return dx if inner_gradient is None else dx.addmm_(inner_gradient.mT, right)


def merged_weight(weight: Tensor, right: Tensor, left: Tensor, scaling: float) -> Tensor:
    """``W + α B̂ Â`` in the precision of W."""
    return torch.addmm(weight, left.to(weight.dtype), right.to(weight.dtype), alpha=scaling)
