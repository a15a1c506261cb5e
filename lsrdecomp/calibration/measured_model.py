"""A model while it is measured: its modules by name, their sizes, its modes, and less memory.

Blocks can compute their activations again on the way back instead of keeping them. transformers
does so for training alone, and asks ``module.training``, which would switch dropout on. So its
blocks are found by their class and wrapped here; hooks inside them see the second pass, the one
with gradients.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from lsrdecomp.adapters.geometry import LINEAR, geometry_of
from lsrdecomp.calibration.errors import CalibrationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules under the names they have in the plain base, without PEFT's wrapping.

    A shared module stands under all its names.
    """
    base: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return dict(base.named_modules(remove_duplicate=False))


def layer_size(module: nn.Module, name: str) -> tuple[int, int]:
    """Return (m, n) of a Linear layer, GPT-2's Conv1D or an adapter's wrapping of either.

    Raises
    ------
    CalibrationError
        If it is another layer; the message calls it by ``name``.
    """
    plain: nn.Module = getattr(module, "get_base_layer", lambda: module)()
    if not isinstance(plain, LINEAR):
        raise CalibrationError(
            f"{name} is a {type(plain).__name__}; statistics are for Linear layers"
        )
    return geometry_of(plain).matrix_shape


@contextmanager
def measurement_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode for a block, with gradients but no parameter that needs one.

    It has no cache and no gradient checkpointing of its own. At the end all is as before.
    """
    # 1. What the model was set to.
    was_training = {module: module.training for module in model.modules()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    checkpointing: list[Any] = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
    ]
    # 2. The mode, and back.
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
def recomputed(model: nn.Module, watched: Sequence[nn.Module]) -> Iterator[int]:
    """Let the blocks of a model keep their inputs alone, and run again on the way back.

    Yields the number of blocks, which is 0 if the model has none.

    Parameters
    ----------
    model : nn.Module
        Its blocks are `transformers.modeling_layers.GradientCheckpointingLayer`; one inside another
        is left to the outer. Parameters must be frozen.
    watched : sequence of nn.Module
        Modules that hooks record. Gradients reach a block through its arguments, or begin in it if
        it holds one of these.

    Notes
    -----
    Costs another forward pass of the blocks that gradients go through.
    """
    # Instances get a forward of their own, which shadows their class's; one that they had already
    # (accelerate's hooks set one) is put back at the end.
    blocks = _outermost_blocks(model)
    recorded = set(watched)
    instance_forwards: dict[nn.Module, Any] = {
        block: block.__dict__.get("forward") for block in blocks
    }
    try:
        for block in blocks:
            is_watched = not recorded.isdisjoint(block.modules())
            block.forward = _recomputing(block.forward, is_watched)
        yield len(blocks)
    finally:
        for block, forward in instance_forwards.items():
            del block.forward
            if forward is not None:
                block.forward = forward


def _outermost_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model that lie in no other block, each once."""
    if isinstance(model, GradientCheckpointingLayer):
        return [model]
    blocks: dict[nn.Module, None] = {}
    for child in model.children():
        blocks.update(dict.fromkeys(_outermost_blocks(child)))
    return list(blocks)


def _recomputing(forward: Callable[..., Any], is_watched: bool) -> Callable[..., Any]:
    """Return a block's forward that computes activations again on the way back.

    ``is_watched`` says that gradients begin in the block even if no argument needs one.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        # 1. All arguments in a row, as a checkpoint takes them. What a cache holds would be written
        #    twice, and nothing here reads one.
        names = list(kwargs)
        n_positional = len(args)
        values: list[Any] = [
            None if isinstance(value, Cache) else value for value in (*args, *kwargs.values())
        ]

        def call(*values: Any) -> Any:
            named = dict(zip(names, values[n_positional:], strict=True))
            return forward(*values[:n_positional], **named)

        # 2. Without gradients nothing is kept anyway.
        needs_gradient = any(isinstance(value, Tensor) and value.requires_grad for value in values)
        if not torch.is_grad_enabled() or not (needs_gradient or is_watched):
            return call(*values)
        # 3. A reentrant checkpoint goes back only if an argument needs a gradient: where gradients
        #    begin inside, one is made to.
        if not needs_gradient:
            index = next(i for i, value in enumerate(values) if _is_floating(value))
            values[index] = values[index].detach().requires_grad_()
        # 4. The reentrant form runs first without gradients, then with them, so that hooks can tell
        #    the two passes apart.
        return checkpoint(call, *values, use_reentrant=True, preserve_rng_state=False)

    return run


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
