"""Compressed variants of an adapter: written, measured and trained, each once.

They are kept in a journal, so that a killed run need not repeat what it has done.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lsrdecomp.arrays import to_numpy
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.lora.base.behaviour import Behaviour
from lsrdecomp.lora.compress.prune import prune
from lsrdecomp.lora.compress.rewrite import recorded_layers, rewrite
from lsrdecomp.lora.files import Checkpoint, Journal, content_key
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.measure.fidelity import Measurement, share_kept
from lsrdecomp.lora.train.distillation import Distillation, distill_factors
from lsrdecomp.lora.train.factor_rounding import FactorRounding, lsr_layers

if TYPE_CHECKING:
    from pathlib import Path

    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.files.progress import ProgressUpdate
    from lsrdecomp.lora.measure.evaluator import Evaluator
    from lsrdecomp.lora.measure.teacher import DistillationData
    from lsrdecomp.lora.search.layers import StatisticsByLayer
    from lsrdecomp.lora.search.searched import Compression


@dataclass(frozen=True, slots=True)
class DistilledVariant:
    """A variant before and after distillation, of which the better one is used."""

    untrained: Path
    trained: Path
    before: Behaviour
    after: Behaviour
    training: Distillation

    @property
    def improved(self) -> bool:
        """Whether training made it keep more."""
        return share_kept(self.after) > share_kept(self.before)

    @property
    def path(self) -> Path:
        """The directory of the better one."""
        return self.trained if self.improved else self.untrained

    @property
    def behaviour(self) -> Behaviour:
        """The behaviour of the better one."""
        return self.after if self.improved else self.before

    @property
    def steps(self) -> int:
        """The steps of training that the better one has had."""
        return self.training.steps if self.improved else 0

    def to_json(self) -> dict[str, Any]:
        """Return how it was trained, and the two behaviours."""
        return {
            **asdict(self.training),
            "before": {**asdict(self.before), "kept": self.before.kept},
            "after": {**asdict(self.after), "kept": self.after.kept},
            "kept_steps": self.steps,
        }


@dataclass(frozen=True)
class CompressedVariant:
    """A variant on disk, and its behaviour on the selection texts."""

    compression: Compression
    path: Path
    behaviour: Behaviour
    distillation: DistilledVariant | None = None
    origin: CompressedVariant | None = None
    """The trained variant that it was pruned from."""

    @property
    def steps(self) -> int:
        """The steps of training that it has had."""
        own = 0 if self.distillation is None else self.distillation.steps
        return own if self.origin is None else own + self.origin.steps

    def stopped_early(self, target_share: float) -> bool:
        """Return whether training ended because this share was kept on its validation texts."""
        return self.distillation is not None and self.distillation.training.after >= target_share

    @property
    def annotations(self) -> dict[str, Any]:
        """Entries of the record beside those of the compression."""
        record = {} if self.distillation is None else self.distillation.to_json()
        if self.origin is not None:
            record["pruned_from"] = {
                "bytes": bytes_to_open(self.origin.path / WEIGHTS),
                "parameters": self.origin.compression.totals.parameters,
                **self.origin.annotations,
            }
        return {"distillation": record} if record else {}


class VariantCache:
    """Writes variants to a journal, measures and trains them, each once.

    Parameters
    ----------
    evaluator : Evaluator
    source : Checkpoint
        The LoRA.
    statistics : mapping
        The norm of each layer, in which integer codes are solved after training. An attribute: each
        pass sets its own.
    steps : int
        Maximum steps of training; 0: none.
    journal : Journal
        Keeps variants with what was measured, under the digest of their files. A later run on the
        same texts, base and settings reads them, and resumes a training from its last evaluation.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        source: Checkpoint,
        statistics: StatisticsByLayer,
        steps: int,
        journal: Journal,
    ) -> None:
        self.evaluator = evaluator
        self.source = source
        self.statistics = statistics
        self.steps = steps
        self.journal = journal
        self._measurements: dict[str, Measurement] = {}

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Every variant that was measured, in that order."""
        return tuple(self._measurements.values())

    def measure(self, compression: Compression) -> CompressedVariant:
        """Write a variant and measure it, untrained."""
        # 1. Write it, then name the directory by the digest of its files: compressions of two sizes
        #    may be the same variant.
        unnamed = self.journal.directory("new")
        compression.save(unnamed, force=True, record=bool(self.steps))
        files = [(unnamed / name).read_bytes() for name in (WEIGHTS, "adapter_config.json")]
        key = content_key(self.evaluator.key, files)
        path = self.journal.directory(key)
        if path.exists():
            shutil.rmtree(unnamed)
        else:
            unnamed.replace(path)
        # 2. Measure it, unless this run or an earlier one has.
        entry = self.journal.get(key)
        if entry is not None:
            behaviour = Behaviour(**entry.values)
        else:
            number = len(self._measurements) + 1
            ratio = compression.totals.ratio
            self.evaluator.announce(f"measuring version {number}, {ratio:.3g} times fewer numbers")
            behaviour = self.evaluator.measure(path)
            self.journal.put(key, values=asdict(behaviour))
        # 3. List it for the report. If it was measured before, the list may have its share after
        #    training too, which stays.
        size = bytes_to_open(path / WEIGHTS)
        measurement = Measurement(size, compression.totals.parameters, behaviour.kept)
        self._measurements.setdefault(key, measurement)
        return CompressedVariant(compression, path, behaviour)

    @cached_property
    def distillation_data(self) -> DistillationData:
        """Batches that every variant is trained on, so that the LoRA runs on them once."""
        return self.evaluator.distillation_data(self.steps)

    def prune(self, variant: CompressedVariant, share: float) -> CompressedVariant:
        """Leave out terms of a trained variant, and measure the rest.

        Parameters
        ----------
        variant : CompressedVariant
        share : float
            Share of the bytes of its numbers that is removed, at least.
        """
        # 1. Write it, unless an earlier run has.
        key = content_key("pruned", variant.path.name, share)
        path = self.journal.directory(key)
        entry = self.journal.get(key)
        if entry is None:
            shutil.rmtree(path, ignore_errors=True)
            prune(path, variant.path, self.source, share, statistics=self.statistics)
            # 2. Measure it.
            self.evaluator.announce("measuring without its smallest terms")
            behaviour = self.evaluator.measure(path)
            self.journal.put(key, values=asdict(behaviour))
        else:
            behaviour = Behaviour(**entry.values)
        # 3. List it for the report.
        compression = replace(variant.compression, layers=recorded_layers(path))
        size = bytes_to_open(path / WEIGHTS)
        measurement = Measurement(size, compression.totals.parameters, behaviour.kept)
        self._measurements.setdefault(path.name, measurement)
        return CompressedVariant(compression, path, behaviour, origin=variant)

    def train(
        self,
        variant: CompressedVariant,
        stage_prefix: str = "",
        target_share: float = math.inf,
        *,
        steps: int | None = None,
        rate: float | None = None,
    ) -> CompressedVariant:
        """Train a variant on the LoRA's outputs; return the better of trained and untrained.

        Parameters
        ----------
        variant : CompressedVariant
            As `measure` returned it.
        stage_prefix : str
            Goes before the names of stages in progress updates.
        target_share : float
            Share kept on the validation texts at which training ends early. Called again with a
            larger one, it resumes there.
        steps : int, optional
            Maximum steps; absent, `steps`.
        rate : float, optional
            Peak learning rate; absent, it is the best one in short trials.
        """
        steps = self.steps if steps is None else steps
        # 1. Train it, unless an earlier run has.
        key = content_key(variant.path.name, steps, rate, target_share)
        entry = self.journal.get(key)
        if entry is not None:
            distilled = DistilledVariant(
                variant.path,
                self.journal.directory(key),
                Behaviour(**entry.values["before"]),
                Behaviour(**entry.values["after"]),
                Distillation.from_json(entry.values["training"]),
            )
        else:
            distilled = self._distill(key, variant, stage_prefix, target_share, steps, rate)
        # 2. Complete its line in the list for the report, even if the untrained variant is used.
        name = variant.path.name
        self._measurements[name] = replace(
            self._measurements[name],
            distilled=distilled.behaviour.kept,
            steps=distilled.training.steps,
        )
        # 3. Training changed the numbers, and with them the errors of the layers.
        compression = variant.compression
        if distilled.steps:
            compression = replace(compression, layers=recorded_layers(distilled.path))
        return CompressedVariant(
            compression, distilled.path, distilled.behaviour, distilled, variant.origin
        )

    def _distill(
        self,
        key: str,
        variant: CompressedVariant,
        stage_prefix: str,
        target_share: float,
        steps: int,
        rate: float | None,
    ) -> DistilledVariant:
        """Train a variant, and keep the result in the journal under a key."""
        out = self.journal.directory(key)
        # Remove what an earlier run wrote and was killed before it measured it.
        shutil.rmtree(out, ignore_errors=True)
        distilled = distill_variant(
            self.evaluator,
            variant.path,
            self.source,
            out,
            self.distillation_data,
            steps=steps,
            rate=rate,
            before=variant.behaviour,
            target_share=target_share,
            journal=self.journal,
            key=content_key("training", variant.path.name, steps, rate),
            statistics=self.statistics,
            stage_prefix=stage_prefix,
        )
        values = {
            "before": asdict(distilled.before),
            "after": asdict(distilled.after),
            "training": asdict(distilled.training),
        }
        self.journal.put(key, values=values)
        return distilled


def distill_variant(
    evaluator: Evaluator,
    written: Path,
    source: Checkpoint,
    out: Path,
    data: DistillationData,
    *,
    steps: int,
    before: Behaviour,
    rate: float | None = None,
    target_share: float = math.inf,
    journal: Journal | None = None,
    key: str = "",
    statistics: StatisticsByLayer | None = None,
    stage_prefix: str = "",
) -> DistilledVariant:
    """Train a written variant on an open base, write it again and measure it.

    Parameters
    ----------
    evaluator : Evaluator
        The base with the LoRA, and the texts.
    written : path
        The variant.
    source : Checkpoint
        The LoRA.
    out : path
        Directory to write the trained variant to; must not exist.
    data : DistillationData
        Batches to train on.
    before : Behaviour
        What the variant keeps untrained.
    steps, rate, target_share, journal, key
        As for `distill_factors`.
    statistics : Mapping, optional
        As for `rewrite`.
    stage_prefix : str
        Goes before the names of stages in progress updates.
    """
    # 1. Train its factors, rounded as they are stored.
    student = evaluator.base.with_adapter(written)
    rounding = FactorRounding(student, written)
    stage = f"{stage_prefix}distilling, at most {steps} steps of {evaluator.batch_size} examples"
    evaluator.announce(stage)

    def announce_step(step: ProgressUpdate) -> None:
        evaluator.announce(stage, step.done, step.total, step.unit)

    is_measured = data.validation is evaluator.selection_reference
    training = distill_factors(
        student,
        data,
        steps=steps,
        round_factors=rounding,
        rate=rate,
        share_before=share_kept(before) if is_measured else None,
        seed=evaluator.settings.seed,
        target_share=target_share,
        journal=journal,
        key=key,
        on_step=announce_step,
    )
    # 2. Write them, rounded as the old ones were, and measure what the written files keep.
    evaluator.announce(f"{stage_prefix}writing and measuring again")
    rewrite(out, written, source, products_of(student), statistics=statistics)
    return DistilledVariant(written, out, before, evaluator.measure(out), training)


def products_of(student: Base) -> dict[str, SeparatedProduct]:
    """Return the factors of all LSR layers of an open model, by their names in its base."""
    products = {}
    for name, module in lsr_layers(student):
        left = _factors(module.lsr_B["default"].factors)
        right = _factors(module.lsr_A["default"].factors)
        # Written layers have a scale of 1, so PEFT's scale is multiplied into a factor.
        left[0] = left[0] * module.scaling["default"]
        products[name] = SeparatedProduct(
            SeparatedMatrix.from_factors(left), SeparatedMatrix.from_factors(right)
        )
    return products


def _factors(side: Any) -> list[Any]:
    """Return the factors of one side as NumPy arrays in double precision."""
    return [to_numpy(factor.detach().double().cpu()) for factor in side]
