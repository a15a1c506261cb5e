"""What a run reads: where its base is, the examples of its task, and how they become batches and scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.special import log_softmax
from torch import Tensor

from lsrdecomp.calibration.base_files import find_base
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
        """Of the training examples, to sort by."""
        return [length(example) for example in self.train]

    @property
    def outputs(self) -> int:
        """Numbers the head gives a row of tokens."""
        return 1 if self.task.regression or len(self.dev[0].choices) > 1 else len(self.task.labels)

    @property
    def baseline(self) -> dict[str, float]:
        """Metrics of always giving the commonest answer."""
        return self.task.baseline(self.dev)

    def collator(self, tokenizer: Any) -> Callable[[Sequence[Any]], dict[str, Tensor]]:
        length = min(
            self.settings.max_length, tokenizer.model_max_length
        )  # longer ones the base cannot read
        return partial(
            collated, tokenizer=tokenizer, length=length, regression=self.task.regression
        )

    def judge_dev(self, trainer: Trainer) -> Scores:
        return self._judged(trainer, self.dev)

    def judge_validation(self, trainer: Trainer) -> Scores | None:
        return self._judged(trainer, self.validation) if self.validation else None

    def samples(self, trainer: Trainer) -> tuple[Sample, ...]:
        return ()

    def questions(self, base: Base, *, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """The training examples as a calibration reads them."""
        return text_batches(
            base, task_texts(self.train), size=size, max_length=self.settings.max_length, seed=seed
        )

    def _judged(self, trainer: Trainer, examples: list[LabelledExample]) -> Scores:
        answered = trainer.predict(examples)  # type: ignore[arg-type]
        return judge(self.task, np.asarray(answered.predictions), np.asarray(answered.label_ids))


Dataset = TaskDataset | LanguageDataset
"""What a run reads: both offer the same, and ``train`` and ``validation`` hold what ``collator``
takes."""


def judge(task: Task, outputs: np.ndarray, labels: np.ndarray) -> Scores:
    """Scores of a model's outputs.

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
    finite = bool(np.isfinite(outputs).all())
    outputs = np.nan_to_num(outputs, nan=0.0, posinf=0.0, neginf=0.0)
    if task.regression:
        answers = outputs[:, 0]
        loss = float(np.mean((answers - labels) ** 2))
        accuracy = None
    else:
        answers = outputs.argmax(-1)
        # log_loss of scikit-learn cuts probabilities off at 2⁻⁵²; a sure and wrong answer costs
        # more than that.
        loss = float(
            -log_softmax(outputs, axis=-1)[np.arange(len(labels)), labels.astype(int)].mean()
        )
        accuracy = float(np.mean(answers == labels))
    return Scores(task.score(labels, answers), accuracy, loss if finite else None, len(labels))


def read_dataset(settings: FinetuneSettings) -> TaskDataset | LanguageDataset:
    """The examples of a run, and where its base is; the embedded ones are made if need be.

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
    own = (
        embedded()
        if settings.model == EMBEDDED or (settings.task == EMBEDDED and settings.data is None)
        else None
    )
    base = (
        str(own.model)
        if own is not None and settings.model == EMBEDDED
        else find_base(settings.model)
    )
    data = settings.data if settings.data is not None or own is None else str(own.data)
    assert data is not None
    train = subsample(task.read(data, "train"), settings.train_examples, seed=SPLIT_SEED)
    validation: list[LabelledExample] = []
    if settings.patience is not None:
        train, validation = split(train, settings.validation)
    dev = sorted(
        subsample(task.read(data, "dev"), settings.dev_examples, seed=SPLIT_SEED), key=length
    )
    return TaskDataset(settings, task, base, train, sorted(validation, key=length), dev)


def split(
    examples: Sequence[LabelledExample], share: float
) -> tuple[list[LabelledExample], list[LabelledExample]]:
    """Examples to train on and a ``share`` of them apart, always the same ones.

    Raises
    ------
    SettingsError
        If one of the two would be empty.
    """
    count = round(share * len(examples))
    if not 0 < count < len(examples):
        raise SettingsError(
            f"validation = {share} of {len(examples)} training examples leaves {count} of them apart"
        )
    order = np.random.default_rng(SPLIT_SEED + 1).permutation(len(examples))
    return [examples[i] for i in order[count:]], [examples[i] for i in order[:count]]


def length(example: LabelledExample) -> int:
    """Characters of the longest choice: near enough to its tokens to sort by, and free."""
    return max(len(first) + len(second or "") for first, second in example.choices)


def collated(
    examples: Sequence[LabelledExample], *, tokenizer: Any, length: int, regression: bool
) -> dict[str, Tensor]:
    """Examples as a classifier reads them: one row per choice, ``labels`` one per example.

    Parameters
    ----------
    tokenizer
        Of the base.
    length : int
        Tokens of a row; longer ones are cut.
    regression : bool
        Whether labels are scores, float32, and not classes, int64.
    """
    rows = task_texts(examples)
    first, second = [row[0] for row in rows], [row[1] for row in rows]
    pairs = None if any(text is None for text in second) else second
    read = tokenizer(
        first, pairs, padding=True, truncation=True, max_length=length, return_tensors="pt"
    )
    kind = torch.float32 if regression else torch.int64
    return {**read, "labels": torch.tensor([example.label for example in examples], dtype=kind)}
