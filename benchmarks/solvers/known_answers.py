"""Sums of three and more factors whose best error is known: what ALS finds of it.

    OMP_NUM_THREADS=1 python -m benchmarks.solvers.known_answers

Theory tells the best of border rank two and of the sum operator in two terms, as stored; Strassen's
seven terms are exact; of the inverse Laplacian the best that was found elsewhere is known
(`tests/problems.py`). Writes results/known_answers.json.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from benchmarks import record as records
from benchmarks.record import RESULTS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import problems

import lsrdecomp as lsr
from lsrdecomp.solvers.cp.regularized import MEASURED_ROUNDING
from lsrdecomp.targets.target import Dense

STORAGES = ("bfloat16", "float16", "float32")
SEEDS = 30
"""Starts of the matrix multiplication; of the inverse Laplacian a tenth as many."""


def rounding_of(storage: str, d: int) -> float:
    return MEASURED_ROUNDING * math.sqrt(d) * lsr.unit_roundoff(storage)


def total_error(matrix, shape, storage: str) -> float:
    """Error of two terms as stored: what they leave, and what rounding adds to it."""
    found = lsr.ALS(storage=storage).solve(Dense(matrix), shape, rank=2).approximation
    error = problems.relative_error(matrix, found)
    return math.hypot(error, rounding_of(storage, shape.order) * found.condition)


def border_rank() -> list[dict]:
    """Of x⊗x⊗y + x⊗y⊗x + y⊗x⊗x the theory is that of the sum operator of three factors."""
    matrix, shape = problems.as_matrix(problems.border_rank_two())
    rows = []
    for storage in STORAGES:
        theory, _ = problems.sum_operator_optimum(3, rounding_of(storage, 3))
        error = total_error(matrix, shape, storage)
        rows.append({"storage": storage, "theory": theory, "found": error})
    return rows


def sum_operator() -> list[dict]:
    rows = []
    for d in range(3, 11):
        matrix, shape = problems.sum_operator(d), problems.square(*[2] * d)
        for storage in STORAGES:
            theory, _ = problems.sum_operator_optimum(d, rounding_of(storage, d))
            error = total_error(matrix, shape, storage)
            rows.append({"factors": d, "storage": storage, "theory": theory, "found": error})
    return rows


def errors_by_seed(matrix, shape, rank: int, seeds: int) -> list[float]:
    errors = []
    for seed in range(seeds):
        solver = lsr.ALS(storage="float64", seed=seed)
        found = solver.solve(Dense(matrix), shape, rank=rank).approximation
        errors.append(problems.relative_error(matrix, found))
    return errors


def main() -> None:
    strassen = errors_by_seed(*problems.as_matrix(problems.matrix_multiplication()), 7, SEEDS)
    tensor = problems.inverse_laplacian_tensor(16, 3)
    laplacian = [
        {"terms": rank, "errors": errors_by_seed(*problems.as_matrix(tensor), rank, SEEDS // 10)}
        for rank in (7, 8, 9)
    ]
    result = {
        "border rank two": border_rank(),
        "sum operator": sum_operator(),
        "matrix multiplication": strassen,
        "inverse Laplacian": laplacian,
    }
    records.save(RESULTS / "known_answers.json", result, seed=list(range(SEEDS)))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
