"""Batches of texts and of prompts, as a base model reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lsrdecomp.calibration.dataset import DataError, PromptExample, TextPair
from lsrdecomp.calibration.errors import CalibrationError
from lsrdecomp.calibration.heads import IGNORED_LABEL, Head
from lsrdecomp.calibration.tokens import LOSS_TOKENS, token_batches, tokenize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lsrdecomp.calibration.base_model import Base

DEFAULT_TEXT_LENGTH = 128
"""Tokens of a text at most where nothing else is said."""


def text_batches(
    base: Base, texts: Sequence[TextPair], *, size: int, max_length: int | None = None, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of texts in random order, as the model reads them.

    The order depends on ``seed`` alone, so an interrupted calibration finds its place again.

    Parameters
    ----------
    base : Base
        Its tokenizer reads the texts. For seq2seq the second text of each is the output; for others
        it is a second segment, where every text of a batch has one.
    texts : sequence of (str, str or None)
        The texts.
    size : int
        Texts of a batch.
    max_length : int, optional
        Tokens beyond which a text is cut; absent, 128.
    seed : int
        Seed of the order.

    Raises
    ------
    CalibrationError
        If a seq2seq text has no output.
    """
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    settings = {
        "padding": True,
        "truncation": True,
        "max_length": max_length or DEFAULT_TEXT_LENGTH,
        "return_tensors": "pt",
    }
    for start in range(0, len(order), size):
        rows = [texts[i] for i in order[start : start + size]]
        first = [text for text, _ in rows]
        second = [text for _, text in rows]
        all_are_pairs = None not in second
        if base.head is not Head.seq2seq:
            yield dict(base.tokenizer(first, second if all_are_pairs else None, **settings))
            continue
        if not all_are_pairs:
            raise CalibrationError("a seq2seq model needs pairs: input, a tab, output on each line")
        batch = dict(base.tokenizer(first, **settings))
        outputs = base.tokenizer(text_target=second, **settings)
        is_padding = outputs["attention_mask"] == 0
        batch["labels"] = outputs["input_ids"].masked_fill(is_padding, IGNORED_LABEL)
        yield batch


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
    """Return batches of the examples of a JSON-lines file in random order, as the model reads them.

    A causal model reads prompt and completion as one text, and ``loss_mask`` says which tokens
    count; a seq2seq model reads the prompt and is to predict the completion; any other reads the
    two as a pair, a plain text alone.

    Parameters
    ----------
    base : Base
        The model.
    examples : sequence of PromptExample
        As `read_examples` returns them.
    size : int
        Examples of a batch.
    seed : int
        Seed of the order.
    max_length, answers, truncate
        As `tokenize` takes them; only ``max_length`` is of use for other than causal models.

    Raises
    ------
    DataError
        As `tokenize`, of a causal model; of any other if an example is a conversation.
    """
    if base.head is Head.causal_lm:
        rows = tokenize(
            examples, base.tokenizer, max_length=max_length, answers=answers, truncate=truncate
        )
        return token_batches(rows, size=size, seed=seed, pad=base.tokenizer.pad_token_id)
    if answers not in LOSS_TOKENS:
        raise DataError(f"answers must be one of {', '.join(LOSS_TOKENS)}, got {answers!r}")
    texts: list[TextPair] = []
    for example in examples:
        if example.messages:
            raise DataError(
                f'{example.where}: "messages" are for causal language models, and {base.name} is '
                "none"
            )
        if example.prompt:
            texts.append((example.prompt, example.completion))
        else:
            texts.append((example.completion, None))
    return text_batches(base, texts, size=size, max_length=max_length, seed=seed)
