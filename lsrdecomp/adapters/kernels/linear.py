"""One autograd node for a frozen linear layer and its low-rank pair: fewer launches, fewer bytes, same numbers."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lsrdecomp.adapters.kernels import lowrank
from lsrdecomp.adapters.kernels.autocast import without_autocast
from lsrdecomp.adapters.kernels.dispatch import choose
from lsrdecomp.adapters.kernels.second_order import recomposed
from lsrdecomp.adapters.kernels.tracing import is_traced
from lsrdecomp.errors import ShapeError

Mode = Literal["auto", "plain", "blas"]


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

    Exact under gradient checkpointing, accumulation, repeated use of a layer, and in second derivatives. Under autocast
    everything is computed in autocast's precision; gradients come back in the precision of what they belong to.

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
    mode : {"auto", "plain", "blas"}
        ``plain`` composes torch operations and suits ``torch.compile``; ``blas`` adds the adapter's parts in place
        inside matrix products. ``auto`` takes what was measured to be faster for so many tokens.

    Returns
    -------
    Tensor
        Shape (..., w1). Beyond the base layer, `blas` launches 2 kernels forward and 4 backward.

    Raises
    ------
    ShapeError
        If the sizes do not fit together.
    """
    _check(x, weight, right, left, dropped)
    kind = x.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if mode == "auto" and is_traced():
        mode = "plain"
    if mode == "auto":
        mode = choose(x.numel() // max(1, x.shape[-1]), kind)
    if mode == "plain":
        return F.linear(x, weight, bias) + _plain(x if dropped is None else dropped, right, left, scaling, compute)
    bias = None if bias is None else bias.to(compute)
    dropped = None if dropped is None else dropped.to(compute)
    arguments = x.to(compute), dropped, weight.to(compute), bias, right, left, scaling
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
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The output, and what backward needs beside the arguments: inner activations and the pair in x's precision."""
    rows = _rows(x)
    with without_autocast(x.device.type):
        right, left = right.to(x.dtype), left.to(x.dtype)
        seen = rows if dropped is None else _rows(dropped)
        y, inner = lowrank.forward(rows, seen, weight, bias, right, left, scaling)
    return y.view(*x.shape[:-1], y.shape[1]), (inner, right, left)


class _AdaptedLinear(torch.autograd.Function):
    """Mode ``blas``: the input (once), the inner activations and the small matrices are all that is kept."""

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
    ) -> Tensor:
        y, kept = _forward(x, dropped, weight, bias, right, left, scaling)
        # With dropout the base layer's input serves the gradient of W alone; else it is what the adapter saw too.
        base_input = x if dropped is None or ctx.needs_input_grad[2] else None
        ctx.save_for_backward(base_input, dropped, weight, right, left, *kept)
        ctx.scaling, ctx.shape = scaling, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _second_order(ctx, gradient)
        x, dropped, weight, right, left, inner, near_right, near_left = ctx.saved_tensors
        of_x, of_dropped, of_weight, of_bias, of_right, of_left, _ = ctx.needs_input_grad
        dy, seen = _rows(gradient), _rows(x if dropped is None else dropped)
        with without_autocast(gradient.device.type):
            dx, d_dropped, d_right, d_left = lowrank.backward(
                dy,
                seen,
                inner,
                weight,
                near_right,
                near_left,
                ctx.scaling,
                lowrank.Wanted(of_x, of_dropped, of_right, of_left),
                (right.dtype, left.dtype),
                split=dropped is not None,
            )
            d_weight = dy.mT @ _rows(x) if of_weight else None
            d_bias = dy.sum(0) if of_bias else None
        dx, d_dropped = (None if each is None else each.view(ctx.shape) for each in (dx, d_dropped))
        return dx, d_dropped, d_weight, d_bias, d_right, d_left, None


def _second_order(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradients, with a graph of their own."""
    x, dropped, weight, right, left, *_ = ctx.saved_tensors
    of_x, of_dropped, of_weight, of_bias, of_right, of_left, _ = ctx.needs_input_grad
    if x is None:  # not kept, since no gradient depends on it: any tensor of its shape stands in
        x = torch.zeros_like(dropped, requires_grad=of_x)
    given = [x, weight, right, left] if dropped is None else [x, weight, right, left, dropped]

    def compose(x: Tensor, weight: Tensor, right: Tensor, left: Tensor, dropped: Tensor | None = None) -> Tensor:
        return F.linear(x, weight) + _plain(x if dropped is None else dropped, right, left, ctx.scaling, x.dtype)

    with without_autocast(gradient.device.type):
        found = recomposed(compose, given, (of_x, of_weight, of_right, of_left, of_dropped)[: len(given)], gradient)
        d_bias = _rows(gradient).sum(0) if of_bias else None
    dx, d_weight, d_right, d_left, *d_dropped = found
    return dx, d_dropped[0] if d_dropped else None, d_weight, d_bias, d_right, d_left, None


__all__ = ["Mode", "adapted_linear"]
