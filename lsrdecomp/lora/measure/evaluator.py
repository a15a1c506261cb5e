"""Evaluation of compressed variants of a LoRA: its base, its texts, and its outputs on them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer

from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.lora.base.autocast import mixed_precision
from lsrdecomp.lora.base.base_files import resolved_base
from lsrdecomp.lora.base.batch_rows import examples_in
from lsrdecomp.lora.base.calibrate import calibrate
from lsrdecomp.lora.base.dataset import DataError, PromptExample
from lsrdecomp.lora.base.divergence import Reference
from lsrdecomp.lora.base.forward import forward
from lsrdecomp.lora.base.generation import generate
from lsrdecomp.lora.base.heads import TOKEN_HEADS, Batch, Head
from lsrdecomp.lora.base.open_bases import open_base
from lsrdecomp.lora.base.texts import (
    HELD_OUT,
    HELD_OUT_PROMPTS,
    Item,
    few_texts,
    kind_of,
    n_characters,
    n_selection_texts,
    split_texts,
)
from lsrdecomp.lora.base.tokens import prompt_text, tokenize
from lsrdecomp.lora.base.written_texts import (
    N_WRITTEN,
    N_WRITTEN_TO_TRAIN,
    kind_of_written,
    write_texts,
)
from lsrdecomp.lora.files import Checkpoint, Journal, content_key
from lsrdecomp.lora.files.file_checks import bytes_to_open, sha256
from lsrdecomp.lora.files.progress import OnStep, ProgressUpdate
from lsrdecomp.lora.files.statistics import METADATA, Statistics, read_statistics
from lsrdecomp.lora.files.writing import weight_file
from lsrdecomp.lora.measure.fidelity import AnswerPair, Fidelity
from lsrdecomp.lora.measure.output_meter import (
    Meter,
    default_batch,
    evaluation_batches,
)
from lsrdecomp.lora.measure.teacher import DistillationData
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.base.behaviour import Behaviour

MAX_TEXTS = 512
"""Maximum texts that calibration reads for the norm in which shapes are searched; by hand."""
MAX_TEXTS_OF_TOKENS = 64
"""The same for models that predict tokens, of which each text has many; by hand."""
LORA_SCALE = 0.4
"""Factor of the LoRA's ΔW during that calibration. A small variant does only part of what the LoRA
does, and errors add up along the network: statistics for it lie between those with the LoRA and
without. One of four values that were tried on three LoRAs (``norms`` in
``benchmarks/results/one_command.json``)."""

TEACHER_SHARE = 0.2
"""Different batches to train on, as a share of the steps: the LoRA runs once on each. By hand."""
MIN_BATCHES = 8
"""Minimum batches to train on; by hand."""
WRITTEN_HELD_OUT = 0.4
"""Maximum share of the texts that a model wrote itself that is held out: 64 of 160."""

MAX_CALIBRATION_ANSWERS = 96
"""Maximum prompts that the LoRA answers to calibrate and train on; by hand, as many as 60 steps of
eight take."""
VALIDATION_BATCHES = 4
"""Batches that say when to stop, where no selection texts do; neither training nor the final
measurement sees them. By hand."""


class Evaluator:
    """A base with a LoRA on it, and the LoRA's outputs on texts, to compare variants with.

    Parameters
    ----------
    base : str, path, module or Base
        As for `open_base`.
    lora : path
        The adapter whose behaviour is to be kept: a PEFT directory.
    texts : sequence of texts
        Split by seed into held-out, selection and calibration texts, as `split_texts` does. If they
        are too few the model writes texts itself (`lora.base.written_texts`) that are split so;
        given texts are calibration texts then.
    settings : EvaluatorSettings, optional
    chooses : bool
        Whether one of many variants will be selected by what they keep. If enough texts are held
        out, half as many others are then set aside to select by, so that the held-out texts measure
        what was selected on others.
    trains : bool
        Whether variants will be trained too. Then three selection texts are set aside for four that
        are held out, and they also say when a training ends.
    by_answers : bool
        Whether a variant will be selected by whole answers. Then as many texts are set aside for
        that as are held out, and the LoRA's own answers to them are what variants are compared on.
        A language model's own answers take the place of the completions of calibration texts, too.
        Several completions of one prompt count as one text: there is one answer to it.
    journal : Journal, optional
        Keeps texts that the model writes.
    on_step : callable, optional
        Called with a `ProgressUpdate` before and during each part of the work.

    Attributes
    ----------
    base, source : Base
        The plain base, and the base with the LoRA.
    held_out, selection_texts, calibration_texts : list
        Texts for the final measurement, to select variants by (perhaps none), and for calibration
        and training.
    meter : Meter
        Compares with the LoRA on the held-out texts.
    reference : Reference
        The LoRA's outputs on them.
    selection_reference : Reference
        The LoRA's outputs on the selection texts, or on its own answers to them; without any,
        `reference`.
    calibration_reference : Reference, optional
        The LoRA's outputs on the calibration texts, where those are its own answers.
    monitors_by_selection : bool
        Whether the selection texts say when a training ends.
    batch_size : int
    written : str or None
        What the texts are that took the place of those given, as `kind_of_written` calls them.

    Raises
    ------
    LsrError
        If the texts are too long, or the LoRA has no effect on them.
    CheckpointError
        If base and adapter do not fit.

    Notes
    -----
    Costs two forward passes over the held-out and the selection texts. Each `measure` costs one
    over the selection texts.
    """

    def __init__(
        self,
        base: str | Path | Base | nn.Module,
        lora: str | Path,
        texts: Sequence[Item],
        settings: EvaluatorSettings | None = None,
        *,
        chooses: bool = False,
        trains: bool = False,
        by_answers: bool = False,
        journal: Journal | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.settings = settings or EvaluatorSettings()
        self.on_step = on_step
        # 1. Open the base, once: adapters share its large weights.
        self.announce("opening the base")
        self.base, self.source = self._open(base, lora)
        self.batch_size = self.settings.batch or default_batch(self.source)
        self._check_lengths(texts)
        # 2. Split the texts, of which the model writes more if they are too few.
        reads_texts = self.base.batches is None
        if not texts and not reads_texts:
            raise DataError(
                f"{self.base.name} runs on no texts that it could write: give what it runs on by "
                "--data (data= in Python), such as a folder of images or sounds"
            )
        is_short = reads_texts and few_texts(texts)
        self.written = kind_of_written(self.source, texts) if is_short else None
        if self.written is None:
            self.held_out, remaining = self._hold_out(texts, by_prompt=by_answers)
        else:
            count = N_WRITTEN_TO_TRAIN if trains else N_WRITTEN
            written = write_texts(
                self.source,
                texts,
                seed=self.settings.seed,
                count=count,
                max_length=self.settings.max_length,
                journal=journal,
                on_step=on_step,
            )
            self.held_out, remaining = self._hold_out(written, max_share=WRITTEN_HELD_OUT)
        n_selection = 0
        if chooses:
            n_selection = n_selection_texts(len(self.held_out), trains=trains)
        if by_answers:
            n_selection = min(len(self.held_out), len(remaining) // 2)
        self.selection_texts = remaining[:n_selection]
        self.calibration_texts = remaining[n_selection:]
        if self.written is not None:
            self.calibration_texts = [*texts, *self.calibration_texts]
        self.monitors_by_selection = trains and bool(self.selection_texts)
        # 3. Run the LoRA, once: every variant is compared with its outputs.
        n_texts = len(self.held_out) + len(self.selection_texts)
        self.announce(f"the LoRA's own answers to {n_texts} held-out examples")
        self.meter = Meter(self.source, self.held_out, self.settings)
        self.reference = self.meter.reference
        self.selection_reference = self.reference
        self.calibration_reference: Reference | None = None
        if by_answers and self.source.head is not Head.classification:
            self.selection_reference = self._own_answers_to(self.selection_texts)
            self.announce("the LoRA's own answers to calibrate on")
            answered, self.calibration_reference = self.meter.with_own_answers(
                self.calibration_texts, MAX_CALIBRATION_ANSWERS
            )
            self.calibration_texts = [*answered] or self.calibration_texts
        elif self.selection_texts:
            self.selection_reference = Reference(self.source, self.batches(self.selection_texts))

    def _own_answers_to(self, texts: Sequence[Item]) -> Reference:
        """Return the LoRA's outputs on its own greedy answers; raise `LsrError` without prompts."""
        _, reference = self.meter.answers_to(texts)
        if reference is None:
            raise LsrError(
                "there are no whole answers to keep: those of a language model are to prompts "
                "(JSON lines with prompt and completion), those of a classifier are classes; "
                "--keep (keep=) asks for a share of the effect"
            )
        return reference

    def _hold_out(
        self, texts: Sequence[Item], max_share: float = 0.25, *, by_prompt: bool = False
    ) -> tuple[list[Item], list[Item]]:
        """Return held-out and remaining texts, as many as the settings say."""
        has_prompts = any(isinstance(text, PromptExample) for text in texts)
        default = HELD_OUT_PROMPTS if has_prompts else HELD_OUT
        max_held_out = self.settings.held_out or default
        return split_texts(
            texts,
            max_held_out,
            self.settings.seed,
            max_share=max_share,
            by_prompt=by_prompt and has_prompts,  # a classifier answers each text
        )

    def _open(self, base: str | Path | Base | nn.Module, lora: str | Path) -> tuple[Base, Base]:
        """Return the base without and with the LoRA; raise `CheckpointError` if they do not fit."""
        settings = self.settings
        try:
            plain = open_base(
                base,
                lora,
                dtype=settings.dtype,
                device=settings.device or "cpu",
                trust_remote_code=settings.trust_remote_code,
            )
            return plain, plain.with_adapter(lora)
        except LsrError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"does not open on the base {resolved_base(base)}: {reason}", path=lora
            ) from error

    def _check_lengths(self, texts: Sequence[Item]) -> None:
        """Raise `DataError` if any prompt is too long, before work is done on the others."""
        if self.source.head is Head.causal_lm and self.source.batches is None:
            prompts = [text for text in texts if isinstance(text, PromptExample)]
            tokenize(prompts, self.source.tokenizer, **self.settings.prompt_limits)

    def announce(self, stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        """Tell ``on_step`` which stage the work is at, and how much of it is done."""
        if self.on_step is not None:
            self.on_step(ProgressUpdate(stage, done, total, unit))

    def batches(self, texts: Sequence[Item], size: int | None = None) -> Iterator[Batch]:
        """Return batches of texts of similar length; the same texts give the same batches."""
        return evaluation_batches(self.source, texts, self.settings, size or self.batch_size)

    def measure(self, written: Path) -> Behaviour:
        """Compare a written variant with the LoRA on the selection texts."""
        return self.selection_reference.compare(self.base.with_adapter(written))

    def measure_held_out(self, written: Path) -> Behaviour:
        """Compare a written variant with the LoRA on the held-out texts."""
        self.announce(f"measuring what it keeps on held-out {kind_of(self.held_out)}")
        return self.meter.compare(self.base.with_adapter(written))

    def compare_answers(self, written: Path, limit: int = 32) -> list[AnswerPair]:
        """Return the answers of the LoRA and of a written variant to held-out texts.

        Answers are the classes of all of them, or greedy completions of the first ``limit``. There
        are none to texts without a prompt, and none of outputs that are numbers.
        """
        self.announce("answering in words")
        variant = self.base.with_adapter(written)
        if self.source.batches is not None:
            return []
        if self.source.head is Head.classification:
            return self._compare_classes(variant, self.held_out)
        if self.source.head is Head.causal_lm:
            return self._compare_completions(variant, limit)
        return []

    def _compare_classes(self, variant: Base, texts: Sequence[Item]) -> list[AnswerPair]:
        pairs: list[AnswerPair] = []
        for batch in self.batches(texts):
            # The texts of a batch are decoded from it: batches are not in the order of the texts.
            questions = self.source.tokenizer.batch_decode(
                batch["input_ids"], skip_special_tokens=True
            )
            by_lora = _class_names(self.source, batch)
            by_variant = _class_names(variant, batch)
            rows = zip(questions, by_lora, by_variant, strict=True)
            pairs += [AnswerPair(*row) for row in rows]
        return pairs

    def _compare_completions(self, variant: Base, limit: int) -> list[AnswerPair]:
        tokenizer = self.source.tokenizer
        texts = [text for text in self.held_out if isinstance(text, PromptExample)]
        different = dict.fromkeys(prompt_text(text, tokenizer) for text in texts)
        prompts = [prompt for prompt in different if prompt][:limit]
        # As many new tokens as the longest held-out completion has.
        new_tokens = int(self.reference.counts.max())
        by_lora = generate(self.source.model, tokenizer, prompts, new_tokens=new_tokens)
        by_variant = generate(variant.model, tokenizer, prompts, new_tokens=new_tokens)
        rows = zip(prompts, by_lora, by_variant, strict=True)
        return [AnswerPair(*row) for row in rows]

    @property
    def key(self) -> str:
        """Digest of everything that measurements depend on: adapter, base, texts and settings."""
        settings = {
            name: getattr(self.settings, name)
            for name in EvaluatorSettings.fields
            if name != "device"
        }
        dependencies = [
            self.source.adapter_sha256,
            self.source.name,
            self.source.modules,
            self.batch_size,
            settings,
        ]
        data = [self.held_out, self.selection_texts, self.calibration_texts]
        named = [[str(each) if isinstance(each, Path) else each for each in part] for part in data]
        return content_key(dependencies, named)

    def statistics(
        self, journal: Journal, written: Path | None = None, *, lora_scale: float = LORA_SCALE
    ) -> Statistics:
        """Measure statistics of the adapted layers: the norm in which shapes are searched.

        Statistics depend on the adapter that is active meanwhile.

        Parameters
        ----------
        journal : Journal
            Statistics that an earlier run finished here are read, not measured again.
        written : path, optional
            A written variant to be active; absent, the LoRA.
        lora_scale : float
            Factor of the LoRA's ΔW, if the LoRA is active; other methods of PEFT have no such
            factor, and act in full.
        """
        # 1. Read what an earlier run finished.
        # An image that is drawn is run on at many noise levels, as a text at many tokens.
        runs_often = self.source.head in TOKEN_HEADS or self.source.measured_part
        limit = MAX_TEXTS_OF_TOKENS if runs_often else MAX_TEXTS
        texts = self.calibration_texts[:limit]
        adapter = self.source.adapter_sha256
        if written is not None:
            adapter = sha256(weight_file(written))
        key = content_key(self.key, adapter, lora_scale, len(texts))
        out = journal.directory(f"statistics-{key}")
        if (out / METADATA).exists():
            return read_statistics(out)
        # 2. Activate the adapter.
        scaled: AbstractContextManager[None] = nullcontext()
        if written is None:
            stage = "calibrating"
            base = self.source
            if any(isinstance(module, LoraLayer) for module in base.model.modules()):
                scaled = rescale_adapter_scale(base.model, lora_scale)
        else:
            stage = "calibrating with the compressed adapter"
            # A variant may lack layers of the LoRA; they are measured too.
            base = replace(self.base.with_adapter(written), modules=self.source.modules)
        self.announce(stage)

        def announce_step(step: ProgressUpdate) -> None:
            self.announce(stage, step.done, step.total, step.unit)

        # 3. Measure.
        mixed = mixed_precision(base.model)
        batches: Iterable[Batch] = self.batches(texts)
        samples = len(texts)
        if runs_often:  # sounds are written down by the LoRA at its full strength
            batches = list(batches)
        if self.source.measured_part:  # how many rows are drawn is seen when they are
            samples = sum(map(examples_in, batches))
        with scaled, mixed:
            return calibrate(
                base,
                batches,
                out=out,
                seed=self.settings.seed,
                samples=samples,
                effect=False,
                on_step=announce_step,
            )

    def distillation_data(self, steps: int, micro: int | None = None) -> DistillationData:
        """Return batches to train on, and texts to validate by.

        Parameters
        ----------
        steps : int
            Steps of training. There are fewer batches, on each of which the LoRA runs once; steps
            repeat them.
        micro : int, optional
            Examples of a micro-batch; absent, a batch is one.
        """
        size = self.batch_size
        # 1. Set texts aside to validate by, unless the selection texts serve for that.
        if self.monitors_by_selection:
            batches = self._training_batches(self.calibration_texts, steps, micro)
            return DistillationData(self.source, batches, self.selection_reference)
        n_validation = VALIDATION_BATCHES * size
        validation_texts = self.calibration_texts[:n_validation]
        texts = self.calibration_texts[n_validation:]
        if len(texts) < size:  # too few are left for a batch: set every fourth aside
            validation_texts = self.calibration_texts[::4]
            texts = [text for index, text in enumerate(self.calibration_texts) if index % 4]
        validation = Reference(self.source, self.batches(validation_texts))
        batches = self._training_batches(texts, steps, micro)
        return DistillationData(self.source, batches, validation)

    def _training_batches(
        self, texts: Sequence[Item], steps: int, micro: int | None
    ) -> list[list[Batch]]:
        """Return the batches of a training, with texts of similar length in each."""
        size = self.batch_size
        n_batches = max(MIN_BATCHES, round(TEACHER_SHARE * steps))
        by_length = sorted(texts[: n_batches * size], key=n_characters)
        starts = range(0, len(by_length), size)
        return [
            list(self.batches(by_length[start : start + size], micro or size)) for start in starts
        ]

    def fidelity(
        self, behaviour: Behaviour, written: Path, source: Checkpoint, data: str, **annotations: Any
    ) -> Fidelity:
        """Return the record of a written variant of ``source``.

        Parameters
        ----------
        behaviour : Behaviour
            The variant compared with the LoRA on the held-out texts.
        written : path
            The variant.
        source : Checkpoint
            The LoRA.
        data : str
            Name of the texts.
        **annotations
            Further fields of `Fidelity`.

        Notes
        -----
        Costs the LoRA's own answers to the held-out prompts, once, and a forward pass over them.
        """
        if self.written is not None:  # the completions are the LoRA's own
            behaviour = replace(behaviour, right=None)
        if self.meter.prompts:
            self.announce("comparing whole answers")
            variant = self.base.with_adapter(written)
            annotations |= asdict(self.meter.whole_answers(variant))
        return Fidelity.of(
            behaviour,
            data=data,
            base=Path(self.source.name).name,
            bytes_before=bytes_to_open(source.weights),
            bytes_after=bytes_to_open(weight_file(written)),
            head_bytes=source.extra_bytes,
            kind=kind_of(self.held_out),
            written=self.written,
            **annotations,
        )


def _class_names(base: Base, batch: Batch) -> list[str]:
    """Return the name of the class that a model predicts for each example.

    A class that nobody named is told by its number.
    """
    names: Any = base.model.config.id2label  # type: ignore[union-attr]
    with torch.no_grad():
        predicted = forward(base, batch).logits.argmax(-1)
    return [str(names[int(index)]).replace("LABEL_", "class ") for index in predicted]
