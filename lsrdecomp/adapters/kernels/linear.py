"""One autograd node for a frozen linear layer and its low-rank pair: fewer launches, fewer bytes, same numbers.

Shapes throughout: x (n, w2), weight (w1, w2), right Â (r, w2), left B̂ (w1, r); y = x Wᵀ + b + α (x Âᵀ) B̂ᵀ. Whatever has
r and n as its sides is held (r, n): rows of length n suit every matrix product, rows of length r almost none.
"""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lsrdecomp.adapters.kernels.stacked import is_traced, without_autocast
from lsrdecomp.errors import ShapeError

Mode = Literal["auto", "plain", "blas"]
WIDE_RESULT = "dtype" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]
"""Whether this torch, from 2.8 on, multiplies 16-bit matrices into a float32 one on a GPU."""


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
        inside matrix products. ``auto`` takes what was measured to be faster for so many tokens (`crossovers.json`).

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
        mode = "blas" if x.numel() >= blas_from_tokens(kind) * x.shape[-1] else "plain"
    if mode == "plain":
        return F.linear(x, weight, bias) + _plain(x if dropped is None else dropped, right, left, scaling, compute)
    bias = None if bias is None else bias.to(compute)
    dropped = None if dropped is None else dropped.to(compute)
    arguments = x.to(compute), dropped, weight.to(compute), bias, right, left, scaling
    if not torch.is_grad_enabled():
        return _forward(*arguments)[0]
    return _AdaptedLinear.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


@cache
def blas_from_tokens(device: str) -> float:
    """From how many tokens on the node was measured to win on a kind of device; the CPU's for one never measured."""
    stored = json.loads(files(__package__).joinpath("crossovers.json").read_text("utf-8"))
    least = stored.get(device, stored["cpu"])["blas_from_tokens"]
    return math.inf if least is None else least


def _plain(x: Tensor, right: Tensor, left: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    # Few tokens come here: their inner activations are the least to scale.
    return F.linear(scaling * F.linear(x.to(dtype), right.to(dtype)), left.to(dtype))


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
    with without_autocast(x.device.type):
        right, left = right.to(x.dtype), left.to(x.dtype)
        y = F.linear(_rows(x), weight, bias)
        inner = right @ _rows(x if dropped is None else dropped).mT  # (r, n)
        y.addmm_(inner.mT, left.mT, alpha=scaling)
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
        y, saved = _forward(x, dropped, weight, bias, right, left, scaling)
        # With dropout the base layer's input serves the gradient of W alone; else it is what the adapter saw too.
        base_input = x if dropped is None or ctx.needs_input_grad[2] else None
        ctx.save_for_backward(base_input, dropped, weight, right, left, *saved)
        ctx.scaling, ctx.shape = scaling, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, dropped, weight, right, left, inner, near_right, near_left = ctx.saved_tensors
        of_x, of_dropped, of_weight, of_bias, of_right, of_left, _ = ctx.needs_input_grad
        dy, adapter_input = _rows(gradient), _rows(x if dropped is None else dropped)
        dx = d_dropped = d_right = t = None
        with without_autocast(gradient.device.type):
            # 0. For second derivatives the same formulas are differentiated: of what autograd knows, not of our copies.
            if torch.is_grad_enabled():
                near_right, near_left = right.to(dy.dtype), left.to(dy.dtype)
                inner = near_right @ adapter_input.mT
            # 1. t = α B̂ᵀ dyᵀ (r, n), what reaches the inner activations: with α in it, only dB̂ still needs the scale.
            if of_dropped or of_right or (of_x and dropped is None):
                t = inner_gradient(dy, near_left, ctx.scaling)
            # 2. dx = dy W + tᵀ Â, the second term added inside its product; with dropout it is the other input's.
            if of_x:
                dx = dy @ weight
                if t is not None and dropped is None:
                    dx.addmm_(t.mT, near_right)
            if of_dropped and t is not None:
                d_dropped = t.mT @ near_right
            # 3. dÂ = t x and dB̂ = α dyᵀ (x Âᵀ).
            if of_right and t is not None:
                d_right = wide_product(t, adapter_input, right.dtype)
            d_left = left_gradient(dy, inner, ctx.scaling, left.dtype) if of_left else None
            # 4. The base layer's own, where it is trained: dW = dyᵀ x and db = Σ dy.
            d_weight = dy.mT @ _rows(x) if of_weight else None
            d_bias = dy.sum(0) if of_bias else None
        dx, d_dropped = (None if each is None else each.view(ctx.shape) for each in (dx, d_dropped))
        return dx, d_dropped, d_weight, d_bias, d_right, d_left, None


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
