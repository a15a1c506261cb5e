"""Three factors where peers came nearer: noise against six of their starts, and a bounded γ.

    python -m benchmarks.solvers.three_factor_ends

writes benchmarks/results/three_factor_ends.json. CPU seconds of one process; set OMP_NUM_THREADS=1
for one thread.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks import record as records
from benchmarks.record import RESULTS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import problems
import pyttb
import tensorly
from tensorly.decomposition import parafac

from lsrdecomp.decompose import decompose
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.solvers.cp.als import ALS

STARTS, SWEEPS, SETTLED = 6, 100, 1e-6
"""Of each other library: random starts, most sweeps of one, and the change of the error at which it
stops."""
NOISE = [(4, 4, 8), (8, 8, 4)]
"""Side of the three square factors, terms, and how many Gaussian matrices are drawn."""


def by_tensorly(tensor: np.ndarray, rank: int) -> float:
    fits = [
        parafac(tensor, rank, n_iter_max=SWEEPS, tol=SETTLED, init="random", random_state=k)
        for k in range(STARTS)
    ]
    return min(float(np.linalg.norm(tensor - tensorly.cp_to_tensor(fit))) for fit in fits)


def by_pyttb(tensor: np.ndarray, rank: int) -> float:
    wrapped, errors = pyttb.tensor(np.asfortranarray(tensor)), []
    for k in range(STARTS):
        np.random.seed(k)  # noqa: NPY002 - pyttb draws its start from the global generator
        fit, _, _ = pyttb.cp_als(
            wrapped, rank, stoptol=SETTLED, maxiters=SWEEPS, init="random", printitn=0
        )
        errors.append(float(np.linalg.norm(tensor - fit.full().data)))
    return min(errors)


def noise(side: int, rank: int, count: int) -> dict:
    """Mean error and CPU seconds of each library over the same Gaussian matrices."""
    shape, ours = problems.square(side, side, side), []
    measured: dict[str, list[tuple[float, float]]] = {"ALS": ours, "tensorly": [], "pyttb": []}
    for seed in range(count):
        matrix = np.random.default_rng(seed).standard_normal(shape.matrix_shape)
        start = time.process_time()
        result = decompose(matrix, shape, rank=rank)
        ours.append((result.relative_error, time.process_time() - start))
        tensor = np.ascontiguousarray(rearrange(matrix / np.linalg.norm(matrix), shape))
        for library, run in (("tensorly", by_tensorly), ("pyttb", by_pyttb)):
            start = time.process_time()
            error = run(tensor, rank)
            measured[library].append((error, time.process_time() - start))
    row: dict = {"problem": f"Gaussian {side**3}², d=3, s={rank}", "seeds": count}
    for library, values in measured.items():
        errors, seconds = zip(*values, strict=True)
        row[library] = {
            "mean error": float(np.mean(errors)),
            "mean seconds": float(np.mean(seconds)),
            "errors": errors,
        }
    return row


def bounded_condition(rank: int) -> dict:
    """Return error and γ of an inverse of 512 × 512 by the penalty of each type."""
    matrix, shape = problems.variable_coefficient_inverse(512), problems.square(8, 8, 8)
    row: dict = {"problem": f"variable-coefficient inverse 512, d=3, s={rank}"}
    for storage in (None, "float16", "bfloat16"):
        start = time.process_time()
        result = decompose(matrix, shape, rank=rank, solver=ALS(storage=storage))
        row[storage or "no storage"] = {
            "error": result.relative_error,
            "condition": result.condition,
            "seconds": time.process_time() - start,
            "remark": result.remark.strip(),
        }
    return row


def main() -> None:
    rows = [noise(*case) for case in NOISE] + [bounded_condition(rank) for rank in (6, 8)]
    record = {"starts of the others": STARTS, "rows": rows}
    records.save(RESULTS / "three_factor_ends.json", record, "tensorly", "pyttb", seed=0)
    for row in rows:
        print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
