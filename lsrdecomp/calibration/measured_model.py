"""A model that is measured: its modules by name, their sizes, and the state it is in meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.questions import CalibrationError


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Modules under the names they have in the plain base, all names of a shared one; PEFT's wrapping is undone."""
    base: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return dict(base.named_modules(remove_duplicate=False))


def layer_size(module: nn.Module, name: str) -> tuple[int, int]:
    """(m, n) of a Linear layer, GPT-2's Conv1D or an adapter's wrapping of either."""
    plain: nn.Module = getattr(module, "get_base_layer", lambda: module)()
    if isinstance(plain, nn.Linear):
        return plain.out_features, plain.in_features
    weight = getattr(plain, "weight", None)
    if type(plain).__name__ == "Conv1D" and isinstance(weight, Tensor):
        return weight.shape[1], weight.shape[0]
    raise CalibrationError(f"{name} is a {type(plain).__name__}; statistics are for Linear layers")


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, frozen parameters, no cache, no checkpointing of the model's own; then all as before."""
    training = {module: module.training for module in model.modules()}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = getattr(model, "config", None)
    caching = getattr(config, "use_cache", None)
    checkpointing = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
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
