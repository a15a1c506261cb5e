"""Files with labels: a text with a class, a score or choices a row, and how answers are scored.

Each row of a file of JSON lines, of a list in a .json file, or of a .csv or .tsv table has ``text``
and ``label``, and may have ``second``, a text that is read with the first. In JSON it may have
``choices`` instead, a list of texts of which ``label`` is the index of the right one, from 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import needs
from lsrdecomp.lora.base.dataset import DataError, TextPair, read_rows

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Metric = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True, slots=True)
class LabelledExample:
    """One row of a file with labels.

    Attributes
    ----------
    choices : tuple of TextPair
        What the model reads: one pair, or one per choice.
    label : float
        Index of the right class or choice, or a score.
    """

    choices: tuple[TextPair, ...]
    label: float


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels that rows may have, and the metrics of answers.

    Attributes
    ----------
    names : tuple of str
        Classes in the order of their indices; empty where a label is a score.
    has_choices : bool
        Whether a label is the index of the right one of several texts.
    """

    names: tuple[str, ...] = ()
    has_choices: bool = False

    @property
    def regression(self) -> bool:
        """Whether a label is a score and not a class."""
        return not self.names

    @property
    def outputs(self) -> int:
        """How many numbers a head gives a row of tokens."""
        return 1 if self.regression or self.has_choices else len(self.names)

    def read(self, file: str | Path) -> list[LabelledExample]:
        """Read all examples of a file.

        Raises
        ------
        DataError
            If there are none, or a row lacks a text or has a label that is none of these.
        CheckpointError
            If the file is missing, not a regular file or a Git-LFS pointer.
        """
        rows = read_rows(Path(file))
        examples = [LabelledExample(self._texts(row, at), self._label(row, at)) for row, at in rows]
        if not examples:
            raise DataError(f"{file}: no examples")
        return examples

    def _texts(self, row: Mapping[str, Any], where: str) -> tuple[TextPair, ...]:
        """Return what the model reads of a row."""
        first = _text(row, "text", where)
        if self.has_choices:
            choices = row.get("choices")
            if not isinstance(choices, list) or len(choices) != len(self.names):
                raise DataError(
                    f'{where}: "choices" must be a list of {len(self.names)} texts, as in the '
                    "first row of the training file"
                )
            return tuple((first, str(choice)) for choice in choices)
        second = row.get("second")
        return ((first, None if second is None else str(second)),)

    def _label(self, row: Mapping[str, Any], where: str) -> float:
        """Return a score, or the index of a class."""
        value = _label_text(row, where)
        if self.regression:
            try:
                score = float(value)
            except ValueError:
                score = float("nan")
            if not np.isfinite(score):
                raise DataError(f"{where}: score {value[:80]!r} is not a finite number")
            return score
        if value not in self.names:
            known = ", ".join(self.names[:20])
            raise DataError(f"{where}: label {value[:80]!r} is not one of {known}")
        return float(self.names.index(value))

    def score(self, labels: ArrayLike, predictions: ArrayLike) -> dict[str, float]:
        """Compute every metric.

        Of scores Pearson's and Spearman's correlation; of choices the accuracy; of classes the
        accuracy, F1 (of the second of two classes, of more the mean over them) and Matthews'
        correlation.

        Parameters
        ----------
        labels, predictions : array, shape (examples,)
            Class indices, or scores for a regression.
        """
        functions = metric_functions()
        if self.regression:
            names = ["pearson", "spearman"]
        elif self.has_choices:
            names = ["accuracy"]
        else:
            names = ["accuracy", "f1" if len(self.names) == 2 else "macro_f1", "matthews"]
        expected = np.asarray(labels)
        predicted = np.asarray(predictions)
        return {name: float(functions[name](expected, predicted)) for name in names}

    def baseline(self, examples: Sequence[LabelledExample]) -> dict[str, float]:
        """Compute every metric for always predicting the commonest label, or the mean score."""
        labels = np.array([example.label for example in examples])
        if self.regression:
            constant = labels.mean()
        else:
            constant = Counter(labels.tolist()).most_common(1)[0][0]
        return self.score(labels, np.full_like(labels, constant))


def find_labels(file: str | Path) -> Labels:
    r"""Find the classes of a file, or the number of its choices.

    Classes are numbered in the order of their names, whole numbers by size.

    Raises
    ------
    DataError
        If there are fewer than two, or a row has none.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "train.tsv"
    ...     count = file.write_text("text\tlabel\nwell done\tpraise\nnever again\tblame\n")
    ...     find_labels(file).names
    ('blame', 'praise')
    """
    found: set[str] = set()
    n_choices = 0
    for row, where in read_rows(Path(file)):
        if not n_choices and isinstance(row.get("choices"), list):
            n_choices = len(row["choices"])
        found.add(_label_text(row, where))
    if n_choices:
        return Labels(tuple(map(str, range(n_choices))), has_choices=True)
    if len(found) < 2:
        raise DataError(f"{file}: {len(found)} different labels; there must be at least two")
    by_size = all(name.isdecimal() for name in found)
    return Labels(tuple(sorted(found, key=int if by_size else str)))


def texts_of(examples: Sequence[LabelledExample]) -> list[TextPair]:
    """Return the texts of examples, without labels; every choice is a text of its own."""
    return [choice for example in examples for choice in example.choices]


def metric_functions() -> Mapping[str, Metric]:
    """Return all metrics by name.

    What computes them takes a second to load; where it is not installed, `LsrError` is raised.
    """
    with needs("scoring labels", "finetune"):
        from scipy.stats import pearsonr, spearmanr
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    def correlation(
        function: Callable[..., Any], labels: np.ndarray, predictions: np.ndarray
    ) -> float:
        # A constant goes with nothing: what computes it warns, GLUE's tables count 0.
        if np.ptp(labels) == 0 or np.ptp(predictions) == 0:
            return 0.0
        result = function(labels, predictions)
        return float(getattr(result, "statistic", result))

    return {
        "accuracy": accuracy_score,
        "f1": partial(f1_score, pos_label=1.0, zero_division=0.0),
        "macro_f1": partial(f1_score, average="macro", zero_division=0.0),
        "matthews": partial(correlation, matthews_corrcoef),
        "pearson": partial(correlation, pearsonr),
        "spearman": partial(correlation, spearmanr),
    }


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    """Return a text of a row that must be there."""
    value = row.get(column)
    if isinstance(value, str) and value.strip():
        return value
    columns = ", ".join(map(str, row)) or "no fields"
    raise DataError(f'{where}: needs a text in "{column}"; it has {columns}')


def _label_text(row: Mapping[str, Any], where: str) -> str:
    """Return a label as text."""
    value = row.get("label")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float) and str(value).strip():
        return str(value).strip()
    columns = ", ".join(map(str, row)) or "no fields"
    raise DataError(f'{where}: needs a text or a number in "label"; it has {columns}')
