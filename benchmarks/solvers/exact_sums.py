"""Exact sums with three to five factors: is each met with no more terms than it was drawn from?

    OMP_NUM_THREADS=1 python -m benchmarks.solvers.exact_sums

500 sums of `tests/problems.py`, real and complex, at tolerances from 1e-2 to 1e-13. A sum that is
not met must be refused by its status. Writes results/exact_sums.json: counts and CPU seconds by
kind and number of factors.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks import record as records
from benchmarks.record import RESULTS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import problems

import lsrdecomp as lsr


def measure(drawn: problems.DrawnSum) -> dict:
    """How one sum ended."""
    begun = time.process_time()
    result = lsr.decompose(drawn.matrix, drawn.shape, rtol=drawn.rtol)
    seconds = time.process_time() - begun
    error = problems.relative_error(drawn.matrix, result.approximation)
    return {
        "met": result.status.met and error <= 1.01 * drawn.rtol,
        "refused": not result.status.met,
        "more terms": result.separation_rank > drawn.terms,
        "fewer terms": result.separation_rank < drawn.terms,
        "condition": result.condition,
        "seconds": seconds,
    }


def summary(kind: str, order: int, runs: list[dict]) -> dict:
    counts = {
        name: sum(run[name] for run in runs)
        for name in ("met", "refused", "more terms", "fewer terms")
    }
    seconds = [run["seconds"] for run in runs]
    figures = {"median seconds": float(np.median(seconds)), "most seconds": max(seconds)}
    condition = max(run["condition"] for run in runs)
    return {
        "kind": kind,
        "factors": order,
        "sums": len(runs),
        **counts,
        "largest condition": condition,
        **figures,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sums", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    groups: dict[tuple[str, int], list[dict]] = defaultdict(list)
    for drawn in problems.drawn_sums(options.sums, options.seed):
        groups[drawn.kind, drawn.shape.order].append(measure(drawn))
    rows = [summary(kind, order, runs) for (kind, order), runs in sorted(groups.items())]
    for row in rows:
        print(json.dumps(row))
    record = {"sums": options.sums, "rtol": [1e-13, 1e-2], "rows": rows}
    records.save(RESULTS / "exact_sums.json", record, seed=options.seed)


if __name__ == "__main__":
    main()
