"""The arithmetic of one linear layer with a low-rank pair beside it, forward and backward, on plain tensors.

Shapes throughout: x (n, w2), weight (w1, w2), right Â (r, w2), left B̂ (w1, r); y = x Wᵀ + b + α (x Âᵀ) B̂ᵀ. Whatever has
r and n as its sides is held (r, n): rows of length n suit every matrix product, rows of length r almost none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
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
    x: Tensor, dropped: Tensor, weight: Tensor, bias: Tensor | None, right: Tensor, left: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """``y`` and the inner activations ``Â xᵀ`` (r, n); the adapter is added inside the second matrix product."""
    y = F.linear(x, weight, bias)
    inner = right @ dropped.mT
    return y.addmm_(inner.mT, left.mT, alpha=scaling), inner


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
) -> tuple[Tensor | None, ...]:
    """Gradients of x, of what the adapter saw where that is ``split`` from x, of Â and of B̂.

    Those of Â and B̂ come in ``dtypes``.
    """
    dx = d_dropped = d_right = d_left = t = None
    # 1. t = α B̂ᵀ dyᵀ, what reaches the inner activations: with α in it, no later product but B̂'s needs the scale.
    if wanted.dropped or wanted.right or (wanted.x and not split):
        t = inner_gradient(dy, left, scaling)
    # 2. dx = dy W + tᵀ Â, the second term added inside its product; with dropout it belongs to the other input.
    if wanted.x:
        dx = dy @ weight
        if t is not None and not split:
            dx.addmm_(t.mT, right)
    if wanted.dropped and t is not None:
        d_dropped = t.mT @ right
    # 3. dÂ = t x and dB̂ = α dyᵀ (x Âᵀ).
    if wanted.right and t is not None:
        d_right = wide_product(t, seen, dtypes[0])
    if wanted.left:
        d_left = left_gradient(dy, inner, scaling, dtypes[1])
    return dx, d_dropped, d_right, d_left


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
