"""Data files of examples: JSON lines with prompts and completions, conversations or texts.

Each line of a file, or each entry of a list in a .json file, or each row of a .csv file with a
header, has one of

- ``prompt`` and ``completion``: what the model is given, and what it is to say;
- ``messages``: a conversation, ``[{"role": "user", "content": "…"}, {"role": "assistant",
  "content": "…"}]``, written out by the tokenizer's chat template; the model is to say what the
  assistant says. It may be split in two lists, ``prompt`` and ``completion``;
- ``text``: the model is to say all of it.

Any of these may have ``references`` beside it, a list of other right completions.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lsrdecomp.errors import LsrError
from lsrdecomp.gateway import read_json_text
from lsrdecomp.lora.files.file_checks import read_text_lines, regular_file_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TextIO

TABLES: Mapping[str, Mapping[str, Any]] = {
    ".csv": {},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
"""Endings of tables, and the options `csv` reads them with. Quotation marks mean nothing in a .tsv
table: its sentences may have an odd number of them."""
EXTRA_COLUMNS = "further columns"
"""Key under which `csv` puts the cells of a row beyond the header."""
T = TypeVar("T")
TextPair = tuple[str, str | None]
"""A text and a second one that the model reads with it, or None."""


class DataError(LsrError, ValueError):
    """A line of a data file cannot be used; the message names file and line, and what would do."""


@dataclass(frozen=True, slots=True)
class PromptExample:
    """One line of a data file: a prompt with its completion, a text, or a conversation.

    A conversation has ``messages``, which a chat template has yet to write out, and neither prompt
    nor completion.
    """

    prompt: str  # empty for a plain text
    completion: str
    where: str  # file and line, for error messages
    messages: tuple[Mapping[str, str], ...] = ()
    references: tuple[str, ...] = ()  # other right completions, for metrics that compare texts


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
        If a line is not a JSON object, lacks its fields, or has an empty completion.
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
    examples = [_parse_example(row, where) for row, where in read_rows(path)]
    if not examples:
        raise DataError(f"{path}: no line has an example")
    return examples


def read_rows(
    path: Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a data file: lines of JSON, entries of a JSON list, or rows of a table.

    Parameters
    ----------
    path : Path
        A table if it ends in .csv or .tsv; every row of a .tsv table must have all its columns.
    columns : sequence of str, optional
        Names of the columns of a table without a header.

    Yields
    ------
    row : dict
    where : str
        File and line, for error messages.

    Raises
    ------
    DataError, CheckpointError
        As `read_examples`.
    """
    if path.suffix == ".parquet":
        converted = path.with_suffix(".jsonl").name
        raise DataError(
            f"{path}: is Parquet; write it as JSON lines (pip install pandas pyarrow): "
            f"python -c \"import pandas; pandas.read_parquet('{path}')"
            f".to_json('{converted}', orient='records', lines=True)\""
        )
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
        raise DataError(f"{path}: not a valid table ({error})") from None


