"""distil: a compressed adapter learns, without labels, to answer as the LoRA it was made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate import PartialState

from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.arrays import to_numpy
from lsrdecomp.calibration.base_model import Base
from lsrdecomp.calibration.distil import Distillation, distil_factors
from lsrdecomp.calibration.divergence import Behaviour, Reference
from lsrdecomp.checkpoints import Checkpoint, open_checkpoint
from lsrdecomp.checkpoints.output_paths import check_output
from lsrdecomp.checkpoints.statistics import read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.progress import OnStep
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.promise.bench import Bench
from lsrdecomp.promise.publish import publish
from lsrdecomp.promise.record import Promise
from lsrdecomp.promise.rewrite import Statistics, check_pair, rewrite
from lsrdecomp.promise.texts import Texts, data_name, read_data

TEACHER_SHARE = 0.2
"""Batches of the lessons, of all steps: the source answers each once, and that costs a forward pass."""
FEWEST_LESSONS = 8
CHECK_BATCHES = 4
"""Batches that say when to stop; they are held out of the lessons, and the promise is measured on others."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A form before and after distillation, and which of the two is kept."""

    form: Path  # where the better one is written
    before: Behaviour
    after: Behaviour
    training: Distillation

    @property
    def better(self) -> Behaviour:
        return self.after if _kept(self.after) > _kept(self.before) else self.before

    @property
    def steps(self) -> int:
        """Of the form that is kept."""
        return self.training.steps if self.better is self.after else 0

    def to_json(self) -> dict[str, Any]:
        """How it was trained, and the two behaviours."""
        behaviours = {"before": self.before, "after": self.after}
        told = {name: {**asdict(one), "kept": one.kept} for name, one in behaviours.items()}
        return {**asdict(self.training), **told, "kept_steps": self.steps}


