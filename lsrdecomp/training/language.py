"""Language models: examples as JSON lines, the loss of a completion token, and answers judged by what they say.

An answer is right when greedy decoding would give the completion word for word. That needs no decoding: it does so if
and only if, given the true completion so far, every next token is the likeliest one. BLEU and chrF do decode.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsrdecomp.calibration.answers import Answers, ask
from lsrdecomp.calibration.base_model import Base
from lsrdecomp.calibration.dataset import (
    ANSWER_MASK,
    PromptExample,
    Tokens,
    completion_text,
    hold_out,
    prompt_text,
    read_jsonl,
    token_batches,
    tokenize,
)
from lsrdecomp.calibration.fisher import Head
from lsrdecomp.calibration.questions import IGNORED
from lsrdecomp.errors import LsrError
from lsrdecomp.training.record import Sample, Scores
from lsrdecomp.training.settings import FinetuneSettings, SettingsError

EVALUATION_BATCH = 16
HELD_OUT = 0.1  # of the file, where no other file is given
MOST_HELD_OUT = 200


@dataclass(frozen=True, slots=True)
class LanguageData:
    """What a run on JSON lines reads; rows are the examples as tokens, in the same order."""

    train: list[Tokens]
    validation: list[Tokens]
    dev: list[PromptExample]
    dev_rows: list[Tokens]


def read_language_data(settings: FinetuneSettings, tokenizer: Any) -> LanguageData:
    """The examples of a run: those of ``data``, and those of ``dev_data`` or a split of ``data`` to judge by.

    Raises
    ------
    DataError
        Naming file and line.
    SettingsError
        If too few examples are there for the splits.
    """
    check_metric(settings.metric)
    assert settings.data is not None
    train = read_jsonl(settings.data)
    if settings.dev_data is not None:
        dev = read_jsonl(settings.dev_data)
    else:
        share = min(MOST_HELD_OUT, round(HELD_OUT * len(train)))
        if share < 1:
            raise SettingsError(f"{settings.data} has {len(train)} examples, too few to hold some out; give dev_data")
        train, dev = hold_out(train, share, seed=settings.split_seed)
    if settings.train_examples is not None and settings.train_examples < len(train):
        train = hold_out(train, settings.train_examples, seed=settings.split_seed)[1]
    if settings.dev_examples is not None and settings.dev_examples < len(dev):
        dev = hold_out(dev, settings.dev_examples, seed=settings.split_seed)[1]

    def rows(examples: Sequence[PromptExample]) -> list[Tokens]:
        length, cut = settings.max_length, settings.truncate
        return tokenize(examples, tokenizer, max_length=length, answers=settings.answers, truncate=cut)

    used = rows(train)
    validation: list[Tokens] = []
    if settings.patience is not None:
        used, validation = hold_out(used, round(settings.validation * len(used)), seed=settings.split_seed)
        if not validation:
            raise SettingsError(
                f"validation = {settings.validation} of {len(train)} examples leaves none of them apart"
            )
    return LanguageData(used, validation, dev, rows(dev))


class TokenCollator:
    """Rows of tokens as one batch; ``labels`` are the tokens that count, -100 elsewhere."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, rows: Sequence[Tokens]) -> dict[str, Tensor]:
        (batch,) = token_batches(rows, size=len(rows), seed=None, pad=self.pad)
        labels = batch["input_ids"].masked_fill(batch.pop(ANSWER_MASK) == 0, IGNORED)
        return {**batch, "labels": labels}


def asked(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Answers, Tensor]:
    """Logits of the tokens that count, (answers, vocabulary), and those tokens; only they reach the output layer."""
    labels = inputs["labels"]
    batch = {name: inputs[name] for name in ("input_ids", "attention_mask")} | {ANSWER_MASK: (labels != IGNORED).long()}
    wanted = labels[:, 1:]
    return ask(Base("", model, None, Head.causal_lm, ()), batch), wanted[wanted != IGNORED]


