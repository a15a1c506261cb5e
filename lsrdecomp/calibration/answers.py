"""What a model answers: the logits of its answers alone, and the answers of one model kept in little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.base_model import Base
from lsrdecomp.calibration.dataset import model_inputs
from lsrdecomp.calibration.fisher import Head, answer_logits
from lsrdecomp.calibration.questions import Batch, answer_mask

FEW = 4096
"""Classes up to which answers are kept as logits."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to one batch."""

    logits: Tensor  # (answers, classes), float32
    counts: Tensor  # (examples,): how many answers each example gives


def ask(base: Base, batch: Batch) -> Answers:
    """Let a model answer one batch; gradients flow where its parameters want them.

    Of a causal model only the positions that count reach the output layer: a vocabulary is large, a prompt is long.
    """
    return _asked(base, batch)[0]


def keep_answers(base: Base, batch: Batch) -> tuple[Answers, Callable[[], Tensor]]:
    """Answers without gradients, and a way to have their logits again.

    Few classes are kept as they are. Of many, what the output layer reads is kept (a few hundred numbers where a
    vocabulary has a hundred thousand) and the layer is applied again: the same logits, bit by bit. Where a model does
    more after its output layer than that, it is asked again.
    """
    with torch.no_grad():
        answers, read = _asked(base, batch)
        logits, layer = answers.logits, output_layer(base)
        if logits.shape[-1] <= FEW:
            return answers, lambda: logits
        if read is not None and layer is not None and torch.equal(layer(read).float(), logits):
            return answers, lambda: _applied(layer, read)
        return answers, lambda: _again(base, batch)


def _applied(layer: nn.Module, read: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = layer(read).float()
    return logits


def _again(base: Base, batch: Batch) -> Tensor:
    with torch.no_grad():
        return _asked(base, batch)[0].logits


def output_layer(base: Base) -> nn.Module | None:
    """The layer that makes logits of tokens; None where there is none such."""
    if base.head is not Head.causal_lm:
        return None
    found: Any = getattr(base.model, "get_output_embeddings", lambda: None)()
    return found if isinstance(found, nn.Module) else None


def _asked(base: Base, batch: Batch) -> tuple[Answers, Tensor | None]:
    """The answers, and what the output layer read for them if it read only that."""
    device = next(base.model.parameters()).device
    inputs = {key: value.to(device) for key, value in batch.items()}
    mask = answer_mask(inputs, base.head)
    examples, layer = len(next(iter(inputs.values()))), output_layer(base)
    wanted = None if mask is None else mask.bool()
    if wanted is not None and base.head is Head.causal_lm:
        wanted = torch.nn.functional.pad(wanted[:, 1:], (0, 1))  # a position answers for the token after it
    if layer is None or wanted is None:
        logits = answer_logits(base.model(**model_inputs(inputs)).logits, base.head, mask)
        counted = base.head in (Head.tokens, Head.causal_lm, Head.seq2seq) and wanted is not None
        counts = wanted.sum(1) if counted and wanted is not None else torch.full((examples,), len(logits) // examples)
        return Answers(logits, counts.cpu()), None
    with _only(layer, wanted) as read:
        logits = base.model(**model_inputs(inputs)).logits.float()
    return Answers(logits, wanted.sum(1).cpu()), read[0].detach()


@contextmanager
def _only(layer: nn.Module, wanted: Tensor) -> Iterator[list[Tensor]]:
    """Inside, the output layer reads the wanted positions alone, as rows (answers, width); yields what it read."""
    read: list[Tensor] = []

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        read.append(arguments[0][wanted])
        return (read[-1], *arguments[1:])

    handle = layer.register_forward_pre_hook(hook)
    try:
        yield read
    finally:
        handle.remove()
