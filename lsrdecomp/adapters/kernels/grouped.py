"""All expansions of a model at once: one matrix product and one copy per shape class, whatever the number of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lsrdecomp.adapters.kernels.stacked import contract_stack, expand, expand_stack


def expand_all(
    factor_lists: Sequence[Sequence[Tensor]], *, layerwise: bool = False, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Form many sums of Kronecker products, grouped by the shapes of their factors.

    The backward pass may run in several pieces, as reentrant gradient checkpointing makes it: each contracts what it
    brings, and the sum is exact.

    Parameters
    ----------
    factor_lists : sequence of sequences of Tensor
        For each matrix its factors as for `stacked.expand`.
    layerwise : bool
        Contract gradients layer by layer in backward, so that the gradient of one formed matrix is alive at a time.
        For models whose formed matrices are large beside their activations; grouped contraction launches less.
    dtype : torch.dtype, optional
        Of the formed matrices, and so of their gradients, by default that of the factors: with the model's own, no
        layer has to cast.

    Returns
    -------
    list of Tensor
        The formed matrices, in order.
    """
    classes: dict[object, list[int]] = {}
    for index, factors in enumerate(factor_lists):
        key = tuple((tuple(factor.shape), factor.dtype, factor.device) for factor in factors)
        classes.setdefault(key, []).append(index)
    formed: list[Tensor] = [torch.empty(0)] * len(factor_lists)
    for members in classes.values():
        group = [factor_lists[index] for index in members]
        for index, matrix in zip(members, _expand_group(group, layerwise, dtype), strict=True):
            formed[index] = matrix
    return formed


def _expand_group(group: Sequence[Sequence[Tensor]], layerwise: bool, dtype: torch.dtype | None) -> Sequence[Tensor]:
    dtype = dtype or group[0][0].dtype
    order = len(group[0])
    with torch.autocast(group[0][0].device.type, enabled=False):
        if not layerwise:
            flat = [factor for factors in zip(*group, strict=True) for factor in factors]  # factor by factor
            return _ExpandGroup.apply(order, dtype, *flat)  # type: ignore[no-any-return, no-untyped-call]
        with torch.no_grad():
            stacks = [torch.stack(factors) for factors in zip(*group, strict=True)]
            matrices = expand_stack(stacks).to(dtype).unbind(0)
        return [
            _ContractAlone.apply(matrix, [stack[index : index + 1] for stack in stacks], *factors)  # type: ignore[no-untyped-call]
            for index, (matrix, factors) in enumerate(zip(matrices, group, strict=True))
        ]


class _ExpandGroup(torch.autograd.Function):
    """Expansion of one shape class.

    The stacks are our own copies and live on the context, not among the saved tensors: those are freed after the first
    backward pass through the node, and reentrant checkpointing makes one pass for every checkpointed part of the model.
    """

    @staticmethod
    def forward(ctx: Any, order: int, dtype: torch.dtype, *flat: Tensor) -> tuple[Tensor, ...]:
        layers = len(flat) // order
        ctx.stacks = [torch.stack(flat[start : start + layers]) for start in range(0, len(flat), layers)]
        ctx.set_materialize_grads(False)
        return expand_stack(ctx.stacks).to(dtype).unbind(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        stacks = ctx.stacks if len(present) == len(gradients) else [stack[present] for stack in ctx.stacks]
        result: list[Tensor | None] = [None] * (len(gradients) * len(stacks))
        if present:
            stacked = _stack([gradient for gradient in gradients if gradient is not None])
            for position, contracted in enumerate(contract_stack(stacked, stacks)):
                for index, gradient in zip(present, contracted.unbind(0), strict=True):
                    result[position * len(gradients) + index] = gradient
        return None, None, *result


def _stack(matrices: Sequence[Tensor]) -> Tensor:
    """`torch.stack` that leaves transposed matrices transposed."""
    if matrices[0].stride(0) < matrices[0].stride(1):
        return torch.stack([matrix.mT for matrix in matrices]).mT
    return torch.stack(matrices)  # type: ignore[arg-type]


class _ContractAlone(torch.autograd.Function):
    """A formed matrix whose gradient is contracted by itself."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, stacks: list[Tensor], *factors: Tensor) -> Tensor:
        ctx.stacks = stacks
        return matrix.view_as(matrix)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(factor.squeeze(0) for factor in contract_stack(gradient.unsqueeze(0), ctx.stacks))


@dataclass(frozen=True, slots=True)
class Expansion:
    """A formed matrix and the state of the factors it was formed from."""

    matrix: Tensor
    state: tuple[tuple[int, int], ...]

    @staticmethod
    def state_of(factors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
        return tuple((factor.data_ptr(), factor._version) for factor in factors)

    def fits(self, factors: Sequence[Tensor]) -> bool:
        """Whether the matrix may stand for these factors here: they did not change, and gradients reach them."""
        needs_graph = torch.is_grad_enabled() and any(factor.requires_grad for factor in factors)
        return self.state == self.state_of(factors) and (self.matrix.requires_grad or not needs_graph)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # copied and pickled as None: it belongs to one forward pass


class Expandable(nn.Module):
    """A module that holds the factors of one sum of Kronecker products and may be handed the formed matrix."""

    expansion: Expansion | None = None

    @property
    def factors(self) -> list[Tensor]:
        """The factors, shapes (s, m_i, n_i), the outermost first."""
        raise NotImplementedError

    @property
    def is_expanded(self) -> bool:
        """Whether a formed matrix is at hand that may be used here and now."""
        return self.expansion is not None and self.expansion.fits(self.factors)

    def matrix(self) -> Tensor:
        """The formed sum, in the factors' own precision even under autocast; from `grouped_expansion` if it ran."""
        factors = self.factors
        if self.expansion is not None and self.expansion.fits(factors):
            return self.expansion.matrix
        with torch.autocast(factors[0].device.type, enabled=False):
            return expand(factors)


@contextmanager
def grouped_expansion(
    model: nn.Module,
    *,
    select: Callable[[nn.Module], Iterable[Expandable]] | None = None,
    layerwise: bool = False,
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """While open, every forward pass of ``model`` first forms all its sums of Kronecker products at once.

    What was formed stays valid through the backward pass, where gradient checkpointing reads it again, and is not used
    once a factor has changed. Under ``torch.compile`` nothing is grouped: the compiler does that itself.

    Parameters
    ----------
    model : torch.nn.Module
        Its `Expandable` modules are served.
    select : callable, optional
        Given the model, names the modules to serve, for instance those of active adapters; by default all.
    layerwise, dtype
        As for `expand_all`.
    """
    served: list[Expandable] = []

    def before_forward(module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        wanted = list(expandables(module) if select is None else select(module))
        # generation runs one pass a token, with factors that do not change
        if not torch.is_grad_enabled() and wanted == served and all(each.is_expanded for each in served):
            return
        release()
        served.extend(wanted)
        lists = [each.factors for each in served]
        for each, factors, matrix in zip(
            served, lists, expand_all(lists, layerwise=layerwise, dtype=dtype), strict=True
        ):
            each.expansion = Expansion(matrix, Expansion.state_of(factors))

    def release() -> None:
        for each in served:
            each.expansion = None
        served.clear()

    handle = model.register_forward_pre_hook(before_forward)
    try:
        yield
    finally:
        handle.remove()
        release()


def expandables(model: nn.Module) -> list[Expandable]:
    """The modules of a model that hold a sum of Kronecker products, each once."""
    return [module for module in model.modules() if isinstance(module, Expandable)]


__all__ = ["Expandable", "Expansion", "expand_all", "expandables", "grouped_expansion"]
