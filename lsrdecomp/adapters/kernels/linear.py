"""One autograd node for a frozen linear layer and its low-rank pair: fewer launches, fewer bytes, same numbers."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lsrdecomp.adapters.kernels import lowrank
from lsrdecomp.adapters.kernels.autocast import without_autocast
from lsrdecomp.adapters.kernels.dispatch import chosen, crossovers
from lsrdecomp.adapters.kernels.tracing import is_traced
from lsrdecomp.errors import PrecisionError, ShapeError

Mode = Literal["auto", "plain", "blas", "merged", "fused"]
MERGEABLE = (torch.float32, torch.float64)


def adapted_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    right: Tensor,
    left: Tensor,
    scaling: float = 1.0,
    *,
    dropped: Tensor | None = None,
    mode: Mode = "auto",
) -> Tensor:
    """``x Wᵀ + b + scaling · (x Âᵀ) B̂ᵀ``, differentiable in every tensor.

    Exact under gradient checkpointing, accumulation and repeated use of a layer; under autocast everything is computed
    in autocast's precision, and gradients come back in the precision of what they belong to.

    Parameters
    ----------
    x : Tensor
        Shape (..., w2).
    weight : Tensor
        W, shape (w1, w2), frozen or trained.
    bias : Tensor, optional
        Shape (w1,).
    right, left : Tensor
        Â, shape (r, w2), and B̂, shape (w1, r), of any floating dtype.
    scaling : float
        Folded into the matrix products: it costs nothing.
    dropped : Tensor, optional
        What the adapter sees instead of ``x``, after its dropout; the shape of ``x``.
    mode : {"auto", "plain", "blas", "merged", "fused"}
        ``plain`` composes torch operations and suits ``torch.compile``; ``blas`` adds the adapter's parts in place
        inside matrix products; ``merged`` forms W + scaling · B̂Â for one product, in at least float32 and without
        dropout; ``fused`` runs two Triton passes. ``auto`` takes what was measured to be fastest.

    Returns
    -------
    Tensor
        Shape (..., w1). Beyond the base layer, `blas` launches 2 kernels forward and 4 backward.

    Raises
    ------
    ShapeError
        If the sizes do not fit together.
    PrecisionError
        If ``merged`` is asked of a weight of less than float32, where rounding would lose the adapter.
    """
    _check(x, weight, right, left, dropped)
    kind = x.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if mode == "auto" and is_traced():
        mode = "plain"
    if mode == "auto":
        tokens = x.numel() // max(1, x.shape[-1])
        out, into = weight.shape
        mode = chosen(tokens, out, into, right.shape[0], compute, weight.dtype, kind, dropped is not None)
    if mode == "plain":
        return F.linear(x, weight, bias) + _plain(x if dropped is None else dropped, right, left, scaling, compute)
    x = x.to(compute)
    bias = None if bias is None else bias.to(compute)
    if mode == "merged":
        if dropped is not None:
            raise PrecisionError(
                "a merged weight cannot see another input than the base layer: mode 'merged' has no dropout"
            )
        if weight.dtype not in MERGEABLE:
            raise PrecisionError(
                f"W + ΔW in {weight.dtype} would lose most of ΔW; merge in float32, or use mode 'blas'"
            )
        return _MergedLinear.apply(x, weight, bias, right, left, scaling)  # type: ignore[no-any-return, no-untyped-call]
    dropped = None if dropped is None else dropped.to(compute)
    arguments = x, dropped, weight.to(compute), bias, right, left, scaling, mode == "fused"
    if not torch.is_grad_enabled():
        return _forward(*arguments)[0]
    return _AdaptedLinear.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


def _plain(x: Tensor, right: Tensor, left: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    return F.linear(F.linear(x.to(dtype), right.to(dtype)), (scaling * left).to(dtype))


def _check(x: Tensor, weight: Tensor, right: Tensor, left: Tensor, dropped: Tensor | None) -> None:
    (out, into), rank = weight.shape, right.shape[0]
    if right.shape != (rank, into) or left.shape != (out, rank) or x.shape[-1] != into:
        raise ShapeError(
            f"a weight of {out} x {into} with rank {rank} needs Â of {rank} x {into}, B̂ of {out} x {rank} and inputs "
            f"of {into}, got {tuple(right.shape)}, {tuple(left.shape)} and {tuple(x.shape)}"
        )
    if dropped is not None and dropped.shape != x.shape:
        raise ShapeError(f"the adapter's input is {tuple(dropped.shape)}, but the layer's is {tuple(x.shape)}")


def _at_once(weight: Tensor) -> int | None:
    """Rows of a block, if there are to be blocks: W is read for each, so it must be smaller than a block's x and y."""
    rows = crossovers(weight.device.type).rows_at_once
    return None if rows is None or weight.numel() > rows * sum(weight.shape) else rows


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _forward(
    x: Tensor,
    dropped: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    right: Tensor,
    left: Tensor,
    scaling: float,
    fused: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The output, and what backward needs of the adapter: its input, inner activations and pair."""
    rows = _rows(x)
    with without_autocast(x.device.type):
        right, left = right.to(x.dtype), left.to(x.dtype)
        seen = rows if dropped is None else _rows(dropped)
        if fused:
            from lsrdecomp.adapters.kernels.triton_passes import add_low_rank

            y = F.linear(rows, weight, bias)
            inner = add_low_rank(y, seen, right, left, scaling).mT
        else:
            y, inner = lowrank.forward(rows, seen, weight, bias, right, left, scaling, _at_once(weight))
    return y.view(*x.shape[:-1], y.shape[1]), (seen, inner, right, left)


class _AdaptedLinear(torch.autograd.Function):
    """Modes ``blas`` and ``fused``: x (once), the inner activations and the small matrices are all that is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        right: Tensor,
        left: Tensor,
        scaling: float,
        fused: bool,
    ) -> Tensor:
        y, (seen, *kept) = _forward(x, dropped, weight, bias, right, left, scaling, fused)
        base_input = _rows(x) if ctx.needs_input_grad[2] and dropped is not None else None
        ctx.save_for_backward(seen, base_input, weight, *kept)
        ctx.scaling, ctx.fused, ctx.shape, ctx.split = scaling, fused, x.shape, dropped is not None
        ctx.dtypes = right.dtype, left.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        seen, base_input, weight, inner, right, left = ctx.saved_tensors
        wants = ctx.needs_input_grad
        dy = _rows(gradient)
        with without_autocast(gradient.device.type):
            usual, at_once = not ctx.split and wants[0] and wants[4] and wants[5], _at_once(weight)
            if ctx.fused and usual:
                from lsrdecomp.adapters.kernels.triton_passes import backward_pass

                full = dy @ weight
                dx: Tensor | None = full
                small = backward_pass(full, dy, seen, inner.mT, right, left, ctx.scaling)
                d_seen: Tensor | None = None
                d_right: Tensor | None = small[0].to(ctx.dtypes[0])
                d_left: Tensor | None = small[1].to(ctx.dtypes[1])
            elif usual and at_once is not None and dy.shape[0] > at_once:
                dx, d_right, d_left = lowrank.backward(
                    dy, seen, inner, weight, right, left, ctx.scaling, ctx.dtypes, at_once
                )
                d_seen = None
            else:
                through = wants[0] or wants[1] or wants[4]
                t = lowrank.inner_gradient(dy, left, ctx.scaling) if through else None
                d_right = lowrank.wide_product(t, seen, ctx.dtypes[0]) if t is not None and wants[4] else None
                d_left = lowrank.left_gradient(dy, inner, ctx.scaling, ctx.dtypes[1]) if wants[5] else None
                shared = None if ctx.split else t
                dx = lowrank.input_gradient(dy, weight, shared, right) if wants[0] else None
                d_seen = t.mT @ right if t is not None and wants[1] else None
            d_weight = dy.mT @ (seen if base_input is None else base_input) if wants[2] else None
            d_bias = dy.sum(0) if wants[3] else None
        inputs = (None if each is None else each.view(ctx.shape) for each in (dx, d_seen))
        return *inputs, d_weight, d_bias, d_right, d_left, None, None


