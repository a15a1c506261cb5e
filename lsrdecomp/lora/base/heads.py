"""Heads: the meaning of a model's outputs, and the positions at which they are predictions.

A *prediction* is one distribution over classes: that of a whole example for a classifier, that of
the next token at one position for a language model. For outputs that are numbers, such as an
embedding or the noise in an image, it is a normal distribution around them with the same variance
for all, which drops out of every share. Losses and divergences are means over predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import ShapeError
from lsrdecomp.lora.base.tokens import LOSS_MASK

if TYPE_CHECKING:
    from torch import Tensor

Batch = Mapping[str, Any]
"""Arguments of a model's forward pass by name, and perhaps a `LOSS_MASK` or `ROW_COUNTS`."""

IGNORED_LABEL = -100
"""Label that the losses of transformers ignore."""


class Head(Enum):
    """Meaning of a model's logits."""

    classification = "one class per example"
    numbers = "numbers for each example, all with unit variance"
    tokens = "one class per token"
    causal_lm = "the next token at every position"
    seq2seq = "the next token of the output at every position"


TOKEN_HEADS = (Head.tokens, Head.causal_lm, Head.seq2seq)
"""Heads that predict at every token."""
EXAMPLE_HEADS = (Head.classification, Head.numbers)
"""Heads that predict once per example."""


def prediction_logits(logits: Tensor, head: Head, mask: Tensor | None = None) -> Tensor:
    """Return the logits of every prediction of a batch, (predictions, classes) in float32.

    Parameters
    ----------
    logits : Tensor, shape (examples, classes), (examples, …) or (examples, tokens, classes)
        What the model returned; numbers may have any axes.
    head : Head
        Meaning of the logits.
    mask : Tensor, shape (examples, tokens), optional
        Tokens that are to be predicted, as `loss_mask` returns them; absent, all. A causal model
        predicts each token at the position before it.

    Raises
    ------
    ShapeError
        If the logits do not have the shape of the head.
    """
    if head is Head.numbers and logits.ndim > 0:
        return logits.reshape(len(logits), -1).float()
    n_axes = 3 if head in TOKEN_HEADS else 2
    if logits.ndim != n_axes:
        raise ShapeError(f"logits of shape {tuple(logits.shape)} for {head.name} ({head.value})")
    if head is Head.causal_lm:
        logits = logits[:, :-1]
        mask = None if mask is None else mask[:, 1:]
    if head in TOKEN_HEADS:
        logits = logits.flatten(0, 1) if mask is None else logits[mask.bool()]
    return logits.float()


def loss_mask(batch: Batch, head: Head) -> Tensor | None:
    """Return a mask of the tokens to be predicted, (examples, tokens); None if all are."""
    mask: Tensor | None
    if LOSS_MASK in batch:
        mask = batch[LOSS_MASK]
    elif head is not Head.seq2seq:
        mask = batch.get("attention_mask")
    elif "labels" in batch:
        mask = batch["labels"] != IGNORED_LABEL
    else:
        mask = batch.get("decoder_attention_mask")
    return mask
