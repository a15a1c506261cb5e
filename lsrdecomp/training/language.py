"""Language models: examples as JSON lines, and answers judged by what they say.

An answer is right when greedy decoding would give the completion word for word. That needs no
decoding: it does so if and only if, given the true completion so far, every next token is the
likeliest one. BLEU and chrF do decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset as Table
from torch import Tensor, nn
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from lsrdecomp.calibration.base_files import find_base, open_tokenizer
from lsrdecomp.calibration.base_model import Base
from lsrdecomp.calibration.dataset import PromptExample, hold_out, read_examples, subsample
from lsrdecomp.calibration.forward import forward
from lsrdecomp.calibration.generation import evaluation_mode, generate
from lsrdecomp.calibration.heads import IGNORED_LABEL, Head
from lsrdecomp.calibration.tokens import (
    LOSS_MASK,
    TokenizedExample,
    completion_text,
    prompt_text,
    token_batches,
    tokenize,
)
from lsrdecomp.errors import needs
from lsrdecomp.training.record import Sample, Scores
from lsrdecomp.training.settings import FinetuneSettings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import Trainer

EVALUATION_BATCH = 16
HELD_OUT = 0.1  # of the file, where no other file is given
MOST_HELD_OUT = 200


@dataclass(frozen=True)
class LanguageDataset:
    """Prompts and completions of a language model; rows are the examples as tokens, in the same order."""

    settings: FinetuneSettings
    tokenizer: Any
    base: str
    rows: list[TokenizedExample]
    validation_rows: list[TokenizedExample]
    dev: list[PromptExample]
    dev_rows: list[TokenizedExample]

    outputs = None

    @property
    def baseline(self) -> dict[str, float]:
        return {}

    @cached_property
    def train(self) -> Any:
        """The rows as TRL reads them; with ``packing``, several in one as far as ``max_length`` goes."""
        table = _table(self.rows)
        return pack_dataset(table, self.settings.max_length) if self.settings.packing else table

    @cached_property
    def validation(self) -> Any:
        return _table(self.validation_rows) if self.validation_rows else None

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.train["input_ids"]]

    def collator(self, tokenizer: Any) -> Callable[[Sequence[Any]], dict[str, Tensor]]:
        return cast(
            "Callable[[Sequence[Any]], dict[str, Tensor]]",
            DataCollatorForLanguageModeling(
                tokenizer.pad_token_id, padding_free=self.settings.packing
            ),
        )

    def questions(self, base: Base, *, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        return token_batches(self.rows, size=size, seed=seed, pad=base.tokenizer.pad_token_id)

    def judge_dev(self, trainer: Trainer) -> Scores:
        return judge_language(cast("nn.Module", trainer.model), self)

    def judge_validation(self, trainer: Trainer) -> Scores | None:
        if self.validation is None:
            return None
        loss = trainer.evaluate()["eval_loss"]
        return Scores({}, None, float(loss) if np.isfinite(loss) else None, len(self.validation))

    def samples(self, trainer: Trainer) -> tuple[Sample, ...]:
        """The first held-out examples, and what the base and the adapted model say to them."""
        model: Any = trainer.model
        chosen = self.dev[: self.settings.samples]
        prompts = [prompt_text(example, self.tokenizer) for example in chosen]
        adapted = self.generate(model, prompts)
        with model.disable_adapter():
            base = self.generate(model, prompts)
        completions = [completion_text(example).strip() for example in chosen]
        return tuple(map(Sample, prompts, completions, base, adapted))

    def generate(self, model: Any, prompts: Sequence[str]) -> list[str]:
        """`generate` with the settings of the run."""
        tokens, autocast = self.settings.new_tokens, self.settings.precision != "float32"
        return generate(model, self.tokenizer, prompts, new_tokens=tokens, autocast=autocast)


def read_language(settings: FinetuneSettings) -> LanguageDataset:
    """The examples of a run: those of ``data``, and those of ``dev_data`` or a split of ``data`` to judge by.

    Raises
    ------
    DataError
        Naming file and line.
    SettingsError
        If too few examples are there for the splits.
    LsrError
        If the library of the metric is not installed.
    """
    if settings.metric in ("bleu", "chrf"):
        with needs(f"metric {settings.metric}", "llm"):  # before any work
            import sacrebleu  # noqa: F401
    assert settings.data is not None
    tokenizer, train = open_tokenizer(settings.model), read_examples(settings.data)
    if settings.dev_data is not None:
        dev = read_examples(settings.dev_data)
    else:
        share = min(MOST_HELD_OUT, round(HELD_OUT * len(train)))
        if share < 1:
            raise SettingsError(
                f"{settings.data} has {len(train)} examples, too few to hold some out; give dev_data"
            )
        train, dev = hold_out(train, share, seed=settings.split_seed)
    train = subsample(train, settings.train_examples, seed=settings.split_seed)
    dev = subsample(dev, settings.dev_examples, seed=settings.split_seed)

    def tokens(examples: Sequence[PromptExample]) -> list[TokenizedExample]:
        length, cut = settings.max_length, settings.truncate
        return tokenize(
            examples, tokenizer, max_length=length, answers=settings.answers, truncate=cut
        )

    validation: list[TokenizedExample] = []
    rows = tokens(train)
    if settings.patience is not None:
        rows, validation = hold_out(
            rows, round(settings.validation * len(rows)), seed=settings.split_seed
        )
        if not validation:
            raise SettingsError(
                f"validation = {settings.validation} of {len(train)} examples leaves none of them apart"
            )
    return LanguageDataset(
        settings, tokenizer, find_base(settings.model), rows, validation, dev, tokens(dev)
    )


def _table(rows: Sequence[TokenizedExample]) -> Table:
    """Rows under TRL's names; nothing comes before a first token, so it is never an answer."""
    labels = [
        [
            token if counts and i else IGNORED_LABEL
            for i, (token, counts) in enumerate(zip(row.ids, row.loss_mask, strict=True))
        ]
        for row in rows
    ]
    return Table.from_dict({"input_ids": [list(row.ids) for row in rows], "labels": labels})


