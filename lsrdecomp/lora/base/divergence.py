"""Divergence and agreement between the outputs of an adapter and of what it was compressed to."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lsrdecomp.errors import CalibrationError, ShapeError
from lsrdecomp.lora.base.base_model import Base, has_delta
from lsrdecomp.lora.base.behaviour import Behaviour
from lsrdecomp.lora.base.forward import forward, forward_repeatable, predictions_at_a_time
from lsrdecomp.lora.base.heads import TOKEN_HEADS, Batch, Head
from lsrdecomp.lora.base.tokens import LOSS_MASK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class _ReferenceBatch:
    """One batch, and the source's logits on it."""

    batch: Batch
    form_logits: Callable[[], Tensor]  # returns (predictions, classes)
    counts: Tensor  # (examples,): predictions of each example
    labels: Tensor | None  # (predictions,): the right tokens, where the batch says them


class Reference:
    """A source adapter's logits on some batches, with which compressed adapters are compared.

    Parameters
    ----------
    source : Base
        The base with the source adapter.
    batches : iterable of mappings
        Inputs of models, as `lora.base.batches.text_batches` returns them. Padding does not
        count.

    Attributes
    ----------
    head : Head
    counts : Tensor, shape (examples,)
        Predictions of each example.
    effects : Tensor, shape (examples,)
        Σ KL(source ‖ no ΔW) over the predictions of each example, nats.
    n_right : tuple of int, or None
        Examples that the base and the source answer as the data do, token by token.

    Raises
    ------
    CalibrationError
        If there was nothing to predict.

    Notes
    -----
    Costs two forward passes a batch (with ΔW and without), and one more for each comparison. It
    keeps the batches and what `forward_repeatable` keeps of them: the logits of few classes, or one
    row of the model's width for each token.
    """

    def __init__(self, source: Base, batches: Iterable[Batch]) -> None:
        self.head = source.head
        self._batches: list[_ReferenceBatch] = []
        counts: list[Tensor] = []
        effects: list[Tensor] = []  # of every prediction
        base_right: list[Tensor] = []
        lora_right: list[Tensor] = []
        for batch in batches:
            # 1. With ΔW. Logits are not held here, only a function that forms them again.
            output, form_logits = forward_repeatable(source, batch)
            labels = _right_tokens(batch, self.head)
            reference = _ReferenceBatch(batch, form_logits, output.counts, labels)
            self._batches.append(reference)
            counts.append(output.counts)
            # 2. Without ΔW, for the adapter's effect.
            with torch.no_grad(), without_delta(source.model):
                plain = forward(source, batch)
            effects.append(divergences(output.logits, plain.logits, self.head))
            if labels is not None:
                base_right.append(_is_right(plain.logits, labels))
                lora_right.append(_is_right(output.logits, labels))
        if not counts or int(torch.cat(counts).sum()) == 0:
            raise CalibrationError("the data give nothing to predict")
        self.counts = torch.cat(counts)
        # Sums for each example are all that the standard error of a comparison needs. A GPU is
        # waited for here, once.
        self.effects = sum_by_example(torch.cat(effects).cpu(), self.counts)
        self._clusters = _clusters(self._batches, self.head)
        self.n_right = None
        if len(base_right) == len(self._batches):
            self.n_right = self._n_right(base_right), self._n_right(lora_right)

    @property
    def examples(self) -> int:
        """Number of examples."""
        return len(self.counts)

    @property
    def effect(self) -> float:
        """Mean KL(source ‖ no ΔW), nats per prediction."""
        return float(self.effects.sum()) / int(self.counts.sum())

    def margins(self) -> tuple[list[Tensor], Tensor]:
        """Return by how much the source's first class is ahead of the second, and how sure it is.

        Returns
        -------
        margins : list of Tensor, each of shape (predictions,)
            Differences of logits, of one example each.
        uncertainties : Tensor, shape (predictions,)
            1 − Σp² of every prediction, p being the source's probabilities.

        Notes
        -----
        Logits are formed again; no model runs.
        """
        ahead: list[Tensor] = []
        uncertainties: list[Tensor] = []
        for reference in self._batches:
            logits = reference.form_logits()
            for part in torch.split(logits, predictions_at_a_time(logits.shape[-1])):
                first_two = _double(part.topk(2).values)
                ahead.append(first_two[:, 0] - first_two[:, 1])
                uncertainties.append(1.0 - _double(part).softmax(-1).square().sum(-1))
        margins = torch.split(torch.cat(ahead).cpu(), self.counts.tolist())
        return list(margins), torch.cat(uncertainties).cpu()

    def compare(self, compressed: Base) -> Behaviour:
        """Run a compressed adapter on the same batches, and compare its logits with the source's.

        Parameters
        ----------
        compressed : Base
            The same base with the compressed adapter, as `Base.with_adapter` returns it.

        Returns
        -------
        Behaviour

        Raises
        ------
        ShapeError
            If the two have logits of different shapes, such as for different classes.
        """
        lost, n_matching, n_right = self.compare_examples(compressed)
        n_predictions = int(self.counts.sum())
        agreement = None
        if self.head is not Head.numbers:
            agreement = float(n_matching.sum()) / n_predictions
        exact_match_rate = None
        if self.head in TOKEN_HEADS:
            exact_match_rate = float((n_matching == self.counts).double().mean())
        return Behaviour(
            examples=self.examples,
            answers=n_predictions,
            unit="token" if self.head in TOKEN_HEADS else "example",
            kl=float(lost.sum()) / n_predictions,
            agreement=agreement,
            effect=self.effect,
            standard_error=ratio_standard_error(
                torch.bincount(self._clusters, lost), torch.bincount(self._clusters, self.effects)
            ),
            exact_match_rate=exact_match_rate,
            right=None if self.n_right is None else (*self.n_right, n_right),
        )

    def compare_examples(self, compressed: Base) -> tuple[Tensor, Tensor, int]:
        """Compare a compressed adapter's logits with the source's, example by example.

        Returns
        -------
        lost : Tensor, shape (examples,)
            Σ KL(source ‖ compressed) over the predictions of each example, nats.
        n_matching : Tensor, shape (examples,)
            Predictions of each example whose top class is the same.
        n_right : int
            Examples that ``compressed`` answers as the data do.

        Raises
        ------
        ShapeError
            As `compare`.
        """
        # One batch at a time: the logits of all texts would not fit in memory.
        lost: list[Tensor] = []
        n_matching: list[Tensor] = []
        right: list[Tensor] = []
        with torch.no_grad():
            for reference in self._batches:
                expected = reference.form_logits()
                actual = forward(compressed, reference.batch).logits
                if expected.shape != actual.shape:
                    raise ShapeError(
                        f"logits of shape {tuple(actual.shape)} against {tuple(expected.shape)}"
                    )
                lost.append(divergences(expected, actual, self.head))
                n_matching.append((expected.argmax(-1) == actual.argmax(-1)).long())
                if self.n_right is not None and reference.labels is not None:
                    right.append(_is_right(actual, reference.labels))
        # A GPU is waited for once, after the last batch.
        return (
            sum_by_example(torch.cat(lost).cpu(), self.counts),
            sum_by_example(torch.cat(n_matching).cpu(), self.counts),
            self._n_right(right) if right else 0,
        )

    def _n_right(self, is_right: Sequence[Tensor]) -> int:
        """Return the number of examples of which all predictions are right."""
        matches = sum_by_example(torch.cat(list(is_right)).cpu(), self.counts)
        return int((matches == self.counts).sum())


