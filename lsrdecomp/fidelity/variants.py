"""Compressed variants of an adapter: written, measured and distilled, each once.

What a killed run has done is kept.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.arrays import to_numpy
from lsrdecomp.calibration.behaviour import Behaviour
from lsrdecomp.calibration.distil import Distillation, distil_factors
from lsrdecomp.calibration.distil_schedule import DistillationSchedule
from lsrdecomp.checkpoints import Checkpoint, Journal, content_key
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.fidelity.fidelity import Measurement, share_kept
from lsrdecomp.fidelity.rewrite import recorded_layers, rewrite
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix

if TYPE_CHECKING:
    from pathlib import Path

    from lsrdecomp.calibration.base_model import Base
    from lsrdecomp.calibration.teacher import DistillationData
    from lsrdecomp.checkpoints.progress import ProgressUpdate
    from lsrdecomp.compression.compress import Compression
    from lsrdecomp.compression.layers import StatisticsByLayer
    from lsrdecomp.fidelity.evaluate import Evaluator


@dataclass(frozen=True, slots=True)
class DistilledVariant:
    """A variant before and after distillation; the better of the two is kept."""

    untrained: Path
    trained: Path
    before: Behaviour
    after: Behaviour
    training: Distillation

    @property
    def improved(self) -> bool:
        """Whether the trained one keeps more."""
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
        """The steps of training in the better one."""
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
    """A variant on disk, measured."""

    compression: Compression
    path: Path
    behaviour: Behaviour
    distilled: DistilledVariant | None = None

    @property
    def steps(self) -> int:
        """The steps of training in it."""
        return 0 if self.distilled is None else self.distilled.steps

    def stopped_early(self, target_share: float) -> bool:
        """Return whether training ended because this share was kept on its validation texts."""
        return self.distilled is not None and self.distilled.training.after >= target_share

    @property
    def annotations(self) -> dict[str, Any]:
        """Entries of the record beside those of the compression."""
        return {} if self.distilled is None else {"distillation": self.distilled.to_json()}


class VariantCache:
    """Writes variants to a directory, measures and distils them, each once.

    Parameters
    ----------
    evaluator : Evaluator
    source : Checkpoint
        The LoRA.
    statistics : mapping
        The norm that integer codes are solved in after distillation.
    steps : int
        Steps of distillation; 0: none.
    journal : Journal
        Where variants are kept under the digest of their numbers, with what was measured. In
        another run on the same texts, base and settings what is there is not done again, and a
        distillation goes on from its last evaluation.
    schedule : DistillationSchedule, optional
        Learning rates, evaluations and the stopping rule of distillation.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        source: Checkpoint,
        statistics: StatisticsByLayer,
        steps: int,
        journal: Journal,
        schedule: DistillationSchedule | None = None,
    ) -> None:
        self.evaluator = evaluator
        self.source = source
        self.statistics = statistics
        self.steps = steps
        self.journal = journal
        self.schedule = schedule or DistillationSchedule()
        self._measurements: dict[str, Measurement] = {}

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Every variant that was measured, in that order."""
        return tuple(self._measurements.values())

    def untrained(self, compression: Compression) -> CompressedVariant:
        """Return the variant as compressed, written and measured."""
        # 1. Written first, since its name is the digest of its bytes: equal variants of two sizes
        #    are one.
        new = compression.save(self.journal.directory("new"), force=True, record=bool(self.steps))
        files = [(new / name).read_bytes() for name in (WEIGHTS, "adapter_config.json")]
        key = content_key(self.evaluator.key, files)
        path = self.journal.directory(key)
        if path.exists():
            shutil.rmtree(new)
        else:
            new.replace(path)
        # 2. Measured, unless this run or one before has.
        found = self.journal.get(key)
        if found is not None:
            behaviour = Behaviour(**found.values)
        else:
            number = len(self._measurements) + 1
            ratio = compression.totals.ratio
            self.evaluator.announce(f"measuring version {number}, {ratio:.3g} times fewer numbers")
            behaviour = self.evaluator.measure(path)
            self.journal.put(key, values=asdict(behaviour))
        # 3. In the list for the report; a variant that was there keeps what training brought it.
        size = bytes_to_open(path / WEIGHTS)
        measurement = Measurement(size, compression.totals.parameters, behaviour.kept)
        self._measurements.setdefault(key, measurement)
        return CompressedVariant(compression, path, behaviour)

    @cached_property
    def distillation_data(self) -> DistillationData:
        """Batches that every variant is trained on: the LoRA answers once."""
        return self.evaluator.distillation_data(self.steps)

    def distilled(
        self, variant: CompressedVariant, stage_prefix: str = "", target_share: float = math.inf
    ) -> CompressedVariant:
        """Return the variant trained on the LoRA's answers, or as it was where that is no better.

        Training ends when the target share is kept, and goes on from there when it is asked for
        with a larger one. ``stage_prefix`` says in the progress which variant it is.
        """
        key = content_key(variant.path.name, self.steps, target_share, self.schedule)
        found = self.journal.get(key)
        if found is not None:
            distilled = DistilledVariant(
                variant.path,
                self.journal.directory(key),
                Behaviour(**found.values["before"]),
                Behaviour(**found.values["after"]),
                Distillation.from_json(found.values["training"]),
            )
        else:
            distilled = self._distil(key, variant, stage_prefix, target_share)
        # The list has shares after training also where the untrained variant stays; the variant
        # itself is the better one.
        name = variant.path.name
        self._measurements[name] = replace(
            self._measurements[name],
            distilled=distilled.behaviour.kept,
            steps=distilled.training.steps,
        )
        layers = variant.compression.layers
        if distilled.steps:
            layers = recorded_layers(distilled.path)
        return CompressedVariant(
            replace(variant.compression, layers=layers),
            distilled.path,
            distilled.behaviour,
            distilled,
        )

    def _distil(
        self, key: str, variant: CompressedVariant, stage_prefix: str, target_share: float
    ) -> DistilledVariant:
        """Train a variant, and keep what came of it under a key of the journal."""
        out = self.journal.directory(key)
        shutil.rmtree(out, ignore_errors=True)  # a kill came between writing and measuring
        distilled = distil_variant(
            self.evaluator,
            variant.path,
            self.source,
            out,
            self.distillation_data,
            steps=self.steps,
            before=variant.behaviour,
            schedule=self.schedule,
            target_share=target_share,
            journal=self.journal,
            key=content_key("training", variant.path.name, self.steps),
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


def distil_variant(
    evaluator: Evaluator,
    written: Path,
    source: Checkpoint,
    out: Path,
    data: DistillationData,
    *,
    steps: int,
    before: Behaviour,
    rate: float | None = None,
    schedule: DistillationSchedule | None = None,
    target_share: float = math.inf,
    journal: Journal | None = None,
    key: str = "",
    statistics: StatisticsByLayer | None = None,
    stage_prefix: str = "",
) -> DistilledVariant:
    """Distil a written directory on an open base, and write it again; see `lsrdecomp.distil`.

    ``steps`` to ``key`` are as for `distil_factors`; ``before`` is what the variant keeps as it is;
    ``stage_prefix`` goes before the name of each part of the work.
    """
    # 1. Training.
    student = evaluator.base.with_adapter(written)
    stage = f"{stage_prefix}distilling, at most {steps} steps of {evaluator.batch_size} examples"
    evaluator.announce(stage)

    def announce_step(step: ProgressUpdate) -> None:
        evaluator.announce(stage, step.done, step.total, step.unit)

    training = distil_factors(
        student,
        data,
        steps=steps,
        rate=rate,
        seed=evaluator.settings.seed,
        schedule=schedule,
        target_share=target_share,
        journal=journal,
        key=key,
        on_step=announce_step,
    )
    # 2. What the new numbers keep as written: rounded as the old ones were.
    evaluator.announce(f"{stage_prefix}writing and measuring again")
    rewrite(out, written, source, products_of(student), statistics=statistics)
    return DistilledVariant(written, out, before, evaluator.measure(out), training)


def products_of(student: Base) -> dict[str, SeparatedProduct]:
    """Return the products in the LSR layers of an open model, by names of modules in its base."""
    products = {}
    for name, module in student.model.get_base_model().named_modules():  # type: ignore[operator]
        if not isinstance(module, LsrLayer):
            continue
        left = _factors(module.lsr_B["default"].factors)
        right = _factors(module.lsr_A["default"].factors)
        # What is written has a scale of 1: PEFT's goes into a factor.
        left[0] = left[0] * module.scaling["default"]
        products[name] = SeparatedProduct(
            SeparatedMatrix.from_factors(left), SeparatedMatrix.from_factors(right)
        )
    return products


def _factors(side: Any) -> list[Any]:
    """Return the factors of one side as NumPy arrays in double precision."""
    return [to_numpy(factor.detach().double().cpu()) for factor in side]
