"""Forms of an adapter, written, measured and distilled, each once: what a killed run has done is not done again."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.arrays import to_numpy
from lsrdecomp.calibration.behaviour import Behaviour
from lsrdecomp.calibration.distil import Distillation, distil_factors
from lsrdecomp.calibration.distil_trainer import DistillationSchedule
from lsrdecomp.checkpoints import Checkpoint, Journal, content_key
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.fidelity.evaluate import Evaluator, share_kept
from lsrdecomp.fidelity.fidelity import Measurement
from lsrdecomp.fidelity.rewrite import recorded_layers, rewrite
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix

if TYPE_CHECKING:
    from pathlib import Path

    from lsrdecomp.calibration.base_model import Base
    from lsrdecomp.calibration.teacher import DistillationData
    from lsrdecomp.compression.compress import Compression
    from lsrdecomp.compression.layers import StatisticsByLayer


@dataclass(frozen=True, slots=True)
class DistilledForm:
    """A form before and after distillation; the better of the two is kept."""

    untrained: Path
    trained: Path
    before: Behaviour
    after: Behaviour
    training: Distillation

    @property
    def gained(self) -> bool:
        """Whether the trained one keeps more."""
        return share_kept(self.after) > share_kept(self.before)

    @property
    def path(self) -> Path:
        """Where the better one is written."""
        return self.trained if self.gained else self.untrained

    @property
    def behaviour(self) -> Behaviour:
        """Of the better one."""
        return self.after if self.gained else self.before

    @property
    def steps(self) -> int:
        """Of the better one."""
        return self.training.steps if self.gained else 0

    def to_json(self) -> dict[str, Any]:
        """How it was trained, and the two behaviours."""
        behaviours = {"before": self.before, "after": self.after}
        shares = {
            name: {**asdict(behaviour), "kept": behaviour.kept}
            for name, behaviour in behaviours.items()
        }
        return {**asdict(self.training), **shares, "kept_steps": self.steps}


@dataclass(frozen=True)
class CompressedForm:
    """A form on disk, measured."""

    compression: Compression
    path: Path
    behaviour: Behaviour
    distilled: DistilledForm | None = None

    @property
    def steps(self) -> int:
        """Of training in what is kept of it."""
        return 0 if self.distilled is None else self.distilled.steps

    def training_ended(self, enough: float) -> bool:
        """Whether training ended because this share was kept on the texts that were looked at meanwhile."""
        return self.distilled is not None and self.distilled.training.after >= enough

    @property
    def facts(self) -> dict[str, Any]:
        """What the record says of it beside the compression."""
        return {} if self.distilled is None else {"distillation": self.distilled.to_json()}


class CompressedFormCache:
    """Writes forms to a directory, measures and distils them, each once.

    Parameters
    ----------
    evaluator : Evaluator
    source : Checkpoint
        The LoRA.
    statistics : mapping
        That integer codes are solved by after distillation.
    steps : int
        Of distillation; 0: none.
    journal : Journal
        Where forms are kept under the digest of their numbers, with what was measured. In another
        run on the same texts, base and settings what is there is not done again, and a distillation
        goes on from its last evaluation.
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
        self.evaluator, self.source, self.statistics, self.steps = (
            evaluator,
            source,
            statistics,
            steps,
        )
        self.journal = journal
        self.schedule = schedule or DistillationSchedule()
        self._measurements: dict[str, Measurement] = {}

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Every form that was measured, in that order."""
        return tuple(self._measurements.values())

    def untrained(self, compression: Compression) -> CompressedForm:
        """The form as compressed."""
        # 1. Written first, since its name is the digest of its bytes: equal forms of two sizes are
        # one.
        new = compression.save(self.journal.directory("new"), force=True, record=bool(self.steps))
        files = [(new / name).read_bytes() for name in (WEIGHTS, "adapter_config.json")]
        key = content_key(self.evaluator.key, files)
        path = self.journal.directory(key)
        if path.exists():
            shutil.rmtree(new)
        else:
            os.replace(new, path)
        # 2. Measured, unless this run or one before has.
        measured = self.journal.get(key)
        if measured is not None:
            behaviour = Behaviour(**measured.facts)
        else:
            number, ratio = len(self._measurements) + 1, compression.totals.ratio
            self.evaluator.say(f"measuring form {number}, {ratio:.3g} times fewer numbers")
            behaviour = self.evaluator.measure(path)
            self.journal.put(key, facts=asdict(behaviour))
        # 3. In the list for the report; a form that was there keeps what training brought it.
        size = bytes_to_open(path / WEIGHTS)
        measurement = Measurement(size, compression.totals.parameters, behaviour.kept)
        self._measurements.setdefault(key, measurement)
        return CompressedForm(compression, path, behaviour)

    @cached_property
    def lessons(self) -> DistillationData:
        """What every form is trained on: the LoRA answers once."""
        return self.evaluator.lessons(self.steps)

    def distilled(
        self, form: CompressedForm, words: str = "", enough: float = math.inf
    ) -> CompressedForm:
        """The form trained on the LoRA's answers, or as it was where that is no better; ``words`` say which it is.

        Training ends when the share ``enough`` is kept, and goes on from there when it is asked for
        with a larger one.
        """
        key = content_key(form.path.name, self.steps, enough, self.schedule)
        out, measured = self.journal.directory(key), self.journal.get(key)
        if measured is not None:
            before, after = (Behaviour(**measured.facts[name]) for name in ("before", "after"))
            trained = DistilledForm(
                form.path, out, before, after, Distillation.from_json(measured.facts["training"])
            )
        else:
            shutil.rmtree(out, ignore_errors=True)  # a kill came between writing and measuring
            trained = distil_form(
                self.evaluator,
                form.path,
                self.source,
                out,
                self.lessons,
                steps=self.steps,
                before=form.behaviour,
                schedule=self.schedule,
                enough=enough,
                journal=self.journal,
                key=content_key("training", form.path.name, self.steps),
                statistics=self.statistics,
                words=words,
            )
            behaviours = {"before": asdict(trained.before), "after": asdict(trained.after)}
            self.journal.put(key, facts={**behaviours, "training": asdict(trained.training)})
        # The list has shares after training also where the untrained form stays; the form itself is
        # the better one.
        measurement = self._measurements[form.path.name]
        measurement = replace(
            measurement, distilled=trained.behaviour.kept, steps=trained.training.steps
        )
        self._measurements[form.path.name] = measurement
        layers = recorded_layers(trained.path) if trained.steps else form.compression.layers
        return CompressedForm(
            replace(form.compression, layers=layers), trained.path, trained.behaviour, trained
        )


def distil_form(
    evaluator: Evaluator,
    form: Path,
    source: Checkpoint,
    out: Path,
    lessons: DistillationData,
    *,
    steps: int,
    before: Behaviour,
    rate: float | None = None,
    schedule: DistillationSchedule | None = None,
    enough: float = math.inf,
    journal: Journal | None = None,
    key: str = "",
    statistics: StatisticsByLayer | None = None,
    words: str = "",
) -> DistilledForm:
    """Distil the directory ``form`` on an open base and write what came of it to ``out``; see `lsrdecomp.distil`.

    ``steps`` to ``key`` are as for `distil_factors`; ``before`` is what the form keeps as it is;
    ``words`` go before those on each part of the work.
    """
    # 1. Training.
    student = evaluator.base.adapted(form)
    stage = f"{words}distilling, at most {steps} steps of {evaluator.size} examples"
    evaluator.say(stage)
    training = distil_factors(
        student,
        lessons,
        steps=steps,
        rate=rate,
        seed=evaluator.settings.seed,
        schedule=schedule,
        target_share=enough,
        journal=journal,
        key=key,
        on_step=lambda step: evaluator.say(stage, step.done, step.total, step.unit),
    )
    # 2. What the new numbers keep as written: rounded as the old ones were.
    evaluator.say(f"{words}writing and measuring again")
    rewrite(out, form, source, products_of(student), statistics=statistics)
    return DistilledForm(form, out, before, evaluator.measure(out), training)


def products_of(student: Base) -> dict[str, SeparatedProduct]:
    """The products in the LSR layers of an open model, by the names of the modules in the plain base."""
    products = {}
    for name, module in student.model.get_base_model().named_modules():  # type: ignore[operator]
        if isinstance(module, LsrLayer):
            sides: Any = (side["default"].factors for side in (module.lsr_B, module.lsr_A))
            left, right = (
                [to_numpy(factor.detach().double().cpu()) for factor in side] for side in sides
            )
            # What is written has a scale of 1: PEFT's goes into a factor.
            left[0] = left[0] * module.scaling["default"]
            products[name] = SeparatedProduct(
                SeparatedMatrix.from_factors(left), SeparatedMatrix.from_factors(right)
            )
    return products
