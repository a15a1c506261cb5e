"""Tasks: GLUE and SuperGLUE files as published, as `finetune` reads them, and their metrics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.lab.embedded import EMBEDDED, embedded, embedded_place
from lsrdecomp.lora.base.base_files import cache_directory
from lsrdecomp.lora.base.dataset import DataError, TextPair, read_rows
from lsrdecomp.lora.files.writing import new_file
from lsrdecomp.lora.train.finetune_settings import (
    CLASSES,
    SCORES,
    TEXT,
    FinetuneSettings,
    SettingsError,
)
from lsrdecomp.lora.train.finetune_settings import TASKS as FINETUNE_TASKS
from lsrdecomp.lora.train.labelled import LabelledExample

Row = Mapping[str, Any]
Choices = tuple[TextPair, ...]
"""What the model reads of one row: a pair for a classification, one per answer for a multiple
choice."""
SPLIT_SEED = 20260101  # one split for all runs, so that seeds vary the training alone


@dataclass(frozen=True, slots=True)
class Task:
    """One task: where its rows are, what example a row is, and by which metrics it is scored.

    Attributes
    ----------
    name : str
    labels : tuple of str
        The published label values in the order of their indices; empty for a regression.
    metrics : tuple of str
        The first is the one the benchmark ranks by.
    example : callable
        Makes choices and a label of a row.
    suffix : str
        Ending of the files.
    columns : tuple of str, optional
        Where a file has no header line.
    splits : tuple of str
        Those with labels.

    Examples
    --------
    >>> task = TASKS["MRPC"]
    >>> task.name, task.labels, task.metrics
    ('MRPC', ('0', '1'), ('accuracy', 'f1'))
    """

    name: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    example: Callable[[Row], tuple[Choices, Any]]
    suffix: str = "tsv"
    columns: tuple[str, ...] | None = None
    splits: tuple[str, ...] = ("train", "dev")

    @property
    def regression(self) -> bool:
        """Whether a label is a score and not a class."""
        return not self.labels

    def file(self, data: str | Path, split: str) -> Path:
        """Return where a split lies: ``data`` is the benchmark's directory or the task's own."""
        data = Path(data)
        directory = data if data.name == self.name else data / self.name
        return directory / f"{split}.{self.suffix}"

    def read(self, data: str | Path, split: str) -> list[LabelledExample]:
        """Read all examples of a split.

        Raises
        ------
        DataError
            If the split does not exist, or a row lacks a column, holds an unknown label or is not
            JSON.
        CheckpointError
            If the file is missing, not a regular file or a Git-LFS pointer.
        """
        if split not in self.splits:
            raise DataError(
                f"{self.name} has no split {split!r} with labels; there are: "
                f"{', '.join(self.splits)}"
            )
        path = self.file(data, split)
        examples = [self._example(row, where) for row, where in read_rows(path, self.columns)]
        if not examples:
            raise DataError(f"{path}: no examples")
        return examples

    def _example(self, row: Row, where: str) -> LabelledExample:
        """Make the example of a row; ``where`` it stands is for errors."""
        try:
            choices, value = self.example(row)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            columns = ", ".join(map(str, row))
            raise DataError(f"{where}: {self.name} needs {error}; it has {columns}") from None
        return LabelledExample(choices, self._label(value, where))

    def _label(self, value: Any, where: str) -> float:
        """Return a score, or the index of a class."""
        if self.regression:
            try:
                score = float(value)
            except (TypeError, ValueError):
                score = float("nan")
            if not np.isfinite(score):
                raise DataError(f"{where}: score {str(value)[:80]!r} is not a finite number")
            return score
        label = str(value).lower() if isinstance(value, bool) else str(value)
        if label not in self.labels:
            labels = ", ".join(self.labels)
            raise DataError(f"{where}: label {label[:80]!r} is not one of {labels}")
        return float(self.labels.index(label))


COPA_QUESTIONS = MappingProxyType(
    {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
)


def _columns(
    label: str, first: str, second: str | None = None
) -> Callable[[Row], tuple[Choices, Any]]:
    """Return what reads a row's text columns, one or a pair, and its label."""

    def read(row: Row) -> tuple[Choices, Any]:
        first_text = row[first].strip()
        second_text = row[second].strip() if second else None
        return ((first_text, second_text),), row[label]

    return read


def _copa(row: Row) -> tuple[Choices, Any]:
    """Read a premise with its question, and two alternatives."""
    premise = f"{row['premise'].strip()} {COPA_QUESTIONS[row['question']]}"
    return tuple((premise, row[choice].strip()) for choice in ("choice1", "choice2")), row["label"]


def _wsc(row: Row) -> tuple[Choices, Any]:
    """Read a sentence with its pronoun between stars, and a claim on what that means."""
    # The pronoun may occur more than once: it is known by its place among the words.
    words = row["text"].split(" ")
    target = row["target"]
    index = target["span2_index"]
    marked = " ".join([*words[:index], "*", words[index], "*", *words[index + 1 :]])
    claim = f"{target['span2_text']} is {target['span1_text']}"
    return ((marked, claim),), row["label"]


