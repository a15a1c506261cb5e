"""The table of compress-and-recover: the share of a LoRA's gain each structure keeps or regains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.lab.compare.table import Spread, Table
from benchmarks.lab.recover.jobs import WHOLE, Job, jobs
from benchmarks.lab.recover.plan import STRUCTURES, recover_plan
from benchmarks.lab.recover.recovery import DISTILLED, chosen_rate, read_outcomes, read_point
from benchmarks.lab.runs import outcome
from benchmarks.lab.suite import Suite
from benchmarks.lab.tasks import metrics_of
from lsrdecomp.lora.train.finetune_record import FinetuneRecord, Scores

STAGES = ("compressed", "distilled", "recovered", "scratch")
KINDS = {"recovery": "recovered", "scratch": "scratch"}
LORA = "lora"


@dataclass(frozen=True, slots=True)
class Judged:
    """Scores on dev at one stage with one seed, and their share of the LoRA's gain in loss."""

    seed: int
    loss: float
    score: float  # the task's first metric
    share: float  # (loss of the head alone − loss) / (loss of the head alone − loss of the LoRA)


@dataclass(frozen=True, slots=True)
class Line:
    """One structure at one budget on one task; stages that are not there yet have no entries."""

    task: str
    structure: str
    label: str
    budget: int  # parameters a matrix, on average; 0: all of the LoRA's
    parameters: float  # of the adapter, mean over seeds
    bytes: float  # of its factors as stored
    stages: dict[str, tuple[Judged, ...]]

    def share(self, stage: str) -> Spread | None:
        """Over seeds."""
        found = self.stages[stage]
        return Spread(tuple(judged.share for judged in found)) if found else None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        stages = {
            stage: {
                name: [getattr(judged, name) for judged in found]
                for name in ("seed", "loss", "score", "share")
            }
            for stage, found in self.stages.items()
        }
        names = ("task", "structure", "label", "budget", "parameters", "bytes")
        return {name: getattr(self, name) for name in names} | stages


@dataclass(frozen=True, slots=True)
class Gain:
    """What the LoRA of one task and seed gained on dev over its head alone."""

    task: str
    seed: int
    metric: str
    loss_before: float
    loss: float
    score_before: float
    score: float
    baseline: float  # always the commonest answer
    parameters: int
    bytes: int
    matrices: int

    @property
    def of_loss(self) -> float:
        return self.loss_before - self.loss

    def share(self, loss: float) -> float:
        """How much of the gain a loss holds."""
        return (self.loss_before - loss) / self.of_loss


@dataclass(frozen=True, slots=True)
class Recovery:
    """All of it, as far as it was done."""

    suite: Suite
    gains: tuple[Gain, ...]
    lines: tuple[Line, ...]
    rates: dict[str, float]  # chosen, by "task, structure, kind"
    commits: tuple[str, ...]
    versions: dict[str, str]
    steps: int
    least_gain: float
    distill: int


def read_recovery(suite: Suite, out: str | Path) -> Recovery:
    """What the runs in a directory came to; nothing is run."""
    plan = recover_plan(suite)
    all_jobs = jobs(suite, plan, out)
    loras = {
        job: found for job in all_jobs if isinstance(found := outcome(job.lora()), FinetuneRecord)
    }
    gains = {job: gain for job, record in loras.items() if (gain := _gain(job, record)) is not None}
    lines = []
    for task in dict.fromkeys(job.task for job in gains):
        own = {
            job: gain
            for job, gain in gains.items()
            if job.task == task and gain.of_loss >= plan.least_gain
        }
        if not own:
            continue
        first = next(iter(own))
        for structure, budget in [
            (LORA, WHOLE),
            *sorted(first.points(), key=_order(plan.structures)),
        ]:
            line = _line(own, structure, budget)
            if any(line.stages.values()):
                lines.append(line)
    rates = {
        f"{job.task}, {structure}, {kind}": rate
        for job in gains
        if job.tunes
        for structure in (LORA, *plan.structures)
        for kind in KINDS
        if (kind == "recovery" or structure in plan.scratch)
        and (structure == LORA or STRUCTURES[structure].trained)
        and (rate := chosen_rate(job, structure, kind)) is not None
    }
    records = list(loras.values())
    return Recovery(
        suite,
        tuple(gains.values()),
        tuple(lines),
        rates,
        tuple(sorted({record.commit for record in records if record.commit})),
        dict(records[-1].versions) if records else {},
        plan.steps,
        plan.least_gain,
        plan.distill,
    )


def table(found: Recovery) -> Table:
    """Tabulate the share of the LoRA's gain at each stage, and the score, by task and structure."""
    words = {
        "compressed": "kept",
        "distilled": "distilled",
        "recovered": "after recovery",
        "scratch": "from scratch",
    }
    stages = [stage for stage in STAGES if found.distill or stage != "distilled"]
    head = (
        "task",
        "structure",
        "parameters",
        "bytes",
        *(words[stage] for stage in stages),
        "score",
        "seeds",
    )
    rows: list[tuple[str, ...]] = []
    for line in found.lines:
        shares = [line.share(stage) for stage in stages]
        best = next(
            line.stages[stage]
            for stage in ("recovered", "compressed", "scratch")
            if line.stages[stage]
        )
        score = Spread(tuple(judged.score for judged in best)).text(100)
        cells = ("–" if share is None else share.text(1, 2) for share in shares)
        rows.append(
            (
                line.task,
                line.label,
                f"{line.parameters:,.0f}",
                f"{line.bytes:,.0f}",
                *cells,
                score,
                str(len(best)),
            )
        )
    return head, rows


