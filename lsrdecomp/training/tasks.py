"""Tasks: GLUE and SuperGLUE files as published, read from disk, with the metrics each task is judged by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.calibration.dataset import Choices, DataError, LabelledExample, read_rows
from lsrdecomp.errors import needs

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Row = Mapping[str, Any]
Metric = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True, slots=True)
class Task:
    """One task: where its rows are, how a row becomes an example, and how answers are judged.

    ``labels`` are the published label values in the order of their indices; empty for a regression.
    The first of ``metrics`` is the one the benchmark ranks by.

    Examples
    --------
    >>> task = find_task("glue/MRPC")
    >>> task.name, task.labels, task.metrics
    ('MRPC', ('0', '1'), ('accuracy', 'f1'))
    """

    name: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    example: Callable[[Row], tuple[Choices, Any]]
    suffix: str = "tsv"
    columns: tuple[str, ...] | None = None  # given where the file has no header line
    splits: tuple[str, ...] = ("train", "dev")

    @property
    def regression(self) -> bool:
        """Whether a label is a score and not a class."""
        return not self.labels

    def file(self, data: str | Path, split: str) -> Path:
        """Where a split lies: ``data`` is the benchmark's directory or the task's own."""
        data = Path(data)
        directory = data if data.name == self.name else data / self.name
        return directory / f"{split}.{self.suffix}"

    def read(self, data: str | Path, split: str) -> list[LabelledExample]:
        """All examples of a split.

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
                f"{self.name} has no split {split!r} with labels; there are: {', '.join(self.splits)}"
            )
        path = self.file(data, split)
        examples = [self._example(row, where) for row, where in read_rows(path, self.columns)]
        if not examples:
            raise DataError(f"{path}: no examples")
        return examples

    def _example(self, row: Row, where: str) -> LabelledExample:
        try:
            choices, value = self.example(row)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise DataError(
                f"{where}: {self.name} needs {error}; it has {', '.join(map(str, row))}"
            ) from None
        if self.regression:
            try:
                score = float(value)
            except (TypeError, ValueError):
                score = float("nan")
            if not np.isfinite(score):
                raise DataError(f"{where}: score {str(value)[:80]!r} is not a finite number")
            return LabelledExample(choices, score)
        label = str(value).lower() if isinstance(value, bool) else str(value)
        if label not in self.labels:
            labels = ", ".join(self.labels)
            raise DataError(f"{where}: label {label[:80]!r} is not one of {labels}")
        return LabelledExample(choices, float(self.labels.index(label)))

    def score(self, labels: ArrayLike, answers: ArrayLike) -> dict[str, float]:
        """Every metric of the task for ``answers``: class indices, or scores for a regression; one to each label."""
        expected, answered = np.asarray(labels), np.asarray(answers)
        functions = metric_functions()
        return {name: float(functions[name](expected, answered)) for name in self.metrics}

    def baseline(self, examples: Sequence[LabelledExample]) -> dict[str, float]:
        """Every metric for always answering the commonest label (the mean score for a regression)."""
        labels = np.array([example.label for example in examples])
        constant = (
            labels.mean() if self.regression else Counter(labels.tolist()).most_common(1)[0][0]
        )
        return self.score(labels, np.full_like(labels, constant))


def metric_functions() -> Mapping[str, Metric]:
    """All metrics by name; what computes them takes a second to load. Raises `LsrError` where it is not installed."""
    with needs("judging a task", "finetune"):
        from scipy.stats import pearsonr, spearmanr
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    def correlation(function: Callable[..., Any], labels: np.ndarray, answers: np.ndarray) -> float:
        # A constant says nothing about the order: SciPy warns of nan, GLUE's tables count 0.
        constant = np.ptp(labels) == 0 or np.ptp(answers) == 0
        return 0.0 if constant else float(function(labels, answers).statistic)

    return {
        "accuracy": accuracy_score,
        "f1": partial(f1_score, pos_label=1.0, zero_division=0.0),
        "macro_f1": partial(f1_score, average="macro", zero_division=0.0),
        "matthews": matthews_corrcoef,
        "pearson": partial(correlation, pearsonr),
        "spearman": partial(correlation, spearmanr),
    }


COPA_QUESTIONS = MappingProxyType(
    {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
)


def _reads(
    label: str, first: str, second: str | None = None
) -> Callable[[Row], tuple[Choices, Any]]:
    """A row's text columns, one or a pair, and its label."""
    return lambda row: (
        ((row[first].strip(), row[second].strip() if second else None),),
        row[label],
    )


def _copa(row: Row) -> tuple[Choices, Any]:
    premise = f"{row['premise'].strip()} {COPA_QUESTIONS[row['question']]}"
    return tuple((premise, row[choice].strip()) for choice in ("choice1", "choice2")), row["label"]


def _wsc(row: Row) -> tuple[Choices, Any]:
    # The pronoun may occur more than once: stars mark the one that is meant, by its place among the
    # words.
    words, target = row["text"].split(" "), row["target"]
    index = target["span2_index"]
    marked = " ".join([*words[:index], "*", words[index], "*", *words[index + 1 :]])
    return ((marked, f"{target['span2_text']} is {target['span1_text']}"),), row["label"]


CLASSES, TRUTH = ("0", "1"), ("false", "true")
TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task(
                "CoLA",
                CLASSES,
                ("matthews", "accuracy"),
                _reads("label", "sentence"),
                columns=("source", "label", "mark", "sentence"),
            ),
            Task("SST-2", CLASSES, ("accuracy",), _reads("label", "sentence")),
            Task("MRPC", CLASSES, ("accuracy", "f1"), _reads("Quality", "#1 String", "#2 String")),
            Task("STS-B", (), ("pearson", "spearman"), _reads("score", "sentence1", "sentence2")),
            Task(
                "RTE",
                ("entailment", "not_entailment"),
                ("accuracy",),
                _reads("label", "sentence1", "sentence2"),
            ),
            Task(
                "CB",
                ("entailment", "contradiction", "neutral"),
                ("accuracy", "macro_f1"),
                _reads("label", "premise", "hypothesis"),
                suffix="jsonl",
            ),
            Task("COPA", CLASSES, ("accuracy",), _copa, suffix="jsonl"),
            Task("WSC", TRUTH, ("accuracy",), _wsc, suffix="jsonl"),
            Task(
                "BoolQ",
                TRUTH,
                ("accuracy",),
                _reads("answer", "question", "passage"),
                suffix="jsonl",
            ),
            Task(
                "embedded", tuple("0123456789"), ("accuracy", "macro_f1"), _reads("label", "pixels")
            ),
        )
    }
)


def find_task(directory: str | Path) -> Task:
    """The task whose files lie in ``directory``, by its name, as ``--task glue/SST-2`` means it.

    Parameters
    ----------
    directory : path
        Need not exist: only its last part is looked at.

    Returns
    -------
    Task

    Raises
    ------
    DataError
        If no task is called so.

    Examples
    --------
    >>> find_task("glue/SST-2").metrics
    ('accuracy',)
    """
    name = Path(directory).resolve().name
    if name not in TASKS:
        raise DataError(
            f"{directory}: no task is called {name!r}; the directory's name is one of {', '.join(TASKS)}"
        )
    return TASKS[name]
