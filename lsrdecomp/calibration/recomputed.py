"""Blocks whose activations are computed again on the way back instead of being kept, in evaluation mode.

transformers does so for training alone, and asks ``module.training``, which would switch dropout on. So its blocks are
found by their class and wrapped here; hooks inside them see the second pass, the one with gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def recomputed(model: nn.Module, watched: Sequence[nn.Module]) -> Iterator[int]:
    """Inside, blocks of ``model`` keep their inputs alone; yields how many blocks it has, 0 if the model has no such.

    A block is a `transformers.modeling_layers.GradientCheckpointingLayer`, and one inside another is left to the outer.
    Parameters must be frozen: gradients reach a block through its arguments, or begin in it if it holds one of the
    ``watched`` modules. Costs another forward pass of the blocks that gradients go through.
    """
    found = _outermost(model)
    own: dict[nn.Module, Any] = {block: block.__dict__.get("forward") for block in found}
    some = set(watched)
    try:
        for block in found:
            block.forward = _again(block.forward, any(module in some for module in block.modules()))
        yield len(found)
    finally:
        for block, forward in own.items():
            del block.forward
            if forward is not None:
                block.forward = forward


def _outermost(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, GradientCheckpointingLayer):
        return [model]
    return list(dict.fromkeys(block for child in model.children() for block in _outermost(child)))


def _again(forward: Callable[..., Any], begins: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        names, most = list(kwargs), len(args)
        # What a cache holds would be written twice, and nothing here reads one.
        values: list[Any] = [None if isinstance(value, Cache) else value for value in (*args, *kwargs.values())]
        flowing = any(isinstance(value, Tensor) and value.requires_grad for value in values)
        if not torch.is_grad_enabled() or not (flowing or begins):
            return forward(*values[:most], **dict(zip(names, values[most:], strict=True)))
        if not flowing:
            first = next(i for i, value in enumerate(values) if isinstance(value, Tensor) and value.is_floating_point())
            values[first] = values[first].detach().requires_grad_()

        def block(*values: Any) -> Any:
            return forward(*values[:most], **dict(zip(names, values[most:], strict=True)))

        # The reentrant form: first without gradients, then with them, so that hooks can tell the two passes apart.
        return checkpoint(block, *values, use_reentrant=True, preserve_rng_state=False)

    return run
