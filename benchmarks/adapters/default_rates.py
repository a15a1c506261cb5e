"""Does the default learning rate hold where it was not tuned? Runs with it, a third and thrice it.

    python -m benchmarks.adapters.default_rates DATA --work RUNS [--tasks embedded STS-B] \\
        [--arms lsr] [--seeds 0 1 2] [--minutes 30] [--out FILE]

`rates.py` tuned the rule on SST-2, on E2E and on sums with four terms. Here an arm is trained with
the rate that `finetune` takes unasked, with a third of it and with three times as much; where an
end is best, a step further. DATA holds glue/ and e2e/ as their authors published them.

Runs that RUNS holds are not done again, so the same command goes on; after ``--minutes`` none
begins. Writes `results/default_rates.json`: a row a run, and of each task and arm the mean loss
over the seeds at each multiple, and by how much the default is behind the best.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import record as records
from benchmarks.adapters.rates import ARMS, AUTO, COMMON, ENCODER, encoder, loss_of, row
from benchmarks.lab.embedded import embedded
from benchmarks.lab.tasks import published, write_files
from benchmarks.language.tasks import write_task
from benchmarks.record import RESULTS
from lsrdecomp.lora.train.finetune_record import RECORD, FinetuneRecord, read_record
from lsrdecomp.lora.train.finetune_run import finetune
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

ENCODER_TASK = ENCODER | {"steps": 200}
LANGUAGE = {
    "base": "smollm2",
    "batch": 4,
    "steps": 50,
    "dev_examples": 32,
    "samples": 0,
    "precision": "bfloat16-autocast",
}
TASKS: dict[str, dict[str, Any]] = {
    "embedded": {"task": "embedded", "batch": 16, "steps": 200},
    "STS-B": ENCODER_TASK | {"task": "STS-B"},
    "CoLA": ENCODER_TASK | {"task": "CoLA", "max_length": 32},
    "extraction": LANGUAGE,
    "sums": LANGUAGE,
}
TEXTS = {"extraction": "extraction", "sums": "arithmetic"}
"""Tasks of a language model, and what `benchmarks.language.tasks` calls them."""
MULTIPLES = (1 / 3, 1.0, 3.0)
"""Of the default; the row grows by a third or by three while its best is at an end."""
ENDS = 1 / 9, 9.0


@dataclass(frozen=True)
class Place:
    """Where data and runs are."""

    data: Path
    work: Path

    def settings(self, task: str) -> dict[str, Any]:
        """Return what all arms of a task share."""
        settings = COMMON | TASKS[task]
        if task in TEXTS:
            name = TEXTS[task]
            files = self.work / "tasks"
            if not (files / name).exists():
                write_task(name, self.data, files)
            data = str(files / name / "train.jsonl")
            return settings | {"data": data, "dev_data": str(files / name / "held.jsonl")}
        if task == "embedded":
            place = embedded(self.work / "base")
            return published(settings | {"base": str(place.model), "data": str(place.data)})
        settings |= {"base": encoder(), "data": str(self.data / "glue")}
        write_files(settings)
        return published(settings)

    def run(self, task: str, arm: str, multiple: float | str, seed: int) -> FinetuneRecord:
        """Return a finished run, or a new one."""
        out = self._directory(task, arm, multiple, seed)
        if (out / RECORD).exists():
            return read_record(out)
        changes = ARMS[arm] | {"seed": seed}
        if multiple == AUTO:
            changes |= {"learning_rate": AUTO}
        elif isinstance(multiple, float) and multiple != 1:
            default = self.run(task, arm, 1.0, seed).settings.learning_rate
            assert isinstance(default, float)
            changes |= {"learning_rate": float(f"{multiple * default:.2g}")}
        out.parent.mkdir(parents=True, exist_ok=True)
        return finetune(FinetuneSettings.from_mapping(self.settings(task) | changes), out)

    def _directory(self, task: str, arm: str, multiple: float | str, seed: int) -> Path:
        name = multiple if isinstance(multiple, str) else f"{multiple:.2g}"
        return self.work / task / re.sub(r"\W+", "-", arm) / f"{name}-{seed}"


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run what is asked for and not done, and write the record of all that is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=tuple(TASKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=("lsr", "lora"))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--auto", action="store_true", help="also by trials of three rates")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=RESULTS / "default_rates.json")
    options = parser.parse_args(given)
    begin = time.monotonic()
    place = Place(options.data, options.work)
    results: dict[str, Any] = {"rows": []} | records.load(options.out)
    rows = {
        (each["task"], each["arm"], each["asked"], each["seed"]): each for each in results["rows"]
    }
    for seed in options.seeds:
        for task in options.tasks:
            for arm in options.arms:
                for multiple in to_run(rows, task, arm, seed, auto=options.auto):
                    if time.monotonic() - begin > 60 * options.minutes:
                        print("stopped; the same command goes on")
                        return results
                    record = place.run(task, arm, multiple, seed)
                    key = task, arm, multiple, seed
                    rows[key] = row(task, arm, multiple, seed, record)
                    print(rows[key], flush=True)
                    results |= {"rows": list(rows.values()), "defaults": summary(rows)}
                    seeds = sorted({each["seed"] for each in rows.values()})
                    records.save(options.out, results, "torch", "transformers", "peft", seed=seeds)
    return results


def to_run(
    rows: dict[tuple[Any, ...], dict[str, Any]], task: str, arm: str, seed: int, *, auto: bool
) -> Iterator[float | str]:
    """Yield multiples of the default: three, and further while an end is best; then ``"auto"``."""
    yield 1.0
    yield from (multiple for multiple in MULTIPLES if multiple != 1)
    grid = list(MULTIPLES)
    while True:
        best = min(grid, key=lambda multiple: loss_of(rows[task, arm, multiple, seed]))
        if ENDS[0] < best == grid[0]:
            further = best / 3
        elif ENDS[1] > best == grid[-1]:
            further = best * 3
        else:
            break
        yield further
        grid = sorted([*grid, further])
    if auto:
        yield AUTO


def summary(rows: dict[tuple[Any, ...], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of each task and arm the mean losses, and how far the default is behind the best.

    Means are over the seeds that ran with each of `MULTIPLES`, and a multiple beyond them counts
    where all of these seeds ran with it.
    """
    losses: dict[tuple[str, str], dict[float, dict[int, float]]] = {}
    chosen: dict[tuple[str, str], dict[int, float]] = {}
    for (task, arm, multiple, seed), each in rows.items():
        if multiple == AUTO:
            chosen.setdefault((task, arm), {})[seed] = loss_of(each)
            continue
        losses.setdefault((task, arm), {}).setdefault(multiple, {})[seed] = loss_of(each)
    found = []
    for (task, arm), by_multiple in losses.items():
        seeds = set.intersection(*(set(by_multiple.get(each, {})) for each in MULTIPLES))
        if not seeds:
            continue
        means = {
            multiple: mean(by_seed[seed] for seed in seeds)
            for multiple, by_seed in sorted(by_multiple.items())
            if seeds <= set(by_seed)
        }
        best = min(means, key=lambda multiple: means[multiple])
        behind = [by_multiple[1.0][seed] - by_multiple[best][seed] for seed in sorted(seeds)]
        by_trials = chosen.get((task, arm), {})
        auto_behind = [loss - by_multiple[best][seed] for seed, loss in sorted(by_trials.items())]
        found.append(
            {
                "task": task,
                "arm": arm,
                "rate": rows[task, arm, 1.0, min(seeds)]["rate"],
                "seeds": len(seeds),
                "losses": {f"{multiple:.2g}": loss for multiple, loss in means.items()},
                "best": float(f"{best:.2g}"),
                "behind": round(mean(behind), 4),
                "behind_of_each_seed": [round(each, 4) for each in behind],
                "auto_behind_of_each_seed": [round(each, 4) for each in auto_behind],
            }
        )
    return found


if __name__ == "__main__":
    main()
