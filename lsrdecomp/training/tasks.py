"""Tasks: GLUE and SuperGLUE files as published, read from disk, and the metrics of each task."""

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
    >>> task = find_task("glue/MRPC")
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

    def score(self, labels: ArrayLike, predictions: ArrayLike) -> dict[str, float]:
        """Compute every metric of the task.

        Parameters
        ----------
        labels, predictions : array, shape (examples,)
            Class indices, or scores for a regression.
        """
        functions = metric_functions()
        expected = np.asarray(labels)
        predicted = np.asarray(predictions)
        return {name: float(functions[name](expected, predicted)) for name in self.metrics}

    def baseline(self, examples: Sequence[LabelledExample]) -> dict[str, float]:
        """Compute every metric for always predicting the commonest label, or the mean score."""
        labels = np.array([example.label for example in examples])
        if self.regression:
            constant = labels.mean()
        else:
            constant = Counter(labels.tolist()).most_common(1)[0][0]
        return self.score(labels, np.full_like(labels, constant))


def metric_functions() -> Mapping[str, Metric]:
    """Return all metrics by name.

    What computes them takes a second to load; where it is not installed, `LsrError` is raised.
    """
    with needs("judging a task", "finetune"):
        from scipy.stats import pearsonr, spearmanr
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    def correlation(
        function: Callable[..., Any], labels: np.ndarray, predictions: np.ndarray
    ) -> float:
        # A constant says nothing about the order: SciPy warns of nan, GLUE's tables count 0.
        is_constant = np.ptp(labels) == 0 or np.ptp(predictions) == 0
        return 0.0 if is_constant else float(function(labels, predictions).statistic)

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


CLASSES = ("0", "1")
TRUTH = ("false", "true")
TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task(
                "CoLA",
                CLASSES,
                ("matthews", "accuracy"),
                _columns("label", "sentence"),
                columns=("source", "label", "mark", "sentence"),
            ),
            Task("SST-2", CLASSES, ("accuracy",), _columns("label", "sentence")),
            Task(
                "MRPC", CLASSES, ("accuracy", "f1"), _columns("Quality", "#1 String", "#2 String")
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
            Task("COPA", CLASSES, ("accuracy",), _copa, suffix="jsonl"),
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
                _columns("label", "pixels"),
            ),
        )
    }
)


def find_task(directory: str | Path) -> Task:
    """Find the task whose files lie in ``directory``, as ``--task glue/SST-2`` means it.

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
            f"{directory}: no task is called {name!r}; the directory's name is one of "
            f"{', '.join(TASKS)}"
        )
    return TASKS[name]