def _clusters(batches: Sequence[_ReferenceBatch], head: Head) -> Tensor:
    """Return a number for each example, which completions of one prompt share.

    What is lost on them is not independent, as a standard error over them takes for granted.
    """
    prompts: list[tuple[int, ...]] = []
    for reference in batches:
        batch = reference.batch
        if head is not Head.causal_lm or LOSS_MASK not in batch:
            prompts += [()] * len(reference.counts)
            continue
        starts = batch[LOSS_MASK].argmax(-1).tolist()
        rows = batch["input_ids"].tolist()
        prompts += [tuple(row[:start]) for row, start in zip(rows, starts, strict=True)]
    # At most the token that begins every text comes before one without a prompt: it is alone.
    keys = [prompt if len(prompt) > 1 else index for index, prompt in enumerate(prompts)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys])


def _right_tokens(batch: Batch, head: Head) -> Tensor | None:
    """Return the tokens that a batch of prompts and completions is to be answered with."""
    if head is not Head.causal_lm or LOSS_MASK not in batch:
        return None
    mask = batch[LOSS_MASK][:, 1:].bool()
    labels: Tensor = batch["input_ids"][:, 1:][mask]
    return labels


def _is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 for each top prediction that is the right token, 0 for others."""
    return (logits.argmax(-1) == labels.to(logits.device)).long()


def divergences(
    expected: Tensor, actual: Tensor, head: Head, *, at_a_time: int | None = None
) -> Tensor:
    """Return KL(expected ‖ actual) of every prediction in nats, in double precision.

    Parameters
    ----------
    expected, actual : Tensor, shape (predictions, classes)
        Logits.
    head : Head
        Meaning of the logits. For numbers, half the squared difference is returned.
    at_a_time : int, optional
        Predictions that are held in double precision at a time; absent, `predictions_at_a_time`.

    Returns
    -------
    Tensor, shape (predictions,)
    """
    size = at_a_time or predictions_at_a_time(expected.shape[-1])
    parts: list[Tensor] = []
    for p, q in zip(torch.split(expected, size), torch.split(actual, size), strict=True):
        # In double precision: the divergence of nearly equal logits is below the rounding of
        # float32 logarithms.
        p, q = _double(p), _double(q)
        if head is Head.numbers:
            divergence = (p - q).square().sum(-1) / 2
        else:
            log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
            divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
        parts.append(divergence)
    return torch.cat(parts)


def _double(values: Tensor) -> Tensor:
    """Return values in double precision, on the CPU where the device has none."""
    return values.cpu().double() if values.device.type == "mps" else values.double()


def sum_by_example(values: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of each example's values.

    Parameters
    ----------
    values : Tensor, shape (predictions,)
        In the order of the examples.
    counts : Tensor, shape (examples,)
        Predictions of each example.

    Returns
    -------
    Tensor, shape (examples,)
    """
    example_of_value = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.zeros(len(counts), dtype=values.dtype).index_add_(0, example_of_value, values)


def ratio_standard_error(lost: Tensor, effects: Tensor) -> float | None:
    """Return the standard error of the share kept, 1 − Σ lost / Σ effects.

    It is the jackknife's over examples, or prompts, and not over predictions: those of one are not
    independent. None for fewer than two examples, or where leaving one out leaves no effect.
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
    """Set ΔW = 0 in every adapted layer inside a ``with`` block.

    Heads and embeddings of tokens that came with the adapter stay.
    """
    layers = [module for module in model.modules() if has_delta(module)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
