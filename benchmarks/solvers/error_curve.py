"""The first points of a large matrix's error curve, against svds of the rearranged matrix.

    python -m benchmarks.solvers.error_curve

A Gaussian kernel on 4096 points with a hundredth of noise, 64 × 64 ⊗ 64 × 64. CPU seconds of both
in one run, and how far the last point lies above the optimum. Writes results/error_curve.json.
"""

from __future__ import annotations

import json
import time

import numpy as np
from scipy.sparse.linalg import svds

import lsrdecomp as lsr
from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.kronecker.rearrange import rearrange

SIZE, RANKS, SEED = 4096, (8, 32), 0


def main() -> None:
    """Measure and write."""
    rng, grid = np.random.default_rng(SEED), np.arange(SIZE) / SIZE
    matrix = np.exp(-50.0 * (grid[:, None] - grid[None, :]) ** 2) + 0.01 * rng.standard_normal(
        (SIZE, SIZE)
    )
    shape, norm, rows = lsr.KroneckerShape.balanced((SIZE, SIZE)), float(np.linalg.norm(matrix)), []
    for rank in RANKS:
        begun = time.process_time()
        curve = lsr.error_curve(matrix, shape, rank=rank)
        ours = time.process_time() - begun
        begun = time.process_time()
        sigma = svds(np.asarray(rearrange(matrix, shape)), k=rank)[1]
        theirs = time.process_time() - begun
        optimum = float(np.sqrt(max(norm**2 - np.sum(sigma**2), 0.0))) / norm
        excess = curve.relative_errors[-1] / optimum - 1.0
        rows.append(
            {
                "rank": rank,
                "seconds": ours,
                "svds_seconds": theirs,
                "ratio": ours / theirs,
                "excess": excess,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    record = {"size": SIZE, "shape": str(shape), "rows": rows}
    records.save(RESULTS / "error_curve.json", record, seed=SEED)


if __name__ == "__main__":
    main()
