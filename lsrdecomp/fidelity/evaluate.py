"""Evaluator: a base with a LoRA on it, and texts: what written forms of the LoRA keep, and what its layers do."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft.helpers import rescale_adapter_scale

from lsrdecomp.calibration.base_model import (
    Text,
    open_base,
    prompt_batches,
    read_text_pairs,
    task_texts,
    text_batches,
)
from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.calibration.dataset import (
    DataError,
    PromptExample,
    prompt_text,
    read_examples,
    tokenize,
)
from lsrdecomp.calibration.divergence import Reference
from lsrdecomp.calibration.forward import forward
from lsrdecomp.calibration.generation import generate
from lsrdecomp.calibration.heads import TOKEN_HEADS, Batch, Head
from lsrdecomp.calibration.teacher import DistillationData
from lsrdecomp.checkpoints import Checkpoint, Journal, content_key
from lsrdecomp.checkpoints.files import EXAMPLE_SUFFIXES, bytes_to_open, sha256
from lsrdecomp.checkpoints.progress import OnStep, ProgressUpdate
from lsrdecomp.checkpoints.statistics import METADATA, Statistics, read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.measured_settings import EvaluatorSettings
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.fidelity.fidelity import Answered, Fidelity
from lsrdecomp.training.tasks import find_task

if TYPE_CHECKING:
    from lsrdecomp.calibration.behaviour import Behaviour

Item = Text | PromptExample
Texts = Sequence[str | Item]

NO_EFFECT = 1e-9
"""Nats: a divergence below this is rounding."""
HELD_OUT, HELD_OUT_PROMPTS = 128, 64
"""Examples that a promise is measured on, and where each has many answers."""
SAMPLES, SAMPLES_OF_TOKENS = 512, 64
"""Examples that calibration reads at most, and where each asks for many tokens."""
STRENGTH = 0.4
"""Of the LoRA while the norm is measured: errors add up along the network, and a small form does in
part what the LoRA does. At 5.5 kB on SmolLM2 .886 is kept in place of .816
(benchmarks/results/one_command.json, one seed)."""
ANSWERED = 32
"""Held-out examples that are answered in words, where that is asked for."""
TEACHER_SHARE = 0.2
"""Batches of the lessons, of all steps: the source answers each once, and that costs a forward
pass."""
FEWEST_LESSONS = 8
CHECK_BATCHES = 4
"""Batches that say when to stop; they are held out of the lessons, and the promise is measured on
others."""
LEAST = 32
"""Texts a promise needs: eight to measure on, the others to learn from."""
LEAST_HELD_OUT = 8
ENOUGH_TO_CHOOSE = 60
"""Held-out texts from which on others choose: half of fewer would choose by luck."""


class Evaluator:
    """A base with a LoRA on it, the LoRA's answers to held-out texts, and the texts that calibration may see.

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
        Whether one of many forms is chosen by what they keep. Where `ENOUGH_TO_CHOOSE` or more are
        held out it is on half as many others, so that what is promised of it is measured on texts
        that chose nothing.
    on_step : callable, optional
        Called with a `ProgressUpdate` before and during each part of the work.

    Raises
    ------
    LsrError
        If the texts are too few or too long, or the LoRA does nothing on them.
    CheckpointError
        If base and adapter do not fit.

    Notes
    -----
    Costs two forward passes over the held-out texts and those that choose; each `measure` costs one
    over these.
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
    ) -> None:
        self.settings = settings = settings or EvaluatorSettings()
        self.on_step = on_step
        # 1. Three parts of the texts: what is promised is measured on the first, forms are chosen
        #    by the second, norms and training see the third.
        prompted = any(isinstance(text, PromptExample) for text in texts)
        held_out = settings.held_out or (HELD_OUT_PROMPTS if prompted else HELD_OUT)
        self.held_out, rest = split(texts, held_out, settings.seed)
        choosing = (
            len(self.held_out) // 2 if chooses and len(self.held_out) >= ENOUGH_TO_CHOOSE else 0
        )
        self.choosing, self.calibration = rest[:choosing], rest[choosing:]
        # 2. The base, once; adapters share its large weights.
        self.say("opening the base")
        try:
            self.base = open_base(base, lora, dtype=settings.dtype, device=settings.device or "cpu")
            self.source = self.base.adapted(lora)
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, LsrError):
                raise
            words = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"does not open on the base {base}: {words}", path=lora
            ) from error
        self.size = settings.batch or (8 if self.source.head in TOKEN_HEADS else 32)
        if (
            self.source.head is Head.causal_lm
        ):  # what is too long is told of all texts, before the work
            tokenize(
                [text for text in texts if isinstance(text, PromptExample)],
                self.source.tokenizer,
                **self._cut,
            )
        # 3. The LoRA's answers, once; every form is compared with them.
        self.say(f"the LoRA's own answers to {len(self.held_out) + choosing} held-out examples")
        self.reference = Reference(self.source, self.batches(self.held_out))
        self.chooser = (
            Reference(self.source, self.batches(self.choosing)) if choosing else self.reference
        )
        if not self.reference.effect > NO_EFFECT:
            raise LsrError(
                f"the adapter changes no answer on these texts (divergence {self.reference.effect:.2g} nats): there is "
                "no effect to keep; give texts of the task it was trained for"
            )

    def say(self, stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        """What is done now, and how much of it."""
        if self.on_step is not None:
            self.on_step(ProgressUpdate(stage, done, total, unit))

    def batches(self, texts: Sequence[Item], size: int | None = None) -> Iterator[Batch]:
        """Texts of like length together, as the model reads them; the same texts give the same batches."""
        size = size or self.size
        order = sorted(texts, key=_letters)
        for start in range(0, len(order), size):
            some = order[start : start + size]
            prompts = [item for item in some if isinstance(item, PromptExample)]
            pairs = [item for item in some if not isinstance(item, PromptExample)]
            settings: dict[str, Any] = {"size": size, "seed": self.settings.seed}
            if prompts:
                yield from prompt_batches(self.source, prompts, **settings, **self._cut)
            if pairs:
                yield from text_batches(
                    self.source, pairs, **settings, max_length=self.settings.max_length
                )

    @property
    def _cut(self) -> dict[str, Any]:
        return {"max_length": self.settings.max_length, "truncate": self.settings.truncate}

    def measure(self, written: Path) -> Behaviour:
        """How a written form answers the texts that forms are compared by."""
        return self.chooser.compare(self.base.adapted(written))

    def measure_held_out(self, written: Path) -> Behaviour:
        """How it answers texts that chose nothing."""
        self.say("measuring what it keeps on texts that chose nothing")
        return self.reference.compare(self.base.adapted(written))

    def answered(self, written: Path) -> list[Answered]:
        """What the LoRA and a written form answer to the first held-out texts: their classes, or greedy completions.

        Empty where texts have no prompt, and for a regression.
        """
        self.say("answering in words")
        models, texts = (self.source, self.base.adapted(written)), self.held_out[:ANSWERED]
        tokenizer, head = self.source.tokenizer, self.source.head
        questions: list[str] = []
        answers: tuple[list[str], ...] = ([], [])
        if head is Head.classification:
            names: Any = self.source.model.config.id2label  # type: ignore[union-attr]
            # As the model reads them: batches are of like length, so answers do not come in the
            # order of the texts.
            for batch in self.batches(texts):
                questions += tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
                for model, said in zip(models, answers, strict=True):
                    with torch.no_grad():
                        said += [
                            str(names[int(k)]) for k in forward(model, batch).logits.argmax(-1)
                        ]
        elif head is Head.causal_lm:
            prompted = [
                prompt_text(text, tokenizer) for text in texts if isinstance(text, PromptExample)
            ]
            questions = [prompt for prompt in prompted if prompt]
            # As many new tokens as the longest held-out completion has.
            longest = int(self.reference.counts.max())
            answers = tuple(
                generate(each.model, tokenizer, questions, new_tokens=longest) for each in models
            )
        return [Answered(*each) for each in zip(questions, *answers, strict=True)]

    @property
    def key(self) -> str:
        """A digest of what its answers depend on: adapter, base, settings (but not where it runs) and texts."""
        settings = {
            name: getattr(self.settings, name)
            for name in EvaluatorSettings.fields
            if name != "device"
        }
        about = [
            self.source.adapter_sha256,
            self.source.name,
            self.source.modules,
            self.size,
            settings,
        ]
        return content_key(about, self.held_out, self.choosing, self.calibration)

    def statistics(self, journal: Journal, written: Path | None = None) -> Statistics:
        """Statistics of the adapted layers, on texts that are not held out: the norm in which forms are searched.

        With the LoRA at `STRENGTH`, or with a compressed form of it, as ``written``. Those that a
        run before finished in the journal are read.
        """
        # Of a language model few texts do: each has as many answers as tokens.
        many_tokens = self.source.head in TOKEN_HEADS
        texts = self.calibration[: SAMPLES_OF_TOKENS if many_tokens else SAMPLES]
        adapter = self.source.adapter_sha256 if written is None else sha256(written / WEIGHTS)
        out = journal.directory(f"statistics-{content_key(self.key, adapter, len(texts))}")
        if not (out / METADATA).exists():
            stage = "calibrating" if written is None else "calibrating with the compressed adapter"
            self.say(stage)
            # A form may have left layers out, which then act as they do in the base.
            base = replace(
                self.source if written is None else self.base.adapted(written),
                modules=self.source.modules,
            )
            with rescale_adapter_scale(base.model, STRENGTH) if written is None else nullcontext():
                return calibrate(
                    base,
                    self.batches(texts),
                    out=out,
                    seed=self.settings.seed,
                    samples=len(texts),
                    effect=False,
                    on_step=lambda step: self.say(stage, step.done, step.total, step.unit),
                )
        return read_statistics(out)

    def lessons(self, steps: int, micro: int | None = None) -> DistillationData:
        """Of the texts that are not held out: a few to check by, of the others what so many steps go through."""
        check, rest = (
            self.calibration[: CHECK_BATCHES * self.size],
            self.calibration[CHECK_BATCHES * self.size :],
        )
        if len(rest) < self.size:  # so few that no batch would be left: every fourth checks
            check = self.calibration[::4]
            rest = [text for index, text in enumerate(self.calibration) if index % 4]
        # As many as the teacher answers at little cost beside the steps, which go through them
        # again and again.
        count = max(FEWEST_LESSONS, round(TEACHER_SHARE * steps))
        rest = sorted(rest[: count * self.size], key=_letters)  # texts of like length in a step
        parts = [rest[start : start + self.size] for start in range(0, len(rest), self.size)]
        batches = [list(self.batches(part, micro or self.size)) for part in parts]
        return DistillationData(self.source, batches, Reference(self.source, self.batches(check)))

    def fidelity(
        self, behaviour: Behaviour, written: Path, source: Checkpoint, data: str, **facts: Any
    ) -> Fidelity:
        """The record of a measured form of ``source``, with further facts of it."""
        return Fidelity.of(
            behaviour,
            data=data,
            base=Path(self.source.name).name,
            bytes_before=bytes_to_open(source.weights),
            bytes_after=bytes_to_open(written / WEIGHTS),
            head_bytes=source.extra_bytes,
            **facts,
        )


def share_kept(behaviour: Behaviour) -> float:
    """The share kept, to compare by: −∞ where it is no number."""
    return (
        behaviour.kept
        if behaviour.kept is not None and math.isfinite(behaviour.kept)
        else -math.inf
    )


def read_data(data: str | Path | Texts) -> list[Item]:
    """Read the texts of a file or of a GLUE directory (its train split), or take them as given.

    A file whose name ends in .jsonl, .json or .csv holds prompts and completions, conversations or
    texts, see `lsrdecomp.calibration.dataset`: only completions are answers. Any other has a text a
    line, a tab between pairs.

    Parameters
    ----------
    data : str, path or sequence
        A file, a directory, or texts: strings, pairs ``(first, second or None)`` or `PromptExample`.

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
        f"data[{index}] is {text!r:.60}; give strings, pairs (first, second) or PromptExample values"
    )


def data_name(data: str | Path | Texts) -> str:
    """What the texts are called in a sentence."""
    return Path(data).name if isinstance(data, str | Path) else f"{len(data):,} texts"


def split(texts: Sequence[Item], held_out: int, seed: int) -> tuple[list[Item], list[Item]]:
    """Held-out texts, at most ``held_out`` and a quarter of all, and the others, both in an order drawn from ``seed``.

    Texts that begin alike (the references of one prompt) stay on one side.

    Raises
    ------
    LsrError
        If the texts are too few.
    """
    # A group moves as a whole: held-out texts whose prompt was trained on would flatter the form.
    groups: dict[str, list[Item]] = {}
    for text in texts:
        groups.setdefault(_beginning(text), []).append(text)
    if len(groups) < LEAST:
        raise LsrError(
            f"{len(groups)} different texts are too few: a promise needs {LEAST}, a few hundred are better"
        )
    most = max(LEAST_HELD_OUT, min(held_out, len(texts) // 4))
    keys = list(groups)
    random.Random(seed).shuffle(keys)
    measured: list[Item] = []
    rest: list[Item] = []
    for key in keys:
        (measured if len(measured) + len(groups[key]) <= most else rest).extend(groups[key])
    return measured, rest


def _letters(item: Item) -> int:
    """Letters of a text, for sorting."""
    if isinstance(item, PromptExample):
        return (
            len(item.prompt)
            + len(item.completion)
            + sum(len(each["content"]) for each in item.messages)
        )
    return len(item[0]) + len(item[1] or "")


def _beginning(item: Item) -> str:
    """What two texts that belong together have in common: the prompt, or the first text of a pair."""
    if not isinstance(item, PromptExample):
        return item[0]
    return item.messages[0]["content"] if item.messages else item.prompt or item.completion
