"""Is a LoRA compressed on texts that its model wrote as good as one compressed on real texts?

    python -m benchmarks.behaviour.written TASKS --loras LORAS [--tasks e2e …] [--arms real …]
        [--seeds 0 1 2] [--work DIRECTORY]

`benchmarks.language.tasks` writes TASKS; the LoRA of a task is LORAS/TASK, see
`benchmarks.cost.one_command --train`. Each arm is a source of texts, of which 64 calibrate:

- ``real``: 100 prompts of the task;
- ``few``: five prompts, which the base continues;
- ``none``: nothing, as `compress` without texts;
- ``one form``, ``forms``, ``backwards``, ``beginnings``: a part of the mixture of ``none`` alone.

The LoRA is compressed to so many bytes in the norm of these texts, untrained. A row has the share
kept on further real prompts of the task, and the share estimated on texts of the arm that were held
out, each with its standard error. ``--redraw`` estimates again, with texts by other seeds, what was
compressed by the first. Rows are added as they come; those that are there stay. One thread.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.lora.base import written_texts
from lsrdecomp.lora.base.behaviour import Behaviour
from lsrdecomp.lora.base.dataset import PromptExample, read_examples
from lsrdecomp.lora.base.divergence import Reference
from lsrdecomp.lora.files import Journal, open_checkpoint
from lsrdecomp.lora.measure.evaluator import Evaluator
from lsrdecomp.lora.search.effort import LIMITS_BESIDE_A_BASE
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings
from lsrdecomp.lora.search.plan import CompressionPlan, Resources, Search
from lsrdecomp.lora.search.searched import search_adapter

REAL = 100
"""Prompts that the arm of real texts has."""
FEW = 5
"""Prompts that the arm of few texts has."""
SHARES = {
    "none": None,
    "one form": (0.0, 0.0),
    "forms": (0.0, 0.0),
    "backwards": (0.75, 0.0),
    "beginnings": (0.0, 1.0),
}
"""Shares of prompts written backwards and of beginnings, of arms without texts."""
SEARCH = Search(orders=(2,), rounds=0)
"""The fastest search: arms are compared with each other."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A row: a task, an arm, and the seed of the texts; another seed of what was compressed."""

    task: str
    arm: str
    seed: int
    compressed_by: int

    @property
    def names(self) -> Row:
        """What the row is called by."""
        return vars(self)


