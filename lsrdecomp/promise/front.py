"""compress with a base: calibrate, search once, measure, and take the smallest form that keeps what was asked."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.calibration.divergence import Behaviour
from lsrdecomp.checkpoints import Checkpoint
from lsrdecomp.checkpoints.statistics import METADATA, Statistics, read_statistics
from lsrdecomp.compression.compress import Compression, SearchedAdapter, search_adapter
from lsrdecomp.compression.plan import CompressionPlan, share_of_effect
from lsrdecomp.compression.report import LayerReport, Totals
from lsrdecomp.compression.search import Search
from lsrdecomp.compression.searched import Resources
from lsrdecomp.errors import BudgetError
from lsrdecomp.promise.bench import Bench, Say
from lsrdecomp.promise.distil import OnStep, distil_form, promised
from lsrdecomp.promise.keep import MOST_MEASURED, SMALLEST, Measured, smallest
from lsrdecomp.promise.publish import publish
from lsrdecomp.promise.record import Promise
from lsrdecomp.promise.rewrite import recorded_layers
from lsrdecomp.promise.texts import Texts, data_name, read_data

SAMPLES = 512
"""Examples that calibration reads at most."""
FIRST = 6.0
"""Times smaller than the LoRA is the largest form that the search prepares for; larger ones are searched when asked."""
DISTILLED_PRIOR = 0.4
"""What distillation is guessed to leave of a loss until one is measured; in the one run measured it left .52."""
MOST_DISTILLED = 4


@dataclass(frozen=True, repr=False)
class Promised:
    """A compression with its measured promise: it looks like a `Compression` and is saved like one."""

    compression: Compression
    promise: Promise
    made: Path  # the form as written, in a temporary directory that lives as long as this
    facts: dict[str, Any]
    _folder: TemporaryDirectory[str]

    def __repr__(self) -> str:
        """The compression's goal, sizes and errors, then what it keeps, in ten lines or fewer."""
        *compression, unsaved = repr(self.compression).split("\n")
        return "\n".join([*compression, *(f"   {line.strip()}" for line in repr(self.promise).split("\n")), unsaved])

    @property
    def source(self) -> Checkpoint:
        return self.compression.source

    @property
    def plan(self) -> CompressionPlan:
        return self.compression.plan

    @property
    def layers(self) -> tuple[LayerReport, ...]:
        return self.compression.layers

    @property
    def totals(self) -> Totals:
        return self.compression.totals

    @property
    def met(self) -> bool:
        return self.compression.met

    def to_json(self) -> dict[str, Any]:
        """The report of the compression, and the promise."""
        return {**self.compression.to_json(), **self.facts, "promise": self.promise.to_json()}

    def save(self, out: str | Path, *, force: bool = False, record: bool = False) -> Path:
        """As `Compression.save`; the promise stands in the record and on the card."""
        facts = {**self.facts, **({"layers": self.to_json()["layers"]} if record else {})}
        return publish(self.made, out, self.promise, facts=facts, inputs=(self.source.path,), force=force)


def compress_measured(
    checkpoint: Checkpoint,
    plan: CompressionPlan | None = None,
    *,
    base: str | Path,
    data: str | Path | Texts,
    keep: float | None = None,
    distil: int = 0,
    statistics: Statistics | None = None,
    storage: str = "float32",
    max_rank: int | None = None,
    search: Search | None = None,
    resources: Resources | None = None,
    workspace: Path | None = None,
    held_out: int = 128,
    batch: int | None = None,
    max_length: int = 128,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    on_stage: Say | None = None,
    on_step: OnStep | None = None,
) -> Promised:
    """Compress a LoRA against its base and measure what is kept.

    Parameters
    ----------
    checkpoint : Checkpoint
        The LoRA, a PEFT directory.
    plan : CompressionPlan, optional
        One goal as for `compress`, or none with ``keep``. ``kl`` means the measured divergence here.
    base : str or path
    data : path or sequence of texts
        Texts of the task; no labels.
    keep : float, optional
        The least share of what the adapter does, as measured, in the smallest form that has it.
    distil : int
        Steps of distillation of every form that is measured; see `lsrdecomp.promise.distil`.
    statistics : Statistics, optional
        Absent, they are measured first, on the texts that are not held out.
    storage, max_rank
        With ``keep``: as in a plan.
    search, resources
        As for `search_adapter`: how far to look, and where.
    workspace : path, optional
        Where statistics are gathered, so that a killed calibration goes on; removed at the end.
    held_out, batch, max_length, dtype, device, seed
        As for `lsrdecomp.promise.distil`.
    on_stage, on_step : callable, optional
        Called with a few words before each part of the work; and after every step of distillation.

    Returns
    -------
    Promised
        Nothing is written before `Promised.save`.

    Raises
    ------
    BudgetError
        If both or neither of ``plan`` and ``keep`` are given; if no form keeps as much.
    LsrError, CheckpointError
        As `lsrdecomp.promise.distil`.
    """
    if (plan is None) == (keep is None):
        raise BudgetError("one goal is needed with a base: a share to keep, or a size or error")
    if keep is not None and not 0.0 < keep < 1.0:
        raise BudgetError(f"the share to keep lies between 0 and 1, such as 0.95; got {keep:g}")
    say = on_stage or (lambda _: None)
    options: dict[str, Any] = {"held_out": held_out, "batch": batch, "max_length": max_length, "dtype": dtype}
    bench = Bench(base, checkpoint.path, read_data(data), device=device, seed=seed, on_step=say, **options)
    if plan is not None and plan.kl is not None:
        keep, storage, max_rank = 1.0 - share_of_effect(plan.kl, bench.reference.effect), plan.storage, plan.max_rank
        plan = None
    folder = TemporaryDirectory()
    place = workspace or Path(folder.name) / "statistics"
    known = _calibrated(bench, place, say) if statistics is None else statistics
    maker = _Maker(bench, checkpoint, known, distil, Path(folder.name), say, on_step)
    searches = partial(search_adapter, checkpoint, statistics=known, search=search, resources=resources)
    if plan is None:
        assert keep is not None
        chosen = _smallest(maker, checkpoint, searches, keep, {"storage": storage, "max_rank": max_rank})
    else:
        chosen = maker.make(searches([plan]).compress(plan))
    name = data_name(data)
    promise = promised(bench, chosen.behaviour, chosen.path, checkpoint, name, distilled=chosen.distilled, asked=keep)
    if workspace is not None and statistics is None:
        shutil.rmtree(workspace, ignore_errors=True)
    return Promised(chosen.compression, promise, chosen.path, chosen.facts, folder)


