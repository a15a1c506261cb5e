"""The data of a run: where its base is, its examples, and how they become batches and scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.special import log_softmax
from torch import Tensor

from lsrdecomp.lora.base.base_files import reachable_base
from lsrdecomp.lora.base.batches import text_batches
from lsrdecomp.lora.base.dataset import subsample
from lsrdecomp.lora.train.finetune_record import Sample, Scores
from lsrdecomp.lora.train.finetune_settings import CLASSES, FinetuneSettings, SettingsError
from lsrdecomp.lora.train.labelled import (
    LabelledExample,
    Labels,
    find_labels,
    metric_functions,
    texts_of,
)
from lsrdecomp.lora.train.language import LanguageDataset, hold_out_dev, read_language

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import Trainer

    from lsrdecomp.lora.base.base_model import Base


@dataclass(frozen=True, slots=True)
class LabelledDataset:
    """The examples of a classification, a multiple choice or a regression."""

    settings: FinetuneSettings
    labels: Labels
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
        return self.labels.outputs

    @property
    def baseline(self) -> dict[str, float]:
        """Metrics of always giving the commonest answer."""
        return self.labels.baseline(self.dev)

    def collator(self, tokenizer: Any) -> Callable[[Sequence[Any]], dict[str, Tensor]]:
        """Return what makes a batch of examples."""
        # Longer texts than the tokenizer says the base cannot read.
        max_length = min(self.settings.max_length, tokenizer.model_max_length)
        return partial(
            collate, tokenizer=tokenizer, max_length=max_length, regression=self.labels.regression
        )

    def evaluate_dev(self, trainer: Trainer) -> Scores:
        """Score a model on the dev split."""
        return self._evaluate(trainer, self.dev)

    def evaluate_validation(self, trainer: Trainer) -> Scores | None:
        """Score a model on the split of the training set, if there is one."""
        return self._evaluate(trainer, self.validation) if self.validation else None

    def answers(self, _trainer: Trainer) -> tuple[str, ...]:
        """Return no answers: the right ones are labels, not texts."""
        return ()

    def samples(self, _trainer: Trainer, _before: Sequence[str] = ()) -> tuple[Sample, ...]:
        """Return no samples either."""
        return ()

    def calibration_batches(
        self, base: Base, *, size: int, seed: int
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the training examples as a calibration reads them."""
        texts = texts_of(self.train)
        return text_batches(base, texts, size=size, max_length=self.settings.max_length, seed=seed)

    def _evaluate(self, trainer: Trainer, examples: list[LabelledExample]) -> Scores:
        prediction = trainer.predict(examples)  # type: ignore[arg-type]
        outputs = np.asarray(prediction.predictions)
        return score_outputs(self.labels, outputs, np.asarray(prediction.label_ids))


Dataset = LabelledDataset | LanguageDataset
"""The data of a run: both offer the same, and ``train`` and ``validation`` hold what ``collator``
takes."""


def score_outputs(known: Labels, outputs: np.ndarray, labels: np.ndarray) -> Scores:
    """Score a model's outputs.

    Parameters
    ----------
    known : Labels
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
    is_finite = np.isfinite(outputs).all(axis=1, keepdims=True)
    outputs = np.where(is_finite, outputs, 0.0)
    if known.regression:
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
    metrics = known.score(labels, predictions)
    return Scores(metrics, accuracy, loss if is_finite.all() else None, len(labels))


def read_dataset(settings: FinetuneSettings) -> Dataset:
    """Read the examples of a run and find its base.

    Raises
    ------
    DataError, CheckpointError
        If a file is missing or holds a bad row.
    SettingsError
        If a split would leave nothing.
    """
    if settings.is_language:
        return read_language(settings)
    metric_functions()  # refuses, before any work, where they cannot be computed
    base = reachable_base(settings.base)
    seed = settings.split_seed
    labels = find_labels(settings.data) if settings.task == CLASSES else Labels()
    train = labels.read(settings.data)
    if settings.dev_data is not None:
        dev = labels.read(settings.dev_data)
    else:
        train, dev = hold_out_dev(train, settings)
    train = subsample(train, settings.train_examples, seed=seed)
    validation: list[LabelledExample] = []
    if settings.patience is not None:
        train, validation = split_off(train, settings.validation, seed=seed)
    dev = subsample(dev, settings.dev_examples, seed=seed)
    return LabelledDataset(
        settings, labels, base, train, sorted(validation, key=length), sorted(dev, key=length)
    )


def split_off(
    examples: Sequence[LabelledExample], share: float, *, seed: int
) -> tuple[list[LabelledExample], list[LabelledExample]]:
    """Split a share off the examples; the same seed splits the same ones off.

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
    order = np.random.default_rng(seed + 1).permutation(len(examples))
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
    rows = texts_of(examples)
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