def _rows(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a file by its format, each with its file and line."""
    is_table = path.suffix in TABLES
    # utf-8-sig: Windows programs write a byte-order mark.
    with path.open(encoding="utf-8-sig", newline="" if is_table else None) as lines:
        if is_table:
            yield from _table_rows(path, lines, columns)
            return
        is_list = path.suffix == ".json" and lines.read(64).lstrip().startswith("[")
        lines.seek(0)
        if is_list:
            entries = _parse_json(lines.read(), f"{path}")
            for number, row in enumerate(entries, start=1):
                yield row, f"{path}, entry {number}"
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _parse_json(line, where), where


def _table_rows(
    path: Path, lines: TextIO, columns: Sequence[str] | None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a .csv or .tsv table, each with its file and line."""
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
        return read_json_text(text)
    except ValueError as error:
        message = f"{where}: not JSON ({error}); each example must be a JSON object"
        raise DataError(message) from None


def _parse_example(row: dict[str, Any], where: str) -> PromptExample:
    """Return a row as an example; raise `DataError` if it lacks its fields."""
    references = _references(row, where)
    prompt = row.get("prompt")
    completion = row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat_example(prompt + completion, where, references)
    if "messages" in row:
        return _chat_example(row["messages"], where, references)
    if "prompt" in row or "completion" in row:
        prompt = _text_field(row, "prompt", where)
        completion = _non_empty_field(row, "completion", where)
        return PromptExample(prompt, completion, where, references=references)
    text = _non_empty_field(row, "text", where)
    return PromptExample("", text, where, references=references)


def _chat_example(messages: Any, where: str, references: tuple[str, ...]) -> PromptExample:
    """Return a conversation as an example; raise `DataError` if it has nothing to answer."""
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise DataError(
            f'{where}: "messages" must be a list of objects with the texts "role" and "content"'
        )
    completions = [message["content"] for message in messages if message["role"] == "assistant"]
    problem = None
    if not completions:
        problem = "no message is from the assistant"
    elif not all(text.strip() for text in completions):
        problem = "a message from the assistant is empty"
    if problem is not None:
        raise DataError(
            f"{where}: {problem}, so there is nothing to answer; correct it or remove the line"
        )
    return PromptExample("", "", where, messages=tuple(messages), references=references)


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _references(row: dict[str, Any], where: str) -> tuple[str, ...]:
    """Return the other right completions of a row."""
    references = row.get("references", [])
    if not isinstance(references, list) or not all(map(_is_filled_text, references)):
        raise DataError(f'{where}: "references" must be a list of texts that are not empty')
    return tuple(references)


def _is_filled_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _text_field(row: dict[str, Any], field: str, where: str) -> str:
    """Return a field of a row that must be text."""
    value = row.get(field)
    if isinstance(value, str):
        return value
    problem = "is not text"
    if field not in row:
        problem = f"is missing; it has {', '.join(map(str, row)) or 'no fields'}"
    raise DataError(
        f'{where}: "{field}" {problem}; give "prompt" and "completion", "messages", or "text"'
    )


def _non_empty_field(row: dict[str, Any], field: str, where: str) -> str:
    """Return a field of a row that must be text and not empty."""
    text = _text_field(row, field, where)
    if not text.strip():
        raise DataError(
            f'{where}: "{field}" is empty, so there is nothing to answer; '
            "fill it or remove the line"
        )
    return text


def hold_out(rows: Sequence[T], count: int, *, seed: int) -> tuple[list[T], list[T]]:
    """Draw ``count`` rows at random, to be held out.

    Returns
    -------
    remaining, held_out : list
        Both in the order of ``rows``.

    Raises
    ------
    DataError
        If nothing would remain.
    """
    if not 0 <= count < len(rows):
        raise DataError(
            f"{count} of {len(rows)} examples cannot be held out; fewer than all must be"
        )
    order = np.random.default_rng(seed).permutation(len(rows))
    drawn = set(order[:count].tolist())
    remaining = [row for i, row in enumerate(rows) if i not in drawn]
    held_out = [row for i, row in enumerate(rows) if i in drawn]
    return remaining, held_out


def subsample(rows: Sequence[T], count: int | None, *, seed: int) -> list[T]:
    """Return at most ``count`` rows in their order; the same seed draws the same rows."""
    if count is None or count >= len(rows):
        return list(rows)
    _, drawn = hold_out(rows, count, seed=seed)
    return drawn


def read_text_pairs(file: str | Path) -> list[TextPair]:
    """Read one text per line, or two with a tab between; empty lines are left out.

    Raises
    ------
    CheckpointError
        As `lsrdecomp.lora.files.file_checks.read_text_lines`.
    """
    pairs: list[TextPair] = []
    for line in read_text_lines(Path(file)):
        first, _, second = line.partition("\t")
        pairs.append((first, second or None))
    return pairs
