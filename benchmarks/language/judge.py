"""How a form of an adapter answers: its loss, what it keeps of the LoRA, and other texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lsrdecomp.lora.base.base_model import Base
from lsrdecomp.lora.base.dataset import PromptExample, read_examples
from lsrdecomp.lora.base.divergence import divergences, without_delta
from lsrdecomp.lora.base.forward import forward, forward_repeatable
from lsrdecomp.lora.base.open_bases import load_base
from lsrdecomp.lora.base.tokens import prompt_text, token_batches, tokenize
from lsrdecomp.lora.train.language import generate, overlap

BATCH = 16


@dataclass
class _Part:
    """One batch, the tokens that are right, and the LoRA's answers."""

    batch: dict[str, Tensor]
    wanted: Tensor
    recall: Callable[[], Tensor]
    counts: list[int]


class Judge:
    """The LoRA's answers to one set of held-out examples, with which any form of it is compared.

    Parameters
    ----------
    source : Base
        The base with the LoRA.
    file : path
        Examples as JSON lines.
    mixed : bool
        Products in bfloat16, as the adapters were trained; else in the base's type.
    """

    def __init__(
        self, source: Base, file: Path, *, examples: int, max_length: int, mixed: bool = True
    ) -> None:
        self.examples: list[PromptExample] = read_examples(file)[:examples]
        rows = tokenize(self.examples, source.tokenizer, max_length=max_length)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        self.order = order
        self.parts: list[_Part] = []
        self.effect = self.answers = 0.0
        pad = source.tokenizer.pad_token_id
        self.mixed = mixed
        with self._products(source):
            for batch in token_batches(
                [rows[i] for i in order], size=BATCH, seed=None, pad_token_id=pad
            ):
                answers, recall = forward_repeatable(source, batch)
                counted = batch["loss_mask"][:, 1:].bool()
                wanted = batch["input_ids"][:, 1:][counted]
                self.parts.append(_Part(batch, wanted, recall, answers.counts.tolist()))
                with torch.no_grad(), without_delta(source.model):
                    bare = forward(source, batch)
                self.effect += float(divergences(answers.logits, bare.logits, source.head).sum())
                self.answers += len(wanted)

    def judge(self, form: Base | None) -> dict[str, Any]:
        """Figures of a form; of the LoRA itself without one."""
        total = lost = 0.0
        agreeing = hits = 0
        right: list[bool] = []
        with torch.no_grad(), self._products(form):
            for part in self.parts:
                old = part.recall()
                new = old if form is None else forward(form, part.batch).logits
                wanted = part.wanted.to(new.device)
                total += float(F.cross_entropy(new, wanted, reduction="sum"))
                if form is not None:
                    lost += float(divergences(old, new, form.head).sum())
                likeliest = new.argmax(-1)
                agreeing += int((likeliest == old.argmax(-1)).sum())
                same = (likeliest == wanted).cpu()
                hits += int(same.sum())
                right += [bool(each.all()) for each in torch.split(same, part.counts)]
        return {
            "loss": total / self.answers,
            "token_accuracy": hits / self.answers,
            "exact": float(np.mean(right)),
            "kl": lost / self.answers,
            "effect": self.effect / self.answers,
            "agreement": agreeing / self.answers,
            "tokens": int(self.answers),
        }

    def _products(self, form: Base | None) -> Any:
        return autocast(form) if self.mixed and form is not None else nullcontext()


def said(
    form: Base, examples: Sequence[PromptExample], *, new_tokens: int, batch: int = BATCH
) -> list[str]:
    """What a form says to the prompts of examples, of like length together."""
    prompts = [prompt_text(example, form.tokenizer) for example in examples]
    return generate(
        form.model, form.tokenizer, prompts, new_tokens=new_tokens, autocast=True, batch_size=batch
    )


def overlaps(texts: list[str], examples: Sequence[PromptExample]) -> dict[str, float]:
    """BLEU and chrF."""
    return {name: overlap(name, texts, examples) for name in ("bleu", "chrf")}


def opened(base: str, adapter: Path, device: str, dtype: str) -> Base:
    """A base with an adapter."""
    return load_base(base, adapter, device=device, dtype=dtype)


def autocast(base: Base) -> Any:
    """Products in bfloat16, as the adapters were trained."""
    return torch.autocast(next(base.model.parameters()).device.type, torch.bfloat16)