@torch.no_grad()
def judge_tokens(
    model: nn.Module, rows: Sequence[TokenizedExample], pad: int, *, autocast: bool
) -> tuple[Scores, list[bool]]:
    """Loss and accuracy per completion token, and which examples greedy decoding would answer word for word.

    Parameters
    ----------
    rows : sequence of TokenizedExample
        Judged in batches of like length.
    pad : int
        Token that fills short rows up.
    autocast : bool
        Whether products are taken in bfloat16.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    total, hits, count, right = 0.0, 0, 0, [False] * len(rows)
    base = Base("", model, None, Head.causal_lm)
    with evaluation_mode(model, autocast=autocast) as device:
        for start in range(0, len(order), EVALUATION_BATCH):
            chosen = order[start : start + EVALUATION_BATCH]
            (inputs,) = token_batches(
                [rows[i] for i in chosen], size=len(chosen), seed=None, pad=pad, device=device
            )
            answers = forward(base, inputs)
            wanted = inputs["input_ids"][:, 1:][inputs[LOSS_MASK][:, 1:].bool()]
            total += float(F.cross_entropy(answers.logits, wanted, reduction="sum"))
            same = (answers.logits.argmax(-1) == wanted).cpu()
            hits, count = hits + int(same.sum()), count + len(wanted)
            for i, part in zip(chosen, torch.split(same, answers.counts.tolist()), strict=True):
                right[i] = bool(part.all())
    loss = total / count
    return Scores({}, hits / count, loss if np.isfinite(loss) else None, len(rows)), right


def judge_language(model: nn.Module, data: LanguageDataset) -> Scores:
    """Scores on the held-out examples of a run.

    Beside the loss stands what the setting ``metric`` asks for: the share of examples that greedy
    decoding would answer word for word, or BLEU or chrF of what it says (by sacrebleu, from 0 to
    100, against all ``references`` of a line or its completion).
    """
    metric, autocast = data.settings.metric, data.settings.precision != "float32"
    scores, right = judge_tokens(
        model, data.dev_rows, data.tokenizer.pad_token_id, autocast=autocast
    )
    assert scores.accuracy is not None
    metrics = {"token_accuracy": scores.accuracy}
    if metric == "exact":
        metrics = {"exact": float(np.mean(right))} | metrics
    elif metric in ("bleu", "chrf"):
        said = data.generate(model, [prompt_text(example, data.tokenizer) for example in data.dev])
        metrics = {metric: overlap(metric, said, data.dev)} | metrics
    return Scores(metrics, scores.accuracy, scores.loss, scores.examples)


def overlap(metric: str, said: Sequence[str], examples: Sequence[PromptExample]) -> float:
    """BLEU or chrF of texts against the references of their examples, 0 to 100."""
    import sacrebleu

    references = [example.references or (completion_text(example).strip(),) for example in examples]
    most = max(map(len, references))
    columns: Any = [
        [each[k] if k < len(each) else None for each in references] for k in range(most)
    ]
    measure = sacrebleu.corpus_bleu if metric == "bleu" else sacrebleu.corpus_chrf
    return float(measure(list(said), columns).score)
