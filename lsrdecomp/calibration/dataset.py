"""Examples as people have them: JSON lines with prompts and completions, conversations or plain texts.

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
        model(**model_inputs(batch)).logits        # batch["loss_mask"]: which tokens count as answers

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

    from numpy.typing import NDArray

LOSS_MASK = "loss_mask"
"""Key of a batch that says which tokens count as answers; no argument of a model, see
`model_inputs`."""
ANSWERS = ("completion", "all")
TABLES: Mapping[str, Mapping[str, Any]] = {
    ".csv": {},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
"""Endings of tables, and how `csv` reads them."""
FURTHER = "further columns"
POOL = 50  # batches that are sorted by length together
MAX_LENGTH = 1024  # tokens of an example where nothing else is said
TEXT_LENGTH = 128  # of a text that is answered as a whole, whose rest is cut
T = TypeVar("T")


class DataError(LsrError, ValueError):
    """A line of a data file cannot be used; the message names file and line, and what would do."""


Choices = tuple[tuple[str, str | None], ...]


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
    """One line: alternately what is given and what is to follow, or a conversation that a template has yet to write.

    ``prompt`` is empty for a plain text. ``messages`` is given instead of both where the line had a
    conversation.
    """

    prompt: str
    completion: str
    where: str  # file and line, for complaints
    messages: tuple[Mapping[str, str], ...] = ()
    references: tuple[str, ...] = ()  # other right answers, for metrics that compare texts


@dataclass(frozen=True, slots=True)
class Tokens:
    """An example as a language model reads it: ``answers[i]`` says whether token i belongs to a completion."""

    ids: tuple[int, ...]
    answers: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.ids)


def read_examples(file: str | Path) -> list[PromptExample]:
    """The examples of a file of JSON lines, of a list in a .json file or of a .csv file; empty lines are left out.

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
    ...     count = Path(f"{folder}/train.jsonl").write_text('{"prompt": "2 + 2 =", "completion": " 4"}')
    ...     read_examples(f"{folder}/train.jsonl")[0].completion
    ' 4'
    """
    path = Path(file)
    if path.suffix == ".parquet":
        new = path.with_suffix(".jsonl").name
        raise DataError(
            f'{path}: is Parquet; write it as JSON lines (pip install pandas pyarrow): python -c "import pandas; '
            f"pandas.read_parquet('{path}').to_json('{new}', orient='records', lines=True)\""
        )
    examples = [_example(row, where) for row, where in read_rows(path)]
    if not examples:
        raise DataError(f"{path}: no line has an example")
    return examples


def read_rows(
    path: Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """What each line of JSON, entry of a list in a .json file or row of a .csv or .tsv table holds, and where it is.

    ``columns`` name those of a table without a header. A .tsv table has no quotation marks, since
    sentences hold lone ones, and all its columns in every row.

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
    with path.open(encoding="utf-8-sig", newline="" if path.suffix in TABLES else None) as lines:
        if path.suffix in TABLES:
            table = csv.DictReader(lines, columns, restkey=FURTHER, **TABLES[path.suffix])
            for row in table:
                where, further = f"{path}, line {table.line_num}", row.get(FURTHER, [])
                if path.suffix == ".tsv" and (further or None in row.values()):
                    count = sum(isinstance(value, str) for value in row.values()) + len(further)
                    raise DataError(
                        f"{where}: {count} columns, expected {len(table.fieldnames or ())}"
                    )
                yield row, where
            return
        if path.suffix == ".json" and lines.read(64).lstrip().startswith("["):
            lines.seek(0)
            yield from (
                (row, f"{path}, entry {number}")
                for number, row in enumerate(_json(lines.read(), f"{path}"), 1)
            )
            return
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _json(line, where), where


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: no JSON ({error}); each example must be a JSON object") from None


