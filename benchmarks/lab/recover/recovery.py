"""Compress and recover: train a LoRA, compress it by each structure, judge, train on, judge.

For every task and seed a head is trained alone and then kept, so that every nat gained on dev is an
adapter's doing. A LoRA is trained on it and calibrated on examples it was trained on. Each
compressed form is judged as it is, after ``distill`` steps on the LoRA's own answers if the plan
says so, after ``steps`` steps of recovery on labels, and beside the same shapes trained from
scratch for as many steps. Rates of both are chosen from one grid by the loss on a split of the
training set, with the first seed and at one budget.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.lab.recover.compress_lora import CompressedPoint, compress_lora
from benchmarks.lab.recover.jobs import WHOLE, Job, jobs
from benchmarks.lab.recover.plan import (
    STRUCTURES,
    recover_plan,
)
from benchmarks.lab.runs import Failure, Outcome, Run, do_runs, outcome
from benchmarks.lab.suite import Suite
from lsrdecomp.errors import BudgetError, LsrError
from lsrdecomp.lora.base.calibrate import calibrate
from lsrdecomp.lora.base.open_bases import load_base
from lsrdecomp.lora.compress.distill_lora import distill
from lsrdecomp.lora.compress.distill_settings import DistillSettings
from lsrdecomp.lora.files.progress import Counter, OnStep
from lsrdecomp.lora.files.statistics import METADATA, read_statistics
from lsrdecomp.lora.search.plan import Search
from lsrdecomp.lora.train.finetune_record import ADAPTER, FinetuneRecord
from lsrdecomp.lora.train.finetune_run import evaluate
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings
from lsrdecomp.lora.train.labelled import texts_of
from lsrdecomp.lora.train.run_data import read_dataset

COMPRESSED, JUDGED, DISTILLED = "compressed.json", "judged.json", "distilled.json"


def recover(
    suite: Suite,
    out: str | Path,
    *,
    search: Search | None = None,
    retry: bool = False,
    on_run: Callable[[Run, Outcome], object] | None = None,
    on_step: OnStep | None = None,
) -> None:
    """Do all of it; after a kill, the same call goes on where it was.

    `benchmarks.lab.recover.table` reads it.

    Parameters
    ----------
    suite : Suite
        With a table ``[recover]``; its ``[methods]`` play no part.
    out : path
    search : Search, optional
        How far `compress` looks for shapes.
    retry : bool
        Do failed runs again.
    on_run : callable, optional
        Called with each run and its outcome.
    on_step : callable, optional
        Called with a `ProgressUpdate` before each part of the work and after the last.

    Raises
    ------
    SuiteError
        If the suite says something impossible.
    CheckpointError
        If ``out`` holds runs with other settings.
    LsrError
        If a head or a LoRA could not be trained: without them there is nothing to compress.
    """
    plan = recover_plan(suite)
    suite.write_files()
    everything = jobs(suite, plan, out)
    counter = Counter(
        on_step, "experiment", sum(2 + len(job.points()) for job in everything), "parts"
    )
    for job in everything:
        counter.stage = f"{job.task}, seed {job.seed}: head and LoRA"
        counter.add(0)
        for run in (job.head(), job.lora()):
            do_runs([run], retry=retry, on_run=on_run)
            found = outcome(run)
            if isinstance(found, Failure):
                raise LsrError(
                    f"{run.directory}: {found.kind}: {found.message}; do it again with retry"
                )
        counter.add()
    for job in everything:
        if (gain(job) or 0.0) < plan.least_gain:
            counter.add(1 + len(job.points()))
            continue
        counter.stage = f"{job.task}, seed {job.seed}: calibration"
        counter.add(0)
        _calibrate(job)
        _train(job, "lora", WHOLE, retry, on_run)
        counter.add()
        for structure, budget in job.points():
            counter.stage = (
                f"{job.task}, seed {job.seed}: {structure}, {budget or 'all'} parameters a matrix"
            )
            counter.add(0)
            further = STRUCTURES[structure].trained and budget not in job.plan.judged
            if _compressed_and_judged(job, structure, budget, search):
                _distill(job, structure, budget)
                if further:
                    _train(job, structure, budget, retry, on_run)
            counter.add()


def gain(job: Job) -> float | None:
    """Return the nats that the LoRA gained on dev over its head alone.

    None before it is trained, or if its loss was lost.
    """
    found = outcome(job.lora())
    if (
        not isinstance(found, FinetuneRecord)
        or found.start is None
        or None in (found.start.loss, found.dev.loss)
    ):
        return None
    return found.start.loss - found.dev.loss  # type: ignore[operator]


def chosen_rate(job: Job, structure: str, kind: str) -> float | None:
    """Return the rate of least validation loss with the first seed at the plan's budget, or None.

    ``kind`` is "recovery" or "scratch". A rate at which the run failed is out of question.
    """
    first = replace(job, seed=job.suite.seeds[0])
    budgeted = structure != "lora" and STRUCTURES[structure].budgeted
    budget = job.plan.tuned_at if budgeted else WHOLE
    losses: dict[float, float] = {}
    for rate in sorted(job.suite.rates):
        try:
            found = outcome(getattr(first, kind)(structure, budget, rate))
        except FileNotFoundError:  # nothing was compressed yet
            return None
        if found is None:
            return None
        known = (
            isinstance(found, FinetuneRecord)
            and found.validation is not None
            and found.validation.loss is not None
        )
        losses[rate] = found.validation.loss if known else math.inf  # type: ignore[union-attr, assignment]
    best = min(losses, key=lambda rate: losses[rate])
    return best if math.isfinite(losses[best]) else None


def read_point(job: Job, structure: str, budget: int, file: str = JUDGED) -> CompressedPoint | None:
    """Read a form that was judged, or distilled.

    None if there is none, or if nothing fits into the budget.
    """
    path = job.place.point(structure, budget) / file
    return CompressedPoint.read(path) if path.exists() else None


def _train(
    job: Job,
    structure: str,
    budget: int,
    retry: bool,
    on_run: Callable[[Run, Outcome], object] | None,
) -> None:
    kinds = ["recovery", *(["scratch"] if structure in job.plan.scratch else [])]
    for kind in kinds:
        rates: tuple[float, ...] = job.suite.rates
        if not (job.tunes and budget in (job.plan.tuned_at, WHOLE)):
            best = chosen_rate(job, structure, kind)
            rates = () if best is None else (best,)
        do_runs(
            [getattr(job, kind)(structure, budget, rate) for rate in rates],
            retry=retry,
            on_run=on_run,
        )


def _compressed_and_judged(job: Job, structure: str, budget: int, search: Search | None) -> bool:
    """Compress and judge, unless that was done; whether there is something to train."""
    point = job.place.point(structure, budget)
    if (point / JUDGED).exists():
        return True
    statistics = read_statistics(job.place.statistics)
    compressed = point / COMPRESSED
    if not compressed.exists():
        shutil.rmtree(point / ADAPTER, ignore_errors=True)  # a kill came between the two
        try:
            made = compress_lora(
                job.place.lora / ADAPTER,
                STRUCTURES[structure],
                budget,
                statistics,
                point / ADAPTER,
                search,
            )
        except BudgetError:
            return False
        made.write(compressed)
    made = CompressedPoint.read(compressed)
    replace(
        made, scores=evaluate(job.recovery(structure, budget, job.suite.rates[0]).settings)
    ).write(point / JUDGED)
    return True


def _distill(job: Job, structure: str, budget: int) -> None:
    """Train a form on the LoRA's answers to training texts and judge it, if the plan says so."""
    point, about = job.place.point(structure, budget), STRUCTURES[structure]
    if not job.plan.distill or about.direct or not about.budgeted or (point / DISTILLED).exists():
        return
    settings, out = job.lora().settings, point / "distilled" / ADAPTER
    dataset = read_dataset(settings)
    distill(
        point / ADAPTER,
        base=dataset.base,
        data=texts_of(dataset.train),
        teacher=job.place.lora / ADAPTER,
        steps=job.plan.distill,
        out=out,
        settings=DistillSettings(
            dtype=_dtype(settings),
            statistics=job.place.statistics if about.functional else None,
            max_length=settings.max_length,
        ),
        device=_device(settings),
        seed=job.seed,
        force=True,
    )
    answers = evaluate(
        job.recovery(structure, budget, job.suite.rates[0]).settings.replace(init=str(out))
    )
    replace(CompressedPoint.read(point / JUDGED), scores=answers).write(point / DISTILLED)


