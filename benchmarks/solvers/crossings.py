"""From which size on is `Krylov` faster than `SVD` with the same tolerance?

    python -m benchmarks.solvers.crossings [--runs 5]

Matrices whose rearrangement is square have singular values that fall fast, e^(−k/4), or slowly, 1/k
and k^(−½), or are noise; in double and in single precision, alone and sixteen together. Both
solvers may be a thousandth above the optimum. Krylov is not allowed to hand over where values
hardly fall, which `choose_solver` and it do by the table that comes of this record,
`lsrdecomp.solvers.svd.crossings`. The record has the time of SVD over that of Krylov by the side:
CPU seconds of one thread, minima of runs in turns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import record as records
from benchmarks.record import RESULTS, THREAD_VARIABLES

SIDES = ((8, 8), (10, 10), (12, 12), (14, 14), (16, 16), (20, 20), (23, 23), (28, 28), (32, 32))
RANKS = (1, 4, 8, 16, 32, 64)
COUNTS = (1, 16)
KEYS = ("spectrum", "dtype", "rank", "count")
Key = tuple[str, str, int, int]
Row = dict[str, Any]
MAX_BATCH_SIDE = 256  # of those that are solved sixteen together


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "crossings.json")
    arguments = parser.parse_args()
    for name in THREAD_VARIABLES:
        os.environ[name] = "1"  # read when the libraries are first imported, below
    found: dict[Key, Row] = {}
    for sides in SIDES:
        for key, ratio in measured(sides, arguments):
            row = found.setdefault(key, dict(zip(KEYS, key, strict=True)) | {"ratios": {}})
            row["ratios"][str(sides[0] * sides[1])] = round(ratio, 2)
    record = {"runs": arguments.runs, "rows": list(found.values())}
    records.save(arguments.out, record, seed=arguments.seed)


def measured(sides: tuple[int, int], arguments: argparse.Namespace) -> Iterator[tuple[Key, float]]:
    """Yield the time of SVD over that of Krylov, for matrices of one size."""
    import numpy as np

    from lsrdecomp import KroneckerShape
    from lsrdecomp.kronecker.rearrange import inverse_rearrange
    from lsrdecomp.solvers import SVD, Krylov
    from lsrdecomp.solvers.svd import block_krylov
    from lsrdecomp.targets.target import Dense

    rng = np.random.default_rng(arguments.seed)
    shape = KroneckerShape((sides, sides))
    side = sides[0] * sides[1]
    left, right = (np.linalg.qr(rng.standard_normal((side, side)))[0] for _ in range(2))
    k = np.arange(1.0, side + 1)
    spectra = {"e^(−k/4)": np.exp(-k / 4), "1/k": 1 / k, "k^(−½)": k**-0.5, "noise": None}
    for name, sigma in spectra.items():
        matrix = rng.standard_normal((side, side)) if sigma is None else (left * sigma) @ right.T
        for dtype in ("float64", "float32"):
            entries = inverse_rearrange(matrix, shape).astype(dtype)
            for rank in RANKS:
                for count in COUNTS:
                    if 4 * rank > side or (count > 1 and side > MAX_BATCH_SIDE):
                        continue
                    ways: dict[str, Callable[[], Any]] = {}
                    for label, solver in (("SVD", SVD(tolerance=1e-3)), ("Krylov", Krylov())):
                        if count == 1:
                            target = Dense(entries)
                            ways[label] = lambda s=solver, t=target, r=rank: s.solve(
                                t, shape, rank=r
                            )
                        else:
                            stack = np.stack([entries] * count)
                            ways[label] = lambda s=solver, t=stack, r=rank: s.solve_batch(
                                t, shape, rank=r
                            )
                    with patch.object(block_krylov, "krylov_side", lambda *_, **__: 0):
                        seconds = timed(ways, arguments.runs)
                    yield (name, dtype, rank, count), seconds["SVD"] / seconds["Krylov"]
        print(side, name, flush=True)


def timed(ways: dict[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Return the least CPU seconds of each way, which take turns."""
    least = dict.fromkeys(ways, float("inf"))
    for run in range(runs + 1):
        for label, way in ways.items():
            start = time.process_time()
            way()
            seconds = time.process_time() - start
            if run:  # the first one fills caches
                least[label] = min(least[label], seconds)
    return least


if __name__ == "__main__":
    main()