def _example(row: dict[str, Any], where: str) -> PromptExample:
    references = row.get("references", [])
    if not isinstance(references, list) or not all(
        isinstance(text, str) and text.strip() for text in references
    ):
        raise DataError(f'{where}: "references" must be a list of texts that are not empty')
    if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        row["messages"] = row["prompt"] + row["completion"]
    if "messages" in row:
        return PromptExample(
            "", "", where, _conversation(row["messages"], where), tuple(references)
        )
    fields = ("prompt", "completion") if "prompt" in row or "completion" in row else ("text",)
    for name in fields:
        if not isinstance(row.get(name), str):
            had = (
                "is no text"
                if name in row
                else f"is missing; it has {', '.join(map(str, row)) or 'no fields'}"
            )
            raise DataError(
                f'{where}: "{name}" {had}; give "prompt" and "completion", "messages", or "text"'
            )
    if not row[fields[-1]].strip():
        raise DataError(
            f'{where}: "{fields[-1]}" is empty, so there is nothing to answer; fill it or remove the line'
        )
    prompt = row["prompt"] if len(fields) == 2 else ""
    return PromptExample(prompt, row[fields[-1]], where, references=tuple(references))


def _conversation(messages: Any, where: str) -> tuple[Mapping[str, str], ...]:
    if not isinstance(messages, list) or not all(
        isinstance(each, dict)
        and isinstance(each.get("role"), str)
        and isinstance(each.get("content"), str)
        for each in messages
    ):
        raise DataError(
            f'{where}: "messages" must be a list of objects with the texts "role" and "content"'
        )
    said = [each["content"] for each in messages if each["role"] == "assistant"]
    if not said or not all(text.strip() for text in said):
        what = "a message of the assistant is empty" if said else "no message is of the assistant"
        raise DataError(
            f"{where}: {what}, so there is nothing to answer; mend it or remove the line"
        )
    return tuple(messages)


def tokenize(
    examples: Sequence[PromptExample],
    tokenizer: Any,
    *,
    max_length: int | None = None,
    answers: str = "completion",
    truncate: bool = False,
) -> list[Tokens]:
    """Examples as a language model reads them, in their order.

    Parameters
    ----------
    tokenizer
        Of the base, as transformers has it.
    max_length : int, optional
        Most tokens of an example; absent, `MAX_LENGTH`.
    answers : {"completion", "all"}
        Which tokens count as answers; the first token of an example never does, nothing comes
        before it.
    truncate : bool
        Cut what is longer at its beginning, so that the completion stays, instead of refusing it.

    Raises
    ------
    DataError
        If an example is longer than ``max_length`` and not to be cut, or if there are conversations
        and the tokenizer has no chat template.
    """
    if answers not in ANSWERS:
        raise DataError(f"answers must be one of {', '.join(ANSWERS)}, got {answers!r}")
    rows = [_tokens(example, tokenizer, answers) for example in examples]
    max_length = max_length or MAX_LENGTH
    if truncate:
        return [Tokens(row.ids[-max_length:], row.answers[-max_length:]) for row in rows]
    longest = max(range(len(rows)), key=lambda i: len(rows[i]), default=None)
    if longest is not None and len(rows[longest]) > max_length:
        count = sum(len(row) > max_length for row in rows)
        raise DataError(
            f"{examples[longest].where}: {len(rows[longest])} tokens, more than the length of {max_length} "
            f"({count} of {len(rows)} examples are, this one most); give --max-length {len(rows[longest])}, or "
            "--truncate to cut them at their beginning, or shorten or remove them"
        )
    return rows


def segments(example: PromptExample, tokenizer: Any) -> list[tuple[str, bool]]:
    """Pieces of text and whether each is an answer; one after the other they are the example.

    Raises
    ------
    DataError
        As `tokenize`.
    """
    if not example.messages:
        end = tokenizer.eos_token or ""
        closed = (
            example.completion
            if end and example.completion.endswith(end)
            else example.completion + end
        )
        return [(example.prompt, False), (closed, True)]
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise DataError(
            f'{example.where}: "messages" need a chat template, and the tokenizer of {name} has none; give "prompt" '
            'and "completion" instead'
        )
    # A template writes whole conversations: what a turn of the assistant adds is the difference of
    # two of them, with and without it, as long as the template lets stand what it wrote before.
    messages, written, pieces = list(example.messages), "", []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(
            messages[:i], tokenize=False, add_generation_prompt=True
        )
        after = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        if not (before.startswith(written) and after.startswith(before)):
            raise DataError(
                f"{example.where}: the chat template rewrites what came before message {i + 1}, so the completion "
                'cannot be told from the prompt; give "prompt" and "completion" instead'
            )
        pieces += [(before[len(written) :], False), (after[len(before) :], True)]
        written = after
    return pieces


