"""A few terms of a matrix or of many: `decompose` beside the best of what others offer.

    python -m benchmarks.solvers.best_peer
    python -m benchmarks.solvers.best_peer --sizes 256 --ranks 1 4 --batches --seconds 5

A cell is a size, a spectrum and a number of terms. The best peer of a cell is chosen afterwards,
among those whose error is within 1.1e-3 of the least that anybody reached: a user would have to
know which it is. Everybody gets the matrix, rearranges it, and returns its terms with their
measured error. One thread, CPU seconds, all in turns, so that nobody finds the cache as it left it;
the least of the turns counts. Our two solvers stand beside the default that chooses between them.

Cells that are done are kept in ``--work``, and the same command goes on after a kill. Writes
results/best_peer.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import record as records
from benchmarks.record import RESULTS
from benchmarks.solvers import two_factor_peers as peers

NEAR = 1.1e-3
"""Excess over the least error up to which a peer counts: what `decompose` promises, and a tenth."""

ROUNDING = 1e-14
"""Relative error that counts as none."""

OUTRUN = 3.0
"""Whoever takes so many times the best of its kind at first is not run again."""

FAILURES = (RuntimeError, ValueError)
"""What a peer raises where it gives up: PROPACK on small flat spectra, others on exact sums."""

OURS = "lsrdecomp"

OWN_SOLVERS = ("svd", "krylov")
"""Our two solvers, as text; `decompose` chooses one of them."""

FEW_RANKS = {4096: (4, 16)}
"""Numbers of terms of the sizes of which not all are taken."""

Runs: TypeAlias = dict[str, Callable[[], list[float]]]
"""What is timed, by its name; it returns the relative error of each matrix."""


@dataclass(frozen=True)
class Cell:
    """Square matrices of one size and spectrum, and the terms to be found of each."""

    count: int
    size: int
    spectrum: str
    rank: int

    @property
    def sides(self) -> tuple[int, int]:
        """Sides of the two square factors, as even as powers of two allow; the smaller first."""
        larger = 2 ** (self.size.bit_length() // 2)
        return min(larger, self.size // larger), max(larger, self.size // larger)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    arguments.add_argument("--sizes", type=int, nargs="*", default=sizes)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16, 64])
    arguments.add_argument("--batches", nargs="*", default=["64x64", "16x256"], help="COUNTxSIZE")
    arguments.add_argument("--seconds", type=float, default=1.0, help="of turns in a cell")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--out", type=Path, default=RESULTS)
    arguments.add_argument("--work", type=Path, default=Path("build/best_peer.json"))
    options = arguments.parse_args()
    for name in records.THREAD_VARIABLES:
        os.environ[name] = "1"  # read when the libraries are first imported, below
    names = ("sizes", "ranks", "batches", "seconds", "seed")
    settings = {name: getattr(options, name) for name in names}
    packages = ["scikit-learn", "torch"]
    packages += [name for name in peers.OPTIONAL if name not in peers.left_out()]

    record = begun(options.work, settings)
    done = [{name: row[name] for name in Cell.__annotations__} for row in record["rows"]]
    for cell in cells(options.sizes, options.ranks, options.batches):
        if asdict(cell) in done:
            continue
        row = asdict(cell) | compared(cell, options.seconds, options.seed)
        print(line_of(row), flush=True)
        record["rows"].append(row)
        record = records.save(options.work, record, *packages, seed=options.seed)
    record["summary"] = summary(record["rows"])
    records.save(options.out / "best_peer.json", record, *packages, seed=options.seed)
    options.work.unlink(missing_ok=True)
    for line in record["summary"]:
        print(line)


def begun(work: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a run that was stopped, if it had these settings and this code."""
    record = records.load(work)
    if record.get("settings") == settings:
        last = record["provenance"][-1]
        if (last["commit"], last["changes"]) == records.CHECKOUT:
            return record
    return {"settings": settings, "left out": peers.left_out(), "rows": []}


