"""A model that is measured: its modules by name, their sizes, the state it is in meanwhile, and what it keeps.

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
    """Modules under the names they have in the plain base, all names of a shared one; PEFT's wrapping is undone."""
    base: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return dict(base.named_modules(remove_duplicate=False))


def layer_size(module: nn.Module, name: str) -> tuple[int, int]:
    """(m, n) of a Linear layer, GPT-2's Conv1D or an adapter's wrapping of either."""
    plain: nn.Module = getattr(module, "get_base_layer", lambda: module)()
    if not isinstance(plain, LINEAR):
        raise CalibrationError(
            f"{name} is a {type(plain).__name__}; statistics are for Linear layers"
        )
    return geometry_of(plain).matrix_shape


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, frozen parameters, no cache, no checkpointing of the model's own; then all as before."""
    training = {module: module.training for module in model.modules()}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = getattr(model, "config", None)
    caching = getattr(config, "use_cache", None)
    checkpointing = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
    ]
    model.eval()
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        for module in checkpointing:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        if caching:
            config.use_cache = False  # type: ignore[union-attr]
        with torch.enable_grad():
            yield
    finally:
        if caching:
            config.use_cache = caching  # type: ignore[union-attr]
        for module in checkpointing:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        for parameter in learning:
            parameter.requires_grad_(True)
        for module, mode in training.items():
            module.training = mode


@contextmanager
def recomputed(model: nn.Module, watched: Sequence[nn.Module]) -> Iterator[int]:
    """Inside, blocks of ``model`` keep their inputs alone; yields how many blocks it has, 0 if the model has no such.

    A block is a `transformers.modeling_layers.GradientCheckpointingLayer`, and one inside another
    is left to the outer. Parameters must be frozen: gradients reach a block through its arguments,
    or begin in it if it holds one of the ``watched`` modules. Costs another forward pass of the
    blocks that gradients go through.
    """
    # Instances get a forward of their own, which shadows their class's; one that they had already
    # (accelerate's hooks set one) is put back at the end.
    blocks = _outermost(model)
    own: dict[nn.Module, Any] = {block: block.__dict__.get("forward") for block in blocks}
    some = set(watched)
    try:
        for block in blocks:
            block.forward = _again(block.forward, any(module in some for module in block.modules()))
        yield len(blocks)
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
        values: list[Any] = [
            None if isinstance(value, Cache) else value for value in (*args, *kwargs.values())
        ]
        flowing = any(isinstance(value, Tensor) and value.requires_grad for value in values)
        if not torch.is_grad_enabled() or not (flowing or begins):
            return forward(*values[:most], **dict(zip(names, values[most:], strict=True)))
        # A reentrant checkpoint goes back only if an argument asks for it: where they begin inside,
        # one is made to.
        if not flowing:
            first = next(
                i
                for i, value in enumerate(values)
                if isinstance(value, Tensor) and value.is_floating_point()
            )
            values[first] = values[first].detach().requires_grad_()

        def block(*values: Any) -> Any:
            return forward(*values[:most], **dict(zip(names, values[most:], strict=True)))

        # The reentrant form: first without gradients, then with them, so that hooks can tell the
        # two passes apart.
        return checkpoint(block, *values, use_reentrant=True, preserve_rng_state=False)

    return run
