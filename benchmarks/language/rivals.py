"""Ways to write a LoRA in a few kilobytes, at equal bytes and equal training.

    python -m benchmarks.language.rivals --lora LORA --data train.jsonl --held held.jsonl \\
        --other TEXTS.jsonl ... --bytes 1000 3000 --seeds 0 1 2 --methods LSR SVD Uni-LoRA \\
        --work rivals-work [--task E2E] [--out rivals.json]

Every method learns the LoRA's answers to the same texts for the same number of steps. Then its
numbers are stored in few bits, and it is judged on held-out texts that nothing else saw: 1 − KL /
effect, and to how many of 64 fresh prompts the greedy answer is the LoRA's, word for word; older
rows lack that. `benchmarks.language.rival_methods` says what the methods are and how their bytes
are counted.

The learning rate is bracketed at each size, by one rule for all: with the first seed, rates a
factor of three apart are run until the best has a worse one on either side, four at most. The
search begins at the best rate of the next smaller size that was run, or at one of `FIRST_RATES`,
from 60 kB on at a ninth of it: there little is left to learn.
Further seeds run at the best. Rates are relative to the size of a tensor's numbers, as `distill`
has them; those of PEFT's methods, which begin at nothing or at noise, are in plain numbers.

A row of the record is one training. Where nothing fits, ``does_not_fit`` of the record says so.
Rows are added as they come; a stopped run goes on.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import record as records
from benchmarks.language.rival_methods import (
    COMPRESSED,
    LARGE,
    METHODS,
    Rival,
    compressed,
    make_rival,
)
from benchmarks.language.subject import Subject, add_arguments, judged, open_subject
from benchmarks.record import RESULTS
from lsrdecomp.errors import BudgetError
from lsrdecomp.lora.base.autocast import mixed_precision
from lsrdecomp.lora.base.forward import forward
from lsrdecomp.lora.base.open_bases import load_base
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.peft.kernels import without_autocast
from lsrdecomp.lora.train.distill_trainer import kl_loss

FIRST_RATES = {
    "LSR": 0.1,
    "SVD": 0.3,
    "Fisher core": 0.3,
    "XS": 0.3,
    "LoRAQuant": 0.3,
    "Rank one": 1.0,
    "VeRA": 0.3,
    "Uni-LoRA": 0.3,
    "TinyLoRA": 0.03,
    "FourierFT": 1.0,
    "VB-LoRA": 3.0,
}
"""The best rates of earlier trials, from which the search at the smallest size begins."""
RATIO = 3.0
"""Factor between rates."""
MAX_RATES = 4
"""Rates that are run at most for a method and size."""
WARMUP_STEPS = 3
"""Steps over which the rate rises."""

Row = dict[str, Any]


def first_rate(method: str, budget: int, rows: Sequence[Row]) -> float:
    """Return the best rate of the next smaller size, or that of earlier trials.

    Parameters
    ----------
    method : str
    budget : int
    rows : sequence of dict
        Trainings of this method, of any size.

    Examples
    --------
    >>> of_1_kb = {"budget": 1000, "rate": 0.9, "kept": 0.8}
    >>> of_3_kb = {"budget": 3000, "rate": 0.3, "kept": 0.9}
    >>> first_rate("LSR", 1000, [of_1_kb]), first_rate("LSR", 10_000, [of_1_kb, of_3_kb])
    (0.1, 0.3)
    >>> first_rate("LSR", 60_000, [])
    0.0111
    """
    smaller = [row for row in rows if row["budget"] < budget]
    if not smaller:
        rate = FIRST_RATES[method]
        return float(f"{rate / RATIO**2:.3g}") if budget >= LARGE else rate
    nearest = max(row["budget"] for row in smaller)
    of_nearest = [row for row in smaller if row["budget"] == nearest]
    best: float = max(of_nearest, key=lambda row: row["kept"])["rate"]
    return best


def next_rate(first: float, shares: dict[float, float]) -> float | None:
    """Return the next rate to run, None if the best is bracketed or enough were run.

    Parameters
    ----------
    first : float
        The rate to begin with.
    shares : dict of rate to float
        What was kept at the rates that were run.

    Examples
    --------
    >>> next_rate(0.1, {}), next_rate(0.1, {0.1: 0.9}), next_rate(0.1, {0.1: 0.9, 0.3: 0.8})
    (0.1, 0.3, 0.0333)
    >>> next_rate(0.1, {0.1: 0.9, 0.3: 0.8, 0.0333: 0.7}) is None
    True
    """
    if not shares:
        return first
    if len(shares) >= MAX_RATES:
        return None
    best = max(shares, key=lambda rate: shares[rate])
    if best == max(shares):
        return float(f"{best * RATIO:.3g}")
    if best == min(shares):
        return float(f"{best / RATIO:.3g}")
    return None


def train(
    subject: Subject, rival: Rival, seed: int, steps: int, rate: float, *, is_large: bool = False
) -> None:
    """Train a rival on the LoRA's answers, through its rounding.

    It runs in bfloat16 where the processor has it, but for large adapters: what those have lost is
    about as much as the roundoff.
    """
    student = replace(subject.source, model=rival.model)
    # 1. A step is relative to the size of each tensor's numbers.
    groups: list[dict[str, Any]] = []
    for parameter in rival.parameters:
        scale = 1.0
        if rival.is_relative:
            scale = float(parameter.detach().square().mean().sqrt())
        groups.append({"params": [parameter], "scale": scale})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    # 2. Each lesson is seen once, in an order that the seed draws.
    n_lessons = len(subject.lessons)
    order = random.Random(seed).sample(range(n_lessons), n_lessons)
    with nullcontext() if is_large else mixed_precision(rival.model):
        for step in range(steps):
            rising = min(1.0, (step + 1) / WARMUP_STEPS)
            falling = 1.0 - step / steps
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"] * rising * falling
            lesson = subject.lessons[order[step % n_lessons]]
            with rival.rounded():
                logits = forward(student, lesson.batch).logits
                loss = kl_loss(lesson.form_logits(), logits, student.head) / lesson.n_predictions
                optimizer.zero_grad()
                with without_autocast("cpu"):
                    loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def run(subject: Subject, method: str, budget: int, seed: int, steps: int, rate: float) -> Row:
    """Make, train, store and judge one rival."""
    begin = time.process_time()
    rival = make_rival(subject, method, budget, seed, name=f"{seed}-{rate}")
    train(subject, rival, seed, steps, rate, is_large=budget >= LARGE)
    stored = rival.store(subject)
    row = {
        "method": method,
        "budget": budget,
        "seed": seed,
        "steps": steps,
        "rate": rate,
        "bytes": rival.bytes,
        "numbers": rival.numbers,
        **judged(subject, stored),
    }
    row["cpu_seconds"] = round(time.process_time() - begin, 1)
    return row


def untrained(subject: Subject, method: str, budget: int) -> Row:
    """Judge LSR or truncated SVD as it was compressed."""
    begin = time.process_time()
    written = compressed(subject, method, budget)
    row = {
        "method": method,
        "budget": budget,
        "seed": 0,
        "steps": 0,
        "rate": None,
        "bytes": bytes_to_open(written / WEIGHTS),
        **judged(subject, load_base(subject.base, written)),
    }
    row["cpu_seconds"] = round(time.process_time() - begin, 1)
    return row


class Comparison:
    """The record of a comparison, to which rows are added.

    Parameters
    ----------
    subject : Subject
    task : str
    steps : int
    seeds : list of int
    out : Path
    """

    def __init__(
        self, subject: Subject, task: str, steps: int, seeds: list[int], out: Path
    ) -> None:
        self.subject = subject
        self.steps = steps
        self.seeds = seeds
        self.out = out
        self.key = {"task": task, "base": Path(subject.base).name}
        self.record: dict[str, Any] = {"rows": [], "tasks": []} | records.load(out)
        lora = next(subject.lora.glob("*.safetensors"))
        about = {
            **self.key,
            "bytes_of_lora": bytes_to_open(lora),
            "effect": subject.reference.effect,
            "examples": subject.reference.examples,
            "effects": [round(effect, 3) for effect in subject.reference.effects.tolist()],
        }
        others = [each for each in self.record["tasks"] if not self.key.items() <= each.items()]
        self.record["tasks"] = [*others, about]

    def compare(self, method: str, budget: int) -> None:
        """Run a method at a size: as compressed, at bracketed rates, and with further seeds."""
        if self._found("does_not_fit", method=method, budget=budget):
            return
        try:
            if method in COMPRESSED and not self._rows(method, budget, steps=0):
                self._add(untrained(self.subject, method, budget))
            best = self._bracket(method, budget)
            for seed in self.seeds[1:]:
                if not self._rows(method, budget, seed=seed, rate=best, steps=self.steps):
                    self._add(run(self.subject, method, budget, seed, self.steps, best))
        except BudgetError as error:
            print(method, budget, error, flush=True)
            missing = {**self.key, "method": method, "budget": budget}
            known = self.record.get("does_not_fit", [])
            self._save({"does_not_fit": [*known, missing]})

    def _bracket(self, method: str, budget: int) -> float:
        """Run rates with the first seed until the best is bracketed; return the best."""
        seed = self.seeds[0]
        trained = self._found("rows", method=method, seed=seed, steps=self.steps)
        first = first_rate(method, budget, trained)
        while True:
            rows = self._rows(method, budget, seed=seed, steps=self.steps)
            shares = {row["rate"]: row["kept"] for row in rows}
            rate = next_rate(first, shares)
            if rate is None:
                return max(shares, key=lambda each: shares[each])
            self._add(run(self.subject, method, budget, seed, self.steps, rate))

    def _rows(self, method: str, budget: int, **facts: Any) -> list[Row]:
        return self._found("rows", method=method, budget=budget, **facts)

    def _found(self, part: str, **facts: Any) -> list[Row]:
        """Return the entries of a part of the record that say these facts of this task."""
        wanted = {**self.key, **facts}
        return [row for row in self.record.get(part, []) if wanted.items() <= row.items()]

    def _add(self, row: Row) -> None:
        shown = {name: value for name, value in row.items() if name != "lost"}
        print(self.key["task"], shown, flush=True)
        self._save({"rows": [*self.record["rows"], {**self.key, **row}]})

    def _save(self, changes: dict[str, Any]) -> None:
        packages = ("torch", "transformers", "peft")
        record = self.record | changes
        self.record = records.save(self.out, record, *packages, seed=self.seeds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--task", default="E2E", help="name of the task in the record")
    parser.add_argument("--bytes", type=int, nargs="+", default=[1000, 3000, 10_000, 30_000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["LSR", "SVD", "Uni-LoRA"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--work", type=Path, default=Path("rivals-work"))
    parser.add_argument("--out", type=Path, default=RESULTS / "rivals.json")
    arguments = parser.parse_args()
    if "Fisher core" in arguments.methods and not arguments.other:
        parser.error("Fisher cores need texts of other tasks: --other TEXTS.jsonl")
    comparison = Comparison(
        open_subject(arguments), arguments.task, arguments.steps, arguments.seeds, arguments.out
    )
    for budget in arguments.bytes:
        for method in arguments.methods:
            comparison.compare(method, budget)


if __name__ == "__main__":
    main()