def main() -> None:
    """Make the rows that are not there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path, metavar="TASKS")
    parser.add_argument("--loras", type=Path, required=True)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--tasks", nargs="+", default=["e2e", "sst2", "arithmetic", "tickets"])
    parser.add_argument("--arms", nargs="+", default=["real", "few", "none"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--redraw", action="store_true")
    parser.add_argument("--bytes", type=int, default=8000)
    parser.add_argument("--held", type=int, default=110, help="real prompts that judge, at most")
    parser.add_argument("--work", type=Path, required=True, help="for what takes long to make")
    parser.add_argument("--out", type=Path, default=RESULTS / "written_texts.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for job in jobs(arguments):
        record: dict[str, Any] = {"rows": []} | records.load(arguments.out)
        if any(job.names.items() <= row.items() for row in record["rows"]):
            continue
        row = {**job.names, **measured(job, arguments)}
        print(row, flush=True)
        record = {**record, "rows": [*record["rows"], row]}
        record["bias"] = bias(record["rows"])
        packages = ("torch", "transformers", "peft")
        records.save(arguments.out, record, *packages, seed=arguments.seeds)


def jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """Yield the rows that are asked for."""
    for seed in arguments.seeds:
        compressed_by = arguments.seeds[0] if arguments.redraw else seed
        for arm in arguments.arms:
            for task in arguments.tasks:
                if (arguments.loras / task).is_dir():
                    yield Job(task, arm, seed, compressed_by)


def measured(job: Job, arguments: argparse.Namespace) -> Row:
    """Write or draw texts, compress on them, and measure on them and on real ones."""
    began = time.process_time()
    lora = arguments.loras / job.task
    given = draw(arguments.texts / job.task / "train.jsonl", job)
    work = arguments.work / job.task / job.arm.replace(" ", "-")
    journal = Journal(work)
    work.mkdir(parents=True, exist_ok=True)
    with shares_of(job.arm):
        settings = EvaluatorSettings(seed=job.seed)
        evaluator = Evaluator(arguments.base, lora, given, settings, journal=journal)
    wrote = time.process_time()
    stem = f"small-{job.compressed_by}-{arguments.bytes}"
    small = work / f"{stem}-{evaluator.key[:12]}"  # other texts make another
    if job.seed != job.compressed_by:
        (small,) = work.glob(f"{stem}-*")
    if not small.exists():
        plan = CompressionPlan(bytes=arguments.bytes, storage="auto")
        searched = search_adapter(
            open_checkpoint(lora),
            [plan],
            statistics=evaluator.statistics(journal),
            search=SEARCH,
            resources=Resources(limits=LIMITS_BESIDE_A_BASE),
        )
        searched.compress(plan).save(small)
    compressed = time.process_time()
    estimate = evaluator.measure_held_out(small)
    held = read_examples(arguments.texts / job.task / "held.jsonl")[: arguments.held]
    variant = evaluator.base.with_adapter(small)
    real = Reference(evaluator.source, evaluator.batches(held)).compare(variant)
    return {
        "bytes": sum(file.stat().st_size for file in small.glob("adapter_*")),
        "written": evaluator.written,
        "texts": len(evaluator.held_out) + len(evaluator.calibration_texts),
        "real": share(real),
        "estimate": share(estimate),
        "seconds": {
            "texts": round(wrote - began, 1),
            "compressing": round(compressed - wrote, 1),
            "measuring": round(time.process_time() - compressed, 1),
        },
    }


def draw(file: Path, job: Job) -> list[PromptExample]:
    """Return the prompts that an arm is given."""
    count = {"real": REAL, "few": FEW}.get(job.arm, 0)
    return random.Random(job.seed).sample(read_examples(file), count)


@contextmanager
def shares_of(arm: str) -> Iterator[None]:
    """Let texts be written from a part of the mixture alone."""
    shares = SHARES.get(arm)
    if shares is None:
        yield
        return
    with (
        patch.object(written_texts, "BACKWARDS_SHARE", shares[0]),
        patch.object(written_texts, "BEGINNINGS_SHARE", shares[1]),
        patch.object(written_texts, "N_WORDS", 0 if arm == "one form" else written_texts.N_WORDS),
    ):
        yield


def share(behaviour: Behaviour) -> Row:
    """Return the share kept, with its standard error."""
    return {
        "examples": behaviour.examples,
        "kept": behaviour.kept,
        "standard_error": behaviour.standard_error,
        "effect": behaviour.effect,
    }


def bias(rows: list[Row]) -> dict[str, Row]:
    """Return by how much estimates on written texts exceed the shares on real ones.

    Tasks count alike, however many rows they have. The spread is the root of the mean square about
    the mean, over rows. Rows of ``--redraw`` do not count: they are what the bias is tested on.
    """
    found = {}
    for arm in ("few", "none"):
        differences: dict[str, list[float]] = {}
        for row in rows:
            if row["arm"] == arm and row["seed"] == row["compressed_by"]:
                difference = row["estimate"]["kept"] - row["real"]["kept"]
                differences.setdefault(row["task"], []).append(difference)
        if not differences:
            continue
        means = {task: sum(values) / len(values) for task, values in differences.items()}
        mean = sum(means.values()) / len(means)
        every = [value for values in differences.values() for value in values]
        spread = (sum((value - mean) ** 2 for value in every) / len(every)) ** 0.5
        found[arm] = {"mean": mean, "spread": spread, "draws": len(every), "by_task": means}
    return found


if __name__ == "__main__":
    main()
