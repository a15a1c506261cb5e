"""Examples as people have them: JSON lines with prompts and completions, conversations or texts.

Each line of a file, or each entry of a list in a .json file, or each row of a .csv file with a
header, has one of

- ``prompt`` and ``completion``: what is given, and what is to follow;
- ``messages``: a conversation, ``[{"role": "user", "content": "…"}, {"role": "assistant",
  "content": "…"}]``, written out by the tokenizer's chat template; what the assistant says is what
  is to follow. It may be parted in two lists, ``prompt`` and ``completion``;
- ``text``: all of it is to follow.

``references``, a list of texts, may say beside any of these what else would be right::

    rows = tokenize(read_examples("train.jsonl"), tokenizer, max_length=256)
    train, held = hold_out(rows, 100, seed=0)
    for batch in token_batches(train, size=16, seed=0, pad=tokenizer.pad_token_id):
        model(**model_inputs(batch)).logits       # batch["loss_mask"]: tokens to be predicted

Conventions are those of TRL's SFTTrainer: a completion and a text end with the end-of-text token; a
prompt and its completion are tokenized apart, as they are when a model goes on from the prompt.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lsrdecomp.checkpoints.files import regular_file_size
from lsrdecomp.errors import LsrError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TextIO

    from numpy.typing import NDArray

LOSS_MASK = "loss_mask"
"""Key of a batch that says which tokens are to be predicted; no argument of a model, see
`model_inputs`."""
LOSS_TOKENS = ("completion", "all")
"""Choices of which tokens are to be predicted."""
TABLES: Mapping[str, Mapping[str, Any]] = {
    ".csv": {},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
"""Endings of tables, and how `csv` reads them. A .tsv table has no quotation marks, since sentences
hold lone ones."""
EXTRA_COLUMNS = "further columns"
"""Key of `csv` for the cells of a row beyond the header."""
DEFAULT_PROMPT_LENGTH = 1024
"""Tokens of an example at most where nothing else is said."""

T = TypeVar("T")
Choices = tuple[tuple[str, str | None], ...]


class DataError(LsrError, ValueError):
    """A line of a data file cannot be used; the message names file and line, and what would do."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a task.

    ``choices`` holds what the model reads: one ``(text, second text or None)`` for a
    classification, one per answer for a multiple choice. ``label`` is an index into the task's
    labels (or choices), a score for a regression.
    """

    choices: Choices
    label: float


@dataclass(frozen=True, slots=True)
class PromptExample:
    """One line of a data file: a prompt with its completion, a text, or a conversation.

    ``prompt`` is empty for a plain text. ``messages`` is given instead of both where the line had a
    conversation, which a chat template has yet to write.
    """

    prompt: str
    completion: str
    where: str  # file and line, for messages of errors
    messages: tuple[Mapping[str, str], ...] = ()
    references: tuple[str, ...] = ()  # other right answers, for metrics that compare texts


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """An example as a language model reads it."""

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # which tokens are to be predicted

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)


def read_examples(file: str | Path) -> list[PromptExample]:
    """Read the examples of a file of JSON lines, of a list in a .json file or of a .csv file.

    Empty lines are left out.

    Parameters
    ----------
    file : str or path
        In UTF-8. A line, entry or row has the texts "prompt" and "completion", or "text", or a
        conversation as "messages" or as lists of them under "prompt" and "completion"; and where
        there are other right answers, a list of them as "references".

    Returns
    -------
    list of PromptExample

    Raises
    ------
    DataError
        If a line is no JSON object, lacks its fields, or has an empty completion.
    CheckpointError
        If the file is missing, not a regular file or a Git-LFS pointer.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "train.jsonl"
    ...     count = file.write_text('{"prompt": "2 + 2 =", "completion": " 4"}')
    ...     read_examples(file)[0].completion
    ' 4'
    """
    path = Path(file)
    if path.suffix == ".parquet":
        converted = path.with_suffix(".jsonl").name
        raise DataError(
            f"{path}: is Parquet; write it as JSON lines (pip install pandas pyarrow): "
            f"python -c \"import pandas; pandas.read_parquet('{path}')"
            f".to_json('{converted}', orient='records', lines=True)\""
        )
    examples = [_example(row, where) for row, where in read_rows(path)]
    if not examples:
        raise DataError(f"{path}: no line has an example")
    return examples


def read_rows(
    path: Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each line of JSON, entry of a list in a .json file or row of a table, and where it is.

    Parameters
    ----------
    path : Path
        A table if it ends in .csv or .tsv. A .tsv table has all its columns in every row.
    columns : sequence of str, optional
        Names of the columns of a table without a header.

    Raises
    ------
    DataError, CheckpointError
        As `read_examples`.
    """
    regular_file_size(path)
    try:
        for row, where in _rows(path, columns):
            if not isinstance(row, dict):
                raise DataError(
                    f"{where}: a {type(row).__name__}; each example must be a JSON object"
                )
            yield row, where
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except csv.Error as error:
        raise DataError(f"{path}: no table ({error})") from None