def _calibrate(job: Job) -> None:
    if (job.place.statistics / METADATA).exists():
        return
    settings = job.lora().settings
    dataset = read_dataset(settings)
    base = load_base(
        dataset.base, job.place.lora / ADAPTER, device=_device(settings), dtype=_dtype(settings)
    )
    base = replace(base, name=settings.base)
    calibrate(
        base,
        dataset.calibration_batches(base, size=16, seed=job.seed),
        out=job.place.statistics,
        seed=job.seed,
        samples=job.plan.samples,
    )


def _dtype(settings: FinetuneSettings) -> str:
    """Precision in which the base is held outside of training."""
    return "bfloat16" if settings.precision == "bfloat16" else "float32"


def _device(settings: FinetuneSettings) -> str:
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def read_outcomes(job: Job, structure: str, budget: int) -> Mapping[str, FinetuneRecord]:
    """Return the runs at their chosen rates, from a form ("recovery") and from "scratch"."""
    found: dict[str, FinetuneRecord] = {}
    for kind in ("recovery", "scratch"):
        if kind == "scratch" and structure not in job.plan.scratch:
            continue
        rate = chosen_rate(job, structure, kind)
        if rate is None:
            continue
        done = outcome(getattr(job, kind)(structure, budget, rate))
        if isinstance(done, FinetuneRecord):
            found[kind] = done
    return found