class _MergedLinear(torch.autograd.Function):
    """Mode ``merged``: the sum W + α B̂Â is formed in the weight's precision, and again in backward, never kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, right: Tensor, left: Tensor, scaling: float
    ) -> Tensor:
        with without_autocast(x.device.type):
            y = F.linear(x, lowrank.merged_weight(weight, right, left, scaling).to(x.dtype), bias)
        ctx.save_for_backward(_rows(x), weight, right, left)
        ctx.scaling, ctx.shape = scaling, x.shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, right, left = ctx.saved_tensors
        wants, scaling, dy = ctx.needs_input_grad, ctx.scaling, _rows(gradient)
        dx = d_right = d_left = None
        with without_autocast(gradient.device.type):
            if wants[0]:
                dx = (dy @ lowrank.merged_weight(weight, right, left, scaling).to(dy.dtype)).view(ctx.shape)
            if wants[3]:
                t = lowrank.inner_gradient(dy, left.to(dy.dtype), scaling)
                d_right = lowrank.wide_product(t, x, right.dtype)
            if wants[4]:
                d_left = lowrank.left_gradient(dy, right.to(x.dtype) @ x.mT, scaling, left.dtype)
            d_weight = (dy.mT @ x).to(weight.dtype) if wants[1] else None
            d_bias = dy.sum(0) if wants[2] else None
        return dx, d_weight, d_bias, d_right, d_left, None


__all__ = ["Mode", "adapted_linear"]
