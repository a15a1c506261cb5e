"""The table of a suite: each method on each task over its seeds, beside the majority baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.lab.compare.comparison import Cell, Results
from benchmarks.lab.tasks import metrics_of

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # a head and rows of text

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over several seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Of a single seed; None if there is but one."""
        return stdev(self.values) if len(self.values) > 1 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "mean": self.mean,
            "deviation": self.deviation,
            "median": median(self.values),
            "seeds": len(self.values),
            "values": list(self.values),
        }

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """Mean ± deviation; the mean alone for one seed."""
        spread = "" if self.deviation is None else f" ± {scale * self.deviation:.{digits}f}"
        return f"{scale * self.mean:.{digits}f}{spread}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A method against another on one task, seed by seed."""

    against: str
    mean: float
    interval: tuple[float, float] | None  # 95 %, by Student's t; None for fewer than two seeds
    verdict: str  # "better", "worse", "equal": the interval holds 0; "one seed"


@dataclass(frozen=True, slots=True)
class Line:
    """One method on one task."""

    method: str
    task: str
    metric: str
    score: Spread  # of the task's first metric, on dev
    metrics: Mapping[str, Spread]  # all of the task's
    accuracy: Spread | None
    loss: Spread | None  # None where one is not finite
    baseline: float  # of the first metric, always giving the commonest answer
    adapter_parameters: int
    head_parameters: int
    adapter_bytes: int
    rate: float
    edge: bool
    steps: int
    wall_seconds: float  # of one run, median
    failures: int
    difference: Difference | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        spreads = {name: spread.to_json() for name, spread in self.metrics.items()}
        accuracy, loss = (
            None if each is None else each.to_json() for each in (self.accuracy, self.loss)
        )
        figures = {
            "score": self.score.to_json(),
            "loss": loss,
            "accuracy": accuracy,
            "metrics": spreads,
        }
        names = (
            *(
                "method",
                "task",
                "metric",
                "baseline",
                "adapter_parameters",
                "head_parameters",
                "adapter_bytes",
            ),
            *("rate", "edge", "steps", "wall_seconds", "failures"),
        )
        difference = None if self.difference is None else asdict(self.difference)
        return {name: getattr(self, name) for name in names} | figures | {"difference": difference}


def lines(results: Results) -> list[Line]:
    """One line for every method and task that has a finished run at its rate."""
    by_place = {(cell.spec.label, cell.task): cell for cell in results.cells}
    return [
        _line(cell, by_place.get((cell.spec.against or "", cell.task)))
        for cell in results.cells
        if cell.records
    ]


def _line(cell: Cell, other: Cell | None) -> Line:
    records = list(cell.records.values())
    first = records[0]
    metrics = {
        name: Spread(tuple(r.dev.metrics[name] for r in records))
        for name in metrics_of(cell.task, first.dev.metrics)
    }
    metric = next(iter(metrics))
    accuracies = [r.dev.accuracy for r in records if r.dev.accuracy is not None]
    losses = [r.dev.loss for r in records if r.dev.loss is not None]
    assert cell.rate is not None
    return Line(
        method=cell.spec.label,
        task=cell.task,
        metric=metric,
        score=metrics[metric],
        metrics=metrics,
        accuracy=Spread(tuple(accuracies)) if accuracies else None,
        loss=None if len(losses) < len(records) else Spread(tuple(losses)),
        baseline=first.baseline[metric],
        adapter_parameters=first.adapter_parameters,
        head_parameters=first.head_parameters,
        adapter_bytes=first.adapter_bytes,
        rate=cell.rate,
        edge=cell.edge,
        steps=round(median(r.steps for r in records)),
        wall_seconds=median(r.wall_seconds for r in records),
        failures=len(cell.failures),
        difference=None if other is None or not other.records else difference(cell, other, metric),
    )


def difference(cell: Cell, other: Cell, metric: str) -> Difference:
    """Of the scores of two methods on the seeds both have."""
    both = [seed for seed in cell.records if seed in other.records]
    gaps = [
        cell.records[s].dev.metrics[metric] - other.records[s].dev.metrics[metric] for s in both
    ]
    mean = fmean(gaps) if gaps else math.nan
    if len(gaps) < 2:
        return Difference(other.spec.label, mean, None, "one seed" if gaps else "no common seed")
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(gaps) - 1)) * stdev(gaps) / math.sqrt(len(gaps))
    verdict = "better" if mean - half > 0 else "worse" if mean + half < 0 else "equal"
    return Difference(other.spec.label, mean, (mean - half, mean + half), verdict)


def overview(rows: Sequence[Line]) -> Table:
    """Tabulate methods by tasks: the first metric in percent, the majority baseline above."""
    tasks = {row.task: row for row in rows}
    head: tuple[str, ...]
    head = (
        "method",
        "parameters",
        "bytes",
        *(f"{task} ({_short(row.metric)})" for task, row in tasks.items()),
        "mean",
    )
    baselines = [row.baseline for row in tasks.values()]
    body: list[tuple[str, ...]]
    body = [
        (
            "majority",
            "0",
            "0",
            *(f"{100 * value:.1f}" for value in baselines),
            f"{100 * fmean(baselines):.1f}",
        )
    ]
    for method in dict.fromkeys(row.method for row in rows):
        own = {row.task: row for row in rows if row.method == method}
        cells = [own[task].score.text(100) if task in own else "–" for task in tasks]
        mean = average(list(own.values())).text(100) if len(own) == len(tasks) else "–"
        some = next(iter(own.values()))
        body.append(
            (method, f"{some.adapter_parameters:,}", f"{some.adapter_bytes:,}", *cells, mean)
        )
    return head, body


