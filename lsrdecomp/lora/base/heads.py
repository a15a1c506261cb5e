"""Heads: the meaning of a model's logits, and the positions at which they are predictions.

A *prediction* is one distribution over classes: that of a whole example for a classifier, that of
the next token at one position for a language model. Losses and divergences are means over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from torch import Tensor

from lsrdecomp.errors import ShapeError
from lsrdecomp.lora.base.tokens import LOSS_MASK

Batch = Mapping[str, Tensor]
"""Arguments of a model's forward pass by name, and perhaps a `LOSS_MASK`."""

IGNORED_LABEL = -100
"""Label that the losses of transformers ignore."""


class Head(Enum):
    """Meaning of a model's logits."""

    classification = "one class per example"
    regression = "one number per example, with unit variance"
    tokens = "one class per token"
    causal_lm = "the next token at every position"
    seq2seq = "the next token of the output at every position"


TOKEN_HEADS = (Head.tokens, Head.causal_lm, Head.seq2seq)
"""Heads that predict at every token."""
EXAMPLE_HEADS = (Head.classification, Head.regression)
"""Heads that predict once per example."""


def prediction_logits(logits: Tensor, head: Head, mask: Tensor | None = None) -> Tensor:
    """Return the logits of every prediction of a batch, (predictions, classes) in float32.

    Parameters
    ----------
    logits : Tensor, shape (examples, classes), (examples, 1) or (examples, tokens, classes)
        What the model returned.
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
    n_axes = 3 if head in TOKEN_HEADS else 2
    has_wrong_width = head is Head.regression and logits.shape[-1] != 1
    if logits.ndim != n_axes or has_wrong_width:
        raise ShapeError(f"logits of shape {tuple(logits.shape)} for {head.name} ({head.value})")
    if head is Head.causal_lm:
        logits = logits[:, :-1]
        mask = None if mask is None else mask[:, 1:]
    if head in TOKEN_HEADS:
        logits = logits.flatten(0, 1) if mask is None else logits[mask.bool()]
    return logits.float()


def loss_mask(batch: Batch, head: Head) -> Tensor | None:
    """Return a mask of the tokens to be predicted, (examples, tokens); None if all are."""
    if LOSS_MASK in batch:
        return batch[LOSS_MASK]
    if head is not Head.seq2seq:
        return batch.get("attention_mask")
    if "labels" in batch:
        return batch["labels"] != IGNORED_LABEL
    return batch.get("decoder_attention_mask")
