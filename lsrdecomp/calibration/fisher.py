"""Gradients of sampled log-likelihoods: what each layer reads, and how the model's answer leans on what it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.dataset import ANSWER_MASK
from lsrdecomp.errors import LsrError, ShapeError


class CalibrationError(LsrError, RuntimeError):
    """The data or the model gave nothing to measure; the message says what was missing."""


class Head(Enum):
    """What the logits mean, and so what one answer of the model is."""

    classification = "one class per example"
    regression = "one number per example, with unit variance"
    tokens = "one class per token"
    causal_lm = "the next token at every position"
    seq2seq = "the next token of the output at every position"


Batch = Mapping[str, Tensor]
TOKEN_HEADS = (Head.tokens, Head.causal_lm, Head.seq2seq)
IGNORED = -100  # label of a token that is not to be answered, as transformers has it


@dataclass(slots=True)
class Call:
    """One use of a module: what went in, and the gradient of the log-likelihood at what came out."""

    inputs: Tensor
    gradient: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """All uses of one module in a pass: x of shape (examples, tokens, n), g of shape (examples, tokens, m)."""

    inputs: Tensor
    gradients: Tensor

    def used(self) -> Tensor:
        """Tokens that the answer depends on, (examples, tokens): padding has a gradient of exactly 0 and drops out."""
        return self.gradients.ne(0).any(-1)


@dataclass(slots=True)
class Record:
    """The calls of each watched module during one forward pass, handed on as the backward pass completes them.

    ``uses`` counts the calls of a forward pass. Those inside a block that is computed again on the
    way back, where `torch.is_grad_enabled` says no at first, are recorded when gradients reach the
    block.
    """

    sink: Callable[[str, Pairs], None]
    examples: int = 0
    calls: dict[str, list[Call]] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    returning: bool = False  # on the way back

    def clear(self) -> None:
        """Forget the calls of a pass."""
        for name, calls in self.calls.items():
            calls.clear()
            self.uses[name] = 0

    def backward(self, score: Tensor, examples: int, gradient: Tensor | None = None) -> None:
        """Go back from ``score``; each module's pairs go to the sink, and out of memory, once its gradients are there.

        ``gradient`` of the log-likelihood at ``score`` if that is no log-likelihood itself.

        Raises
        ------
        ShapeError
            If the input rows of a module cannot be shared out among the examples.
        """
        self.examples, self.returning = examples, True
        try:
            score.backward(gradient)  # type: ignore[no-untyped-call]
        finally:
            self.returning = False
        for name in self.calls:
            self._deliver(name)

    def keep(self, name: str, call: Call, gradient: Tensor) -> None:
        """Take the gradient of one call; with the last one of its module, deliver."""
        call.gradient = gradient.detach()
        calls = self.calls[name]
        if len(calls) == self.uses[name] and all(other.gradient is not None for other in calls):
            self._deliver(name)

    def _deliver(self, name: str) -> None:
        calls = [
            (call.inputs, call.gradient) for call in self.calls[name] if call.gradient is not None
        ]
        self.calls[name].clear()
        self.uses[name] = 0
        if not calls:
            return
        # A module used several times in a pass has the tokens of all uses side by side: the
        # gradient of its weight is their sum.
        both: tuple[list[Tensor], list[Tensor]] = ([], [])
        for inputs, gradient in calls:
            rows = inputs[..., 0].numel()
            if rows % self.examples:
                raise ShapeError(
                    f"{name}: {rows} input rows (shape {tuple(inputs.shape)}) for {self.examples} examples"
                )
            for parts, tensor in zip(both, (inputs, gradient), strict=True):
                parts.append(
                    tensor.reshape(self.examples, rows // self.examples, tensor.shape[-1]).float()
                )
        self.sink(name, Pairs(torch.cat(both[0], 1), torch.cat(both[1], 1)))


@contextmanager
def watched(
    modules: Mapping[str, nn.Module], sink: Callable[[str, Pairs], None]
) -> Iterator[Record]:
    """Record inputs and output gradients of ``modules``; parameters need no gradient, hooks go when the block ends."""
    record = Record(sink, calls={name: [] for name in modules}, uses=dict.fromkeys(modules, 0))
    handles = [
        module.register_forward_hook(_hook(record, name)) for name, module in modules.items()
    ]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _hook(record: Record, name: str) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not record.returning:
            record.uses[name] += 1
        if not torch.is_grad_enabled():
            return None
        call = Call(arguments[0].detach())
        record.calls[name].append(call)
        keep = partial(record.keep, name, call)
        if output.requires_grad:
            output.register_hook(keep)  # type: ignore[no-untyped-call]
            return None
        # All parameters are frozen: here the graph begins. The copy lets later code write into its
        # result.
        start = output.detach().requires_grad_()
        start.register_hook(keep)  # type: ignore[no-untyped-call]
        return start.clone()

    return hook


def sampled_answers(logits: Tensor, head: Head, generator: torch.Generator) -> Tensor:
    """Σ log p(y) for answers y drawn from the model itself, whose logits are (answers, classes).

    Draws are made on the CPU, the same on every device up to rounding of the probabilities.
    """
    if head is Head.regression:
        noise = torch.randn(logits.shape, generator=generator).to(logits.device)
        return -(noise + logits.detach() - logits).square().sum() / 2
    scores = logits.log_softmax(-1)
    draws = torch.multinomial(scores.detach().exp().cpu(), 1, generator=generator).to(logits.device)
    return scores.gather(-1, draws).sum()


def answer_logits(logits: Tensor, head: Head, mask: Tensor | None = None) -> Tensor:
    """The logits of every answer the model gives, (answers, classes) in float32.

    Parameters
    ----------
    logits : Tensor, shape (examples, classes), (examples, 1) or (examples, tokens, classes)
    head : Head
    mask : Tensor, shape (examples, tokens), optional
        Real tokens; positions without one (or, for a causal model, without a next one) give no
        answer.

    Raises
    ------
    ShapeError
        If the logits do not have the shape of the head.
    """
    expected = 2 if head in (Head.classification, Head.regression) else 3
    if logits.ndim != expected or (head is Head.regression and logits.shape[-1] != 1):
        raise ShapeError(f"logits of shape {tuple(logits.shape)} for {head.name} ({head.value})")
    if head is Head.causal_lm:
        logits, mask = logits[:, :-1], None if mask is None else mask[:, 1:]
    if expected == 3:
        logits = logits.reshape(-1, logits.shape[-1]) if mask is None else logits[mask.bool()]
    return logits.float()


def answer_mask(batch: Batch, head: Head) -> Tensor | None:
    """Which positions of a batch hold real tokens of the answer, (examples, tokens); None where all do."""
    if ANSWER_MASK in batch:
        return batch[ANSWER_MASK]
    if head is not Head.seq2seq:
        return batch.get("attention_mask")
    if "labels" in batch:
        return batch["labels"] != IGNORED
    return batch.get("decoder_attention_mask")
