"""Features of a classifier: what its last linear layer reads, which is where its logits come from.

They are hundreds of numbers for each prediction, where the logits are two or three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.forward import BatchLogits, forward
from lsrdecomp.calibration.heads import Batch, Head

if TYPE_CHECKING:
    from lsrdecomp.calibration.base_model import Base

EXAMPLE_HEADS = (Head.classification, Head.regression)
"""Heads of models that have features here."""


def forward_with_features(base: Base, batch: Batch) -> tuple[BatchLogits, Tensor | None]:
    """Run a model on one batch; return its logits and features, both with their graph.

    Returns
    -------
    logits : BatchLogits
        As `forward` returns them.
    features : Tensor, shape (predictions, width), optional
        None for models that predict tokens, and where no linear layer's output is the logits.
    """
    # 1. Record the calls of all linear layers that have an output for each class.
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
    # 2. The last of them whose output is the logits, bit by bit, read the features.
    for inputs, output in reversed(calls):
        features = _rows_behind(result.logits.detach(), inputs, output.detach().float())
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


def _rows_behind(logits: Tensor, inputs: Tensor, output: Tensor) -> Tensor | None:
    """Return the rows of a layer's input (examples, [tokens,] width) that became the logits.

    None if the logits are not among the layer's output.
    """
    if output.shape == logits.shape and torch.equal(output, logits):
        return inputs
    if output.ndim != 3 or (len(output), output.shape[-1]) != tuple(logits.shape):
        return None
    # The layer classified every token, and the model took the logits of one.
    is_logits = (output == logits[:, None]).all(-1)
    if not bool(is_logits.any(1).all()):
        return None
    examples = torch.arange(len(inputs), device=inputs.device)
    return inputs[examples, is_logits.long().argmax(1)]