@torch.no_grad()
def judge_tokens(
    model: nn.Module, rows: Sequence[Tokens], pad: int, *, autocast: bool, batch: int = EVALUATION_BATCH
) -> tuple[Scores, list[bool]]:
    """Loss and accuracy per completion token, and which examples greedy decoding would answer word for word.

    Parameters
    ----------
    rows : sequence of Tokens
        Judged in batches of like length.
    pad : int
        Token that fills short rows up.
    autocast : bool
        Whether products are taken in bfloat16.
    """
    device = next(model.parameters()).device
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    collate, total, hits, count = TokenCollator(pad), 0.0, 0, 0
    right = [False] * len(rows)
    with _evaluating(model), torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            inputs = {name: value.to(device) for name, value in collate([rows[i] for i in chosen]).items()}
            answers, wanted = asked(model, inputs)
            total += float(F.cross_entropy(answers.logits, wanted, reduction="sum"))
            same = (answers.logits.argmax(-1) == wanted).cpu()
            hits, count = hits + int(same.sum()), count + len(wanted)
            for i, part in zip(chosen, torch.split(same, answers.counts.tolist()), strict=True):
                right[i] = bool(part.all())
    loss = total / count
    return Scores({}, hits / count, loss if np.isfinite(loss) else None, len(rows)), right


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    autocast: bool,
    batch: int = EVALUATION_BATCH,
) -> list[str]:
    """What the model says to each prompt, by greedy decoding, without special tokens."""
    device = next(model.parameters()).device
    order, said = sorted(range(len(prompts)), key=lambda i: len(prompts[i])), [""] * len(prompts)
    with _evaluating(model), torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            read = tokenizer([prompts[i] for i in chosen], padding=True, padding_side="left", return_tensors="pt")
            read = {name: read[name].to(device) for name in ("input_ids", "attention_mask")}
            written = model.generate(
                **read,
                max_new_tokens=new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
            texts = tokenizer.batch_decode(written[:, read["input_ids"].shape[1] :], skip_special_tokens=True)
            for i, text in zip(chosen, texts, strict=True):
                said[i] = text.strip()
    return said


def judge_language(
    model: nn.Module,
    tokenizer: Any,
    data: LanguageData,
    *,
    metric: str = "loss",
    new_tokens: int = 64,
    autocast: bool = False,
    said: Sequence[str] | None = None,
) -> Scores:
    """Scores on the held-out examples of a run.

    Parameters
    ----------
    metric : {"loss", "exact", "bleu", "chrf"}
        Beside the loss: the share of examples that greedy decoding would answer word for word, or BLEU or chrF of what
        it says (by sacrebleu, from 0 to 100, against all ``references`` of a line or its completion).
    said : sequence of str, optional
        What the model generated, if that is known.
    """
    scores, right = judge_tokens(model, data.dev_rows, tokenizer.pad_token_id, autocast=autocast)
    assert scores.accuracy is not None
    metrics = {"token_accuracy": scores.accuracy}
    if metric == "exact":
        metrics = {"exact": float(np.mean(right))} | metrics
    elif metric in ("bleu", "chrf"):
        if said is None:
            prompts = [prompt_text(example, tokenizer) for example in data.dev]
            said = generate(model, tokenizer, prompts, new_tokens=new_tokens, autocast=autocast)
        metrics = {metric: overlap(metric, said, data.dev)} | metrics
    return Scores(metrics, scores.accuracy, scores.loss, scores.examples)


def overlap(metric: str, said: Sequence[str], examples: Sequence[PromptExample]) -> float:
    """BLEU or chrF of texts against the references of their examples, 0 to 100."""
    import sacrebleu

    references = [example.references or (completion_text(example).strip(),) for example in examples]
    most = max(map(len, references))
    columns: Any = [[each[k] if k < len(each) else None for each in references] for k in range(most)]
    measure = sacrebleu.corpus_bleu if metric == "bleu" else sacrebleu.corpus_chrf
    return float(measure(list(said), columns).score)


def samples(
    model: Any, tokenizer: Any, data: LanguageData, count: int, *, new_tokens: int, autocast: bool
) -> Iterator[Sample]:
    """The first held-out examples, and what the base and the adapted model say to them."""
    chosen = data.dev[:count]
    prompts = [prompt_text(example, tokenizer) for example in chosen]
    after = generate(model, tokenizer, prompts, new_tokens=new_tokens, autocast=autocast)
    with model.disable_adapter():
        before = generate(model, tokenizer, prompts, new_tokens=new_tokens, autocast=autocast)
    for example, prompt, one, other in zip(chosen, prompts, before, after, strict=True):
        yield Sample(prompt, completion_text(example).strip(), one, other)


def check_metric(metric: str) -> None:
    """Refuse a metric whose library is not installed, before any work.

    Raises
    ------
    LsrError
    """
    if metric in ("bleu", "chrf") and importlib.util.find_spec("sacrebleu") is None:
        raise LsrError(f"{metric} is measured by sacrebleu, which is not installed: pip install 'lsrdecomp[llm]'")


__all__ = ["LanguageData", "judge_language", "judge_tokens", "read_language_data"]