ZERO_OR_ONE = ("0", "1")
TRUTH = ("false", "true")
TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task(
                "CoLA",
                ZERO_OR_ONE,
                ("matthews", "accuracy"),
                _columns("label", "sentence"),
                columns=("source", "label", "mark", "sentence"),
            ),
            Task("SST-2", ZERO_OR_ONE, ("accuracy",), _columns("label", "sentence")),
            Task(
                "MRPC",
                ZERO_OR_ONE,
                ("accuracy", "f1"),
                _columns("Quality", "#1 String", "#2 String"),
            ),
            Task("STS-B", (), ("pearson", "spearman"), _columns("score", "sentence1", "sentence2")),
            Task(
                "RTE",
                ("entailment", "not_entailment"),
                ("accuracy",),
                _columns("label", "sentence1", "sentence2"),
            ),
            Task(
                "CB",
                ("entailment", "contradiction", "neutral"),
                ("accuracy", "macro_f1"),
                _columns("label", "premise", "hypothesis"),
                suffix="jsonl",
            ),
            Task("COPA", ZERO_OR_ONE, ("accuracy",), _copa, suffix="jsonl"),
            Task("WSC", TRUTH, ("accuracy",), _wsc, suffix="jsonl"),
            Task(
                "BoolQ",
                TRUTH,
                ("accuracy",),
                _columns("answer", "question", "passage"),
                suffix="jsonl",
            ),
            Task(
                "embedded",
                tuple("0123456789"),
                ("accuracy", "macro_f1"),
                _columns("label", "text"),
            ),
        )
    }
)


def published(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of `finetune` for those whose ``task`` is the name of a published one.

    Settings with another task are left as they are. The files that ``data`` and ``dev_data`` then
    name need not be there yet: `write_files` makes them. ``base`` may be "embedded".

    Raises
    ------
    SettingsError
        If no task is called so, or ``data`` is missing.

    Examples
    --------
    >>> published({"base": "BASE", "task": "text", "data": "train.jsonl"})["task"]
    'text'
    >>> found = published({"base": "BASE", "task": "STS-B", "data": "glue"})
    >>> found["task"], Path(found["data"]).parts[-2:]
    ('scores', ('STS-B', 'train.jsonl'))
    """
    values = dict(FinetuneSettings.checked_names(settings))
    if values.get("base") == EMBEDDED:
        values["base"] = str(embedded_place().model)
    name = values.get("task", TEXT)
    if name in FINETUNE_TASKS:
        return values
    if name not in TASKS:
        known = ", ".join((*TASKS, *FINETUNE_TASKS))
        raise SettingsError(f"task must be one of {known}, got {name!r}")
    if name == EMBEDDED:
        files = _embedded_files(values.get("data"))
    elif values.get("data") is None:
        raise SettingsError(f"task {name} reads files: give data, the directory that holds {name}/")
    else:
        files = _written_files(name, values["data"])
    values["task"] = SCORES if TASKS[name].regression else CLASSES
    values["data"] = str(files["train"])
    values["dev_data"] = str(files["dev"])
    return {"split_seed": SPLIT_SEED} | values


def write_files(settings: Mapping[str, Any]) -> None:
    """Make what settings for `published` name: the embedded base, and files that `finetune` reads.

    Raises
    ------
    DataError, CheckpointError
        As `Task.read`.
    """
    values = FinetuneSettings.checked_names(settings)
    name = values.get("task", TEXT)
    if EMBEDDED in (values.get("base"), name):
        embedded()
    if name not in TASKS or name == EMBEDDED:
        return
    for split, file in _written_files(name, values["data"]).items():
        lines = [json.dumps(_row(example)) for example in TASKS[name].read(values["data"], split)]
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file, force=True) as part:
            part.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _embedded_files(directory: str | Path | None) -> dict[str, Path]:
    directory = embedded_place().data if directory is None else Path(directory)
    return {split: directory / f"{split}.tsv" for split in ("train", "dev")}


def _written_files(name: str, data: str | Path) -> dict[str, Path]:
    """Return where the examples of published files lie as `finetune` reads them."""
    source = str(TASKS[name].file(data, "train").resolve().parent)
    key = hashlib.sha256(source.encode()).hexdigest()[:16]
    directory = cache_directory() / "tasks" / key / name
    return {split: directory / f"{split}.jsonl" for split in ("train", "dev")}


def _row(example: LabelledExample) -> dict[str, Any]:
    """Return an example as a row of a file with labels."""
    label = example.label
    whole = {"label": int(label) if label.is_integer() else label}
    first, second = example.choices[0]
    if len(example.choices) > 1:
        return {"text": first, "choices": [choice for _, choice in example.choices]} | whole
    return {"text": first, "second": second} | whole


def metrics_of(task: str, found: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that a benchmark reports of a task, the one it ranks by first."""
    names = TASKS[task].metrics if task in TASKS else tuple(found)
    return {name: found[name] for name in names if name in found}
