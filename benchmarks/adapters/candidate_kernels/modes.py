"""`adapted_linear` with two more modes: ``merged`` and ``fused``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.adapters.candidate_kernels.triton_passes import add_low_rank, backward_pass
from lsrdecomp.adapters.kernels import adapted_linear
from lsrdecomp.adapters.kernels.linear import inner_gradient, left_gradient, wide_product
from lsrdecomp.errors import PrecisionError

MERGEABLE = (torch.float32, torch.float64)


def applied(
    x: Tensor, weight: Tensor, bias: Tensor | None, right: Tensor, left: Tensor, scaling: float, mode: Any
) -> Tensor:
    """``x Wᵀ + b + scaling · (x Âᵀ) B̂ᵀ`` in the asked mode, W and b frozen; shapes as for `adapted_linear`."""
    if mode == "merged":
        if weight.dtype not in MERGEABLE:
            raise PrecisionError(f"W + ΔW in {weight.dtype} would lose most of ΔW; merge in float32")
        return _Merged.apply(x, weight, bias, right, left, scaling)  # type: ignore[no-any-return, no-untyped-call]
    if mode == "fused":
        return _Fused.apply(x, weight, bias, right, left, scaling)  # type: ignore[no-any-return, no-untyped-call]
    return adapted_linear(x, weight, bias, right, left, scaling, mode=mode)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _merged_weight(weight: Tensor, right: Tensor, left: Tensor, scaling: float) -> Tensor:
    return torch.addmm(weight, left.to(weight.dtype), right.to(weight.dtype), alpha=scaling)


class _Merged(torch.autograd.Function):
    """The sum W + α B̂Â is formed in the weight's precision, and again in backward, never kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, right: Tensor, left: Tensor, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, right, left)
        ctx.scaling = scaling
        return F.linear(x, _merged_weight(weight, right, left, scaling), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, right, left = ctx.saved_tensors
        dy, rows = _rows(gradient), _rows(x)
        dx = (dy @ _merged_weight(weight, right, left, ctx.scaling)).view(x.shape)
        d_right = wide_product(inner_gradient(dy, left, ctx.scaling), rows, right.dtype)
        d_left = left_gradient(dy, right @ rows.mT, ctx.scaling, left.dtype)
        return dx, None, None, d_right, d_left, None


class _Fused(torch.autograd.Function):
    """The frozen product, and then the pair added in one Triton pass; backward likewise."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, right: Tensor, left: Tensor, scaling: float
    ) -> Tensor:
        rows, near_right, near_left = _rows(x), right.to(x.dtype), left.to(x.dtype)
        y = F.linear(rows, weight, bias)
        inner = add_low_rank(y, rows, near_right, near_left, scaling)
        ctx.save_for_backward(rows, weight, inner, near_right, near_left)
        ctx.scaling, ctx.shape, ctx.dtypes = scaling, x.shape, (right.dtype, left.dtype)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, inner, right, left = ctx.saved_tensors
        dy = _rows(gradient)
        dx = dy @ weight
        d_right, d_left = backward_pass(dx, dy, rows, inner, right, left, ctx.scaling)
        return dx.view(ctx.shape), None, None, d_right.to(ctx.dtypes[0]), d_left.to(ctx.dtypes[1]), None


__all__ = ["applied"]
