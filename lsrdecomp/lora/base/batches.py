"""Batches of texts and of prompts, as a base of any task reads them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lsrdecomp.errors import CalibrationError
from lsrdecomp.lora.base.dataset import DataError, PromptExample, TextPair
from lsrdecomp.lora.base.heads import IGNORED_LABEL, Head
from lsrdecomp.lora.base.tokens import LOSS_TOKENS, token_batches, tokenize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lsrdecomp.lora.base.base_model import Base

DEFAULT_TEXT_LENGTH = 128
"""Maximum tokens of a text, unless another number is given."""


def text_batches(
    base: Base, texts: Sequence[TextPair], *, size: int, max_length: int | None = None, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of texts in random order.

    The order depends on ``seed`` alone, so an interrupted calibration can be resumed.

    Parameters
    ----------
    base : Base
        Its tokenizer reads the texts. Of a seq2seq model the second text of each pair is the
        output. Any other reads it beside the first, if every text of the batch has one.
    texts : sequence of (str, str or None)
    size : int
        Texts of a batch.
    max_length : int, optional
        Tokens beyond which a text is cut; absent, `DEFAULT_TEXT_LENGTH`.
    seed : int
        Seed of the order.

    Raises
    ------
    CalibrationError
        If a seq2seq text has no output.
    """
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    tokenize_texts = partial(
        base.tokenizer,
        padding=True,
        truncation=True,
        max_length=max_length or DEFAULT_TEXT_LENGTH,
        return_tensors="pt",
    )
    for start in range(0, len(order), size):
        rows = [texts[i] for i in order[start : start + size]]
        first = [text for text, _ in rows]
        second = [text for _, text in rows]
        all_are_pairs = None not in second
        if base.head is Head.seq2seq:
            if not all_are_pairs:
                raise CalibrationError(
                    "a seq2seq model needs pairs: input, a tab, output on each line"
                )
            yield _seq2seq_batch(tokenize_texts, inputs=first, outputs=second)
        elif all_are_pairs:
            yield dict(tokenize_texts(first, second))
        else:
            yield dict(tokenize_texts(first))


def _seq2seq_batch(
    tokenize_texts: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str | None]
) -> dict[str, Tensor]:
    """Return a batch whose labels are the tokens of the outputs."""
    batch = dict(tokenize_texts(inputs))
    labels = tokenize_texts(text_target=outputs)
    is_padding = labels["attention_mask"] == 0
    batch["labels"] = labels["input_ids"].masked_fill(is_padding, IGNORED_LABEL)
    return batch


def prompt_batches(
    base: Base,
    examples: Sequence[PromptExample],
    *,
    size: int,
    seed: int,
    max_length: int | None = None,
    answers: str = "completion",
    truncate: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Return an iterator over batches of prompts with completions, in random order.

    A causal model reads prompt and completion as one text, whose ``loss_mask`` marks the tokens to
    be predicted. A seq2seq model reads the prompt and is to predict the completion. Any other reads
    the two as a pair of texts.

    Parameters
    ----------
    base : Base
    examples : sequence of PromptExample
        As `read_examples` returns them.
    size : int
        Examples of a batch.
    seed : int
        Seed of the order.
    max_length, answers, truncate
        As for `tokenize`. Models that are not causal have a use for ``max_length`` only.

    Raises
    ------
    DataError
        As `tokenize`, for a causal model; for any other if an example is a conversation.
    """
    if base.head is Head.causal_lm:
        rows = tokenize(
            examples, base.tokenizer, max_length=max_length, answers=answers, truncate=truncate
        )
        pad_token_id = base.tokenizer.pad_token_id
        return token_batches(rows, size=size, seed=seed, pad_token_id=pad_token_id)
    if answers not in LOSS_TOKENS:
        raise DataError(f"answers must be one of {', '.join(LOSS_TOKENS)}, got {answers!r}")
    texts: list[TextPair] = []
    for example in examples:
        if example.messages:
            raise DataError(
                f'{example.where}: "messages" are for causal language models, and {base.name} is '
                "not one"
            )
        if example.prompt:
            texts.append((example.prompt, example.completion))
        else:
            texts.append((example.completion, None))
    return text_batches(base, texts, size=size, max_length=max_length, seed=seed)
