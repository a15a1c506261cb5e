"""ALS against tensorly.parafac and pyttb.cp_als: CPU seconds to the same error, in one process.

    python -m benchmarks.solvers.cp

writes benchmarks/results/cp.json. Our error and γ are those of `ALS(storage="float16")`;
the others run until they are as accurate or the limit of CPU seconds is over. Set OMP_NUM_THREADS=1
for one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import record as records
from benchmarks.record import RESULTS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import problems
import pyttb
from tensorly.decomposition import parafac

from lsrdecomp.kronecker.cp import from_cp
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.cp.als import ALS
from lsrdecomp.targets.target import Dense

CHUNK = 20
"""Sweeps between two looks at the error of another library."""


def cases(small: bool) -> list[tuple[str, np.ndarray, KroneckerShape, int]]:
    n = 512 if small else 4096
    three = problems.square(*[round(n ** (1 / 3))] * 3)
    four = problems.square(*[round(n**0.25)] * 4)
    laplacian, laplacian_shape = problems.as_matrix(problems.inverse_laplacian_tensor(32, 3))
    inverse = problems.variable_coefficient_inverse(n)
    rows = [
        (f"exponential kernel {n}, d=3, s=8", problems.exponential_kernel(n, n / 10.0), three, 8),
        (f"variable-coefficient inverse {n}, d=3, s=8", inverse, three, 8),
        ("grid inverse 16³, d=3, s=8", problems.grid_inverse(8 if small else 16, 3), three, 8),
        ("inverse Laplacian spectrum 32³, s=6", laplacian, laplacian_shape, 6),
        ("sum operator, d=6, s=2", problems.sum_operator(6), problems.square(*[2] * 6), 2),
        ("sine of a sum, d=4, s=4", *problems.sine_of_a_sum(4, 4), 4),
    ]
    if small:
        return rows
    grid = ("grid inverse 8⁴, d=4, s=16", problems.grid_inverse(8, 4), four, 16)
    return [*rows, (f"variable-coefficient inverse {n}, d=4, s=16", inverse, four, 16), grid]


def chase(
    step: Callable[[object], tuple[object, SeparatedMatrix]],
    target: Dense,
    goal: float,
    limit: float,
) -> dict:
    """Run ``step`` until the error meets ``goal`` or ``limit`` CPU seconds are over.

    Measuring is not counted.
    """
    state, spent, error, best = None, 0.0, math.inf, math.inf
    approximation = None
    while spent < limit and best > goal:
        start = time.process_time()
        try:
            state, approximation = step(state)
        except np.linalg.LinAlgError:
            return {"seconds": spent, "error": best, "reached": False, "note": "singular system"}
        spent += time.process_time() - start
        error = target.residual_norm(approximation) / target.norm
        best = min(best, error)
    condition = approximation.condition if approximation is not None else math.nan
    return {"seconds": spent, "error": best, "reached": best <= goal, "condition": condition}


def tensorly_step(tensor: np.ndarray, shape: KroneckerShape, rank: int, size: float):
    def step(state):
        init = "random" if state is None else state
        cp = parafac(
            tensor,
            rank,
            n_iter_max=CHUNK,
            tol=0,
            init=init,
            random_state=0,
            normalize_factors=False,
        )
        found = from_cp(cp, shape)
        return cp, SeparatedMatrix(found.weights * size, found.factors)

    return step


def pyttb_step(tensor: np.ndarray, shape: KroneckerShape, rank: int, size: float):
    held = pyttb.tensor(np.asfortranarray(tensor))

    def step(state):
        if state is None:
            np.random.seed(0)  # noqa: NPY002 - pyttb draws its start from the global generator
        found, _, _ = pyttb.cp_als(
            held, rank, stoptol=0.0, maxiters=CHUNK, init=state or "random", printitn=0
        )
        matrix = from_cp((found.weights, found.factor_matrices), shape)
        return found, SeparatedMatrix(matrix.weights * size, matrix.factors)

    return step


def measure(
    name: str, matrix: np.ndarray, shape: KroneckerShape, rank: int, limit: float, runs: int
) -> dict:
    target = Dense(matrix)
    size = target.norm
    times, ours = [], None
    for _ in range(runs):
        start = time.process_time()
        ours = (
            ALS(storage="float16", initializations=1).solve(target, shape, rank=rank).approximation
        )
        times.append(time.process_time() - start)
    error = target.residual_norm(ours) / size
    row = {
        "problem": name,
        "rank": rank,
        "ALS": {
            "seconds": float(np.median(times)),
            "error": error,
            "condition": ours.condition,
            "error in float16": target.residual_norm(ours.round_to("float16")) / size,
        },
    }
    tensor = np.ascontiguousarray(rearrange(matrix / size, shape))
    for library, make in (("tensorly", tensorly_step), ("pyttb", pyttb_step)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row[library] = chase(make(tensor, shape, rank, size), target, 1.01 * error, limit)
        row[library]["ratio"] = row[library]["seconds"] / row["ALS"]["seconds"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--limit", type=float, default=60.0, help="CPU seconds for each other library and problem"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of ALS, of which the median counts"
    )
    parser.add_argument("--small", action="store_true", help="512 instead of 4096 rows")
    parser.add_argument(
        "--only", nargs="*", help="problems whose names contain one of these; others stay as stored"
    )
    options = parser.parse_args()
    stored = RESULTS / "cp.json"
    held = records.load(stored) if options.only else {}
    rows = {row["problem"]: row for row in held.get("rows", [])}
    for case in cases(options.small):
        if not options.only or any(word in case[0] for word in options.only):
            rows[case[0]] = measure(*case, options.limit, options.runs) | {"limit": options.limit}
            print(json.dumps(rows[case[0]]), flush=True)
    record = held | {"rows": list(rows.values())}
    records.save(stored, record, "tensorly", "pyttb", seed=0)


if __name__ == "__main__":
    main()
