"""Fine-tuning: one run from settings to an adapter directory and its record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lsrdecomp.training.record import Record, Scores
from lsrdecomp.training.settings import FinetuneSettings


@dataclass(frozen=True, slots=True)
class Step:
    """How far a run is, given to ``on_step`` after every step."""

    step: int
    steps: int


def finetune(
    settings: FinetuneSettings,
    out: str | Path,
    *,
    resume: bool = True,
    on_step: Callable[[Step], None] | None = None,
) -> Record:
    """Train an adapter and write ``out/adapter``, ``out/record.json`` and, with ``log_every``, ``out/layers.jsonl``.

    Raises
    ------
    SettingsError
        If a setting does not fit the model or the task.
    CheckpointError
        If ``out`` exists.
    """
    raise NotImplementedError


def evaluate(settings: FinetuneSettings) -> Scores:
    """Answers on dev of the adapter directory ``settings.init``, judged without any training."""
    raise NotImplementedError