def cells(sizes: list[int], ranks: list[int], batches: list[str]) -> list[Cell]:
    """Return the cells of single matrices, then those of stacks."""
    counts = [(1, size) for size in sizes]
    for text in batches:
        count, size = text.split("x")
        counts.append((int(count), int(size)))
    found = []
    for count, size in counts:
        for spectrum in ("fast", "slow", "noise", "steps", "exact", "near rounding"):
            for rank in ranks:
                cell = Cell(count, size, spectrum, rank)
                is_taken = rank in FEW_RANKS.get(size, ranks)
                if is_taken and rank < cell.sides[0] ** 2:
                    found.append(cell)
    return found


def rearranged_matrix(cell: Cell, rng: Any) -> Any:
    """Return a rearranged matrix of the spectrum of a cell, in random bases."""
    import numpy as np

    rows, columns = (side * side for side in cell.sides)
    if cell.spectrum == "noise":
        return rng.standard_normal((rows, columns))
    k = np.arange(min(rows, columns, 512))
    spectra = {
        "fast": np.exp(-k / 4.0),
        "slow": 1.0 / (1.0 + k),
        "steps": 0.5 ** (k // 8),
        "exact": np.exp(-k[: min(8, rows // 4)] / 4.0),
        "near rounding": np.maximum(0.2**k, 1e-13),
    }
    sigma = spectra[cell.spectrum]
    left = np.linalg.qr(rng.standard_normal((rows, len(sigma))))[0]
    right = np.linalg.qr(rng.standard_normal((columns, len(sigma))))[0]
    return (left * sigma) @ right.T


def compared(cell: Cell, seconds: float, seed: int) -> dict[str, Any]:
    """Return the seconds of those who came near in time, and the best peer's over ours."""
    import numpy as np

    own, others = runs(cell, seed)
    errors = {}
    first = {}
    for name, run in (own | others).items():
        try:
            first[name], errors[name] = first_time(run)
        except FAILURES:
            continue
    least = np.min([found for found in errors.values() if np.all(np.isfinite(found))], axis=0)
    allowed = least * (1.0 + NEAR) + ROUNDING
    near = [name for name in errors if np.all(np.asarray(errors[name]) <= allowed)]
    best_own = min(first[name] for name in own)
    best_other = min(first[name] for name in others if name in near)
    contenders = [OURS]
    for name in near:
        limit = OUTRUN * (best_own if name in own else best_other)
        if name != OURS and first[name] <= limit:
            contenders.append(name)
    taken = in_turns({name: (own | others)[name] for name in contenders}, first, seconds)

    best = min((name for name in taken if name in others), key=taken.__getitem__)
    own_best = min((taken[name] for name in taken if name in own and name != OURS), default=None)
    worst = np.max(np.asarray(errors[OURS]) / np.maximum(least, ROUNDING)) - 1.0
    return {
        "best peer": best,
        "its time over ours": taken[best] / taken[OURS],
        "our time over our better solver's": own_best and taken[OURS] / own_best,
        "excess": max(float(worst), 0.0),
        "seconds": {name: float(f"{spent:.4g}") for name, spent in taken.items()},
        "too far from the optimum": [name for name in errors if name not in near],
    }


def runs(cell: Cell, seed: int) -> tuple[Runs, Runs]:
    """Return ours and the peers', each from the matrices to the errors of its terms."""
    import numpy as np

    from lsrdecomp import KroneckerShape, decompose, decompose_each
    from lsrdecomp.kronecker.rearrange import inverse_rearrange

    rng = np.random.default_rng(seed)
    a, b = cell.sides
    shape = KroneckerShape(((a, a), (b, b)))
    rearranged = [rearranged_matrix(cell, rng) for _ in range(cell.count)]
    matrices = np.stack([inverse_rearrange(matrix, shape) for matrix in rearranged])
    single = np.ascontiguousarray(matrices[0])
    rank = cell.rank

    def ours(solver: str | None) -> Callable[[], list[float]]:
        goals = {} if solver is None else {"solver": solver}
        if cell.count == 1:
            return lambda: [decompose(single, shape, rank=rank, **goals).relative_error]
        return lambda: [
            record.relative_error for record in decompose_each(matrices, shape, rank=rank, **goals)
        ]

    def each(way: peers.Way) -> Callable[[], list[float]]:
        def run() -> list[float]:
            errors = []
            for matrix in matrices:
                entries = matrix.reshape(a, b, a, b).transpose(0, 2, 1, 3).reshape(a * a, b * b)
                length = np.linalg.norm(entries)
                u, sigma, vh = way(entries)
                errors.append(float(np.linalg.norm(entries - (u * sigma) @ vh) / length))
            return errors

        return run

    def together(way: peers.Way) -> Callable[[], list[float]]:
        def run() -> list[float]:
            entries = matrices.reshape(-1, a, b, a, b).transpose(0, 1, 3, 2, 4)
            entries = entries.reshape(-1, a * a, b * b)
            lengths = np.linalg.norm(entries, axis=(1, 2))
            u, sigma, vh = way(entries)
            residuals = entries - (u * sigma[..., None, :]) @ vh
            return list(np.linalg.norm(residuals, axis=(1, 2)) / lengths)

        return run

    own = {OURS: ours(None)}
    for name in OWN_SOLVERS:
        if name != "svd" or a * b <= peers.MAX_GRAM_SIDE:
            own[f"{OURS} {name}"] = ours(name)
    sides = a * a, b * b
    others = {name: each(way) for name, way in peers.ways(sides, rank, seed).items()}
    if cell.count > 1:
        for name, way in peers.batched_ways(sides, rank).items():
            others[name] = together(way)
    return own, others


def first_time(run: Callable[[], list[float]]) -> tuple[float, list[float]]:
    """Return the CPU seconds and the errors of a run; of a short one when it is warm."""
    least = float("inf")
    for _ in range(3):
        start = time.process_time()
        errors = run()
        least = min(least, time.process_time() - start)
        if least > 0.02:
            break
    return least, errors


def in_turns(ways: Runs, first: dict[str, float], seconds: float) -> dict[str, float]:
    """Return the least CPU seconds of each in at least two turns, and for so many seconds.

    A way that fails in one of them, with other random numbers, has taken forever.
    """
    repeats = {name: max(1, int(0.004 / max(first[name], 1e-6))) for name in ways}
    least = dict.fromkeys(ways, float("inf"))
    failed: set[str] = set()
    start = time.process_time()
    turns = 0
    while turns < 2 or time.process_time() - start < seconds:
        for name, run in ways.items():
            if name in failed:
                continue
            try:
                least[name] = min(least[name], mean_time(run, repeats[name]))
            except FAILURES:
                failed.add(name)
        turns += 1
    return least | dict.fromkeys(failed, float("inf"))


def mean_time(run: Callable[[], list[float]], repeats: int) -> float:
    """Return the mean CPU seconds of so many runs."""
    if repeats > 1:
        run()  # brings its code back into the caches, which others have had
    start = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - start) / repeats


def line_of(row: dict[str, Any]) -> str:
    """Return a row for the terminal."""
    cell = f"{row['count']} × {row['size']} {row['spectrum']}, {row['rank']} terms"
    own = row["our time over our better solver's"] or float("nan")
    return (
        f"{cell}: {row['best peer']} {row['its time over ours']:.2f}; "
        f"default over our better {own:.2f}, excess {row['excess']:.1e}"
    )


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return median and least of the best peer's time over ours, by size and number of terms."""
    lines = []
    for count, size in dict.fromkeys((row["count"], row["size"]) for row in rows):
        of_size = [row for row in rows if (row["count"], row["size"]) == (count, size)]
        for rank in ("all", *dict.fromkeys(row["rank"] for row in of_size)):
            chosen = [row for row in of_size if rank in ("all", row["rank"])]
            ratios = [row["its time over ours"] for row in chosen]
            own = [row["our time over our better solver's"] for row in chosen]
            lines.append(
                {
                    "count": count,
                    "size": size,
                    "rank": rank,
                    "median": statistics.median(ratios),
                    "least": min(ratios),
                    "over our better solver": max((ratio for ratio in own if ratio), default=None),
                    "largest excess": max(row["excess"] for row in chosen),
                    "best peers": dict(Counter(row["best peer"] for row in chosen).most_common()),
                }
            )
    return lines


if __name__ == "__main__":
    main()
