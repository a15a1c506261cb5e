"""Divergence and agreement of an adapter's outputs before and after compression, without labels."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lsrdecomp._renamed import keep_old_attributes
from lsrdecomp.calibration.base_model import Base, has_delta
from lsrdecomp.calibration.behaviour import Behaviour
from lsrdecomp.calibration.errors import CalibrationError
from lsrdecomp.calibration.forward import forward, forward_repeatable, predictions_at_a_time
from lsrdecomp.calibration.heads import TOKEN_HEADS, Batch, Head
from lsrdecomp.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass(frozen=True, slots=True)
class _ReferenceBatch:
    """One batch with the source's logits."""

    batch: Batch
    logits: Callable[[], Tensor]  # forms them: (predictions, classes)
    counts: Tensor  # (examples,): predictions of each example


@keep_old_attributes
class Reference:
    """A source's logits on some batches, kept so that many compressed adapters compare with them.

    Parameters
    ----------
    source : Base
        The base with the adapter that others are compared with.
    batches : iterable of mappings
        What models are called with, as `calibration.batches.text_batches` makes them. Padding is
        left out.

    Raises
    ------
    CalibrationError
        If there was nothing to predict.

    Notes
    -----
    Costs two forward passes a batch (with ΔW and without), and one more for each comparison.
    Between them are held the batches and what `forward_repeatable` keeps: the logits of few
    classes, or one row of the model's width for each token.
    """

    def __init__(self, source: Base, batches: Iterable[Batch]) -> None:
        self.head = source.head
        self._batches: list[_ReferenceBatch] = []
        counts: list[Tensor] = []
        effects: list[Tensor] = []
        for batch in batches:
            # 1. With ΔW. Logits are not held here, only a function that forms them again.
            output, form_logits = forward_repeatable(source, batch)
            self._batches.append(_ReferenceBatch(batch, form_logits, output.counts))
            # 2. Without ΔW, for the adapter's effect. Sums for each example are all that the
            #    jackknife needs.
            with torch.no_grad(), without_delta(source.model):
                plain = forward(source, batch)
            effect = divergences(output.logits, plain.logits, self.head)
            effects.append(sum_by_example(effect, output.counts))
            counts.append(output.counts)
        if not counts or int(torch.cat(counts).sum()) == 0:
            raise CalibrationError("the texts give nothing to predict")
        self.counts = torch.cat(counts)
        self.effects = torch.cat(effects)

    @property
    def examples(self) -> int:
        """Number of examples."""
        return len(self.counts)

    @property
    def effect(self) -> float:
        """KL(source ‖ no ΔW), nats per prediction."""
        return float(self.effects.sum()) / int(self.counts.sum())

    def compare(self, compressed: Base) -> Behaviour:
        """Run another adapter on the same base and batches, and compare its logits.

        Parameters
        ----------
        compressed : Base
            The base with it, as `load_pair` opens the two.

        Returns
        -------
        Behaviour

        Raises
        ------
        ShapeError
            If the two have logits of other shapes, such as with other classes.
        """
        lost, n_matching = self.compare_examples(compressed)
        n_predictions = int(self.counts.sum())
        agreement, exact_match_rate = None, None
        if self.head is not Head.regression:
            agreement = float(n_matching.sum()) / n_predictions
        if self.head in TOKEN_HEADS:
            exact_match_rate = float((n_matching == self.counts).double().mean())
        return Behaviour(
            examples=self.examples,
            answers=n_predictions,
            unit="token" if self.head in TOKEN_HEADS else "example",
            kl=float(lost.sum()) / n_predictions,
            agreement=agreement,
            effect=self.effect,
            standard_error=ratio_standard_error(lost, self.effects),
            exact_match_rate=exact_match_rate,
        )

    def compare_examples(self, compressed: Base) -> tuple[Tensor, Tensor]:
        """Compare another adapter's logits example by example.

        Returns
        -------
        divergence : Tensor, shape (examples,)
            Σ KL(source ‖ compressed) over the predictions of each example, nats.
        n_matching : Tensor, shape (examples,)
            Predictions of each example whose top class is the same.

        Raises
        ------
        ShapeError
            As `compare`.
        """
        # One batch at a time: the logits of all texts would not fit.
        divergence: list[Tensor] = []
        n_matching: list[Tensor] = []
        with torch.no_grad():
            for part in self._batches:
                expected = part.logits()
                found = forward(compressed, part.batch).logits
                if expected.shape != found.shape:
                    raise ShapeError(
                        f"logits of shape {tuple(found.shape)} against {tuple(expected.shape)}"
                    )
                lost = divergences(expected, found, self.head)
                divergence.append(sum_by_example(lost, part.counts))
                matches = (expected.argmax(-1) == found.argmax(-1)).long().cpu()
                n_matching.append(sum_by_example(matches, part.counts))
        return torch.cat(divergence), torch.cat(n_matching)


def divergences(
    expected: Tensor, found: Tensor, head: Head, *, at_a_time: int | None = None
) -> Tensor:
    """Return KL(expected ‖ found) of every prediction in nats, in double precision on the CPU.

    Parameters
    ----------
    expected, found : Tensor, shape (predictions, classes)
        Logits.
    head : Head
        Their meaning; of a regression, half the squared difference is returned.
    at_a_time : int, optional
        Predictions that are held in double precision at a time; absent, as many as
        `predictions_at_a_time` says.

    Returns
    -------
    Tensor, shape (predictions,)
    """
    size = at_a_time or predictions_at_a_time(expected.shape[-1])
    parts = [torch.zeros(0, dtype=torch.float64)]
    for first, second in zip(torch.split(expected, size), torch.split(found, size), strict=True):
        # Logits that are nearly equal have divergences below the rounding of float32 logarithms.
        p, q = _double(first), _double(second)
        if head is Head.regression:
            parts.append(((p - q).square().sum(-1) / 2).cpu())
        else:
            log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
            parts.append((log_p.exp() * (log_p - log_q)).sum(-1).cpu())
    return torch.cat(parts)


def _double(values: Tensor) -> Tensor:
    """Return values in double precision, on the CPU where the device has none."""
    return values.cpu().double() if values.device.type == "mps" else values.double()


def sum_by_example(values: Tensor, counts: Tensor) -> Tensor:
    """Return the sums of values (predictions,) over those of each example, (examples,)."""
    example = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.zeros(len(counts), dtype=values.dtype).index_add_(0, example, values)


def ratio_standard_error(lost: Tensor, effects: Tensor) -> float | None:
    """Return the standard error of 1 − Σ lost / Σ effects over examples: the jackknife of a ratio.

    Examples are the units that were drawn. None for fewer than two, or where leaving one out leaves
    no effect.
    """
    n_examples = len(lost)
    effects_without_one = effects.sum() - effects
    if n_examples < 2 or bool((effects_without_one <= 0.0).any()):
        return None
    shares_lost = (lost.sum() - lost) / effects_without_one
    squares = (shares_lost - shares_lost.mean()).square().sum()
    return float(((n_examples - 1) / n_examples * squares).sqrt())


@contextmanager
def without_delta(model: nn.Module) -> Iterator[None]:
    """Set ΔW = 0 in every adapted layer inside a block.

    Heads and rows of tokens that came with the adapter stay.
    """
    layers = [module for module in model.modules() if has_delta(module)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