def average(rows: Sequence[Line]) -> Spread:
    """Average the first metrics over tasks, seed by seed where all tasks have the same seeds."""
    if len({len(row.score.values) for row in rows}) == 1:
        return Spread(tuple(map(fmean, zip(*(row.score.values for row in rows), strict=True))))
    return Spread((fmean(row.score.mean for row in rows),))


def details(rows: Sequence[Line]) -> Table:
    """Tabulate every metric, the loss, the rate and the difference, a line a method and task."""
    head = (
        "task",
        "method",
        "seeds",
        "metrics",
        "accuracy",
        "loss",
        "rate",
        "steps",
        "seconds",
        "against",
        "failed",
    )
    body: list[tuple[str, ...]] = []
    for row in sorted(
        rows, key=lambda row: list(dict.fromkeys(r.task for r in rows)).index(row.task)
    ):
        metrics = ", ".join(
            f"{_short(name)} {spread.text(100)}" for name, spread in row.metrics.items()
        )
        accuracy = "–" if row.accuracy is None else row.accuracy.text(100)
        loss = "not finite" if row.loss is None else row.loss.text(1, 4)
        figures = (metrics, accuracy, loss, f"{row.rate:g}{' (edge)' if row.edge else ''}")
        counts = (
            str(row.steps),
            f"{row.wall_seconds:.0f}",
            _words(row.difference),
            str(row.failures or ""),
        )
        body.append((row.task, row.method, str(len(row.score.values)), *figures, *counts))
    return head, body


def notes(results: Results, rows: Sequence[Line]) -> list[str]:
    """What a reader of the table must know."""
    rates = ", ".join(f"{rate:g}" for rate in results.suite.rates)
    said = [
        (
            "Scores in percent on the dev split, mean ± standard deviation over seeds; rates "
            f"chosen by the loss on a split of the training set from {rates}, the same for every "
            "method."
        ),
        f"{results.done} of {results.planned} runs done.",
        *(f"{task} skipped: {why}." for task, why in results.skipped.items()),
    ]
    edges = [f"{row.method} on {row.task}" for row in rows if row.edge]
    if edges:
        said.append(f"The chosen rate is at an end of the grid for: {'; '.join(edges)}.")
    said += [
        (
            f"{cell.spec.label} on {cell.task}, rate {rate:g}, seed {seed} failed: "
            f"{failure.kind}: {failure.message[:200]}"
        )
        for cell in results.cells
        for (rate, seed), failure in cell.failures.items()
    ]
    return said


def points(rows: Sequence[Line], size: str) -> list[tuple[str, int, float, float | None]]:
    """(method, size, mean score in percent, its deviation) of every method that has all tasks.

    ``size`` is the name of a field: "adapter_parameters" or "adapter_bytes".
    """
    tasks, found = {row.task for row in rows}, []
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method]
        if len(own) == len(tasks) and getattr(own[0], size) > 0:
            score = average(own)
            spread = None if score.deviation is None else 100 * score.deviation
            found.append((method, getattr(own[0], size), 100 * score.mean, spread))
    return found


def markdown(results: Results) -> str:
    """Both tables and the notes."""
    rows = lines(results)
    parts = [f"# {results.suite.title or 'Comparison'}"]
    if rows:
        parts += [markdown_table(overview(rows)), markdown_table(details(rows))]
    return "\n\n".join([*parts, *notes(results, rows)]) + "\n"


def markdown_table(table: Table) -> str:
    """A table in Markdown."""
    head, rows = table
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)
    )


def to_json(results: Results) -> dict[str, Any]:
    """Suite, lines and what was run on, as plain values."""
    rows, suite = lines(results), results.suite
    records = [record for cell in results.cells for record in cell.records.values()]
    return {
        "title": suite.title,
        "seeds": list(suite.seeds),
        "rates": list(suite.rates),
        "tune_seeds": suite.tune_seeds,
        "common": suite.public_settings,
        "tasks": {task: dict(settings) for task, settings in suite.tasks.items()},
        "methods": {spec.label: dict(spec.settings) for spec in suite.specs},
        "skipped": dict(results.skipped),
        "runs": {"planned": results.planned, "done": results.done},
        "versions": dict(records[-1].versions) if records else {},
        "commits": sorted({record.commit for record in records if record.commit}),
        "devices": sorted({record.device for record in records}),
        "lines": [row.to_json() for row in rows],
    }


def _short(metric: str) -> str:
    return {"accuracy": "acc", "matthews": "MCC", "macro_f1": "macro F1", "f1": "F1"}.get(
        metric, metric
    )


def _words(found: Difference | None) -> str:
    if found is None:
        return ""
    if found.interval is None:
        return f"{100 * found.mean:+.1f} to {found.against} ({found.verdict})"
    low, high = (f"{100 * end:+.1f}" for end in found.interval)
    return f"{100 * found.mean:+.1f} [{low}, {high}] to {found.against}: {found.verdict}"
