"""Forward passes: the logits of a batch's predictions, held in little memory.

A vocabulary is about a hundred times as large as the model's width, and whoever computes with
logits holds several float32 copies of them. So the hidden states that the output layer reads are
kept in their place, and logits are formed from them for a few predictions at a time.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from lsrdecomp.lora.base.heads import TOKEN_HEADS, Batch, Head, loss_mask, prediction_logits
from lsrdecomp.lora.base.tokens import ROW_COUNTS, model_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lsrdecomp.lora.base.base_model import Base


@dataclass(frozen=True, slots=True)
class BatchLogits:
    """Logits of the predictions of one batch, formed when they are asked for.

    Either hidden states with the layer that makes logits of them, or the logits themselves and no
    layer.
    """

    hidden: Tensor
    """Hidden states (predictions, width), or logits (predictions, classes) if ``layer`` is None;
    with their graph."""
    counts: Tensor
    """Predictions of each example, (examples,)."""
    layer: nn.Module | None
    """The output layer."""

    def __len__(self) -> int:
        """Return the number of predictions."""
        return len(self.hidden)

    @property
    def logits(self) -> Tensor:
        """Logits of all predictions, (predictions, classes) in float32, formed anew each time."""
        return self.form_logits(self.hidden)

    def form_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of some rows of ``hidden``, (rows, classes) in float32."""
        if self.layer is None:
            return hidden
        logits: Tensor = self.layer(hidden).float()
        return logits


def forward(base: Base, batch: Batch, *, full_logits: bool = False) -> BatchLogits:
    """Run a model on one batch, and return the logits of its predictions.

    Of a causal model only the positions that predict reach the output layer: a vocabulary is large,
    and a prompt is long.

    Parameters
    ----------
    base : Base
        The model, perhaps with an adapter. Parameters that require gradients get them through the
        result.
    batch : Mapping of name to Tensor
    full_logits : bool
        Hold logits, not hidden states. Models that do something to the logits after the output
        layer, such as a scale or a cap, always have theirs held.
    """
    device = next(base.model.parameters()).device
    # Found where the batch lies, on the CPU as a rule: the number of predictions shapes what
    # follows, and the CPU would wait for a GPU to count them.
    positions = _predicting_positions(batch, base.head)
    inputs = send_to_device(batch, device)
    layer = output_layer(base)
    # 1. Where every position predicts, or the model has no output layer for tokens, take what the
    #    model returns.
    if layer is None or positions is None:
        return _forward_in_full(base, batch, inputs, positions)
    counts = positions.sum(1).cpu()
    # 2. Keep the hidden states of the predicting positions, if the output layer alone makes the
    #    logits of them.
    if not full_logits:
        hidden = _hidden_states(base, inputs, layer, positions)
        if hidden is not None:
            return BatchLogits(hidden, counts, layer)
    # 3. Else keep the logits of these positions, as the model returns them.
    with _restrict_output_layer(layer, positions):
        logits = base.model(**model_inputs(inputs)).logits.float()
    return BatchLogits(logits, counts, None)


def forward_repeatable(
    base: Base, batch: Batch, *, max_kept_classes: int = 4096
) -> tuple[BatchLogits, Callable[[], Tensor]]:
    """Run a model without gradients; also return a function that forms the same logits again.

    Parameters
    ----------
    base : Base
    batch : Mapping of name to Tensor
    max_kept_classes : int
        Logits of more classes than this are not kept, by hand: the model runs again. That concerns
        models whose logits cannot be formed from hidden states (see `forward`).

    Returns
    -------
    output : BatchLogits
    form_logits : callable
        Returns the logits of ``output``, the same bit by bit, at any later time. It keeps no more
        than one row of the model's width, or of ``max_kept_classes``, per prediction.
    """
    with torch.no_grad():
        output = forward(base, batch)

    @torch.no_grad()
    def form_from_kept_rows() -> Tensor:
        return output.logits

    @torch.no_grad()
    def run_again() -> Tensor:
        return forward(base, batch).logits

    # Numbers are no more than the model read.
    holds_logits = output.layer is None and base.head is not Head.numbers
    if holds_logits and output.hidden.shape[-1] > max_kept_classes:
        return output, run_again
    return output, form_from_kept_rows


def predictions_at_a_time(n_classes: int) -> int:
    """Return the number of predictions whose logits are held at a time, at least one.

    Together they are four million numbers at most, a limit set by hand: 16 MB in single and 32 MB
    in double precision.
    """
    return max(1, 2**22 // n_classes)


def output_layer(base: Base) -> nn.Module | None:
    """Return the layer that makes the logits of tokens; None where there is no such layer."""
    if base.head is not Head.causal_lm:
        return None
    layer: Any = getattr(base.model, "get_output_embeddings", lambda: None)()
    return layer if isinstance(layer, nn.Module) else None


def _predicting_positions(inputs: Batch, head: Head) -> Tensor | None:
    """Return which positions predict, a row for each example; None where all do.

    A position of a causal model predicts the token after it, and so the last one nothing.
    """
    mask = loss_mask(inputs, head)
    if mask is None:
        return None
    mask = mask.bool()
    return mask[:, 1:] if head is Head.causal_lm else mask


def _hidden_states(base: Base, inputs: Batch, layer: nn.Module, positions: Tensor) -> Tensor | None:
    """Run a model for what its output layer reads at the positions that predict.

    Returns
    -------
    Tensor, shape (predictions, width), or None
        None if the model's logits are not the outputs of the layer.
    """
    # The output layer runs on the first few predictions only. If the model returns exactly the
    # layer's outputs for them, it does nothing to its logits after the layer.
    n_probes = 8
    with _restrict_output_layer(layer, positions, n_probes) as layer_inputs:
        probes = base.model(**model_inputs(inputs)).logits.float()
    hidden = layer_inputs[0]
    with torch.no_grad():
        outputs_of_layer = layer(hidden[:n_probes]).float()
    return hidden if torch.equal(outputs_of_layer, probes) else None


def _forward_in_full(
    base: Base, batch: Batch, inputs: Batch, positions: Tensor | None
) -> BatchLogits:
    """Run a model for all its logits, and return those of the positions that predict.

    ``inputs`` are the batch on the device of the model.
    """
    all_logits = base.outputs(base.model, inputs)
    logits = prediction_logits(all_logits, base.head, loss_mask(batch, base.head))
    if ROW_COUNTS in batch:
        counts = batch[ROW_COUNTS].cpu()
    elif positions is None or base.head not in TOKEN_HEADS:
        n_examples = len(all_logits)
        counts = torch.full((n_examples,), len(logits) // n_examples)
    else:
        counts = positions.sum(1).cpu()
    return BatchLogits(logits, counts, None)


@contextmanager
def _restrict_output_layer(
    layer: nn.Module, positions: Tensor, limit: int | None = None
) -> Iterator[list[Tensor]]:
    """Let the output layer run on the positions that predict, or on the first ``limit`` of them.

    Yields a list to which each call of the layer appends its input at all these positions,
    (predictions, width).
    """
    layer_inputs: list[Tensor] = []
    predicting = positions.nonzero(as_tuple=True)

    def hook(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        hidden = arguments[0][predicting]
        layer_inputs.append(hidden)
        return (hidden[:limit], *arguments[1:])

    handle = layer.register_forward_pre_hook(hook)
    try:
        yield layer_inputs
    finally:
        handle.remove()
