"""What the last layer of a classifier reads: hundreds of numbers for each answer, where its logits are two or three."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.answers import Answers, ask, keep_answers
from lsrdecomp.calibration.divergence import without_delta
from lsrdecomp.calibration.fisher import Batch, Head

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.calibration.base_model import Base


@dataclass(frozen=True, slots=True)
class Lesson:
    """A batch with the source's answers to it."""

    batch: Batch
    logits: Callable[[], Tensor]  # (answers, classes)
    features: (
        Tensor | None
    )  # (answers, width) that the last layer read; None where that is not known
    answers: int


def lesson(source: Base, batch: Batch) -> Lesson:
    """What the source answers, without gradients, in little memory."""
    with torch.no_grad():
        if source.head in (Head.classification, Head.regression):
            answers, features = ask_with_features(source, batch)
            return Lesson(batch, lambda: answers.logits, features, int(answers.counts.sum()))
        answers, logits = keep_answers(source, batch)
        return Lesson(batch, logits, None, int(answers.counts.sum()))


def ask_with_features(base: Base, batch: Batch) -> tuple[Answers, Tensor | None]:
    """As `ask`, with what the last linear layer read for each answer: (answers, width), with its graph.

    None where there is more than one answer to an example, or no linear layer whose output is the
    logits.
    """
    calls: list[tuple[Tensor, Tensor]] = []

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(output, Tensor):
            calls.append((inputs[0], output))

    classes = getattr(getattr(base.model, "config", None), "num_labels", 0)
    linear = [module for module in base.model.modules() if isinstance(module, nn.Linear)]
    last = linear if base.head in (Head.classification, Head.regression) else []
    handles = [
        module.register_forward_hook(hook) for module in last if module.out_features == classes
    ]
    try:
        answers = ask(base, batch)
    finally:
        for handle in handles:
            handle.remove()
    # Of the layers with as many outputs as there are classes the last one whose outputs are the
    # logits, bit by bit.
    for inputs, output in reversed(calls):
        rows = _rows(inputs, output.detach().float(), answers.logits.detach())
        if rows is not None:
            return answers, rows
    return answers, None


def distance_without(source: Base, lessons: list[Lesson]) -> float | None:
    """How far ΔW moves the features: the mean over answers of the squared distance to those without it.

    None where features are not known, or do not move. One forward pass a lesson.
    """
    total, answers = 0.0, 0
    with torch.no_grad(), without_delta(source.model):
        for each in lessons:
            if each.features is None:
                return None
            bare = ask_with_features(source, each.batch)[1]
            if bare is None:
                return None
            total, answers = (
                total + float((bare - each.features).square().sum()),
                answers + each.answers,
            )
    return total / answers if total > 0.0 else None


def _rows(inputs: Tensor, output: Tensor, logits: Tensor) -> Tensor | None:
    """The rows of a layer's input (answers, [tokens,] width) from which it made the logits; None if it did not."""
    if output.shape == logits.shape and torch.equal(output, logits):
        return inputs
    if output.ndim == 3 and (len(output), output.shape[-1]) == tuple(logits.shape):
        same = (output == logits[:, None]).all(-1)  # of all tokens the one that answers
        if bool(same.any(1).all()):
            return inputs[torch.arange(len(inputs), device=inputs.device), same.long().argmax(1)]
    return None
