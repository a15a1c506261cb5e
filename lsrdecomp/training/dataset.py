"""The data of a run: where its base is, its examples, and how they become batches and scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.special import log_softmax
from torch import Tensor

from lsrdecomp.calibration.base_files import reachable_base
from lsrdecomp.calibration.batches import text_batches
from lsrdecomp.calibration.dataset import LabelledExample, subsample, task_texts
from lsrdecomp.training.embedded import embedded
from lsrdecomp.training.language import LanguageDataset, read_language
from lsrdecomp.training.record import Sample, Scores
from lsrdecomp.training.settings import EMBEDDED, FinetuneSettings, SettingsError
from lsrdecomp.training.tasks import TASKS, Task, metric_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import Trainer

    from lsrdecomp.calibration.base_model import Base

SPLIT_SEED = 20260101  # one split for all runs, so that seeds vary the training alone


@dataclass(frozen=True, slots=True)
class TaskDataset:
    """The examples of a classification, a multiple choice or a regression."""

    settings: FinetuneSettings
    task: Task
    base: str
    train: list[LabelledExample]
    validation: list[LabelledExample]
    dev: list[LabelledExample]

    @property
    def lengths(self) -> list[int]:
        """Lengths of the training examples, to sort by."""
        return [length(example) for example in self.train]

    @property
    def outputs(self) -> int:
        """How many numbers the head gives a row of tokens."""
        has_one_output = self.task.regression or len(self.dev[0].choices) > 1
        return 1 if has_one_output else len(self.task.labels)

    @property
    def baseline(self) -> dict[str, float]:
        """Metrics of always giving the commonest answer."""
        return self.task.baseline(self.dev)

    def collator(self, tokenizer: Any) -> Callable[[Sequence[Any]], dict[str, Tensor]]:
        """Return what makes a batch of examples."""
        # Longer texts than the tokenizer says the base cannot read.
        max_length = min(self.settings.max_length, tokenizer.model_max_length)
        return partial(
            collate, tokenizer=tokenizer, max_length=max_length, regression=self.task.regression
        )

    def evaluate_dev(self, trainer: Trainer) -> Scores:
        """Score a model on the dev split."""
        return self._evaluate(trainer, self.dev)

    def evaluate_validation(self, trainer: Trainer) -> Scores | None:
        """Score a model on the split of the training set, if there is one."""
        return self._evaluate(trainer, self.validation) if self.validation else None

    def answers(self, _trainer: Trainer) -> tuple[str, ...]:
        """Return no answers: a task has labels, not texts."""
        return ()

    def samples(self, _trainer: Trainer, _before: Sequence[str] = ()) -> tuple[Sample, ...]:
        """Return no samples either."""
        return ()

    def calibration_batches(
        self, base: Base, *, size: int, seed: int
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the training examples as a calibration reads them."""
        texts = task_texts(self.train)
        return text_batches(base, texts, size=size, max_length=self.settings.max_length, seed=seed)

    def _evaluate(self, trainer: Trainer, examples: list[LabelledExample]) -> Scores:
        prediction = trainer.predict(examples)  # type: ignore[arg-type]
        outputs = np.asarray(prediction.predictions)
        return score_outputs(self.task, outputs, np.asarray(prediction.label_ids))


Dataset = TaskDataset | LanguageDataset
"""The data of a run: both offer the same, and ``train`` and ``validation`` hold what ``collator``
takes."""


