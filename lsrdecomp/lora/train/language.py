"""Language models: examples as JSON lines, and the scores of a model's answers.

An answer is right when greedy decoding would give the completion word for word. That needs no
decoding: it does so if and only if, given the true completion so far, every next token is the
likeliest one. BLEU and chrF do decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset as Table
from torch import Tensor, nn
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from lsrdecomp.errors import needs
from lsrdecomp.lora.base.base_files import open_tokenizer, reachable_base
from lsrdecomp.lora.base.base_model import Base
from lsrdecomp.lora.base.dataset import PromptExample, hold_out, read_examples, subsample
from lsrdecomp.lora.base.forward import forward
from lsrdecomp.lora.base.generation import evaluation_mode, generate
from lsrdecomp.lora.base.heads import IGNORED_LABEL, Head
from lsrdecomp.lora.base.tokens import (
    LOSS_MASK,
    TokenizedExample,
    completion_text,
    prompt_text,
    token_batches,
    tokenize,
)
from lsrdecomp.lora.train.finetune_record import Sample, Scores
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class LanguageDataset:
    """Prompts and completions of a language model; rows are the examples as tokens, in order."""

    settings: FinetuneSettings
    tokenizer: Any
    base: str
    rows: list[TokenizedExample]
    validation_rows: list[TokenizedExample]
    dev: list[PromptExample]
    dev_rows: list[TokenizedExample]

    outputs = None
    """A language model has no head of its own."""

    @property
    def baseline(self) -> dict[str, float]:
        """No metrics: there is no commonest answer."""
        return {}

    @cached_property
    def train(self) -> Any:
        """The rows as TRL reads them; packed ones hold several examples up to ``max_length``."""
        table = _table(self.rows)
        return pack_dataset(table, self.settings.max_length) if self.settings.packing else table

    @cached_property
    def validation(self) -> Any:
        """The rows of the split of the training set, or None."""
        return _table(self.validation_rows) if self.validation_rows else None

    @property
    def lengths(self) -> list[int]:
        """Tokens of the training rows, to sort by."""
        return [len(ids) for ids in self.train["input_ids"]]

    @property
    def uses_autocast(self) -> bool:
        """Whether products are taken in bfloat16."""
        return self.settings.precision != "float32"

    def collator(self, tokenizer: Any) -> Callable[[Sequence[Any]], dict[str, Tensor]]:
        """Return what makes a batch of rows."""
        collator = DataCollatorForLanguageModeling(
            tokenizer.pad_token_id, padding_free=self.settings.packing
        )
        return cast("Callable[[Sequence[Any]], dict[str, Tensor]]", collator)

    def calibration_batches(
        self, base: Base, *, size: int, seed: int
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the training examples as a calibration reads them."""
        return token_batches(
            self.rows, size=size, seed=seed, pad_token_id=base.tokenizer.pad_token_id
        )

    def evaluate_dev(self, trainer: Trainer) -> Scores:
        """Score a model on the held-out examples."""
        return evaluate_language(cast("nn.Module", trainer.model), self)

    def evaluate_validation(self, trainer: Trainer) -> Scores | None:
        """Measure the loss on the split of the training set, if there is one.

        It is the mean of all tokens, as on dev. Trainer's is one of the means of its batches.
        """
        if not self.validation_rows:
            return None
        scores, _ = evaluate_tokens(
            cast("nn.Module", trainer.model),
            self.validation_rows,
            self.tokenizer.pad_token_id,
            autocast=self.uses_autocast,
        )
        return Scores({}, None, scores.loss, scores.examples)

    def answers(self, trainer: Trainer) -> tuple[str, ...]:
        """Generate what the model says to the first held-out examples."""
        examples = self.dev[: self.settings.samples]
        prompts = [prompt_text(example, self.tokenizer) for example in examples]
        return tuple(self.generate(trainer.model, prompts))

    def samples(self, trainer: Trainer, before: Sequence[str] = ()) -> tuple[Sample, ...]:
        """Generate what the base and the adapted model say to the first held-out examples.

        Parameters
        ----------
        trainer : Trainer
        before : sequence of str
            What `answers` returned before the training, of an adapter that was trained on from.
        """
        model: Any = trainer.model
        with model.disable_adapter():
            base = self.answers(trainer)
        adapted = self.answers(trainer)
        samples = []
        for index, example in enumerate(self.dev[: self.settings.samples]):
            sample = Sample(
                prompt=prompt_text(example, self.tokenizer),
                completion=completion_text(example).strip(),
                base=base[index],
                adapted=adapted[index],
                start=before[index] if before else None,
            )
            samples.append(sample)
        return tuple(samples)

    def generate(self, model: Any, prompts: Sequence[str]) -> list[str]:
        """Generate answers with the settings of the run."""
        return generate(
            model,
            self.tokenizer,
            prompts,
            new_tokens=self.settings.new_tokens,
            autocast=self.uses_autocast,
        )


