"""A sum of Kronecker products applied to many vectors without being formed, with its own backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lsrdecomp.adapters.kernels.autocast import without_autocast
from lsrdecomp.adapters.kernels.second_order import recomposed
from lsrdecomp.adapters.kernels.tracing import is_traced
from lsrdecomp.errors import ShapeError


def kronecker_linear(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Apply ``Σ_k F1[k] ⊗ F2[k]`` to the last axis of ``x``.

    With X the reshaped (b, d) input, this is ``Σ_k F1[k] X F2[k]ᵀ``: two matrix products for all terms and tokens, in
    the order that costs less, and no copy between them. Only the input and the factors are kept for backward.

    Parameters
    ----------
    x : Tensor
        Shape (..., b·d).
    first, second : Tensor
        Shapes (s, a, b) and (s, c, d).

    Returns
    -------
    Tensor
        Shape (..., a·c). Operations a token: 2 s b c d + 2 s a b c, or 2 s a b d + 2 s a c d, whichever is less.

    Raises
    ------
    ShapeError
        If the sizes do not fit together.
    """
    if first.ndim != 3 or second.ndim != 3 or first.shape[0] != second.shape[0]:
        raise ShapeError(
            f"factors must have shapes (s, a, b) and (s, c, d), got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    columns = first.shape[2] * second.shape[2]
    if x.shape[-1] != columns:
        raise ShapeError(
            f"{first.shape[2]} x {second.shape[2]} = {columns} columns, but the input has {x.shape[-1]} entries"
        )
    kind = x.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    x, first, second = (tensor.to(compute) for tensor in (x, first, second))
    route = _SecondFirst if _second_is_cheaper(first, second) else _FirstFirst
    apply: Any = route.composed if is_traced() else route.apply
    y = apply(x.reshape(-1, first.shape[2], second.shape[2]), first, second)
    return y.reshape(*x.shape[:-1], first.shape[1] * second.shape[1])  # type: ignore[no-any-return]


def _second_is_cheaper(first: Tensor, second: Tensor) -> bool:
    (_, a, b), (_, c, d) = first.shape, second.shape
    return bool(b * c * (d + a) <= a * d * (b + c))


def _batch_sum(left: Tensor, right: Tensor) -> Tensor:
    """``Σ_n left[n] right[n]ᵀ`` as one product."""
    return left.transpose(0, 1).flatten(1) @ right.transpose(0, 1).flatten(1).mT


class _SecondFirst(torch.autograd.Function):
    """Z = X [F2]ᵀ for all terms, rows ordered (b, k), then Y = [F1] Z with columns ordered alike: nothing is moved."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(blocks, first, second)
        with without_autocast(blocks.device.type):
            return _SecondFirst.composed(blocks, first, second)

    @staticmethod
    def composed(blocks: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return _SecondFirst.wide(first) @ _SecondFirst.half(blocks, second)

    @staticmethod
    def wide(first: Tensor) -> Tensor:
        return first.permute(1, 2, 0).flatten(1)  # (a, b s)

    @staticmethod
    def half(blocks: Tensor, second: Tensor) -> Tensor:
        terms, c, d = second.shape
        n, b, _ = blocks.shape
        return (blocks.reshape(n * b, d) @ second.reshape(terms * c, d).mT).view(n, b * terms, c)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        blocks, first, second = ctx.saved_tensors
        terms, a, b = first.shape
        n, _, d = blocks.shape
        d_blocks = d_first = d_second = None
        with without_autocast(dy.device.type):
            if torch.is_grad_enabled():
                return tuple(recomposed(_SecondFirst.composed, ctx.saved_tensors, ctx.needs_input_grad, dy))
            # dF1 = Σ_n dY[n] Z[n]ᵀ, with Z formed again: keeping it would cost s times the input.
            if ctx.needs_input_grad[1]:
                wide = _batch_sum(dy, _SecondFirst.half(blocks, second))  # (a, b s)
                d_first = wide.view(a, b, terms).permute(2, 0, 1)
            # dZ = [F1]ᵀ dY; then dX = dZ [F2] and dF2 = dZᵀ X, all terms in one product each.
            if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
                dz = (_SecondFirst.wide(first).mT @ dy).view(n * b, -1)  # (n b, s c)
                d_blocks = (dz @ second.reshape(-1, d)).view(blocks.shape)
                d_second = (dz.mT @ blocks.reshape(n * b, d)).view(second.shape)
        return d_blocks, d_first, d_second


class _FirstFirst(torch.autograd.Function):
    """U = [F1] X for all terms, rows ordered (a, k), then Y = U [F2]ᵀ with columns ordered alike: nothing is moved."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(blocks, first, second)
        with without_autocast(blocks.device.type):
            return _FirstFirst.composed(blocks, first, second)

    @staticmethod
    def composed(blocks: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = _FirstFirst.half(blocks, first) @ _FirstFirst.tall(second)
        return y.view(-1, first.shape[1], second.shape[1])

    @staticmethod
    def tall(second: Tensor) -> Tensor:
        return second.mT.flatten(0, 1)  # (s d, c)

    @staticmethod
    def half(blocks: Tensor, first: Tensor) -> Tensor:
        a = first.shape[1]
        return (first.transpose(0, 1).flatten(0, 1) @ blocks).view(blocks.shape[0] * a, -1)  # (n a, s d)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        blocks, first, second = ctx.saved_tensors
        (terms, a, b), (_, c, d) = first.shape, second.shape
        d_blocks = d_first = d_second = None
        with without_autocast(gradient.device.type):
            if torch.is_grad_enabled():
                return tuple(recomposed(_FirstFirst.composed, ctx.saved_tensors, ctx.needs_input_grad, gradient))
            dy = gradient.reshape(-1, c)  # (n a, c)
            # dF2 = Uᵀ dY, with U formed again.
            if ctx.needs_input_grad[2]:
                tall = _FirstFirst.half(blocks, first).mT @ dy  # (s d, c)
                d_second = tall.view(terms, d, c).mT
            # dU = dY [F2]; then dX = [F1]ᵀ dU and dF1 = Σ_n dU[n] X[n]ᵀ.
            if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
                du = (dy @ _FirstFirst.tall(second).mT).view(-1, a * terms, d)
                d_blocks = first.transpose(0, 1).flatten(0, 1).mT @ du
                d_first = _batch_sum(du, blocks).view(a, terms, b).transpose(0, 1)
        return d_blocks, d_first, d_second


__all__ = ["kronecker_linear"]
