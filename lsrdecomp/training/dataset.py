"""What a run reads: the place of its base, and its examples."""

from __future__ import annotations

from dataclasses import dataclass

from lsrdecomp.calibration.examples import Example
from lsrdecomp.training.embedded import embedded
from lsrdecomp.training.encoding import length, some, split
from lsrdecomp.training.settings import EMBEDDED, FinetuneSettings
from lsrdecomp.training.tasks import TASKS, Task


@dataclass(frozen=True, slots=True)
class Material:
    """What a run reads: the base's place and the examples."""

    task: Task
    base: str
    train: list[Example]
    validation: list[Example]
    dev: list[Example]


def read_material(settings: FinetuneSettings) -> Material:
    """The examples of a run, and where its base is; the embedded ones are made if need be.

    Raises
    ------
    TaskError, CheckpointError
        If a file is missing or holds a bad row.
    SettingsError
        If the validation split would leave nothing.
    """
    task = TASKS[settings.task]
    own = embedded() if EMBEDDED in (settings.model, settings.task) and _needs_own(settings) else None
    base = str(own.model) if own is not None and settings.model == EMBEDDED else settings.model
    data = settings.data if settings.data is not None or own is None else str(own.data)
    assert data is not None
    train = some(task.read(data, "train"), settings.train_examples)
    validation: list[Example] = []
    if settings.patience is not None:
        train, validation = split(train, settings.validation)
    dev = sorted(some(task.read(data, "dev"), settings.dev_examples), key=length)
    return Material(task, base, train, sorted(validation, key=length), dev)


def _needs_own(settings: FinetuneSettings) -> bool:
    return settings.model == EMBEDDED or settings.data is None
