"""What a calibrated search costs: CPU seconds, memory and errors of all budgets from one search.

    python benchmarks/search_cost.py --adapter DIR --statistics DIR
    python benchmarks/search_cost.py --synthetic 28

The first runs on a real adapter and its statistics; the second on layers of a 7B model (4096², 11008 × 4096 both ways,
r = 16, 128 eigenpairs a side) with the spectra that SmolLM2's layers have, so many of 224 as are asked for. Writes
results/search_cost.json, one record a run, with versions and seed.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lsrdecomp.checkpoints import open_checkpoint, read_statistics
from lsrdecomp.compression.budget import Budget
from lsrdecomp.compression.fit import Fit
from lsrdecomp.compression.layer import stored_layers
from lsrdecomp.compression.layers import Layer
from lsrdecomp.compression.searched import Resources, search_layers
from lsrdecomp.targets.base import LowRank
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights

RATIOS = (96.0, 48.0, 19.0, 10.0, 4.0)
SIZES = ((4096, 4096),) * 4 + ((11008, 4096),) * 2 + ((4096, 11008),)
"""Of one block of the model: q, k, v, o, gate, up, down."""
RANK, PAIRS, SEED = 16, 128, 0


def synthetic(count: int) -> list[Layer]:
    """Layers of the sizes of a 7B model: spectra like k^-1.1 to k^-1.8, damped by .03 of their mean."""
    rng, layers = np.random.default_rng(SEED), []
    for i in range(count):
        m, n = SIZES[i % len(SIZES)]
        pair = LowRank(rng.standard_normal((m, RANK)) * 0.8 ** np.arange(RANK), rng.standard_normal((RANK, n)))
        layers.append(Layer(f"layer.{i}", pair, NormWeights(weight(rng, m, 1.1), weight(rng, n, 1.8))))
    return layers


def weight(rng: np.random.Generator, size: int, power: float) -> LowRankPlusIdentity:
    """`PAIRS` eigenpairs that fall by a power, and an isotropic rest."""
    values = np.arange(1.0, PAIRS + 1.0) ** -power
    rest = 0.03 * values.sum() / size
    return LowRankPlusIdentity(np.linalg.qr(rng.standard_normal((size, PAIRS)))[0], values + rest, rest)


def measured(layers: Sequence[Layer], ratios: Sequence[float], workers: int) -> list[dict[str, Any]]:
    """One search, every ratio; CPU seconds since the start, of this process and its workers."""
    begun, wall, rows = _cpu(), time.perf_counter(), []
    searched = search_layers(layers, [Budget(ratio=ratio) for ratio in ratios], resources=Resources(workers))
    for ratio in ratios:
        fit = Fit.of(layers, searched.fit(Budget(ratio=ratio)))
        row = {
            "ratio": ratio,
            "parameters": fit.parameters,
            "error": fit.relative_error,
            "low_rank_error": fit.low_rank_error,
            "cpu_seconds": round(_cpu() - begun, 1),
            "wall_seconds": round(time.perf_counter() - wall, 1),
            "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _cpu() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--statistics", type=Path)
    parser.add_argument("--synthetic", type=int, metavar="LAYERS")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "search_cost.json")
    options = parser.parse_args()
    if options.synthetic is not None:
        name, layers = f"synthetic 7B, {options.synthetic} of 224 layers", synthetic(options.synthetic)
    else:
        checkpoint = open_checkpoint(options.adapter)
        name, layers = options.adapter.name, stored_layers(checkpoint, read_statistics(options.statistics))
    rows = measured(layers, options.ratios, options.workers)
    versions = {"python": platform.python_version()} | {name: version(name) for name in ("lsrdecomp", "numpy", "scipy")}
    record = {"of": name, "layers": len(layers), "workers": options.workers, "seed": SEED, "rows": rows}
    known = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    runs = [run for run in known if (run["of"], run["workers"]) != (name, options.workers)] + [record]
    options.out.write_text(
        json.dumps({"runs": runs, "versions": versions, "machine": platform.machine()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
