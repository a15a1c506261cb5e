"""Examples as people have them: JSON lines with prompts and completions, conversations or texts.

Each line of a file, or each entry of a list in a .json file, or each row of a .csv file with a
header, has one of

- ``prompt`` and ``completion``: what is given, and what is to follow;
- ``messages``: a conversation, ``[{"role": "user", "content": "…"}, {"role": "assistant",
  "content": "…"}]``, written out by the tokenizer's chat template; what the assistant says is what
  is to follow. It may be parted in two lists, ``prompt`` and ``completion``;
- ``text``: all of it is to follow.

``references``, a list of texts, may say beside any of these what else would be right.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lsrdecomp.checkpoints.files import read_text_lines, regular_file_size
from lsrdecomp.errors import LsrError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TextIO

TABLES: Mapping[str, Mapping[str, Any]] = {
    ".csv": {},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
"""Endings of tables, and how `csv` reads them. A .tsv table has no quotation marks, since sentences
hold lone ones."""
EXTRA_COLUMNS = "further columns"
"""Key of `csv` for the cells of a row beyond the header."""
T = TypeVar("T")
Text = tuple[str, str | None]
"""A text, and a second one for pairs."""
Choices = tuple[Text, ...]


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


def read_text_pairs(file: str | Path) -> list[Text]:
    """Read one text per line, or two with a tab between; empty lines are left out.

    Raises
    ------
    CheckpointError
        As `lsrdecomp.checkpoints.files.read_text_lines`.
    """
    parted = [line.partition("\t") for line in read_text_lines(Path(file))]
    return [(first, second or None) for first, _, second in parted]


def task_texts(examples: Sequence[Example]) -> list[Text]:
    """Return what a classification task's examples say.

    Choices of one question count as texts of their own.
    """
    return [choice for example in examples for choice in example.choices]
