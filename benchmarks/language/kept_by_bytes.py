"""What is kept of one LoRA against all the bytes that open it: the record of README's picture.

    python -m benchmarks.language.kept_by_bytes --lora LORA --data train.jsonl --held held.jsonl \\
        [--methods LSR …] [--bytes 3000 …] [--work DIRECTORY] [--out kept_by_bytes.json]

LSR and truncated SVD as `lsrdecomp compress --bytes --storage auto` writes them, then as
`lsrdecomp distil` trains them on the LoRA's own answers; beside them the nearest of
`benchmarks.language.rivals`, trained on the same answers for as many steps. That file says how
their bytes are counted. Each training runs once, at the rate of `RATES`. All are judged on held-out
texts that nothing else saw: 1 − KL / effect. A row is one adapter; rows are added as they come, and
a stopped run goes on. Where no compressed adapter is as small as a budget, ``does_not_fit`` of the
record says so, with the bytes of the smallest that was found.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import record as records
from benchmarks.language.rivals import (
    COMPRESSED,
    Subject,
    calibrated_only,
    judged,
    row,
    subject,
)
from benchmarks.record import RESULTS
from lsrdecomp.calibration.base_model import load_base
from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.statistics import read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression import CompressionPlan
from lsrdecomp.compression.compress import SearchedAdapter, search_adapter
from lsrdecomp.errors import BudgetError

RATES = {
    "SVD": {1000: 0.3, 3000: 0.3, 10_000: 0.3, 30_000: 0.03},
    "Uni-LoRA": {1000: 0.3, 3000: 0.3, 10_000: 0.1, 30_000: 0.03},
    "LoRAQuant": {3000: 0.3, 10_000: 0.3, 30_000: 0.1},
    "LSR": {1000: 0.1, 3000: 0.1, 10_000: 0.1, 30_000: 0.03},
}
"""The best rate of each method by budget in bytes, of those a factor of three apart that
`results/rivals.json` has, which tried LoRAQuant from 3 kB on."""
RESOLUTION = 50
"""Bytes to which the smallest adapter of a method is found."""


def rows_of(
    subject: Subject, method: str, budget: int, seed: int, steps: int
) -> list[dict[str, Any]]:
    """Return the adapter as trained and, where the method has one, as it was before."""
    key = {"method": method, "budget": budget, "seed": seed}
    rows = []
    if method in COMPRESSED:
        made = calibrated_only(subject, method, budget)
        facts = judged(subject.reference, load_base(subject.base, made))
        rows.append({**key, "steps": 0, "bytes": bytes_to_open(made / WEIGHTS), **facts})
    rate = RATES[method][budget]
    facts = row(subject, method, budget, seed, steps, rate)
    return [*rows, {**key, "steps": steps, "rate": rate, **facts}]


def smallest_found(
    searched: SearchedAdapter, plan: CompressionPlan, too_few: int, enough: int
) -> int | None:
    """Return the bytes of the smallest adapter found between two budgets, None if there is none."""
    found = None
    tried = enough
    while enough - too_few > RESOLUTION:
        try:
            made = searched.compress(replace(plan, bytes=tried))
        except BudgetError:
            if found is None:
                return None
            too_few = tried
        else:
            enough = tried
            found = made.file_bytes
        tried = (too_few + enough) // 2
    return found


def too_small(subject: Subject, method: str, budget: int, enough: int) -> dict[str, Any]:
    """Return what the record says of a budget that no compressed adapter of the method meets."""
    plan = CompressionPlan(bytes=enough, storage="auto")
    statistics = read_statistics(subject.statistics)
    searched = search_adapter(
        open_checkpoint(subject.lora), [plan], statistics=statistics, search=COMPRESSED[method]
    )
    smallest = smallest_found(searched, plan, budget, enough)
    return {"method": method, "budget": budget, "smallest": smallest}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="texts of the task to learn from")
    parser.add_argument("--held", type=Path, required=True, help="texts of the task to judge on")
    parser.add_argument("--methods", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--bytes", type=int, nargs="+", default=[1000, 3000, 10_000, 30_000])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--texts", type=int, default=160, help="texts to learn from")
    parser.add_argument("--samples", type=int, default=64, help="texts to measure the norm on")
    parser.add_argument("--examples", type=int, default=32, help="held-out texts")
    parser.add_argument("--work", type=Path, default=Path("kept-by-bytes-work"))
    parser.add_argument("--out", type=Path, default=RESULTS / "kept_by_bytes.json")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"rows": []} | records.load(arguments.out)
    wanted = [
        (method, budget)
        for method in arguments.methods
        for budget in arguments.bytes
        if budget in RATES[method]
    ]
    known = [*record["rows"], *record.get("does_not_fit", [])]
    done = {(each["method"], each["budget"]) for each in known}
    left = [each for each in wanted if each not in done]
    if not left:
        return
    # Statistics of the base alone are what cores need, and no method here.
    opened = subject(argparse.Namespace(**vars(arguments), other=[]))
    record |= {
        "base": arguments.base,
        "bytes_of_lora": bytes_to_open(next(arguments.lora.glob("*.safetensors"))),
        "effect": opened.reference.effect,
        "examples": opened.reference.examples,
    }
    for method, budget in left:
        begin = time.process_time()
        try:
            rows = rows_of(opened, method, budget, arguments.seed, arguments.steps)
        except BudgetError:
            enough = min((size for size in RATES[method] if size > budget), default=10 * budget)
            rows = [too_small(opened, method, budget, enough)]
            record["does_not_fit"] = [*record.get("does_not_fit", []), *rows]
        else:
            rows[-1]["cpu_seconds"] = round(time.process_time() - begin, 1)
            record["rows"] += rows
        print(*rows, sep="\n", flush=True)
        packages = ("torch", "transformers", "peft")
        record = records.save(arguments.out, record, *packages, seed=arguments.seed)


if __name__ == "__main__":
    main()