def score_outputs(task: Task, outputs: np.ndarray, labels: np.ndarray) -> Scores:
    """Score a model's outputs.

    Parameters
    ----------
    task : Task
    outputs : ndarray, shape (examples, classes or choices), or (examples, 1) for a regression
    labels : ndarray, shape (examples,)

    Returns
    -------
    Scores
        With a loss of None where the outputs are not finite; such answers count as class 0, or
        score 0.
    """
    outputs = np.asarray(outputs, dtype=np.float64)
    labels = np.asarray(labels)
    is_finite = bool(np.isfinite(outputs).all())
    outputs = np.nan_to_num(outputs, nan=0.0, posinf=0.0, neginf=0.0)
    if task.regression:
        predictions = outputs[:, 0]
        loss = float(np.mean((predictions - labels) ** 2))
        accuracy = None
    else:
        predictions = outputs.argmax(-1)
        # log_loss of scikit-learn cuts probabilities off at 2⁻⁵²; a sure and wrong answer costs
        # more than that.
        rows = np.arange(len(labels))
        loss = float(-log_softmax(outputs, axis=-1)[rows, labels.astype(int)].mean())
        accuracy = float(np.mean(predictions == labels))
    metrics = task.score(labels, predictions)
    return Scores(metrics, accuracy, loss if is_finite else None, len(labels))


def read_dataset(settings: FinetuneSettings) -> TaskDataset | LanguageDataset:
    """Read the examples of a run and find its base; the embedded ones are made if need be.

    Raises
    ------
    DataError, CheckpointError
        If a file is missing or holds a bad row.
    SettingsError
        If the validation split would leave nothing.
    """
    if settings.is_language:
        return read_language(settings)
    task = TASKS[settings.task]
    metric_functions()  # refuses, before any work, where they cannot be computed
    base, data = _places(settings)
    train = subsample(task.read(data, "train"), settings.train_examples, seed=SPLIT_SEED)
    validation: list[LabelledExample] = []
    if settings.patience is not None:
        train, validation = split_off(train, settings.validation)
    dev = subsample(task.read(data, "dev"), settings.dev_examples, seed=SPLIT_SEED)
    return TaskDataset(
        settings, task, base, train, sorted(validation, key=length), sorted(dev, key=length)
    )


def _places(settings: FinetuneSettings) -> tuple[str, str]:
    """Return where the base of a run is, and where its task's files are."""
    base = None
    data = settings.data
    if settings.model == EMBEDDED:
        made = embedded()
        base = str(made.model)
        data = str(made.data) if data is None else data
    elif data is None:  # which only the embedded task may leave out
        data = str(embedded().data)
    return base or reachable_base(settings.model), data


def split_off(
    examples: Sequence[LabelledExample], share: float
) -> tuple[list[LabelledExample], list[LabelledExample]]:
    """Split a share off the examples, always the same ones.

    Returns
    -------
    (list, list)
        What remains, and what was split off.

    Raises
    ------
    SettingsError
        If one of the two would be empty.
    """
    count = round(share * len(examples))
    if not 0 < count < len(examples):
        raise SettingsError(
            f"validation = {share} of {len(examples)} training examples leaves {count} of them "
            "apart"
        )
    order = np.random.default_rng(SPLIT_SEED + 1).permutation(len(examples))
    remaining = [examples[i] for i in order[count:]]
    apart = [examples[i] for i in order[:count]]
    return remaining, apart


def length(example: LabelledExample) -> int:
    """Return the characters of the longest choice, to sort by: free, and near enough to tokens."""
    return max(len(first) + len(second or "") for first, second in example.choices)


def collate(
    examples: Sequence[LabelledExample], *, tokenizer: Any, max_length: int, regression: bool
) -> dict[str, Tensor]:
    """Make a batch as a classifier reads it: one row per choice, ``labels`` one per example.

    Parameters
    ----------
    examples : sequence of LabelledExample
    tokenizer
        Of the base.
    max_length : int
        Maximum tokens of a row; longer ones are cut.
    regression : bool
        Whether labels are scores, float32, and not classes, int64.
    """
    rows = task_texts(examples)
    first = [row[0] for row in rows]
    second = [row[1] for row in rows]
    has_pairs = all(text is not None for text in second)
    tokens = tokenizer(
        first,
        second if has_pairs else None,
        padding=True,
        truncation=True,
        max_length=max_length,
        return_tensors="pt",
    )
    dtype = torch.float32 if regression else torch.int64
    labels = torch.tensor([example.label for example in examples], dtype=dtype)
    return {**tokens, "labels": labels}
