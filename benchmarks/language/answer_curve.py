"""Whole answers kept against bytes: a LoRA compressed by LSR and by truncated SVD.

    python -m benchmarks.language.answer_curve --lora e2e --data train.jsonl --held held.jsonl \\
        --work answer-curve-work [--bytes 8000 30000 60000 120000 240000] [--task E2E] [--seed 1]

A row is a version: its bytes, and to how many fresh prompts its greedy answer is the LoRA's, word
for word. LSR is found in the Fisher norm of 64 texts of ``--data``, as ``compress --base --bytes``
finds it. Truncated SVD is what ``compress --bytes`` writes without a base: the best number of bits
in each layer. The LoRA itself is stored in int8 and int4. Other methods leave out a part of LSR:
the norm, Kronecker products, or integers. Another seed reads other texts for the norm, and answers
the same fresh prompts. Rows are added as they come; a stopped run goes on. At the end one number
for the curve is printed. What training adds, alike for all: `benchmarks.language.rivals`.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import record as records
from benchmarks.language.answer_results import (
    E2E,
    LSR,
    STORED,
    SVD,
    Row,
    mean_size_ratio,
    rows_of_task,
)
from benchmarks.record import RESULTS
from lsrdecomp import compress
from lsrdecomp.lora.base.dataset import read_examples
from lsrdecomp.lora.compress.answer_model import AnswerModel
from lsrdecomp.lora.files import Journal, open_checkpoint
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.measure.evaluator import Evaluator
from lsrdecomp.lora.measure.fidelity import share_kept
from lsrdecomp.lora.measure.output_meter import Meter
from lsrdecomp.lora.search.plan import CompressionPlan, Search

WITHOUT_NORM = "LSR without the norm"
WITHOUT_PRODUCTS = "LSR without Kronecker products"
WITHOUT_INTEGERS = "LSR without integers"
ABLATED = (WITHOUT_NORM, WITHOUT_PRODUCTS, WITHOUT_INTEGERS)
"""LSR without a part: shapes in the Frobenius norm, only low rank, float16 alone."""
FULL_RANK = 1024
"""At least the rank of any LoRA here."""
N_FRESH = 64
"""Prompts that are answered."""
N_TEXTS = 240
"""Texts that are read for the norm; a part of them is set aside, as `compress` does."""


class AnswerCurve:
    """The record of a LoRA's versions, to which rows are added."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.task: str = arguments.task
        self.seed: int = arguments.seed
        self.out: Path = arguments.out
        self.work: Path = arguments.work / f"{arguments.task}-{arguments.seed}"
        self.work.mkdir(parents=True, exist_ok=True)
        self.record: dict[str, Any] = {"rows": []} | records.load(arguments.out)
        self.checkpoint = open_checkpoint(arguments.lora)
        first = self.seed * N_TEXTS
        self.texts = read_examples(arguments.data)[first : first + N_TEXTS]
        self.evaluator = Evaluator(arguments.base, arguments.lora, self.texts)
        fresh = read_examples(arguments.held)[:N_FRESH]
        self.meter = Meter(self.evaluator.source, fresh, self.evaluator.settings)
        _, self.reference = self.meter.own_answers()
        self.model = AnswerModel.of(self.reference)

    def add(self, method: str, budget: int) -> None:
        """Make a version and measure it, unless it has a row."""
        facts = {"task": self.task, "method": method, "budget": budget, "seed": self.seed}
        if any(facts.items() <= row.items() for row in self.record["rows"]):
            return
        was_made = self._place(method, budget).exists()
        begin = time.process_time()
        written = self._written(method, budget)
        cpu_seconds = None if was_made else round(time.process_time() - begin, 1)
        version = self.evaluator.base.with_adapter(written)
        behaviour = self.meter.compare(version)
        matches = self.meter.whole_answers(version)
        expected = self.model.fall(1.0 - share_kept(self.reference.compare(version)))
        row: Row = {
            **facts,
            "bytes": bytes_to_open(written / WEIGHTS),
            **asdict(matches),
            "expected": round(matches.answered * math.exp(-expected), 1),
            "kept": behaviour.kept,
            "agreement": behaviour.agreement,
            "kl": behaviour.kl,
            "cpu_seconds": cpu_seconds,
        }
        print(row, flush=True)
        record = {**self.record, "rows": [*self.record["rows"], row]}
        packages = ("torch", "transformers", "peft")
        self.record = records.save(self.out, record, *packages, seed=self.seed)

    def _place(self, method: str, budget: int) -> Path:
        return self.work / f"{method}-{budget}".replace(" ", "-")

    def _written(self, method: str, budget: int) -> Path:
        """Return the directory of a version, made at the first call."""
        out = self._place(method, budget)
        if out.exists():
            return out
        if method in STORED:
            plan = CompressionPlan(max_rank=FULL_RANK, storage=STORED[method])
            return compress(self.checkpoint, plan).save(out)
        plan = CompressionPlan(
            bytes=budget, storage="float16" if method == WITHOUT_INTEGERS else "auto"
        )
        if method == SVD:
            return compress(self.checkpoint, plan).save(out)
        search = Search(orders=()) if method == WITHOUT_PRODUCTS else Search()
        journal = Journal(self.work / "solved")
        statistics = None
        if method != WITHOUT_NORM:
            statistics = self.evaluator.statistics(Journal(self.work / "statistics"))
        found = compress(
            self.checkpoint, plan, statistics=statistics, search=search, journal=journal
        )
        return found.save(out)


def main() -> None:
    """Add the rows that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default=E2E, help="name of the task in the record")
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="texts of the task, for the norm")
    parser.add_argument("--held", type=Path, required=True, help="fresh prompts of the task")
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=[8000, 30_000, 60_000, 120_000, 240_000]
    )
    methods = [*STORED, SVD, LSR, *ABLATED]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--seed", type=int, default=0, help="which 240 texts of the data are read")
    parser.add_argument("--work", type=Path, default=Path("answer-curve-work"))
    parser.add_argument("--out", type=Path, default=RESULTS / "answer_curve.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    curve = AnswerCurve(arguments)
    for method in arguments.methods:
        budgets = [0] if method in STORED else arguments.bytes
        for budget in budgets:
            curve.add(method, budget)
    rows = rows_of_task(curve.record, arguments.task, arguments.seed)
    if all(sum(row["method"] == method for row in rows) > 1 for method in (LSR, SVD)):
        print(f"{mean_size_ratio(rows, LSR):.2f} of the size of {SVD} at equal answers")


if __name__ == "__main__":
    main()
