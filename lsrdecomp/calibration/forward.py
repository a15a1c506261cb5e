"""Forward passes: the logits of a batch's predictions, held in little memory.

A vocabulary has a hundred entries where the model's width has one, and whoever computes with logits
holds several float32 copies of them. So what the output layer reads is kept in place of the logits,
which are formed from it for a few predictions at a time.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.heads import TOKEN_HEADS, Batch, Head, loss_mask, prediction_logits
from lsrdecomp.calibration.tokens import model_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lsrdecomp.calibration.base_model import Base


@dataclass(frozen=True, slots=True)
class BatchLogits:
    """Logits of the predictions of one batch, not formed yet."""

    hidden: (
        Tensor  # (predictions, width), with its graph: input of `layer`; the logits if it is None
    )
    counts: Tensor  # (examples,): predictions of each example
    layer: nn.Module | None  # the output layer

    def __len__(self) -> int:
        """Return the number of predictions."""
        return len(self.hidden)

    @property
    def logits(self) -> Tensor:
        """Logits of all predictions, (predictions, classes) in float32, formed anew each time."""
        return self.logits_of(self.hidden)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the logits of some rows of ``hidden``."""
        return hidden if self.layer is None else self.layer(hidden).float()


def forward(
    base: Base, batch: Batch, *, full_logits: bool = False, n_probes: int = 8
) -> BatchLogits:
    """Run a model on one batch; gradients flow where its parameters want them.

    Of a causal model only the positions that predict reach the output layer: a vocabulary is large,
    a prompt is long.

    Parameters
    ----------
    base : Base
        The model, perhaps with an adapter.
    batch : Mapping of name to Tensor
        What it is called with.
    full_logits : bool
        Hold logits in place of what the output layer reads. That is also done for models that do
        something to the logits after this layer, such as a scale or a cap.
    n_probes : int
        Predictions by which it is tested whether anything comes after the output layer; by hand.
    """
    device = next(base.model.parameters()).device
    inputs = {name: value.to(device) for name, value in batch.items()}
    layer = output_layer(base)
    positions = _predicting_positions(inputs, base.head)
    # 1. Where every position predicts, or no layer of its own makes the logits of tokens, they are
    #    what the model returns.
    if layer is None or positions is None:
        return _forward_in_full(base, inputs, positions)
    counts = positions.sum(1).cpu()
    # 2. A pass in which the output layer makes the logits of a few rows only. If it makes the same
    #    bits from these rows on its own, nothing comes after it: the rows stand for all logits.
    if not full_logits:
        with _reading_only(layer, positions, n_probes) as inputs_read:
            returned = base.model(**model_inputs(inputs)).logits.float()
        hidden = inputs_read[0]
        with torch.no_grad():
            formed = layer(hidden[:n_probes]).float()
        if torch.equal(formed, returned):
            return BatchLogits(hidden, counts, layer)
    # 3. Otherwise the logits of all positions that predict, as the model returns them.
    with _reading_only(layer, positions):
        logits = base.model(**model_inputs(inputs)).logits.float()
    return BatchLogits(logits, counts, None)


def forward_repeatable(
    base: Base, batch: Batch, *, max_kept_classes: int = 4096
) -> tuple[BatchLogits, Callable[[], Tensor]]:
    """Run a model without gradients; also return a function that forms the same logits again.

    They are the same bit by bit. What the output layer reads is kept and the layer applied again.
    Where a model does more after it, logits of up to ``max_kept_classes`` classes are kept, and for
    more the model runs again.
    """
    with torch.no_grad():
        output = forward(base, batch)

    @torch.no_grad()
    def form_again() -> Tensor:
        return output.logits

    @torch.no_grad()
    def run_again() -> Tensor:
        return forward(base, batch).logits

    holds_logits = output.layer is None
    if holds_logits and output.hidden.shape[-1] > max_kept_classes:
        return output, run_again
    return output, form_again


def predictions_at_a_time(n_classes: int, max_numbers: int = 2**22) -> int:
    """Return of how many predictions the logits are handled at a time: a vocabulary is large.

    ``max_numbers``, set by hand, are 16 MB in single and 32 MB in double precision.
    """
    return max(1, max_numbers // n_classes)


def output_layer(base: Base) -> nn.Module | None:
    """Return the layer that makes the logits of tokens; None where there is no such layer."""
    if base.head is not Head.causal_lm:
        return None
    layer: Any = getattr(base.model, "get_output_embeddings", lambda: None)()
    return layer if isinstance(layer, nn.Module) else None


def _predicting_positions(inputs: Batch, head: Head) -> Tensor | None:
    """Return the positions that predict, (examples, tokens); None where all do."""
    mask = loss_mask(inputs, head)
    if mask is None:
        return None
    mask = mask.bool()
    if head is Head.causal_lm:  # a position predicts the token after it
        mask = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return mask


def _forward_in_full(base: Base, inputs: Batch, positions: Tensor | None) -> BatchLogits:
    """Return the logits that the model returns, without those of positions that do not predict."""
    all_logits = base.model(**model_inputs(inputs)).logits
    logits = prediction_logits(all_logits, base.head, loss_mask(inputs, base.head))
    if positions is None or base.head not in TOKEN_HEADS:
        n_examples = len(next(iter(inputs.values())))
        counts = torch.full((n_examples,), len(logits) // n_examples)
    else:
        counts = positions.sum(1).cpu()
    return BatchLogits(logits, counts, None)


@contextmanager
def _reading_only(
    layer: nn.Module, positions: Tensor, first: int | None = None
) -> Iterator[list[Tensor]]:
    """Let the output layer read the positions that predict alone, or the ``first`` of them.

    Yields a list that gets the input of each call at these positions, (predictions, width).
    """
    inputs: list[Tensor] = []

    def hook(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        hidden = arguments[0][positions]
        inputs.append(hidden)
        return (hidden[:first], *arguments[1:])

    handle = layer.register_forward_pre_hook(hook)
    try:
        yield inputs
    finally:
        handle.remove()
