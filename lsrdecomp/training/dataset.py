"""What a run reads: the place of its base, its examples, and how they become batches and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor, nn
from transformers import Trainer

from lsrdecomp.calibration.base_model import Base, batches, task_texts
from lsrdecomp.calibration.bases import find_base, open_tokenizer
from lsrdecomp.calibration.dataset import token_batches
from lsrdecomp.calibration.examples import Example
from lsrdecomp.training.embedded import embedded
from lsrdecomp.training.encoding import Collator, choices, length, split, subsample
from lsrdecomp.training.language import LanguageData, TokenCollator, judge_language, read_language_data, samples
from lsrdecomp.training.record import Sample, Scores
from lsrdecomp.training.scoring import judge
from lsrdecomp.training.settings import EMBEDDED, JSONL, FinetuneSettings
from lsrdecomp.training.tasks import TASKS, Task

Collate = Callable[[Sequence[Any]], dict[str, Tensor]]


class Dataset(Protocol):
    """What `finetune` asks of the examples of a run; ``train`` and ``validation`` hold what ``collator`` takes."""

    @property
    def base(self) -> str: ...
    @property
    def train(self) -> Sequence[Any]: ...
    @property
    def validation(self) -> Sequence[Any]: ...
    @property
    def lengths(self) -> list[int]:
        """Of the training examples, to sort by."""
        ...

    @property
    def outputs(self) -> int | None:
        """Numbers the head gives a row of tokens; None for a language model."""
        ...

    @property
    def regression(self) -> bool: ...
    @property
    def baseline(self) -> dict[str, float]:
        """Metrics of always giving the commonest answer."""
        ...

    def collator(self, tokenizer: Any) -> Collate: ...
    def judge_dev(self, trainer: Trainer) -> Scores: ...
    def judge_validation(self, trainer: Trainer) -> Scores | None: ...
    def samples(self, trainer: Trainer) -> tuple[Sample, ...]:
        """What the model said, for the record."""
        ...

    def questions(self, base: Base, *, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """The training examples as a calibration reads them."""
        ...


@dataclass(frozen=True, slots=True)
class TaskDataset:
    """The examples of a classification, a multiple choice or a regression."""

    settings: FinetuneSettings
    task: Task
    base: str
    train: list[Example]
    validation: list[Example]
    dev: list[Example]

    @property
    def lengths(self) -> list[int]:
        return [length(example) for example in self.train]

    @property
    def outputs(self) -> int:
        return 1 if self.task.regression or choices(self.dev) > 1 else len(self.task.labels)

    @property
    def regression(self) -> bool:
        return self.task.regression

    @property
    def baseline(self) -> dict[str, float]:
        return self.task.baseline(self.dev)

    def collator(self, tokenizer: Any) -> Collate:
        return Collator(tokenizer, self.settings.max_length, regression=self.regression)

    def judge_dev(self, trainer: Trainer) -> Scores:
        return self._judged(trainer, self.dev)

    def judge_validation(self, trainer: Trainer) -> Scores | None:
        return self._judged(trainer, self.validation) if self.validation else None

    def samples(self, trainer: Trainer) -> tuple[Sample, ...]:
        return ()

    def questions(self, base: Base, *, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        return batches(base, task_texts(self.train), size=size, max_length=self.settings.max_length, seed=seed)

    def _judged(self, trainer: Trainer, examples: list[Example]) -> Scores:
        answered = trainer.predict(examples)  # type: ignore[arg-type]
        return judge(self.task, np.asarray(answered.predictions), np.asarray(answered.label_ids))


@dataclass(frozen=True, slots=True)
class LanguageDataset:
    """Prompts and completions of a language model, as tokens."""

    settings: FinetuneSettings
    tokenizer: Any
    base: str
    data: LanguageData

    @property
    def train(self) -> Sequence[Any]:
        return self.data.train

    @property
    def validation(self) -> Sequence[Any]:
        return self.data.validation

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.data.train]

    @property
    def outputs(self) -> None:
        return None

    @property
    def regression(self) -> bool:
        return False

    @property
    def baseline(self) -> dict[str, float]:
        return {}

    def questions(self, base: Base, *, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        return token_batches(self.data.train, size=size, seed=seed, pad=base.tokenizer.pad_token_id)

    def collator(self, tokenizer: Any) -> Collate:
        return TokenCollator(tokenizer.pad_token_id)

    def judge_dev(self, trainer: Trainer) -> Scores:
        settings, model = self.settings, cast(nn.Module, trainer.model)
        return judge_language(
            model,
            self.tokenizer,
            self.data,
            metric=settings.metric,
            new_tokens=settings.new_tokens,
            autocast=settings.precision != "float32",
        )

    def judge_validation(self, trainer: Trainer) -> Scores | None:
        if not self.validation:
            return None
        loss = trainer.evaluate()["eval_loss"]
        return Scores({}, None, float(loss) if np.isfinite(loss) else None, len(self.validation))

    def samples(self, trainer: Trainer) -> tuple[Sample, ...]:
        settings = self.settings
        if not settings.samples:
            return ()
        autocast = settings.precision != "float32"
        return tuple(
            samples(
                trainer.model,
                self.tokenizer,
                self.data,
                settings.samples,
                new_tokens=settings.new_tokens,
                autocast=autocast,
            )
        )


def read_dataset(settings: FinetuneSettings) -> TaskDataset | LanguageDataset:
    """The examples of a run, and where its base is; the embedded ones are made if need be.

    Raises
    ------
    TaskError, DataError, CheckpointError
        If a file is missing or holds a bad row.
    SettingsError
        If the validation split would leave nothing.
    """
    if settings.task == JSONL:
        tokenizer = open_tokenizer(settings.model)
        return LanguageDataset(settings, tokenizer, find_base(settings.model), read_language_data(settings, tokenizer))
    task = TASKS[settings.task]
    task.check_libraries()
    own = embedded() if EMBEDDED in (settings.model, settings.task) and _needs_own(settings) else None
    base = str(own.model) if own is not None and settings.model == EMBEDDED else find_base(settings.model)
    data = settings.data if settings.data is not None or own is None else str(own.data)
    assert data is not None
    train = subsample(task.read(data, "train"), settings.train_examples)
    validation: list[Example] = []
    if settings.patience is not None:
        train, validation = split(train, settings.validation)
    dev = sorted(subsample(task.read(data, "dev"), settings.dev_examples), key=length)
    return TaskDataset(settings, task, base, train, sorted(validation, key=length), dev)


def _needs_own(settings: FinetuneSettings) -> bool:
    return settings.model == EMBEDDED or settings.data is None
