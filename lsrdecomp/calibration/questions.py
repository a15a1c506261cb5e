"""What calibration, comparison and distillation share: batches, which tokens are to be answered, complaints."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lsrdecomp.calibration.dataset import ANSWER_MASK
from lsrdecomp.calibration.fisher import Head
from lsrdecomp.errors import LsrError

Batch = Mapping[str, Tensor]
TOKEN_HEADS = (Head.tokens, Head.causal_lm, Head.seq2seq)
IGNORED = -100  # label of a token that is not to be answered, as transformers has it


class CalibrationError(LsrError, RuntimeError):
    """The data or the model gave nothing to measure; the message says what was missing."""


def answer_mask(batch: Batch, head: Head) -> Tensor | None:
    """Which positions of a batch hold real tokens of the answer, (examples, tokens); None where all do."""
    if ANSWER_MASK in batch:
        return batch[ANSWER_MASK]
    if head is not Head.seq2seq:
        return batch.get("attention_mask")
    if "labels" in batch:
        return batch["labels"] != IGNORED
    return batch.get("decoder_attention_mask")
