"""The LoRA that a comparison of adapters is about, with what its rivals learn and are judged by."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft.helpers import rescale_adapter_scale
from torch import Tensor, nn

from lsrdecomp.lora.base.base_model import Base
from lsrdecomp.lora.base.batches import prompt_batches
from lsrdecomp.lora.base.calibrate import calibrate
from lsrdecomp.lora.base.dataset import PromptExample, read_examples
from lsrdecomp.lora.base.divergence import Reference, ratio_standard_error, without_delta
from lsrdecomp.lora.base.forward import forward_repeatable
from lsrdecomp.lora.base.open_bases import load_base
from lsrdecomp.lora.files import Checkpoint, content_key, open_checkpoint
from lsrdecomp.lora.files.statistics import METADATA, Statistics, read_statistics
from lsrdecomp.lora.measure.evaluator import LORA_SCALE
from lsrdecomp.lora.measure.output_meter import Meter
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings

BATCH = 4
"""Texts of a training step."""
MEASURING_BATCH = 8
"""Texts that are measured at a time."""
ANSWERED = 64
"""Held-out prompts that are answered in whole."""


@dataclass(frozen=True)
class Lesson:
    """A batch of texts, and the LoRA's logits on it."""

    batch: Mapping[str, Tensor]
    form_logits: Callable[[], Tensor]
    n_predictions: int


@dataclass(frozen=True)
class Subject:
    """A LoRA on its base, its answers, and the norms of its layers.

    Attributes
    ----------
    base : str
        Name of the base.
    lora : Path
    work : Path
        Directory for what takes long to make.
    source : Base
        The base with the LoRA on it.
    lessons : sequence of Lesson
        What is learned, `BATCH` texts each.
    reference : Reference
        The LoRA's outputs on held-out texts.
    answers : Meter
        The LoRA's own answers to `ANSWERED` of them.
    task_statistics : Path
        Statistics of the layers on texts of the task.
    base_statistics : Path
        Statistics of the base alone, on texts of other tasks; not there if none were given.
    """

    base: str
    lora: Path
    work: Path
    source: Base
    lessons: Sequence[Lesson]
    reference: Reference
    answers: Meter
    task_statistics: Path
    base_statistics: Path

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the layers that the LoRA adapts."""
        return self.source.modules

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The LoRA's file."""
        return open_checkpoint(self.lora)

    @cached_property
    def statistics(self) -> Statistics:
        """The norms of the layers on texts of the task."""
        return read_statistics(self.task_statistics)

    @cached_property
    def plain(self) -> nn.Module:
        """The base without an adapter, frozen."""
        model: nn.Module = copy.copy(self.source.model).unload()
        model.requires_grad_(False)
        return model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options by which `open_subject` finds a LoRA and its texts."""
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="texts of the task to learn from")
    parser.add_argument("--held", type=Path, required=True, help="texts of the task to judge on")
    parser.add_argument(
        "--other", type=Path, nargs="+", default=[], help="texts of other tasks, for Fisher cores"
    )
    parser.add_argument("--texts", type=int, default=160, help="texts to learn from")
    parser.add_argument("--samples", type=int, default=64, help="texts of each kind for a norm")
    parser.add_argument("--examples", type=int, default=32, help="held-out texts")


def open_subject(arguments: argparse.Namespace) -> Subject:
    """Open a LoRA, and make what all its rivals need: statistics, lessons and a reference."""
    torch.set_num_threads(1)
    source = load_base(arguments.base, arguments.lora)
    texts = read_examples(arguments.data)[: arguments.texts]
    fresh = read_examples(arguments.held)
    held_out = fresh[: arguments.examples]
    others: list[PromptExample] = []
    for file in arguments.other:
        others += read_examples(file)[: arguments.samples]
    # What was made from another LoRA or from other texts lies in another directory.
    work = arguments.work / content_key(source.adapter_sha256, repr(texts), repr(others))
    work.mkdir(parents=True, exist_ok=True)
    # 1. The norms of the layers: on texts of the task, with the LoRA at the strength that
    #    `compress` takes, and of the base alone.
    task_statistics = work / "statistics"
    base_statistics = work / "statistics-other"
    with rescale_adapter_scale(source.model, LORA_SCALE):
        _calibrate(source, texts[: arguments.samples], task_statistics)
    with without_delta(source.model):
        _calibrate(source, others, base_statistics, answers="all")
    # 2. The LoRA's outputs: on held-out texts, in its own answers, and on texts that are learned.
    answers = Meter(source, fresh[:ANSWERED], EvaluatorSettings(batch=MEASURING_BATCH))
    reference = Reference(source, prompt_batches(source, held_out, size=MEASURING_BATCH, seed=0))
    lessons: list[Lesson] = []
    for batch in prompt_batches(source, texts, size=BATCH, seed=0):
        output, form_logits = forward_repeatable(source, batch)
        lessons.append(Lesson(batch, form_logits, int(output.counts.sum())))
    return Subject(
        arguments.base,
        arguments.lora,
        work,
        source,
        lessons,
        reference,
        answers,
        task_statistics,
        base_statistics,
    )


def _calibrate(
    source: Base, examples: list[PromptExample], out: Path, *, answers: str = "completion"
) -> None:
    """Measure statistics on some texts, unless they are there."""
    if not examples or (out / METADATA).exists():
        return
    batches = prompt_batches(source, examples, size=MEASURING_BATCH, seed=0, answers=answers)
    samples = len(examples)
    calibrate(source, list(batches), out=out, seed=0, samples=samples, effect=False)


def judged(subject: Subject, written: Base) -> dict[str, Any]:
    """Return the share kept, whole answers, and the nats lost on each held-out text."""
    reference = subject.reference
    lost, n_equal_tokens, _ = reference.compare_examples(written)
    matches = subject.answers.whole_answers(written)
    return {
        "kept": 1.0 - float(lost.sum() / reference.effects.sum()),
        "error": ratio_standard_error(lost, reference.effects),
        "agreement": float(n_equal_tokens.sum() / reference.counts.sum()),
        "answered": matches.answered,
        "n_matching": matches.n_matching,
        "lost": [round(loss, 3) for loss in lost.tolist()],
    }