def read_language(settings: FinetuneSettings) -> LanguageDataset:
    """Read the examples of a run; without ``dev_data`` it is evaluated on a split of ``data``.

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
    seed = settings.split_seed
    tokenizer = open_tokenizer(settings.base, trust_remote_code=settings.trust_remote_code)
    # 1. Examples to train on, and examples to evaluate on.
    train = read_examples(settings.data)
    if settings.dev_data is not None:
        dev = read_examples(settings.dev_data)
    else:
        train, dev = hold_out_dev(train, settings)
    train = subsample(train, settings.train_examples, seed=seed)
    dev = subsample(dev, settings.dev_examples, seed=seed)

    # 2. The same as tokens, and with early stopping a split of the training set.
    def to_tokens(examples: Sequence[PromptExample]) -> list[TokenizedExample]:
        return tokenize(
            examples,
            tokenizer,
            max_length=settings.max_length,
            answers=settings.answers,
            truncate=settings.truncate,
        )

    rows = to_tokens(train)
    validation_rows: list[TokenizedExample] = []
    if settings.patience is not None:
        count = round(settings.validation * len(rows))
        rows, validation_rows = hold_out(rows, count, seed=seed)
        if not validation_rows:
            raise SettingsError(
                f"validation = {settings.validation} of {len(train)} examples leaves none of them "
                "apart"
            )
    base = reachable_base(settings.base)
    return LanguageDataset(settings, tokenizer, base, rows, validation_rows, dev, to_tokens(dev))


def hold_out_dev(examples: Sequence[T], settings: FinetuneSettings) -> tuple[list[T], list[T]]:
    """Split the examples of a file where no other file is given to evaluate on.

    A tenth of them is held out, 200 at most: more would make each evaluation longer than it is
    worth.
    """
    count = min(200, round(0.1 * len(examples)))
    if count < 1:
        raise SettingsError(
            f"{settings.data} has {len(examples)} examples, too few to hold some out; give dev_data"
        )
    return hold_out(examples, count, seed=settings.split_seed)


def _table(rows: Sequence[TokenizedExample]) -> Table:
    """Return rows under TRL's names; a first token follows nothing, so it is never predicted."""
    labels = []
    for row in rows:
        tokens = [
            token if counts else IGNORED_LABEL
            for token, counts in zip(row.ids, row.loss_mask, strict=True)
        ]
        labels.append([IGNORED_LABEL, *tokens[1:]])
    return Table.from_dict({"input_ids": [list(row.ids) for row in rows], "labels": labels})


@torch.no_grad()
def evaluate_tokens(
    model: nn.Module,
    rows: Sequence[TokenizedExample],
    pad: int,
    *,
    autocast: bool,
) -> tuple[Scores, list[bool]]:
    """Measure the loss and the accuracy of completions, by token and word for word.

    Parameters
    ----------
    model : nn.Module
    rows : sequence of TokenizedExample
        Evaluated in batches of like length.
    pad : int
        Token that fills short rows up.
    autocast : bool
        Whether products are taken in bfloat16.

    Returns
    -------
    Scores
    list of bool
        Of each example, whether greedy decoding would give its completion.
    """
    batch_size = 16
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    base = Base("", model, None, Head.causal_lm)
    losses: list[Tensor] = []  # summed over the tokens of a batch
    parts: list[Tensor] = []  # of each token, whether it is the likeliest
    counts: list[int] = []  # tokens of each example, in ``order``
    with evaluation_mode(model, autocast=autocast) as device:
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            (inputs,) = token_batches(
                [rows[i] for i in indices],
                size=len(indices),
                seed=None,
                pad_token_id=pad,
            )
            output = forward(base, inputs)
            is_completion = inputs[LOSS_MASK][:, 1:].bool()
            targets = inputs["input_ids"][:, 1:][is_completion].to(device)
            losses.append(F.cross_entropy(output.logits, targets, reduction="sum"))
            parts.append(output.logits.argmax(-1) == targets)
            counts += output.counts.tolist()
    # A GPU is waited for here, once.
    is_correct = torch.cat(parts).cpu()
    is_exact = [False] * len(rows)
    for i, correct_tokens in zip(order, torch.split(is_correct, counts), strict=True):
        is_exact[i] = bool(correct_tokens.all())
    loss = sum(torch.stack(losses).tolist()) / len(is_correct)
    accuracy = int(is_correct.sum()) / len(is_correct)
    return Scores({}, accuracy, loss if np.isfinite(loss) else None, len(rows)), is_exact


def evaluate_language(model: nn.Module, data: LanguageDataset) -> Scores:
    """Score a model on the held-out examples of a run.

    Beside the loss stands what the setting ``metric`` asks for: the share of examples that greedy
    decoding would answer word for word, or BLEU or chrF of what it says (by sacrebleu, from 0 to
    100, against all ``references`` of a line or its completion).
    """
    metric = data.settings.metric
    scores, is_exact = evaluate_tokens(
        model, data.dev_rows, data.tokenizer.pad_token_id, autocast=data.uses_autocast
    )
    assert scores.accuracy is not None
    metrics = {}
    if metric == "exact":
        metrics["exact"] = float(np.mean(is_exact))
    elif metric in ("bleu", "chrf"):
        prompts = [prompt_text(example, data.tokenizer) for example in data.dev]
        metrics[metric] = overlap(metric, data.generate(model, prompts), data.dev)
    metrics["token_accuracy"] = scores.accuracy
    return Scores(metrics, scores.accuracy, scores.loss, scores.examples)


def overlap(metric: str, texts: Sequence[str], examples: Sequence[PromptExample]) -> float:
    """Return BLEU or chrF of texts against the references of their examples, 0 to 100."""
    import sacrebleu

    references = [example.references or (completion_text(example).strip(),) for example in examples]
    most_references = max(map(len, references))
    # sacrebleu takes the first references of all texts, then the second ones, …, None where absent.
    streams: list[list[str | None]] = [
        [given[k] if k < len(given) else None for given in references]
        for k in range(most_references)
    ]
    corpus_score: Any = sacrebleu.corpus_bleu if metric == "bleu" else sacrebleu.corpus_chrf
    return float(corpus_score(list(texts), streams).score)
