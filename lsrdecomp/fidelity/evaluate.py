"""A base with a LoRA on it, and texts: they say what compressed variants of the LoRA keep."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft.helpers import rescale_adapter_scale

from lsrdecomp._renamed import keep_old_attributes
from lsrdecomp.calibration.base_model import open_base
from lsrdecomp.calibration.batches import prompt_batches, text_batches
from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.calibration.dataset import (
    DataError,
    PromptExample,
    TextPair,
    read_examples,
    read_text_pairs,
    task_texts,
)
from lsrdecomp.calibration.divergence import Reference
from lsrdecomp.calibration.forward import forward
from lsrdecomp.calibration.generation import generate
from lsrdecomp.calibration.heads import TOKEN_HEADS, Batch, Head
from lsrdecomp.calibration.teacher import DistillationData
from lsrdecomp.calibration.tokens import prompt_text, tokenize
from lsrdecomp.checkpoints import Checkpoint, Journal, content_key
from lsrdecomp.checkpoints.files import EXAMPLE_SUFFIXES, bytes_to_open, sha256
from lsrdecomp.checkpoints.progress import OnStep, ProgressUpdate
from lsrdecomp.checkpoints.statistics import METADATA, Statistics, read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.measured_settings import EvaluatorSettings
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.fidelity.fidelity import AnswerPair, Fidelity
from lsrdecomp.training.tasks import find_task

if TYPE_CHECKING:
    from lsrdecomp.calibration.base_model import Base
    from lsrdecomp.calibration.behaviour import Behaviour

Item = TextPair | PromptExample
Texts = Sequence[str | Item]

MIN_EFFECT = 1e-9
"""Nats: a divergence below this is rounding."""


@dataclass(frozen=True, slots=True)
class TextSplit:
    """Numbers of texts that are held out and that select among variants; all by hand."""

    held_out: int = 128
    """Texts held out at most, unless the settings say otherwise; never more than a quarter."""
    held_out_prompts: int = 64
    """The same for prompts with completions, each of which has many answers."""
    min_texts: int = 32
    """Different texts that are needed: eight to measure on, the others to learn from."""
    min_held_out: int = 8
    """Texts held out at least."""
    min_to_select: int = 60
    """Held-out texts from which on half as many others select: fewer would choose by luck."""


@dataclass(frozen=True, slots=True)
class NormCalibration:
    """Settings of the norm in which shapes are searched."""

    max_samples: int = 512
    """Texts that calibration reads at most."""
    max_token_samples: int = 64
    """The same where each text asks for many tokens: twice as many brought nothing
    (``benchmarks/results/one_command.json``)."""
    lora_scale: float = 0.4
    """Strength of the LoRA meanwhile: errors add up along the network, and a small variant does in
    part what the LoRA does. At 5.5 kB on SmolLM2 0.886 is kept in place of 0.816
    (``benchmarks/results/one_command.json``, one seed)."""


@dataclass(frozen=True, slots=True)
class DistillationTexts:
    """Numbers of batches that training sees and is checked on; all by hand."""

    teacher_share: float = 0.2
    """Batches of training as a share of its steps: the LoRA answers each once, at a pass each."""
    min_batches: int = 8
    """Batches of training at least."""
    validation_batches: int = 4
    """Batches that say when to stop; neither training nor the final measurement sees them."""


@keep_old_attributes
class Evaluator:
    """A base with a LoRA on it, and the LoRA's answers to held-out texts.

    Parameters
    ----------
    base : str or path
        As `load_base` takes it.
    lora : path
        The adapter whose behaviour is to be kept: a PEFT directory.
    texts : sequence of texts
        Split by seed; texts with the same first part fall on the same side.
    settings : EvaluatorSettings, optional
    chooses : bool
        Whether one of many variants is selected by what they keep. Where enough texts are held out
        it is on half as many others, so that what is reported of it is measured on texts that
        selected nothing.
    on_step : callable, optional
        Called with a `ProgressUpdate` before and during each part of the work.
    text_split : TextSplit, optional
    norm : NormCalibration, optional
    distillation : DistillationTexts, optional

    Raises
    ------
    LsrError
        If the texts are too few or too long, or the LoRA does nothing on them.
    CheckpointError
        If base and adapter do not fit.

    Notes
    -----
    Costs two forward passes over the held-out and the selection texts; each `measure` costs one
    over the latter.
    """

    def __init__(
        self,
        base: str | Path,
        lora: str | Path,
        texts: Sequence[Item],
        settings: EvaluatorSettings | None = None,
        *,
        chooses: bool = False,
        on_step: OnStep | None = None,
        text_split: TextSplit | None = None,
        norm: NormCalibration | None = None,
        distillation: DistillationTexts | None = None,
    ) -> None:
        self.settings = settings or EvaluatorSettings()
        self.on_step = on_step
        self.text_split = text_split or TextSplit()
        self.norm = norm or NormCalibration()
        self.distillation = distillation or DistillationTexts()
        # 1. Three parts of the texts: what is reported is measured on the first, variants are
        #    selected by the second, norms and training see the third.
        self._split_texts(texts, chooses)
        # 2. The base, once; adapters share its large weights.
        self._open(base, lora)
        self._refuse_long(texts)
        # 3. The LoRA's answers, once; every variant is compared with them.
        count = len(self.held_out) + len(self.selection_texts)
        self.announce(f"the LoRA's own answers to {count} held-out examples")
        self.reference = Reference(self.source, self.batches(self.held_out))
        self.selection_reference = self.reference
        if self.selection_texts:
            self.selection_reference = Reference(self.source, self.batches(self.selection_texts))
        if not self.reference.effect > MIN_EFFECT:
            raise LsrError(
                "the adapter changes no answer on these texts (divergence "
                f"{self.reference.effect:.2g} nats): there is no effect to keep; give texts of the "
                "task it was trained for"
            )

    def _split_texts(self, texts: Sequence[Item], chooses: bool) -> None:
        """Divide the texts: held out, selection, and calibration with training."""
        rule = self.text_split
        prompted = any(isinstance(text, PromptExample) for text in texts)
        usual = rule.held_out_prompts if prompted else rule.held_out
        held_out = self.settings.held_out or usual
        self.held_out, remaining = split(texts, held_out, self.settings.seed, rule)
        selecting = 0
        if chooses and len(self.held_out) >= rule.min_to_select:
            selecting = len(self.held_out) // 2
        self.selection_texts = remaining[:selecting]
        self.calibration_texts = remaining[selecting:]

    def _open(self, base: str | Path, lora: str | Path) -> None:
        """Open the base with the LoRA on it; `CheckpointError` if they do not fit."""
        settings = self.settings
        self.announce("opening the base")
        try:
            self.base = open_base(base, lora, dtype=settings.dtype, device=settings.device or "cpu")
            self.source = self.base.with_adapter(lora)
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, LsrError):
                raise
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"does not open on the base {base}: {reason}", path=lora
            ) from error
        self.batch_size = settings.batch or (8 if self.source.head in TOKEN_HEADS else 32)

    def _refuse_long(self, texts: Sequence[Item]) -> None:
        """Raise `DataError` for prompts that are too long: of all of them, before the work."""
        if self.source.head is Head.causal_lm:
            prompts = [text for text in texts if isinstance(text, PromptExample)]
            tokenize(prompts, self.source.tokenizer, **self._length_limits)

    def announce(self, stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        """Tell ``on_step`` what is done now, and how much of it."""
        if self.on_step is not None:
            self.on_step(ProgressUpdate(stage, done, total, unit))

    def batches(self, texts: Sequence[Item], size: int | None = None) -> Iterator[Batch]:
        """Yield batches of texts of like length; the same texts give the same batches."""
        size = size or self.batch_size
        seed = self.settings.seed
        order = sorted(texts, key=_n_letters)
        for start in range(0, len(order), size):
            part = order[start : start + size]
            prompts = [item for item in part if isinstance(item, PromptExample)]
            pairs = [item for item in part if not isinstance(item, PromptExample)]
            if prompts:
                yield from prompt_batches(
                    self.source, prompts, size=size, seed=seed, **self._length_limits
                )
            if pairs:
                max_length = self.settings.max_length
                yield from text_batches(
                    self.source, pairs, size=size, seed=seed, max_length=max_length
                )

    @property
    def _length_limits(self) -> dict[str, Any]:
        return {"max_length": self.settings.max_length, "truncate": self.settings.truncate}

    def measure(self, written: Path) -> Behaviour:
        """Return how a written variant answers the texts that variants are selected by."""
        return self.selection_reference.compare(self.base.with_adapter(written))

    def measure_held_out(self, written: Path) -> Behaviour:
        """Return how a written variant answers the held-out texts."""
        self.announce("measuring what it keeps on held-out texts")
        return self.reference.compare(self.base.with_adapter(written))

    def compare_answers(self, written: Path, limit: int = 32) -> list[AnswerPair]:
        """Return what the LoRA and a written variant answer to the first held-out texts.

        There are ``limit`` texts at most. Answers are classes, or greedy completions. Empty where
        texts have no prompt, and for a regression.
        """
        self.announce("answering in words")
        models = (self.source, self.base.with_adapter(written))
        texts = self.held_out[:limit]
        if self.source.head is Head.classification:
            questions, answers = self._classes(models, texts)
        elif self.source.head is Head.causal_lm:
            questions, answers = self._completions(models, texts)
        else:
            return []
        return [AnswerPair(*row) for row in zip(questions, *answers, strict=True)]

    def _classes(
        self, models: Sequence[Base], texts: Sequence[Item]
    ) -> tuple[list[str], list[list[str]]]:
        """Return texts as the model reads them, and the classes that each model answers."""
        names: Any = self.source.model.config.id2label  # type: ignore[union-attr]
        questions: list[str] = []
        answers: list[list[str]] = [[] for _ in models]
        # As the model reads them: batches are of like length, so answers do not come in the order
        # of the texts.
        for batch in self.batches(texts):
            questions += self.source.tokenizer.batch_decode(
                batch["input_ids"], skip_special_tokens=True
            )
            for model, classes in zip(models, answers, strict=True):
                with torch.no_grad():
                    likeliest = forward(model, batch).logits.argmax(-1)
                classes += [str(names[int(index)]) for index in likeliest]
        return questions, answers

    def _completions(
        self, models: Sequence[Base], texts: Sequence[Item]
    ) -> tuple[list[str], list[list[str]]]:
        """Return the prompts of the texts, and for each model its greedy completions of them."""
        tokenizer = self.source.tokenizer
        prompts = [
            prompt_text(text, tokenizer) for text in texts if isinstance(text, PromptExample)
        ]
        prompts = [prompt for prompt in prompts if prompt]
        # As many new tokens as the longest held-out completion has.
        longest = int(self.reference.counts.max())
        answers = [
            generate(model.model, tokenizer, prompts, new_tokens=longest) for model in models
        ]
        return prompts, answers

    @property
    def key(self) -> str:
        """A digest of what its answers depend on: adapter, base, texts, settings but the device."""
        settings = {
            name: getattr(self.settings, name)
            for name in EvaluatorSettings.fields
            if name != "device"
        }
        about = [
            self.source.adapter_sha256,
            self.source.name,
            self.source.modules,
            self.batch_size,
            settings,
            self.norm,
            self.distillation,
        ]
        return content_key(about, self.held_out, self.selection_texts, self.calibration_texts)

    def statistics(self, journal: Journal, written: Path | None = None) -> Statistics:
        """Return statistics of the adapted layers: the norm in which shapes are searched.

        They are measured on texts that are not held out, with the LoRA at the strength of
        `NormCalibration`, or with a compressed variant of it, as ``written``. Those that a run
        before finished in the journal are read.
        """
        # Few texts of a language model do: each has as many answers as tokens.
        many_tokens = self.source.head in TOKEN_HEADS
        limit = self.norm.max_token_samples if many_tokens else self.norm.max_samples
        texts = self.calibration_texts[:limit]
        adapter = self.source.adapter_sha256 if written is None else sha256(written / WEIGHTS)
        out = journal.directory(f"statistics-{content_key(self.key, adapter, len(texts))}")
        if (out / METADATA).exists():
            return read_statistics(out)
        scaled: AbstractContextManager[None] = nullcontext()
        if written is None:
            stage = "calibrating"
            base = self.source
            scaled = rescale_adapter_scale(base.model, self.norm.lora_scale)
        else:
            stage = "calibrating with the compressed adapter"
            # A variant may have left layers out, which then act as they do in the base.
            base = replace(self.base.with_adapter(written), modules=self.source.modules)
        self.announce(stage)

        def announce_step(step: ProgressUpdate) -> None:
            self.announce(stage, step.done, step.total, step.unit)

        with scaled:
            return calibrate(
                base,
                self.batches(texts),
                out=out,
                seed=self.settings.seed,
                samples=len(texts),
                effect=False,
                on_step=announce_step,
            )

    def distillation_data(self, steps: int, micro: int | None = None) -> DistillationData:
        """Return a few batches to validate by, and those that so many steps go through."""
        limits = self.distillation
        # 1. Texts to validate by; so few that no batch would be left for training: every fourth.
        count = limits.validation_batches * self.batch_size
        validation_texts = self.calibration_texts[:count]
        texts = self.calibration_texts[count:]
        if len(texts) < self.batch_size:
            validation_texts = self.calibration_texts[::4]
            texts = [text for index, text in enumerate(self.calibration_texts) if index % 4]
        # 2. As many as the teacher answers at little cost beside the steps, which go through them
        #    again and again; texts of like length in a step.
        n_batches = max(limits.min_batches, round(limits.teacher_share * steps))
        texts = sorted(texts[: n_batches * self.batch_size], key=_n_letters)
        parts = [
            texts[start : start + self.batch_size]
            for start in range(0, len(texts), self.batch_size)
        ]
        micro_batches = [list(self.batches(part, micro or self.batch_size)) for part in parts]
        validation = Reference(self.source, self.batches(validation_texts))
        return DistillationData(self.source, micro_batches, validation)

    def fidelity(
        self, behaviour: Behaviour, written: Path, source: Checkpoint, data: str, **annotations: Any
    ) -> Fidelity:
        """Return the record of a measured variant of ``source``, with further facts of it."""
        return Fidelity.of(
            behaviour,
            data=data,
            base=Path(self.source.name).name,
            bytes_before=bytes_to_open(source.weights),
            bytes_after=bytes_to_open(written / WEIGHTS),
            head_bytes=source.extra_bytes,
            **annotations,
        )


def read_data(data: str | Path | Texts) -> list[Item]:
    """Read the texts of a file or of a GLUE directory (its train split), or take them as given.

    A file whose name ends in .jsonl, .json or .csv holds prompts and completions, conversations or
    texts, see `lsrdecomp.calibration.dataset`: only completions are answers. Any other has a text a
    line, a tab between pairs.

    Parameters
    ----------
    data : str, path or sequence
        A file, a directory, or texts: strings, pairs ``(first, second or None)`` or
        `PromptExample`.

    Raises
    ------
    CheckpointError, DataError
        If a file cannot be read.
    DataError
        If an element of a sequence is none of these; names its index.
    """
    if not isinstance(data, str | Path):
        return [_as_item(text, index) for index, text in enumerate(data)]
    path = Path(data)
    if path.is_dir():
        return list(task_texts(find_task(path).read(path, "train")))
    if path.suffix in EXAMPLE_SUFFIXES:
        return list(read_examples(path))
    return list(read_text_pairs(path))


def _as_item(text: object, index: int) -> Item:
    """Return one element of a sequence of texts as an item; a plain string is a text of its own."""
    if isinstance(text, str):
        return text, None
    if isinstance(text, PromptExample):
        return text
    if isinstance(text, tuple | list) and len(text) == 2:
        first, second = text
        if isinstance(first, str) and isinstance(second, str | None):
            return first, second
    raise DataError(
        f"data[{index}] is {text!r:.60}; give strings, pairs (first, second) or PromptExample "
        "values"
    )


def data_name(data: str | Path | Texts) -> str:
    """Return what the texts are called in a sentence."""
    if isinstance(data, str | Path):
        return Path(data).name
    return f"{len(data):,} texts"


def split(
    texts: Sequence[Item], held_out: int, seed: int, rule: TextSplit | None = None
) -> tuple[list[Item], list[Item]]:
    """Return held-out texts, at most ``held_out`` and a quarter of all, and the others.

    Both are in an order drawn from ``seed``. Texts that begin alike (the references of one prompt)
    stay on one side.

    Raises
    ------
    LsrError
        If the texts are too few.
    """
    rule = rule or TextSplit()
    # 1. A group moves as a whole: held-out texts whose prompt was trained on would flatter the
    #    variant.
    groups: dict[str, list[Item]] = {}
    for text in texts:
        groups.setdefault(_beginning(text), []).append(text)
    if len(groups) < rule.min_texts:
        raise LsrError(
            f"{len(groups)} different texts are too few: {rule.min_texts} are needed, a few "
            "hundred are better"
        )
    # 2. Groups in an order by chance; each is held out if it still fits.
    limit = max(rule.min_held_out, min(held_out, len(texts) // 4))
    keys = list(groups)
    random.Random(seed).shuffle(keys)
    measured: list[Item] = []
    remaining: list[Item] = []
    for key in keys:
        if len(measured) + len(groups[key]) <= limit:
            measured += groups[key]
        else:
            remaining += groups[key]
    return measured, remaining


def _n_letters(item: Item) -> int:
    """Return the letters of a text, for sorting."""
    if isinstance(item, PromptExample):
        messages = sum(len(message["content"]) for message in item.messages)
        return len(item.prompt) + len(item.completion) + messages
    first, second = item
    return len(first) + len(second or "")


def _beginning(item: Item) -> str:
    """Return what texts that belong together share: the prompt, or the first text of a pair."""
    if not isinstance(item, PromptExample):
        return item[0]
    if item.messages:
        return item.messages[0]["content"]
    return item.prompt or item.completion
