"""What an adapter's answers have become: divergence and agreement before and after compression, without labels."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.answers import ask, keep_answers
from lsrdecomp.calibration.base_model import Base, has_delta
from lsrdecomp.calibration.behaviour import Behaviour
from lsrdecomp.calibration.fisher import TOKEN_HEADS, Batch, CalibrationError, Head
from lsrdecomp.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ENTRIES = 2**22
"""Numbers that are held in double precision at a time: a vocabulary is large."""


class Reference:
    """A source's answers to some batches, kept so that many written forms can be compared with it.

    Parameters
    ----------
    source : Base
        The base with the adapter whose answers are wanted.
    batches : iterable of mappings
        What models are called with, as `calibration.base_model.batches` makes them. Padding is no
        question.

    Raises
    ------
    CalibrationError
        If there was nothing to answer.

    Notes
    -----
    Costs two forward passes a batch (with ΔW and without), and one more for each comparison.
    Between them are held the batches and what `keep_answers` keeps: the logits of few classes, or
    one row of the model's width for each token.
    """

    def __init__(self, source: Base, batches: Iterable[Batch]) -> None:
        self.head = source.head
        self._parts: list[tuple[Batch, Callable[[], Tensor], Tensor]] = []
        effects = []
        # Two passes a batch: with ΔW, and without it for what the adapter does at all.
        for batch in batches:
            answers, recall = keep_answers(source, batch)
            with torch.no_grad(), without_delta(source.model):
                bare = ask(source, batch)
            # Of logits none is kept here: sums for each example are all that effects and the
            # jackknife need.
            self._parts.append((batch, recall, answers.counts))
            effects.append(
                summed(divergences(answers.logits, bare.logits, self.head), answers.counts)
            )
        counts = [counts for _, _, counts in self._parts]
        self.counts = torch.cat(counts) if counts else torch.zeros(0, dtype=torch.long)
        if int(self.counts.sum()) == 0:
            raise CalibrationError("the texts give nothing to answer")
        self.effects = torch.cat(effects)

    @property
    def examples(self) -> int:
        return len(self.counts)

    @property
    def effect(self) -> float:
        """KL(source ‖ no ΔW), nats per answer."""
        return float(self.effects.sum()) / int(self.counts.sum())

    def compare(self, written: Base) -> Behaviour:
        """Let another adapter on the same base answer the same batches.

        Parameters
        ----------
        written : Base
            The base with it, as `load_pair` opens the two.

        Returns
        -------
        Behaviour

        Raises
        ------
        ShapeError
            If the two do not answer alike, such as with other classes.
        """
        lost, agreeing = self.losses(written)
        examples, counts, effects = len(lost), self.counts.cpu(), self.effects
        answers, tokens = int(counts.sum()), self.head in TOKEN_HEADS
        return Behaviour(
            examples=examples,
            answers=answers,
            unit="token" if tokens else "example",
            kl=float(lost.sum()) / answers,
            agreement=None if self.head is Head.regression else float(agreeing.sum()) / answers,
            effect=self.effect,
            standard_error=ratio_error(lost, effects),
            throughout=float((agreeing == counts).double().mean()) if tokens else None,
        )

    def losses(self, written: Base) -> tuple[Tensor, Tensor]:
        """Σ KL(source ‖ written) over the answers of each example, and how many of them are the same: (examples,) each.

        Raises `ShapeError` if the models do not answer alike.
        """
        # One batch at a time: the logits of all texts would not fit.
        lost, agreeing = [], []
        with torch.no_grad():
            for batch, recall, counts in self._parts:
                old, new = recall(), ask(written, batch).logits
                if old.shape != new.shape:
                    raise ShapeError(
                        f"answers of shape {tuple(new.shape)} against {tuple(old.shape)}"
                    )
                lost.append(summed(divergences(old, new, self.head), counts))
                same = (old.argmax(-1) == new.argmax(-1)).long()
                agreeing.append(summed(same.cpu(), counts))
        return torch.cat(lost), torch.cat(agreeing)


def divergences(old: Tensor, new: Tensor, head: Head) -> Tensor:
    """KL(old ‖ new) of every answer of logits (answers, classes), in nats: (answers,), in double precision on the CPU.

    Of a regression, half the squared difference.
    """
    # In double precision: a form that answers nearly alike has divergences below the rounding of
    # float32 logarithms.
    step = max(1, ENTRIES // old.shape[-1])
    kl = [torch.zeros(0, dtype=torch.float64)]
    for first, second in zip(torch.split(old, step), torch.split(new, step), strict=True):
        before, after = (
            part.cpu().double() if part.device.type == "mps" else part.double()
            for part in (first, second)
        )
        if head is Head.regression:
            kl.append(((before - after).square().sum(-1) / 2).cpu())
        else:
            before, after = before.log_softmax(-1), after.log_softmax(-1)
            kl.append((before.exp() * (before - after)).sum(-1).cpu())
    return torch.cat(kl)


def summed(values: Tensor, counts: Tensor) -> Tensor:
    """Sums of the values (answers,) of each example, (examples,)."""
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.zeros(len(counts), dtype=values.dtype).index_add_(0, owner, values)


def ratio_error(lost: Tensor, effects: Tensor) -> float | None:
    """Standard error of 1 − Σ lost / Σ effects over examples, which are the units drawn: the jackknife of a ratio.

    None for fewer than two examples, or where leaving one out leaves no effect.
    """
    count, rest = len(lost), effects.sum() - effects
    if count < 2 or bool((rest <= 0.0).any()):
        return None
    shares = (lost.sum() - lost) / rest  # the share lost with each example left out
    return float(((count - 1) / count * (shares - shares.mean()).square().sum()).sqrt())


@contextmanager
def without_delta(model: nn.Module) -> Iterator[None]:
    """ΔW = 0 in every adapted layer inside the block; heads and rows of tokens that came with the adapter stay."""
    layers = [module for module in model.modules() if has_delta(module)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
