"""What a calibrated search costs: CPU seconds, memory and errors of all budgets from one search.

    python -m benchmarks.cost.search --adapter DIR --statistics DIR
    python -m benchmarks.cost.search --synthetic 224 --ratios 48 [--workers 2]

The first runs on a real adapter and its statistics; the second on layers of a 7B model (4096²,
11008 × 4096 both ways, r = 16, 128 eigenpairs a side) with the spectra that SmolLM2's layers have,
so many of 224 as are asked for, from files as `compress` reads them (1.3 GB for all; --work names
where they lie, and keeps them). Writes results/search_cost.json, one record a run, with versions
and seed.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record as records
from benchmarks.lab.structures.fit import Fit
from benchmarks.record import RESULTS
from lsrdecomp.lora.files import open_checkpoint, read_statistics, write_lora
from lsrdecomp.lora.files.statistics import METADATA
from lsrdecomp.lora.search.layers import Layer, open_layers
from lsrdecomp.lora.search.plan import CompressionPlan, Resources
from lsrdecomp.lora.search.search import fit_budget, search_layers

RATIOS = (96.0, 48.0, 19.0, 10.0, 4.0)
SIZES = ((4096, 4096),) * 4 + ((11008, 4096),) * 2 + ((4096, 11008),)
"""Of one block of the model: q, k, v, o, gate, up, down."""
RANK, PAIRS, SEED = 16, 128, 0


def write_synthetic(directory: Path, count: int) -> tuple[Path, Path]:
    """Make an adapter of a 7B model's sizes.

    Statistics have spectra like k^-1.1 (outputs) and k^-1.8 (inputs).
    """
    # Here, since torch comes with them, whose memory is not to be counted.
    from lsrdecomp.lora.base.accumulators import Counts
    from lsrdecomp.lora.base.statistics_files import write_statistics

    adapter, statistics = directory / f"adapter-{count}", directory / f"statistics-{count}"
    if (statistics / METADATA).exists():
        return adapter, statistics
    rng, tensors = np.random.default_rng(SEED), {}

    def layers() -> Iterator[tuple[str, Any, Any]]:
        for i in range(count):
            (m, n), name = SIZES[i % len(SIZES)], f"layers.{i}.proj"
            left = rng.standard_normal((m, RANK)) * 0.8 ** np.arange(RANK)
            yield name, left.astype(np.float32), rng.standard_normal((RANK, n)).astype(np.float32)
            for side, size, power in (("output", m, 1.1), ("input", n, 1.8)):
                basis = np.linalg.qr(rng.standard_normal((size, PAIRS)))[0]
                values = np.arange(1.0, PAIRS + 1.0) ** -power
                parts = {"eigenvectors": basis, "eigenvalues": values, "rest": np.array(0.0)}
                tensors.update(
                    {
                        f"{name}.{side}.{part}": array.astype(np.float32)
                        for part, array in parts.items()
                    }
                )

    write_lora(adapter, layers=layers(), force=True)
    write_statistics(statistics, {}, tensors, {}, Counts())
    return adapter, statistics


def measured(
    layers: Sequence[Layer], ratios: Sequence[float], workers: int
) -> list[dict[str, Any]]:
    """Search once for every ratio; return seconds since the start of the search or the process."""
    begun, wall, rows = time.process_time(), time.perf_counter(), []
    budgets = [CompressionPlan(ratio=ratio).budget(layers) for ratio in ratios]
    searched = search_layers(layers, budgets, resources=Resources(workers))
    for ratio, budget in zip(ratios, budgets, strict=True):
        fit = Fit.of(layers, fit_budget(searched, budget))
        row = {
            "ratio": ratio,
            "parameters": fit.parameters,
            "error": fit.relative_error,
            "low_rank_error": fit.low_rank_error,
            "cpu_seconds": round(time.process_time() - begun, 1) if workers == 1 else None,
            "wall_seconds": round(time.perf_counter() - wall, 1),
            "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--statistics", type=Path)
    parser.add_argument("--synthetic", type=int, metavar="LAYERS")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "search_cost.json")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.synthetic is not None:
            name = f"synthetic 7B, {options.synthetic} of 224 layers"
            # In a process of its own, whose memory and time are not counted.
            with ProcessPoolExecutor(1) as other:
                files = other.submit(
                    write_synthetic, options.work or Path(place), options.synthetic
                ).result()
        else:
            name, files = options.adapter.name, (options.adapter, options.statistics)
        layers = open_layers(open_checkpoint(files[0]), read_statistics(files[1]))
        rows = measured(layers, options.ratios, options.workers)
    record = {
        "of": name,
        "layers": len(layers),
        "workers": options.workers,
        "rows": rows,
    }
    known = {"runs": []} | records.load(options.out)
    others = [
        run for run in known["runs"] if (run["of"], run["workers"]) != (name, options.workers)
    ]
    records.save(options.out, known | {"runs": [*others, record]}, seed=SEED)


if __name__ == "__main__":
    main()
