"""What an adapter's answers have become: divergence and agreement before and after compression, without labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lsrdecomp.calibration.base_model import Base
from lsrdecomp.calibration.calibrate import TOKEN_HEADS, Batch, CalibrationError, answer_mask
from lsrdecomp.calibration.fisher import Head, answer_logits
from lsrdecomp.errors import ShapeError

ENTRIES = 2**22
"""Numbers that are held in double precision at a time: a vocabulary is large."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How two adapters on one base answer; means over all answers.

    ``kl`` is KL(source ‖ written) in nats; for a regression head, half the squared difference of the scores. ``effect``
    is the same divergence with no ΔW in place of the written one: how much the source does at all.
    """

    examples: int
    answers: int
    unit: str  # what an answer belongs to: "example" or "token"
    kl: float
    agreement: float | None  # share of answers whose likeliest class is the same; None for a regression
    effect: float

    @property
    def kept(self) -> float | None:
        """1 − kl / effect: 1 if nothing changed, 0 if the source might as well be left out; None if it does nothing."""
        return 1.0 - self.kl / self.effect if self.effect > 0.0 else None


def compare_answers(
    source: Base, written: Base, batches: Iterable[Batch], *, on_batch: Callable[[int], object] | None = None
) -> Behaviour:
    """Let a base with two adapters answer the same questions.

    Parameters
    ----------
    source, written : Base
        As `load_pair` opens them.
    batches : iterable of mappings
        What the models are called with, as `calibration.base_model.batches` makes them. Padding is no question.
    on_batch : callable, optional
        Called after every batch with the number of examples so far.

    Returns
    -------
    Behaviour

    Raises
    ------
    ShapeError
        If the models do not answer alike.
    CalibrationError
        If there was nothing to answer.

    Notes
    -----
    Costs three forward passes a batch.
    """
    head = source.head
    examples = answers = 0
    kl = effect = agreeing = 0.0
    with torch.no_grad():
        for batch in batches:
            inputs = {key: value.to(next(source.model.parameters()).device) for key, value in batch.items()}
            mask = answer_mask(inputs, head)
            given = [answer_logits(each.model(**inputs).logits, head, mask) for each in (source, written)]
            with without_delta(source.model):
                given.append(answer_logits(source.model(**inputs).logits, head, mask))
            if given[0].shape != given[1].shape:
                raise ShapeError(f"answers of shape {tuple(given[1].shape)} against {tuple(given[0].shape)}")
            examples, answers = examples + len(inputs["input_ids"]), answers + len(given[0])
            kl, effect = kl + divergence(given[0], given[1], head), effect + divergence(given[0], given[2], head)
            agreeing += float((given[0].argmax(-1) == given[1].argmax(-1)).sum())
            if on_batch is not None:
                on_batch(examples)
    if answers == 0:
        raise CalibrationError("the texts give nothing to answer")
    agreement = None if head is Head.regression else agreeing / answers
    unit = "token" if head in TOKEN_HEADS else "example"
    return Behaviour(examples, answers, unit, kl / answers, agreement, effect / answers)


def divergence(old: Tensor, new: Tensor, head: Head) -> float:
    """Σ KL(old ‖ new) over the answers of logits (answers, classes), in nats."""
    total = 0.0
    step = max(1, ENTRIES // old.shape[-1])
    for first, second in zip(torch.split(old, step), torch.split(new, step), strict=True):
        one, other = first.cpu().double(), second.cpu().double()
        if head is Head.regression:
            total += float((one - other).square().sum()) / 2
        else:
            one, other = one.log_softmax(-1), other.log_softmax(-1)
            total += float((one.exp() * (one - other)).sum())
    return total


@contextmanager
def without_delta(model: nn.Module) -> Iterator[None]:
    """ΔW = 0 in every adapted layer inside the block; heads that came with the adapter stay."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
