"""Tokens: examples as a language model reads them, and batches of these of like length.

From a file to logits::

    rows = tokenize(read_examples("train.jsonl"), tokenizer, max_length=256)
    train, held = hold_out(rows, 100, seed=0)
    for batch in token_batches(train, size=16, seed=0, pad=tokenizer.pad_token_id):
        model(**model_inputs(batch)).logits       # batch["loss_mask"]: tokens to be predicted

Conventions are those of TRL's SFTTrainer: a completion and a text end with the end-of-text token; a
prompt and its completion are tokenized apart, as they are when a model goes on from the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lsrdecomp.calibration.dataset import DataError, PromptExample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

LOSS_MASK = "loss_mask"
"""Key of a batch that says which tokens are to be predicted; no argument of a model, see
`model_inputs`."""
LOSS_TOKENS = ("completion", "all")
"""Choices of which tokens are to be predicted."""
DEFAULT_PROMPT_LENGTH = 1024
"""Tokens of an example at most where nothing else is said."""


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """An example as a language model reads it."""

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # which tokens are to be predicted

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
    """Return examples as a language model reads them, in their order.

    Parameters
    ----------
    examples : sequence of PromptExample
        As `read_examples` returns them.
    tokenizer
        Of the base, as transformers has it.
    max_length : int, optional
        Maximum tokens of an example; absent, 1024.
    answers : {"completion", "all"}
        Which tokens are to be predicted; the first token of an example never is, nothing comes
        before it.
    truncate : bool
        Cut what is longer at its beginning, so that the completion stays, instead of refusing it.

    Raises
    ------
    DataError
        If an example is longer than ``max_length`` and not to be cut, or if there are conversations
        and the tokenizer has no chat template.
    """
    if answers not in LOSS_TOKENS:
        raise DataError(f"answers must be one of {', '.join(LOSS_TOKENS)}, got {answers!r}")
    rows = [_tokenized(example, tokenizer, answers) for example in examples]
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


def _tokenized(example: PromptExample, tokenizer: Any, answers: str) -> TokenizedExample:
    """Return one example as tokens."""
    ids: list[int] = []
    loss_mask: list[bool] = []
    for i, (text, is_completion) in enumerate(segments(example, tokenizer)):
        # Special tokens that begin every text come once; a chat template writes its own.
        begins = i == 0 and not example.messages
        segment_ids = tokenizer(text, add_special_tokens=begins)["input_ids"]
        ids += segment_ids
        loss_mask += [is_completion or answers == "all"] * len(segment_ids)
    return TokenizedExample(tuple(ids), tuple(loss_mask))


def segments(example: PromptExample, tokenizer: Any) -> list[tuple[str, bool]]:
    """Return the pieces of text of an example in order, and whether each is a completion.

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
    """Return the pieces of a conversation as the tokenizer's chat template writes it."""
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise DataError(
            f'{example.where}: "messages" need a chat template, and the tokenizer of {name} has '
            'none; give "prompt" and "completion" instead'
        )
    # A template writes whole conversations: what a turn of the assistant adds is the difference of
    # two of them, with and without it, as long as the template lets stand what it wrote before.
    messages = list(example.messages)
    written = ""
    pieces: list[tuple[str, bool]] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(
            messages[:i], tokenize=False, add_generation_prompt=True
        )
        after = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        if not (before.startswith(written) and after.startswith(before)):
            raise DataError(
                f"{example.where}: the chat template rewrites what came before message {i + 1}, so "
                "the completion cannot be told from the prompt; "
                'give "prompt" and "completion" instead'
            )
        pieces.append((before[len(written) :], False))
        pieces.append((after[len(before) :], True))
        written = after
    return pieces


def prompt_text(example: PromptExample, tokenizer: Any) -> str:
    """Return what a model is given so that it says the last completion."""
    return "".join(text for text, _ in segments(example, tokenizer)[:-1])


def completion_text(example: PromptExample) -> str:
    """Return the last completion, as the line has it."""
    return example.messages[-1]["content"] if example.messages else example.completion


def token_batches(
    rows: Sequence[TokenizedExample],
    *,
    size: int,
    seed: int | None,
    pad: int,
    device: str | torch.device = "cpu",
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of examples of like length.

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
    pad : int
        Token that fills short rows up at their end; it is masked.
    device : str or torch.device
        Where the batches are.

    Notes
    -----
    The order depends on ``rows``, ``size`` and ``seed`` alone, so an interrupted pass finds its
    place again.
    """
    if seed is None:
        indices = list(range(len(rows)))
        batches = [indices[start : start + size] for start in range(0, len(rows), size)]
    else:
        lengths = np.asarray([len(row) for row in rows])
        generator = np.random.default_rng(seed)
        batches = length_sorted_batches(generator.permutation(len(rows)), lengths, size, generator)
    for batch in batches:
        yield _padded([rows[i] for i in batch], pad, device)


def _padded(
    rows: Sequence[TokenizedExample], pad: int, device: str | torch.device
) -> dict[str, Tensor]:
    """Return rows as one batch, filled up at their end."""
    width = max(map(len, rows))
    shape = (len(rows), width)
    input_ids = np.full(shape, pad, dtype=np.int64)
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
    *,
    pool_batches: int = 50,
) -> list[list[int]]:
    """Return batches of examples of like length, which waste no padding, shuffled.

    Parameters
    ----------
    order : array of int
        Indices of the examples, drawn at random.
    lengths : array of int
        Tokens of each example.
    size : int
        Examples of a batch.
    generator : numpy Generator
        Draws the order of the batches.
    pool_batches : int
        Batches that are sorted by length together: never all, so that an order by length is not
        learned. By hand.
    """
    batches: list[list[int]] = []
    pool_size = pool_batches * size
    for start in range(0, len(order), pool_size):
        pool = order[start : start + pool_size]
        longest_first = pool[np.argsort(-lengths[pool], kind="stable")]
        starts = range(0, len(pool), size)
        batches.extend(longest_first[first : first + size].tolist() for first in starts)
    return [batches[i] for i in generator.permutation(len(batches))]


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what of a batch the model is called with: all but the loss mask."""
    return {name: value for name, value in batch.items() if name != LOSS_MASK}
