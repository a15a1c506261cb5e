"""What a model answers: the logits of its answers alone, held in little memory."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.dataset import model_inputs
from lsrdecomp.calibration.fisher import TOKEN_HEADS, Batch, Head, answer_logits, answer_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lsrdecomp.calibration.base_model import Base

FEW = 4096
"""Classes up to which answers are kept as logits, where the output layer does not make them."""
GENERATED = 16
"""Prompts that are completed side by side."""
TRIED = 8
"""Answers by which it is seen whether a model's logits are what its output layer makes of its
rows."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to one batch, not yet as logits: of these a few can be made at a time.

    A vocabulary has a hundred numbers where the model's width has one, and a float32 copy of each
    is wanted several times over.
    """

    rows: Tensor  # (answers, width), with its graph: what the output layer reads; the logits where there is none
    counts: Tensor  # (examples,): how many answers each example gives
    layer: nn.Module | None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def logits(self) -> Tensor:
        """Made anew each time: (answers, classes), float32."""
        return self.logits_of(self.rows)

    def logits_of(self, rows: Tensor) -> Tensor:
        """The logits of some of the rows."""
        return rows if self.layer is None else self.layer(rows).float()


def ask(base: Base, batch: Batch, *, whole: bool = False) -> Answers:
    """Let a model answer one batch; gradients flow where its parameters want them.

    Of a causal model only the positions that count reach the output layer: a vocabulary is large, a
    prompt is long. Where a model does more after that layer than applying it, or with ``whole``,
    the rows are its logits.
    """
    # 1. Where every position answers, or no layer of its own makes logits of tokens, they are what
    # the model returns.
    inputs, wanted = _wanted(base, batch)
    layer = output_layer(base)
    if layer is None or wanted is None:
        logits = answer_logits(
            base.model(**model_inputs(inputs)).logits, base.head, answer_mask(inputs, base.head)
        )
        examples = len(next(iter(inputs.values())))
        if wanted is None or base.head not in TOKEN_HEADS:
            return Answers(logits, torch.full((examples,), len(logits) // examples), None)
        return Answers(logits, wanted.sum(1).cpu(), None)
    # 2. A pass in which the output layer makes a few rows' logits only. If it makes from these
    #    rows, on its own, the same bits that the model returned, nothing comes after it (a scale, a
    #    cap): rows stand for all logits.
    counts = wanted.sum(1).cpu()
    if not whole:
        with _only(layer, wanted, TRIED) as read:
            logits = base.model(**model_inputs(inputs)).logits.float()
        with torch.no_grad():
            alone = layer(read[0][:TRIED]).float()
        if torch.equal(alone, logits):
            return Answers(read[0], counts, layer)
    # 3. Otherwise the logits of all rows that answer, as the model returns them.
    with _only(layer, wanted):
        return Answers(base.model(**model_inputs(inputs)).logits.float(), counts, None)


def keep_answers(base: Base, batch: Batch) -> tuple[Answers, Callable[[], Tensor]]:
    """Answers without gradients, and a way to have their logits again, the same bit by bit.

    What the output layer reads is kept and the layer applied again. Where a model does more after
    it, few classes are kept, and for many it is asked again.
    """
    with torch.no_grad():
        answers = ask(base, batch)
    if answers.layer is None and answers.rows.shape[-1] > FEW:
        return answers, torch.no_grad()(lambda: ask(base, batch).logits)
    return answers, torch.no_grad()(lambda: answers.logits)


def output_layer(base: Base) -> nn.Module | None:
    """The layer that makes logits of tokens; None where there is none such."""
    if base.head is not Head.causal_lm:
        return None
    layer: Any = getattr(base.model, "get_output_embeddings", lambda: None)()
    return layer if isinstance(layer, nn.Module) else None


def _wanted(base: Base, batch: Batch) -> tuple[dict[str, Tensor], Tensor | None]:
    """The batch where the model is, and its positions that answer, (examples, tokens); None where all do."""
    device = next(base.model.parameters()).device
    inputs = {key: value.to(device) for key, value in batch.items()}
    mask = answer_mask(inputs, base.head)
    wanted = None if mask is None else mask.bool()
    if wanted is not None and base.head is Head.causal_lm:
        wanted = torch.nn.functional.pad(
            wanted[:, 1:], (0, 1)
        )  # a position answers for the token after it
    return inputs, wanted


@contextmanager
def _only(layer: nn.Module, wanted: Tensor, first: int | None = None) -> Iterator[list[Tensor]]:
    """Inside, the output layer reads the wanted positions alone, as rows (answers, width); yields these.

    With ``first`` it reads so many of them.
    """
    read: list[Tensor] = []

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        read.append(arguments[0][wanted])
        return (read[-1][:first], *arguments[1:])

    handle = layer.register_forward_pre_hook(hook)
    try:
        yield read
    finally:
        handle.remove()


@contextmanager
def evaluating(model: nn.Module, *, autocast: bool) -> Iterator[torch.device]:
    """Evaluation mode inside, with ``autocast`` products in bfloat16; yields where the model is."""
    device = next(model.parameters()).device
    was = model.training
    model.eval()
    try:
        with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
            yield device
    finally:
        model.train(was)


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    autocast: bool = False,
    batch: int = GENERATED,
) -> list[str]:
    """What the model says to each prompt, by greedy decoding, without special tokens."""
    order, said = sorted(range(len(prompts)), key=lambda i: len(prompts[i])), [""] * len(prompts)
    with evaluating(model, autocast=autocast) as device:
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            read = tokenizer(
                [prompts[i] for i in chosen], padding=True, padding_side="left", return_tensors="pt"
            )
            read = {name: read[name].to(device) for name in ("input_ids", "attention_mask")}
            written = model.generate(
                **read,
                max_new_tokens=new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
            texts = tokenizer.batch_decode(
                written[:, read["input_ids"].shape[1] :], skip_special_tokens=True
            )
            for i, text in zip(chosen, texts, strict=True):
                said[i] = text.strip()
    return said
