"""Every method of a suite on every task, each at the rate that suits it, over several seeds.

Protocol: every method sees the same grid of rates. The rate of a method on a task is the one with
the least loss on a split of the training set, mean over the first ``tune_seeds`` seeds; the dev set
takes no part in any choice. All seeds are then reported at that rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab.runs import Failure, Outcome, Run, do_runs, outcome
from benchmarks.lab.suite import MethodSpec, Suite, slug
from lsrdecomp.lora.train.finetune_record import FinetuneRecord


@dataclass(frozen=True, slots=True)
class Cell:
    """One method on one task."""

    spec: MethodSpec
    task: str
    rate: float | None  # the chosen one; None before there is one
    records: Mapping[int, FinetuneRecord]  # by seed, at that rate
    failures: Mapping[tuple[float, int], Failure]  # by rate and seed
    finished: int  # runs, at all rates
    edge: bool
    """Whether the chosen rate is the smallest or the largest of several: the grid may be narrow."""


@dataclass(frozen=True, slots=True)
class Results:
    """What a suite has come to so far; see `read_results`.

    Examples
    --------
    >>> methods = {"LoRA": {"method": "lora"}}
    >>> suite = Suite(common={"base": "embedded"}, tasks={"embedded": {}}, methods=methods)
    >>> Results(suite, (), skipped={"RTE": "no file RTE/train.jsonl"}, planned=0, done=0).skipped
    {'RTE': 'no file RTE/train.jsonl'}
    """

    suite: Suite
    cells: tuple[Cell, ...]
    skipped: Mapping[str, str]  # tasks left out, and why
    planned: int
    done: int


def compare(
    suite: Suite,
    out: str | Path,
    *,
    workers: int = 1,
    retry: bool = False,
    on_run: Callable[[Run, Outcome], object] | None = None,
) -> Results:
    """Run a suite; after a kill, the same call goes on where it was.

    Parameters
    ----------
    suite : Suite
    out : path
        Directory of the runs, one below it each: ``task/method/rate/seed``.
    workers : int
        Processes.
    retry : bool
        Do failed runs again.
    on_run : callable, optional
        Called with each run and its outcome.

    Returns
    -------
    Results

    Raises
    ------
    SettingsError
        If a method has no such option; before anything is run.
    CheckpointError
        If ``out`` holds runs with other settings.
    """
    check_options(suite)
    out = Path(out)
    suite.write_files()
    skipped = suite.missing()
    tasks = [task for task in suite.tasks if task not in skipped]
    cells = [(spec, task) for task in tasks for spec in suite.specs]
    tuning = [run for spec, task in cells for run in tuning_runs(suite, out, spec, task).values()]
    do_runs(tuning, workers=workers, retry=retry, on_run=on_run)
    further: list[Run] = []
    for spec, task in cells:
        rate = chosen_rate(suite, out, spec, task)
        if rate is not None:
            further += (
                a_run(suite, out, spec, task, rate, seed)
                for seed in suite.seeds[suite.tune_seeds :]
            )
    do_runs(further, workers=workers, retry=retry, on_run=on_run)
    return read_results(suite, out)


def read_results(suite: Suite, out: str | Path) -> Results:
    """What the runs in a directory came to; nothing is run.

    Examples
    --------
    >>> methods = {"LoRA": {"method": "lora"}, "LSR": {"method": "lsr"}}
    >>> common, tasks = {"base": "embedded"}, {"embedded": {}}
    >>> suite = Suite(seeds=(0, 1), common=common, tasks=tasks, methods=methods)
    >>> found = read_results(suite, "no-runs-yet")
    >>> found.done, found.planned                                          # two methods, two seeds
    (0, 4)
    """
    out = Path(out)
    skipped = {
        task: why
        for task, why in suite.missing().items()
        if not any((out / slug(task)).glob("*/*/*/record.json"))
    }
    cells = tuple(
        _cell(suite, out, spec, task)
        for task in suite.tasks
        if task not in skipped
        for spec in suite.specs
    )
    planned = len(cells) * (
        suite.tune_seeds * len(suite.rates) + len(suite.seeds) - suite.tune_seeds
    )
    return Results(suite, cells, skipped, planned, sum(cell.finished for cell in cells))


def a_run(suite: Suite, out: Path, spec: MethodSpec, task: str, rate: float, seed: int) -> Run:
    """One run and its place."""
    place = out / slug(task) / spec.slug / f"rate-{rate:g}" / f"seed-{seed}"
    return Run(suite.settings(spec, task, rate, seed), place)


def tuning_runs(
    suite: Suite, out: Path, spec: MethodSpec, task: str
) -> dict[tuple[float, int], Run]:
    """The runs by which a rate is chosen, by rate and seed."""
    return {
        (rate, seed): a_run(suite, out, spec, task, rate, seed)
        for rate in suite.rates
        for seed in suite.seeds[: suite.tune_seeds]
    }


def chosen_rate(suite: Suite, out: Path, spec: MethodSpec, task: str) -> float | None:
    """Return the rate of least mean validation loss; None while tuning, or if every rate failed.

    A rate at which a run failed is out of question. Of equal rates the smaller one.
    """
    outcomes = {key: outcome(run) for key, run in tuning_runs(suite, out, spec, task).items()}
    if any(found is None for found in outcomes.values()):
        return None
    losses: dict[float, float] = {}
    for rate in sorted(suite.rates):
        found = [outcomes[rate, seed] for seed in suite.seeds[: suite.tune_seeds]]
        losses[rate] = math.fsum(_validation_loss(each) for each in found) / len(found)
    if len(losses) == 1:
        return suite.rates[0]
    best = min(losses, key=lambda rate: losses[rate])
    return best if math.isfinite(losses[best]) else None


def _validation_loss(found: Outcome | None) -> float:
    if (
        not isinstance(found, FinetuneRecord)
        or found.validation is None
        or found.validation.loss is None
    ):
        return math.inf
    return found.validation.loss


def _cell(suite: Suite, out: Path, spec: MethodSpec, task: str) -> Cell:
    rate = chosen_rate(suite, out, spec, task)
    runs = tuning_runs(suite, out, spec, task)
    if rate is not None:
        runs |= {(rate, seed): a_run(suite, out, spec, task, rate, seed) for seed in suite.seeds}
    outcomes = {key: outcome(run) for key, run in runs.items()}
    finished = {key: found for key, found in outcomes.items() if isinstance(found, FinetuneRecord)}
    records = {seed: finished[tried, seed] for tried, seed in sorted(finished) if tried == rate}
    failures = {key: found for key, found in outcomes.items() if isinstance(found, Failure)}
    edge = (
        rate is not None and len(suite.rates) > 2 and rate in (min(suite.rates), max(suite.rates))
    )
    return Cell(spec, task, rate, records, failures, len(finished), edge)


def check_options(suite: Suite) -> None:
    """Raise `SettingsError` if a method of the suite has no such option."""
    from lsrdecomp.lora.train.methods import adapter_config

    for spec in suite.specs:
        for task in suite.tasks:
            settings = suite.settings(spec, task, suite.rates[0], suite.seeds[0])
            if settings.init is None:
                adapter_config(
                    settings.method, settings.options, target_modules=settings.target_modules
                )