@dataclass(frozen=True)
class _Made:
    """A form on disk, measured."""

    compression: Compression
    path: Path
    behaviour: Behaviour
    distilled: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Maker:
    """Writes forms to a temporary directory, distils and measures them."""

    bench: Bench
    source: Checkpoint
    statistics: Statistics
    steps: int
    folder: Path
    say: Say
    on_step: OnStep | None
    count: int = 0

    def make(self, compression: Compression) -> _Made:
        self.count += 1
        self.say(f"measuring form {self.count}, {compression.totals.ratio:.3g} times fewer numbers")
        path = compression.save(self.folder / f"form-{self.count}", record=bool(self.steps))
        if not self.steps:
            return _Made(compression, path, self.bench.measure(path))
        trial = distil_form(
            self.bench,
            path,
            self.source,
            self.folder / f"distilled-{self.count}",
            steps=self.steps,
            statistics=self.statistics,
            on_step=self.on_step,
            on_stage=self.say,
        )
        layers = recorded_layers(trial.form) if trial.steps else compression.layers
        told = {"distillation": trial.to_json()}
        return _Made(replace(compression, layers=layers), trial.form, trial.better, trial.steps, told)


def _smallest(
    maker: _Maker,
    checkpoint: Checkpoint,
    searches: Callable[[Sequence[CompressionPlan]], SearchedAdapter],
    keep: float,
    shared: Mapping[str, Any],
) -> _Made:
    """The smallest form that keeps enough, of those that one search offers."""
    counts_bytes = shared["storage"] == "auto"
    heads = sum(tensor.nbytes for tensor in checkpoint.extras.values())
    whole = float(checkpoint.weights.stat().st_size - heads if counts_bytes else checkpoint.adapter_parameters)

    def plan(size: float) -> CompressionPlan:
        if counts_bytes:
            return CompressionPlan(bytes=heads + math.ceil(size), **shared)
        return CompressionPlan(parameters=size, **shared)

    searched = searches([plan(whole / FIRST), plan(whole / SMALLEST)])

    @cache
    def expected(size: float) -> float:
        total = searched.compress(plan(size), solve=False).totals
        return (total.relative_error if total.functional_error is None else total.functional_error) ** 2

    forms: dict[float, _Made] = {}

    def measure(size: float) -> Behaviour:
        forms[size] = maker.make(searched.compress(plan(size)))
        return forms[size].behaviour

    def told(seen: Sequence[Measured]) -> None:
        maker.say(f"form {len(seen)} of at most {most} keeps {seen[-1].kept:.3f}, {keep:g} asked")

    most = MOST_DISTILLED if maker.steps else MOST_MEASURED
    prior = DISTILLED_PRIOR if maker.steps else 1.0
    found, _ = smallest(keep, whole, expected, measure, most=most, prior=prior, on_measured=told)
    return forms[found.size]


def _calibrated(bench: Bench, out: Path, say: Say) -> Statistics:
    """Statistics of the adapted layers on texts that are not held out; those that a run before finished are taken."""
    source, texts = bench.source, bench.calibration[:SAMPLES]
    asked = {"seed": bench.seed, "samples": len(texts), "base": source.name, "modules": list(source.modules)}
    asked |= {"adapter": source.adapter_sha256}
    if (out / METADATA).exists():
        settings = read_statistics(out).metadata.get("settings", {})
        if any(settings.get(name) != value for name, value in asked.items()):
            shutil.rmtree(out)
    if not (out / METADATA).exists():
        say(f"calibrating on {len(texts)} examples")
        calibrate(
            source.model,
            bench.batches(texts),
            modules=source.modules,
            out=out,
            seed=bench.seed,
            samples=len(texts),
            head=source.head,
            base=source.name,
            adapter_base=source.adapter_base,
            adapter=source.adapter_sha256,
        )
    return read_statistics(out)