def _rows(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a file by its format, each with where it is."""
    is_table = path.suffix in TABLES
    # utf-8-sig: Windows programs write a byte-order mark.
    with path.open(encoding="utf-8-sig", newline="" if is_table else None) as lines:
        if is_table:
            yield from _table_rows(path, lines, columns)
            return
        is_list = path.suffix == ".json" and lines.read(64).lstrip().startswith("[")
        lines.seek(0)
        if is_list:
            for number, row in enumerate(_parse_json(lines.read(), f"{path}"), start=1):
                yield row, f"{path}, entry {number}"
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _parse_json(line, where), where


def _table_rows(
    path: Path, lines: TextIO, columns: Sequence[str] | None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a .csv or .tsv table, each with where it is."""
    table = csv.DictReader(lines, columns, restkey=EXTRA_COLUMNS, **TABLES[path.suffix])
    for row in table:
        where = f"{path}, line {table.line_num}"
        extra = row.get(EXTRA_COLUMNS, [])
        if path.suffix == ".tsv" and (extra or None in row.values()):
            n_columns = sum(isinstance(value, str) for value in row.values()) + len(extra)
            raise DataError(f"{where}: {n_columns} columns, expected {len(table.fieldnames or ())}")
        yield row, where


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: no JSON ({error}); each example must be a JSON object") from None


def _example(row: dict[str, Any], where: str) -> PromptExample:
    """Return a row as an example; raise `DataError` if it lacks its fields."""
    references = _references(row, where)
    # 1. A conversation, perhaps parted in two lists.
    prompt, completion = row.get("prompt"), row.get("completion")
    messages = row.get("messages")
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = prompt + completion
    if messages is not None or "messages" in row:
        return PromptExample("", "", where, _conversation(messages, where), references)
    # 2. A prompt with its completion, or a text, all of which is to follow.
    if "prompt" in row or "completion" in row:
        return PromptExample(
            _text(row, "prompt", where),
            _filled(row, "completion", where),
            where,
            references=references,
        )
    return PromptExample("", _filled(row, "text", where), where, references=references)


def _references(row: dict[str, Any], where: str) -> tuple[str, ...]:
    """Return the other right answers of a row."""
    references = row.get("references", [])
    is_list = isinstance(references, list)
    if not is_list or not all(isinstance(text, str) and text.strip() for text in references):
        raise DataError(f'{where}: "references" must be a list of texts that are not empty')
    return tuple(references)


def _text(row: dict[str, Any], field: str, where: str) -> str:
    """Return a field of a row that must be text."""
    value = row.get(field)
    if isinstance(value, str):
        return value
    problem = "is no text"
    if field not in row:
        problem = f"is missing; it has {', '.join(map(str, row)) or 'no fields'}"
    raise DataError(
        f'{where}: "{field}" {problem}; give "prompt" and "completion", "messages", or "text"'
    )


def _filled(row: dict[str, Any], field: str, where: str) -> str:
    """Return a field of a row that must be text and not empty."""
    text = _text(row, field, where)
    if not text.strip():
        raise DataError(
            f'{where}: "{field}" is empty, so there is nothing to answer; '
            "fill it or remove the line"
        )
    return text


def _conversation(messages: Any, where: str) -> tuple[Mapping[str, str], ...]:
    """Return the messages of a conversation, of which the assistant says some."""
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise DataError(
            f'{where}: "messages" must be a list of objects with the texts "role" and "content"'
        )
    completions = [message["content"] for message in messages if message["role"] == "assistant"]
    if not completions:
        problem = "no message is of the assistant"
    elif not all(text.strip() for text in completions):
        problem = "a message of the assistant is empty"
    else:
        return tuple(messages)
    raise DataError(
        f"{where}: {problem}, so there is nothing to answer; mend it or remove the line"
    )


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


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


def hold_out(rows: Sequence[T], count: int, *, seed: int) -> tuple[list[T], list[T]]:
    """Draw ``count`` rows; return the others and the drawn ones, both in their order.

    Raises
    ------
    DataError
        If nothing would be left.
    """
    if not 0 <= count < len(rows):
        raise DataError(
            f"{count} of {len(rows)} examples cannot be held out; fewer than all must be"
        )
    drawn = set(np.random.default_rng(seed).permutation(len(rows))[:count].tolist())
    left = [row for i, row in enumerate(rows) if i not in drawn]
    return left, [rows[i] for i in sorted(drawn)]


def subsample(rows: Sequence[T], count: int | None, *, seed: int) -> list[T]:
    """Return at most ``count`` rows in their order, drawn by ``seed``: always the same ones."""
    if count is None or count >= len(rows):
        return list(rows)
    return hold_out(rows, count, seed=seed)[1]


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
