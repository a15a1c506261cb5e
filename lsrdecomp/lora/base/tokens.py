"""Tokens: examples as a language model reads them, in batches of similar length.

From a file to logits::

    rows = tokenize(read_examples("train.jsonl"), tokenizer, max_length=256)
    train, held_out = hold_out(rows, 100, seed=0)
    pad = tokenizer.pad_token_id
    for batch in token_batches(train, size=16, seed=0, pad_token_id=pad):
        model(**model_inputs(batch)).logits       # batch["loss_mask"]: tokens to be predicted

Conventions are those of TRL's SFTTrainer: a completion and a text end with the end-of-text token; a
prompt and its completion are tokenized separately, as they are when a model continues the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lsrdecomp.gateway import TemplateError, check_template, limited_template
from lsrdecomp.lora.base.dataset import DataError, PromptExample
from lsrdecomp.lora.files.tensors import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

LOSS_MASK = "loss_mask"
"""Key of a batch under which it marks the tokens to be predicted. It is not an argument of a model:
`model_inputs` leaves it out."""
ROW_COUNTS = "row_counts"
"""Key of a batch under which stands how many of its rows belong to each example, where it is more
than one, as for an image at several noise levels. No argument of a model either."""
LOSS_TOKENS = ("completion", "all")
"""Which tokens may be asked for as ``answers``: those of completions, or all."""
DEFAULT_PROMPT_LENGTH = 1024
"""Maximum tokens of an example, unless another number is given."""


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """An example as a language model reads it."""

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # for each token, whether it is to be predicted

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)


def tokenize(
    examples: Sequence[PromptExample],
    tokenizer: Any,
    *,
    max_length: int | None = None,
    answers: str = "completion",
    truncate: bool = False,
) -> list[TokenizedExample]:
    """Return the tokens of each example, with the ones to predict.

    Parameters
    ----------
    examples : sequence of PromptExample
        As `read_examples` returns them.
    tokenizer
        The tokenizer of the base, from transformers.
    max_length : int, optional
        Maximum tokens of an example; absent, `DEFAULT_PROMPT_LENGTH`.
    answers : {"completion", "all"}
        Tokens that are to be predicted. The first token of an example never is: nothing comes
        before it.
    truncate : bool
        Cut a longer example at its beginning, which keeps the completion, instead of refusing it.

    Raises
    ------
    DataError
        If an example is longer than ``max_length`` and ``truncate`` is off, or if there are
        conversations and the tokenizer has no chat template.
    """
    if answers not in LOSS_TOKENS:
        raise DataError(f"answers must be one of {', '.join(LOSS_TOKENS)}, got {answers!r}")
    rows = [_tokenize_one(example, tokenizer, answers) for example in examples]
    limit = max_length or DEFAULT_PROMPT_LENGTH
    if truncate:
        return [TokenizedExample(row.ids[-limit:], row.loss_mask[-limit:]) for row in rows]
    lengths = [len(row) for row in rows]
    longest = max(lengths, default=0)
    if longest > limit:
        where = examples[lengths.index(longest)].where
        n_longer = sum(length > limit for length in lengths)
        raise DataError(
            f"{where}: {longest} tokens, more than the length of {limit} "
            f"({n_longer} of {len(rows)} examples are, this one most); "
            f"give --max-length {longest}, or --truncate to cut them at their beginning, "
            "or shorten or remove them"
        )
    return rows


def _tokenize_one(example: PromptExample, tokenizer: Any, answers: str) -> TokenizedExample:
    """Return the tokens of one example."""
    ids: list[int] = []
    loss_mask: list[bool] = []
    for i, (text, is_completion) in enumerate(segments(example, tokenizer)):
        # Special tokens that begin every text come once; a chat template writes its own.
        adds_special_tokens = i == 0 and not example.messages
        segment_ids = tokenizer(text, add_special_tokens=adds_special_tokens)["input_ids"]
        is_predicted = is_completion or answers == "all"
        ids += segment_ids
        loss_mask += [is_predicted] * len(segment_ids)
    return TokenizedExample(tuple(ids), tuple(loss_mask))


def segments(example: PromptExample, tokenizer: Any) -> list[tuple[str, bool]]:
    """Return the pieces of an example's text in order, each with whether it is a completion.

    Raises
    ------
    DataError
        As `tokenize`.
    """
    if example.messages:
        return _chat_segments(example, tokenizer)
    completion = example.completion
    end = tokenizer.eos_token or ""
    if not completion.endswith(end):
        completion += end
    return [(example.prompt, False), (completion, True)]


def _chat_segments(example: PromptExample, tokenizer: Any) -> list[tuple[str, bool]]:
    """Return the pieces of a conversation as the tokenizer's chat template writes it.

    It ends with the last message of the assistant: what follows would be no completion.
    """
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise DataError(
            f'{example.where}: "messages" need a chat template, and the tokenizer of {name} has '
            'none; give "prompt" and "completion" instead'
        )
    # A template writes whole conversations and does not mark who says what. So the conversation is
    # written up to each message of the assistant and again with it; the difference of the two texts
    # is the completion. That holds if the template only ever appends to what it wrote before.
    messages = list(example.messages)
    pieces: list[tuple[str, bool]] = []
    text = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        with_prompt = _chat_text(tokenizer, messages[:i], add_generation_prompt=True)
        with_completion = _chat_text(tokenizer, messages[: i + 1])
        if not (with_prompt.startswith(text) and with_completion.startswith(with_prompt)):
            raise DataError(
                f"{example.where}: the chat template rewrites what came before message {i + 1}, so "
                "the completion cannot be separated from the prompt; "
                'give "prompt" and "completion" instead'
            )
        pieces.append((with_prompt[len(text) :], False))
        pieces.append((with_completion[len(with_prompt) :], True))
        text = with_completion
    return pieces


def _chat_text(tokenizer: Any, messages: list[Any], *, add_generation_prompt: bool = False) -> str:
    """Return a conversation as the tokenizer's chat template writes it, within its limits."""
    from jinja2 import TemplateError as JinjaError

    try:
        template = tokenizer.get_chat_template()
        check_template(template)
        with limited_template():
            text: str = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
    except (TemplateError, JinjaError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(
            f'{first_line(error)}; give "prompt" and "completion" instead of "messages"'
        ) from error
    return text


def prompt_text(example: PromptExample, tokenizer: Any) -> str:
    """Return the text that comes before the last completion: what a model is to continue."""
    *before, _last_completion = segments(example, tokenizer)
    return "".join(text for text, _ in before)


def completion_text(example: PromptExample) -> str:
    """Return the last completion, as the data file has it."""
    if example.messages:
        return example.messages[_last_answer(example)]["content"]
    return example.completion


def with_completion(example: PromptExample, completion: str) -> PromptExample:
    """Return an example with another last completion, which ends it."""
    if not example.messages:
        return replace(example, completion=completion)
    last = _last_answer(example)
    answer = {**example.messages[last], "content": completion}
    return replace(example, messages=(*example.messages[:last], answer))


def _last_answer(example: PromptExample) -> int:
    """Return which message of a conversation is the last one of the assistant."""
    return max(i for i, each in enumerate(example.messages) if each["role"] == "assistant")


def token_batches(
    rows: Sequence[TokenizedExample],
    *,
    size: int,
    seed: int | None,
    pad_token_id: int,
    device: str | torch.device = "cpu",
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of examples of similar length.

    Each has ``input_ids``, ``attention_mask`` and ``loss_mask``, (examples, tokens) of int64.

    Parameters
    ----------
    rows : sequence of TokenizedExample
        As `tokenize` returns them.
    size : int
        Examples of a batch; the last one may have fewer.
    seed : int, optional
        Seed of the order, which is that of `length_sorted_batches`. None keeps the order of
        ``rows``.
    pad_token_id : int
        Token that fills short rows at their end; it is masked.
    device : str or torch.device
        Device of the batches.

    Notes
    -----
    The order depends on ``rows``, ``size`` and ``seed`` alone: an interrupted pass can be resumed.
    """
    if seed is None:
        indices = list(range(len(rows)))
        batches = [indices[start : start + size] for start in range(0, len(rows), size)]
    else:
        lengths = np.asarray([len(row) for row in rows])
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(rows))
        batches = length_sorted_batches(order, lengths, size, generator)
    for batch in batches:
        yield _padded_batch([rows[i] for i in batch], pad_token_id, device)


def _padded_batch(
    rows: Sequence[TokenizedExample], pad_token_id: int, device: str | torch.device
) -> dict[str, Tensor]:
    """Return rows as one batch, padded at their end."""
    width = max(map(len, rows))
    shape = (len(rows), width)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.int64)
    for i, row in enumerate(rows):
        input_ids[i, : len(row)] = row.ids
        attention_mask[i, : len(row)] = 1
        loss_mask[i, : len(row)] = row.loss_mask
    arrays = {"input_ids": input_ids, "attention_mask": attention_mask, LOSS_MASK: loss_mask}
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def length_sorted_batches(
    order: NDArray[np.int64],
    lengths: NDArray[np.int64],
    size: int,
    generator: np.random.Generator,
) -> list[list[int]]:
    """Return batches of examples of similar length, in random order.

    Similar lengths need little padding. Examples are sorted by length within random pools: sorted
    all together they would form nearly the same batches in every epoch.

    Parameters
    ----------
    order : array of int
        Indices of the examples, in random order.
    lengths : array of int
        Tokens of each example.
    size : int
        Examples of a batch.
    generator : numpy Generator
        Draws the order of the batches.

    Returns
    -------
    list of lists
        The indices of each batch.
    """
    batches: list[list[int]] = []
    pool_size = 50 * size  # by hand
    for pool_start in range(0, len(order), pool_size):
        pool = order[pool_start : pool_start + pool_size]
        longest_first = pool[np.argsort(-lengths[pool], kind="stable")]
        starts = range(0, len(pool), size)
        batches += [longest_first[start : start + size].tolist() for start in starts]
    return [batches[i] for i in generator.permutation(len(batches))]


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a batch that a model is called with."""
    others = (LOSS_MASK, ROW_COUNTS)
    return {name: value for name, value in batch.items() if name not in others}
