"""Preparation of a model for measuring its layers: names, sizes, mode, and recomputed activations.

The blocks of a model can compute their activations again in the backward pass instead of keeping
them. transformers' own gradient checkpointing works in training mode only, which would switch
dropout on. So blocks are found by their class and wrapped here. Hooks inside them see both passes,
and only the second one has gradients.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from lsrdecomp.errors import CalibrationError
from lsrdecomp.lora.peft.geometry import geometry_of, is_measured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules under the names they have in the plain base, without PEFT's wrapping.

    A shared module is listed under each of its names.
    """
    base: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return dict(base.named_modules(remove_duplicate=False))


def layer_size(module: nn.Module, name: str) -> tuple[int, int]:
    """Return (m, n) of a Linear layer, GPT-2's Conv1D, a Conv2d or an adapter's wrapping of one.

    Raises
    ------
    CalibrationError
        If it is another kind of layer; the message has its ``name``.
    """
    plain: nn.Module = getattr(module, "get_base_layer", lambda: module)()
    if not is_measured(plain):
        raise CalibrationError(
            f"{name} is a {type(plain).__name__}; statistics are for Linear and Conv2d layers"
        )
    return geometry_of(plain).matrix_shape


@contextmanager
def measurement_mode(model: nn.Module) -> Iterator[None]:
    """Prepare a model for gradients of its activations inside a ``with`` block.

    It is in evaluation mode, with all parameters frozen, without a cache and without transformers'
    gradient checkpointing. At the end everything is as it was.
    """
    # 1. Remember what the model was set to.
    was_training = {module: module.training for module in model.modules()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    checkpointing: list[Any] = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
    ]
    # 2. Change it, and change it back.
    model.eval()
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        for module in checkpointing:
            module.gradient_checkpointing = False
        if use_cache:
            config.use_cache = False  # type: ignore[union-attr]
        with torch.enable_grad():
            yield
    finally:
        if use_cache:
            config.use_cache = use_cache  # type: ignore[union-attr]
        for module in checkpointing:
            module.gradient_checkpointing = True
        for parameter in trainable:
            parameter.requires_grad_(True)
        for module, mode in was_training.items():
            module.training = mode


@contextmanager
def recompute_activations(model: nn.Module, watched: Sequence[nn.Module]) -> Iterator[int]:
    """Let the blocks of a model keep only their inputs, and run again in the backward pass.

    Yields the number of blocks, which is 0 if the model has none.

    Parameters
    ----------
    model : nn.Module
        Its blocks are `transformers.modeling_layers.GradientCheckpointingLayer`; one inside another
        is part of the outer one. Parameters must be frozen.
    watched : sequence of nn.Module
        Modules that hooks record. A block that holds one is recomputed even if none of its
        arguments needs a gradient: the hook makes gradients begin inside it.

    Notes
    -----
    Costs another forward pass of the blocks that gradients go through.
    """
    # A `forward` set on the instance shadows that of its class. An instance may have had one before
    # (accelerate's hooks set one), which is put back at the end.
    blocks = _outermost_blocks(model)
    watched_modules = set(watched)
    instance_forwards: dict[nn.Module, Any] = {
        block: block.__dict__.get("forward") for block in blocks
    }
    try:
        for block in blocks:
            is_watched = not watched_modules.isdisjoint(block.modules())
            block.forward = _recomputing_forward(block.forward, is_watched)
        yield len(blocks)
    finally:
        for block, forward in instance_forwards.items():
            del block.forward
            if forward is not None:
                block.forward = forward


def _outermost_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model that are not inside another block, each once."""
    if isinstance(model, GradientCheckpointingLayer):
        return [model]
    blocks: dict[nn.Module, None] = {}
    for child in model.children():
        blocks.update(dict.fromkeys(_outermost_blocks(child)))
    return list(blocks)


def _recomputing_forward(forward: Callable[..., Any], is_watched: bool) -> Callable[..., Any]:
    """Return a block's forward that computes activations again in the backward pass.

    ``is_watched`` says that gradients begin in the block even if no argument needs one.
    """

    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # nothing is kept anyway; a model that writes reads a cache
            return forward(*args, **kwargs)
        # 1. torch's checkpoint takes positional arguments only: put all arguments in one list. A
        #    cache is left out: the second pass would write to it again, and nothing here reads it.
        names = list(kwargs)
        n_positional = len(args)
        values: list[Any] = [
            None if isinstance(value, Cache) else value for value in (*args, *kwargs.values())
        ]

        def call_forward(*values: Any) -> Any:
            named = dict(zip(names, values[n_positional:], strict=True))
            return forward(*values[:n_positional], **named)

        # 2. Where no gradient passes, nothing is kept anyway.
        needs_gradient = any(isinstance(value, Tensor) and value.requires_grad for value in values)
        if not (needs_gradient or is_watched):
            return call_forward(*values)
        # 3. A reentrant checkpoint runs backward only if an argument needs a gradient. Where
        #    gradients begin inside the block, let its first floating-point argument need one.
        if not needs_gradient:
            index = next(i for i, value in enumerate(values) if _is_floating(value))
            values[index] = values[index].detach().requires_grad_()
        # 4. A reentrant checkpoint runs first without gradients and then with them, by which hooks
        #    tell the two passes apart.
        return checkpoint(call_forward, *values, use_reentrant=True, preserve_rng_state=False)

    return recomputing


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
