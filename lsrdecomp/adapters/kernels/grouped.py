"""All expansions of a model at once: one matrix product and one copy per shape class, whatever the number of layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lsrdecomp.adapters.kernels.stacked import contract_stack, expand_stack, without_autocast

LARGEST_GROUP = 1 << 23
"""Most formed entries of a group: in backward a group's gradients are alive together, 32 MB of them in float32.

They are contracted group by group, so that in a large model those of its last layers are gone before the first's come.
"""


def expand_all(factor_lists: Sequence[Sequence[Tensor]], *, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Form many sums of Kronecker products, grouped by the shapes of their factors.

    A tall matrix is formed as the transpose of a wide one, so that the two sides of a square layer are one class. The
    backward pass may run in several pieces, as reentrant gradient checkpointing makes it: each contracts what it
    brings, and the sum is exact.

    Parameters
    ----------
    factor_lists : sequence of sequences of Tensor
        For each matrix its factors as for `stacked.expand`.
    dtype : torch.dtype, optional
        Of the formed matrices, and so of their gradients, by default that of the factors: with the model's own, no
        layer has to cast.

    Returns
    -------
    list of Tensor
        The formed matrices, in order.
    """
    formed: list[Tensor] = [torch.empty(0)] * len(factor_lists)
    for members, wide in _groups(factor_lists):
        group = [factor_lists[index] for index in members]
        flat = [factor for factors in zip(*group, strict=True) for factor in factors]  # factor by factor
        with without_autocast(flat[0].device.type):
            matrices = _ExpandGroup.apply(len(group[0]), wide, dtype or flat[0].dtype, *flat)  # type: ignore[no-untyped-call]
        for index, matrix in zip(members, matrices, strict=True):
            formed[index] = matrix
    return formed


def _groups(factor_lists: Sequence[Sequence[Tensor]]) -> Iterator[tuple[list[int], int]]:
    """Indices of lists that fit together, first the wide ones, and how many of these there are."""
    classes: dict[Any, list[tuple[int, bool]]] = {}
    for index, factors in enumerate(factor_lists):
        shapes = tuple(tuple(factor.shape) for factor in factors)
        tall = math.prod(rows for _, rows, _ in shapes) > math.prod(columns for _, _, columns in shapes)
        if tall:
            shapes = tuple((terms, columns, rows) for terms, rows, columns in shapes)
        classes.setdefault((shapes, factors[0].dtype, factors[0].device), []).append((index, tall))
    for (shapes, *_), members in classes.items():
        most = max(1, LARGEST_GROUP // math.prod(rows * columns for _, rows, columns in shapes))
        for start in range(0, len(members), most):
            part = members[start : start + most]
            wide = [index for index, tall in part if not tall]
            yield wide + [index for index, tall in part if tall], len(wide)


class _ExpandGroup(torch.autograd.Function):
    """Expansion of one shape class: ``wide`` wide matrices, and then tall ones, whose factors are transposed.

    The stacks are our own copies and live on the context, not among the saved tensors: those are freed after the first
    backward pass through the node, and reentrant checkpointing makes one pass for every checkpointed part of the model.
    """

    @staticmethod
    def forward(ctx: Any, order: int, wide: int, dtype: torch.dtype, *flat: Tensor) -> tuple[Tensor, ...]:
        ctx.order, ctx.wide, ctx.stacks = order, wide, _stacked(flat, order, wide)
        ctx.flat, ctx.versions = flat, [factor._version for factor in flat]  # for second derivatives alone
        ctx.set_materialize_grads(False)
        formed = expand_stack(ctx.stacks, dtype)
        return (*formed[:wide].unbind(0), *formed[wide:].mT.unbind(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        result: list[Tensor | None] = [None] * len(ctx.flat)
        # 1. Only matrices that something used bring a gradient; the others' stacks are left out.
        present = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        if not present:
            return None, None, None, *result
        stacks = ctx.stacks
        if torch.is_grad_enabled():  # second derivatives: of the factors themselves, not of our copies
            if any(factor._version != version for factor, version in zip(ctx.flat, ctx.versions, strict=True)):
                raise RuntimeError("second derivatives of Kronecker factors that were changed in place since their use")
            stacks = _stacked(ctx.flat, ctx.order, ctx.wide)
        if len(present) < len(gradients):
            stacks = [stack[list(present)] for stack in stacks]
        # 2. One stack of gradients, the tall ones transposed, contracted against the factors in two products.
        wide = sum(index < ctx.wide for index in present)
        stacked = torch.stack([gradient if index < ctx.wide else gradient.mT for index, gradient in present.items()])
        # 3. Each factor position gives one stack back; its slices go to their layers, transposed back where tall.
        for position, contracted in enumerate(contract_stack(stacked, stacks)):
            parts = list(contracted[:wide].unbind(0))
            if wide < len(present):
                parts += contracted[wide:].mT.contiguous().unbind(0)
            for index, part in zip(present, parts, strict=True):
                result[position * len(gradients) + index] = part
        return None, None, None, *result


def _stacked(flat: Sequence[Tensor], order: int, wide: int) -> list[Tensor]:
    """A copy per factor position: the factors of wide matrices, and then those of tall ones, transposed."""
    layers = len(flat) // order
    positions = [flat[start : start + layers] for start in range(0, len(flat), layers)]
    return [torch.stack([*each[:wide], *(factor.mT for factor in each[wide:])]) for each in positions]