@dataclass(frozen=True, slots=True, repr=False)
class Distilled:
    """What `distil` wrote: its promise, and the form before and after.

    Examples
    --------
    >>> from lsrdecomp.promise.record import Promise
    >>> was, now = (Behaviour(96, 1_895, "token", kl, same, 1.36) for kl, same in ((0.24, 0.86), (0.022, 0.95)))
    >>> sizes = {"bytes_before": 3_700_000, "bytes_after": 39_000, "head_bytes": 0}
    >>> kept = Promise(now.kept, None, now.kl, 1.36, 0.95, "token", 96, 1_895, "e2e.jsonl", "base", **sizes)
    >>> Distilled(Path("small"), kept, Trial(Path("small"), was, now, None))
    Distilled small, which kept 82.4 %
       Promise: keeps 98.4 % of what the adapter does
       divergence 0.022 of 1.36 nats per token; likeliest token the same for 95 %
       file 3.7 MB → 39 kB
       measured on 96 held-out examples of e2e.jsonl
    """

    directory: Path
    promise: Promise
    trial: Trial

    def __repr__(self) -> str:
        """Where it is, what it kept before, and its promise."""
        kept = self.trial.before.kept
        before = "" if kept is None else f", which kept {100 * kept:.1f} %"
        return "\n".join(
            [f"Distilled {self.directory}{before}", *(f"   {line.strip()}" for line in repr(self.promise).split("\n"))]
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        facts = {"directory": str(self.directory), "promise": self.promise.to_json()}
        return {**facts, "distillation": self.trial.to_json()}


def distil(
    directory: str | Path,
    *,
    base: str | Path,
    data: str | Path | Texts,
    teacher: str | Path,
    steps: int = 200,
    out: str | Path | None = None,
    rate: float | None = None,
    calibrated: str | Path | None = None,
    held_out: int = 128,
    batch: int | None = None,
    micro: int | None = None,
    max_length: int | None = None,
    truncate: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    force: bool = False,
    on_step: OnStep | None = None,
) -> Distilled:
    """Train the numbers of a compressed adapter on the LoRA's own answers, and keep the better of old and new.

    Of a classifier it also learns what the LoRA's last layer reads; see `lsrdecomp.calibration.distil.distil_factors`.

    Parameters
    ----------
    directory : path
        What `compress` wrote.
    base : str or path
        The base model, by name or directory.
    data : path or sequence of texts
        Texts of the task, without labels: a text a line, or as `read_data` takes them.
    teacher : path
        The LoRA that ``directory`` was made from, a PEFT directory.
    steps : int
        Optimizer steps at most, the short trials of learning rates among them.
    out : path, optional
        Where to write; absent, ``directory`` is replaced as a whole.
    rate : float, optional
        Relative change of a number per step; absent, tried out.
    calibrated : path, optional
        Statistics, so that integer codes are solved for in the K-FAC norm.
    held_out : int
        Examples the promise is measured on, which training does not see.
    batch, micro : int, optional
        Examples of a step, and of those at a time; absent, 8 for language models and 32 otherwise, all at once.
    max_length : int, optional
        Tokens of an example; absent, 1024 with prompts, and 128 of a text, whose rest is cut.
    truncate : bool
        Cut longer prompts at their beginning, instead of refusing them.
    dtype, device : str
        Precision and place of the base; factors are trained in float32.
    seed : int
    on_step : callable, optional
        Called with a `Step` before each part of the work and after every step of training.

    Returns
    -------
    Distilled

    Raises
    ------
    CheckpointError
        If directory, teacher and base do not belong together.
    LsrError
        If texts are too few, or the LoRA does nothing on them.

    Notes
    -----
    A kill loses nothing: ``directory`` is replaced in one step at the end, and a hidden file beside the output holds
    the state of training, from which the same call goes on. Started by ``accelerate launch`` on several devices, they
    share each step's examples (``micro`` at a time); the first writes.
    """
    made, place = Path(directory), Path(directory if out is None else out)
    source, written = open_checkpoint(teacher), open_checkpoint(made)
    check_pair(written, source)
    check_output(place, (source.path,), force or out is None)
    texts = read_data(data)
    statistics = None if calibrated is None else read_statistics(calibrated)
    if statistics is not None:
        statistics.check_base(source.config.get("base_model_name_or_path"))
    team = PartialState(cpu=device == "cpu")
    bench = Bench(
        base,
        source.path,
        texts,
        held_out=held_out,
        batch=batch,
        max_length=max_length,
        truncate=truncate,
        dtype=dtype,
        device=str(team.device) if device == "cuda" and team.num_processes > 1 else device,
        seed=seed,
        on_step=on_step,
    )
    state = place.absolute().parent / f".{place.name}.distil"
    settings = {"steps": steps, "seed": seed, "teacher": source.source_sha256, "written": written.source_sha256}
    settings |= {"texts": len(texts), "batch": bench.size, "rate": rate, "max_length": max_length, "truncate": truncate}
    with TemporaryDirectory() as folder:
        found = distil_form(
            bench,
            made,
            source,
            Path(folder) / "made",
            steps=steps,
            rate=rate,
            micro=micro,
            statistics=statistics,
            state=state,
            settings=settings,
        )
        promise = promised(bench, found.better, found.form, source, data_name(data), distilled=found.steps)
        if team.is_main_process:
            facts = {"distillation": found.to_json()}
            publish(found.form, place, promise, facts=facts, inputs=(source.path,), force=force or out is None)
            state.unlink(missing_ok=True)
        team.wait_for_everyone()
    return Distilled(place, promise, found)


def distil_form(
    bench: Bench,
    made: Path,
    source: Checkpoint,
    out: Path,
    *,
    steps: int,
    rate: float | None = None,
    micro: int | None = None,
    before: Behaviour | None = None,
    statistics: Statistics | None = None,
    state: Path | None = None,
    settings: dict[str, Any] | None = None,
    words: str = "",
) -> Trial:
    """Distil the directory ``made`` on an open bench and write what came of it to ``out``; see `distil`.

    ``before`` is what it keeps, if that was measured; ``words`` go before those on each part of the work.
    """
    student = bench.open(made)
    if before is None:
        bench.say(f"{words}measuring")
        before = bench.reference.compare(student)
    size = bench.size
    check, rest = bench.calibration[: CHECK_BATCHES * size], bench.calibration[CHECK_BATCHES * size :]
    if len(rest) < size:
        check, rest = bench.calibration[::4], [t for i, t in enumerate(bench.calibration) if i % 4]
    lessons = [
        list(bench.batches(rest[start : start + size], micro or size))
        for start in range(0, len(rest), size)[: max(FEWEST_LESSONS, round(TEACHER_SHARE * steps))]
    ]
    stage = f"{words}distilling, at most {steps} steps of {size} examples"
    bench.say(stage)
    training = distil_factors(
        bench.source,
        student,
        lessons,
        Reference(bench.source, bench.batches(check)),
        steps=steps,
        rate=rate,
        seed=bench.seed,
        settings=settings,
        state=state,
        on_step=lambda step, all_steps, _: bench.say(stage, step, all_steps, "steps"),
    )
    bench.say(f"{words}writing and measuring again")
    rewrite(out, made, source, forms_of(student), statistics=statistics)
    after = bench.measure(out)
    trial = Trial(out, before, after, training)
    return trial if trial.better is after else Trial(made, before, after, training)


def forms_of(student: Base, adapter: str = "default") -> dict[str, SeparatedProduct]:
    """The products in the LSR layers of an open model, by the names of the modules in the plain base."""
    found = {}
    for name, module in student.model.get_base_model().named_modules():  # type: ignore[operator]
        if isinstance(module, LsrLayer) and adapter in module.lsr_A:
            left, right = (_arrays(side[adapter]) for side in (module.lsr_B, module.lsr_A))
            left[0] = left[0] * module.scaling[adapter]
            found[name] = SeparatedProduct(SeparatedMatrix.from_factors(left), SeparatedMatrix.from_factors(right))
    return found


def promised(
    bench: Bench,
    found: Behaviour,
    form: Path,
    source: Checkpoint,
    data: str,
    *,
    distilled: int = 0,
    measurements: int = 1,
    asked: float | None = None,
) -> Promise:
    """The record of a measured form."""
    assert found.kept is not None  # a bench has an effect
    return Promise(
        kept=found.kept,
        standard_error=found.standard_error,
        kl=found.kl,
        effect=found.effect,
        agreement=found.agreement,
        unit=found.unit,
        examples=found.examples,
        answers=found.answers,
        data=data,
        base=Path(bench.source.name).name,
        bytes_before=source.weights.stat().st_size,
        bytes_after=(form / WEIGHTS).stat().st_size,
        head_bytes=sum(tensor.nbytes for tensor in source.extras.values()),
        distilled=distilled,
        measurements=measurements,
        asked=asked,
        throughout=found.throughout,
    )


def _kept(found: Behaviour) -> float:
    return float("-inf") if found.kept is None or found.kept != found.kept else found.kept


def _arrays(side: Any) -> list[Any]:
    return [to_numpy(factor.detach().double().cpu()) for factor in side.factors]
