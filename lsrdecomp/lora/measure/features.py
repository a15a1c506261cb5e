"""Features of a classifier: the inputs of its last linear layer, whose outputs are the logits.

A distillation learns from them too: hundreds of numbers for each prediction say more than two or
three logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lsrdecomp.lora.base.forward import BatchLogits, forward
from lsrdecomp.lora.base.heads import EXAMPLE_HEADS, Batch

if TYPE_CHECKING:
    from lsrdecomp.lora.base.base_model import Base


def forward_with_features(base: Base, batch: Batch) -> tuple[BatchLogits, Tensor | None]:
    """Run a model on one batch; return its logits and features, which gradients can pass through.

    Returns
    -------
    logits : BatchLogits
        As `forward` returns them.
    features : Tensor, shape (predictions, width), or None
        None for models that predict tokens, and where the logits are not the output of a linear
        layer.
    """
    # 1. Record inputs and outputs of all linear layers that have an output for each class.
    calls: list[tuple[Tensor, Tensor]] = []

    def hook(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(output, Tensor):
            calls.append((inputs[0], output))

    handles = [layer.register_forward_hook(hook) for layer in _candidate_layers(base)]
    try:
        result = forward(base, batch)
    finally:
        for handle in handles:
            handle.remove()
    # 2. The features are the inputs of the last call whose outputs are the logits, bit by bit.
    logits = result.logits.detach()
    for inputs, output in reversed(calls):
        features = _inputs_of_logits(logits, inputs, output.detach().float())
        if features is not None:
            return result, features
    return result, None


def _candidate_layers(base: Base) -> list[nn.Linear]:
    """Return the linear layers with as many outputs as a classifier has classes."""
    if base.head not in EXAMPLE_HEADS:
        return []
    n_classes = getattr(getattr(base.model, "config", None), "num_labels", 0)
    linear = [module for module in base.model.modules() if isinstance(module, nn.Linear)]
    return [layer for layer in linear if layer.out_features == n_classes]


def _inputs_of_logits(logits: Tensor, inputs: Tensor, output: Tensor) -> Tensor | None:
    """Return the inputs from which a layer made the logits, if it did.

    Parameters
    ----------
    logits : Tensor, shape (examples, classes)
    inputs : Tensor, shape (examples, width) or (examples, tokens, width)
    output : Tensor, shape (examples, classes) or (examples, tokens, classes)

    Returns
    -------
    Tensor, shape (examples, width), or None
        None if the logits are not among the outputs.
    """
    if output.shape == logits.shape and torch.equal(output, logits):
        return inputs
    if output.ndim != 3 or (len(output), output.shape[-1]) != tuple(logits.shape):
        return None
    # The layer may have classified every token, and the model have taken the logits of one.
    is_logits = (output == logits[:, None]).all(-1)
    if not bool(is_logits.any(1).all()):
        return None
    examples = torch.arange(len(inputs), device=inputs.device)
    return inputs[examples, is_logits.long().argmax(1)]