def gains_table(found: Recovery) -> Table:
    """What the LoRAs gained: if that is little, shares of it mean little."""
    head = (
        "task",
        "seed",
        "loss, head alone",
        "loss, LoRA",
        "metric",
        "majority",
        "head alone",
        "LoRA",
        "parameters",
    )
    rows = [
        (
            *(
                gain.task,
                str(gain.seed),
                f"{gain.loss_before:.4f}",
                f"{gain.loss:.4f}",
                gain.metric,
            ),
            *(f"{100 * value:.1f}" for value in (gain.baseline, gain.score_before, gain.score)),
            f"{gain.parameters:,}",
        )
        for gain in found.gains
    ]
    return head, rows


def notes(found: Recovery) -> list[str]:
    """What a reader of the table must know."""
    return [
        (
            "Shares of the LoRA's gain in loss on dev over its head alone, mean ± standard "
            "deviation over seeds: 1 is the LoRA, 0 no adapter. Recovery and training from "
            f"scratch: {found.steps} steps, rates chosen from "
            f"{', '.join(f'{rate:g}' for rate in found.suite.rates)} by the loss on a split of "
            "the training set. The score is that after recovery, or of the compressed form where "
            "it is not trained."
        ),
        *(
            [f"Distilled: at most {found.distill} steps on the LoRA's own answers, no labels."]
            if found.distill
            else []
        ),
        *(
            f"The LoRA of {gain.task}, seed {gain.seed}, gains {gain.of_loss:.4f} nats: too "
            "little to speak of shares."
            for gain in found.gains
            if gain.of_loss < found.least_gain
        ),
    ]


Sized = tuple[float, float, float | None]  # size, mean share and its deviation


def paths(found: Recovery, task: str, size: str) -> dict[str, list[tuple[str, list[Sized]]]]:
    """Return shares against "parameters" or "bytes": by structure, each stage with its points."""
    words = {
        "compressed": "as compressed",
        "distilled": "distilled",
        "recovered": f"after {found.steps} steps",
        "scratch": "from scratch",
    }
    drawn: dict[str, dict[str, list[Sized]]] = {}
    for line in found.lines:
        for stage in STAGES if line.task == task and line.structure != LORA else ():
            share = line.share(stage)
            if share is not None:
                points = drawn.setdefault(line.label, {}).setdefault(words[stage], [])
                points.append((getattr(line, size), share.mean, share.deviation))
    return {label: list(path.items()) for label, path in drawn.items()}


def to_json(found: Recovery) -> dict[str, Any]:
    """Suite, gains and lines as plain values."""
    suite = found.suite
    gains = [{name: getattr(gain, name) for name in Gain.__slots__} for gain in found.gains]
    return {
        "title": suite.title,
        "seeds": list(suite.seeds),
        "rates": list(suite.rates),
        "common": suite.public_settings,
        "tasks": {task: dict(settings) for task, settings in suite.tasks.items()},
        "recover": dict(suite.recover),
        "versions": found.versions,
        "commits": list(found.commits),
        "chosen_rates": found.rates,
        "gains": gains,
        "lines": [line.to_json() for line in found.lines],
    }


def _order(structures: Sequence[str]) -> Any:
    return lambda point: (structures.index(point[0]), point[1])


def _gain(job: Job, record: FinetuneRecord) -> Gain | None:
    if record.start is None or record.start.loss is None or record.dev.loss is None:
        return None
    metric = next(iter(metrics_of(job.task, record.dev.metrics)))
    return Gain(
        *(job.task, job.seed, metric, record.start.loss, record.dev.loss),
        *(record.start.metrics[metric], record.dev.metrics[metric], record.baseline[metric]),
        *(record.adapter_parameters, record.adapter_bytes, _matrices(job)),
    )


def _matrices(job: Job) -> int:
    from lsrdecomp.lora.files import open_checkpoint
    from lsrdecomp.lora.train.finetune_record import ADAPTER

    return len(open_checkpoint(job.place.lora / ADAPTER).layers)


def _line(gains: dict[Job, Gain], structure: str, budget: int) -> Line:
    stages: dict[str, list[Judged]] = {stage: [] for stage in STAGES}
    sizes: list[int] = []
    held: list[int] = []
    for job, gain in gains.items():
        if structure == LORA:
            sizes, held = [*sizes, gain.parameters], [*held, gain.bytes]
            stages["compressed"].append(Judged(job.seed, gain.loss, gain.score, 1.0))
        else:
            point = read_point(job, structure, budget)
            if point is None:
                continue
            sizes, held = [*sizes, point.parameters], [*held, point.bytes]
            stages["compressed"] += _judged(job.seed, gain, point.scores)
            if (distilled := read_point(job, structure, budget, DISTILLED)) is not None:
                stages["distilled"] += _judged(job.seed, gain, distilled.scores)
        for kind, record in read_outcomes(job, structure, budget).items():
            stages[KINDS[kind]] += _judged(job.seed, gain, record.dev)
    label = "LoRA" if structure == LORA else STRUCTURES[structure].label
    task = next(iter(gains)).task
    mean = (fmean(sizes), fmean(held)) if sizes else (0.0, 0.0)
    return Line(
        task,
        structure,
        label,
        budget,
        *mean,
        {stage: tuple(found) for stage, found in stages.items()},
    )


def _judged(seed: int, gain: Gain, scores: Scores | None) -> list[Judged]:
    if scores is None or scores.loss is None:
        return []
    return [Judged(seed, scores.loss, scores.metrics[gain.metric], gain.share(scores.loss))]