def prompt_text(example: PromptExample, tokenizer: Any) -> str:
    """What a model is given so that it says the last completion."""
    return "".join(text for text, _ in segments(example, tokenizer)[:-1])


def completion_text(example: PromptExample) -> str:
    """The last completion, as the line has it."""
    return example.messages[-1]["content"] if example.messages else example.completion


def _tokens(example: PromptExample, tokenizer: Any, answers: str) -> Tokens:
    ids: list[int] = []
    counted: list[bool] = []
    for i, (text, answer) in enumerate(segments(example, tokenizer)):
        # Special tokens that begin every text come once; a chat template writes its own.
        piece = tokenizer(text, add_special_tokens=i == 0 and not example.messages)["input_ids"]
        ids += piece
        counted += [answer or answers == "all"] * len(piece)
    return Tokens(tuple(ids), tuple(counted))


def hold_out(rows: Sequence[T], count: int, *, seed: int) -> tuple[list[T], list[T]]:
    """Rows in their order without ``count`` of them, drawn by ``seed``, and those.

    Raises
    ------
    DataError
        If nothing would be left.
    """
    if not 0 <= count < len(rows):
        raise DataError(
            f"{count} of {len(rows)} examples cannot be held out; fewer than all must be"
        )
    chosen = set(np.random.default_rng(seed).permutation(len(rows))[:count].tolist())
    return [row for i, row in enumerate(rows) if i not in chosen], [rows[i] for i in sorted(chosen)]


def subsample(rows: Sequence[T], count: int | None, *, seed: int) -> list[T]:
    """At most ``count`` rows in their order, drawn by ``seed``: always the same ones."""
    return (
        list(rows) if count is None or count >= len(rows) else hold_out(rows, count, seed=seed)[1]
    )


def token_batches(
    rows: Sequence[Tokens],
    *,
    size: int,
    seed: int | None,
    pad: int,
    device: str | torch.device = "cpu",
) -> Iterator[dict[str, Tensor]]:
    """Batches of like length: ``input_ids``, ``attention_mask`` and ``loss_mask``, each (examples, tokens) of int64.

    Parameters
    ----------
    size : int
        Examples of a batch; the last one may have fewer.
    seed : int, optional
        Of the order: examples are drawn at random, sorted by length in pools of 50 batches, and the
        batches shuffled. None keeps the order of ``rows``.
    pad : int
        Token that fills short rows up at their end; it is masked.

    Notes
    -----
    The order depends on ``rows``, ``size`` and ``seed`` alone, so an interrupted pass finds its
    place again.
    """
    for chosen in _grouped([len(row) for row in rows], size, seed):
        batch = [rows[i] for i in chosen]
        width = max(map(len, batch))
        fill = [width - len(row) for row in batch]
        parts = {
            "input_ids": [[*row.ids, *[pad] * n] for row, n in zip(batch, fill, strict=True)],
            "attention_mask": [
                [1] * len(row) + [0] * n for row, n in zip(batch, fill, strict=True)
            ],
            LOSS_MASK: [
                [*map(int, row.answers), *[0] * n] for row, n in zip(batch, fill, strict=True)
            ],
        }
        yield {
            name: torch.tensor(values, dtype=torch.int64, device=device)
            for name, values in parts.items()
        }


def _grouped(lengths: Sequence[int], size: int, seed: int | None) -> list[list[int]]:
    if seed is None:
        return [
            list(range(start, min(start + size, len(lengths))))
            for start in range(0, len(lengths), size)
        ]
    generator = np.random.default_rng(seed)
    return like_lengths(generator.permutation(len(lengths)), np.asarray(lengths), size, generator)


def like_lengths(
    order: NDArray[np.int64], lengths: NDArray[np.int64], size: int, generator: np.random.Generator
) -> list[list[int]]:
    """Batches of examples of like length, which waste no padding, shuffled.

    Sorted by length are pools of 50 batches, so that an order by length over all is never learned.
    """
    batches: list[list[int]] = []
    for start in range(0, len(order), POOL * size):
        pool = order[start : start + POOL * size]
        pool = pool[np.argsort(-lengths[pool], kind="stable")]
        batches += [pool[i : i + size].tolist() for i in range(0, len(pool), size)]
    return [batches[i] for i in generator.permutation(len(batches))]


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a batch the model is called with: all but ``loss_mask``."""
    return {name: value for name, value in batch.items() if name != LOSS_MASK}
