"""What compressing a 7B-class adapter costs against reading it, writing it and thin QRs.

python -m benchmarks.cost.route [--work DIR] [--blocks 32] [--widths 512 1024 2048 4096]

A block of a 7B model has seven linear layers, 4096 and 11008 wide; 32 of them are 224 layers, r =
16, bfloat16. In the Frobenius norm `TERMS` terms a side, through `compress` and to disk; the same
process reads the adapter, factorizes both halves of every layer (Q formed, float64) and writes the
adapter again; the run of median ratio is kept. In the K-FAC norm the search of `compress` for one
layer of every width, with weights of 128 eigenpairs as calibration keeps them for wide layers, and
one sweep alone, whose time is fitted by a + b·n.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import record as records
from benchmarks.lab.structures.fit import fit_layers, make_layers
from benchmarks.record import RESULTS
from lsrdecomp import compress
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.files import open_checkpoint, write_lora
from lsrdecomp.lora.search.layers import layer_pair
from lsrdecomp.lora.search.plan import CompressionPlan
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights

RANK = 16
TERMS = 16
EIGENPAIRS = 128
RATIO = 24
MODULES = {
    **{f"self_attn.{name}_proj": (4096, 4096) for name in "qkvo"},
    "mlp.gate_proj": (11008, 4096),
    "mlp.up_proj": (11008, 4096),
    "mlp.down_proj": (4096, 11008),
}


def make_adapter(folder: Path, blocks: int, seed: int) -> Path:
    """A PEFT directory; singular values of every layer fall by about a fifth each."""
    rng, decay = np.random.default_rng(seed), 0.8 ** np.arange(RANK)
    layers = (
        (
            f"model.layers.{block}.{module}",
            (rng.standard_normal((m, RANK)) * decay).astype(ml_dtypes.bfloat16),
            rng.standard_normal((RANK, n)).astype(ml_dtypes.bfloat16),
        )
        for block in range(blocks)
        for module, (m, n) in MODULES.items()
    )
    return write_lora(
        folder, layers=layers, config={"base_model_name_or_path": "7b-class"}, storage="bfloat16"
    )


def seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def frobenius(work: Path, blocks: int, seed: int) -> dict[str, Any]:
    """Seconds of the route and of what it is measured against, each once over all layers."""
    adapter = make_adapter(work / "adapter", blocks, seed)
    checkpoint = open_checkpoint(adapter)
    parts = dict.fromkeys(("read", "factorize", "write", "compress", "save"), 0.0)
    for layer in checkpoint.layers:
        pairs: list[LowRank] = []
        parts["read"] += seconds(
            lambda layer=layer, pairs=pairs: pairs.append(layer_pair(checkpoint, layer))
        )
        parts["factorize"] += seconds(
            lambda pairs=pairs: (np.linalg.qr(pairs[0].left), np.linalg.qr(pairs[0].right.T))
        )
    copies = [(layer.name, *layer.load()) for layer in checkpoint.layers]
    parts["write"] = seconds(
        lambda: write_lora(work / "copy", layers=copies, config={}, storage="bfloat16")
    )
    results: list[Any] = []
    plan = CompressionPlan(separation_rank=TERMS, storage="bfloat16")
    parts["compress"] = seconds(lambda: results.append(compress(open_checkpoint(adapter), plan)))
    parts["save"] = seconds(lambda: results[0].save(work / "out"))
    peer = parts["read"] + parts["factorize"] + parts["write"]
    return {
        "layers": len(checkpoint.layers),
        "terms": TERMS,
        "seconds": parts,
        "ratio": (parts["compress"] + parts["save"]) / peer,
        "relative_error": results[0].totals.relative_error,
    }


def weight(size: int, rng: np.random.Generator) -> LowRankPlusIdentity:
    basis = np.linalg.qr(rng.standard_normal((size, EIGENPAIRS)))[0]
    return LowRankPlusIdentity(basis, 1.0 / np.arange(1.0, EIGENPAIRS + 1), 1e-3)


def kfac(widths: list[int], seed: int) -> list[dict[str, Any]]:
    """Time one layer n × n through the whole search, and a sweep at a fixed shape and rank."""
    rows = []
    for n in widths:
        rng = np.random.default_rng(seed)
        decay = 0.8 ** np.arange(RANK)
        pair = LowRank(rng.standard_normal((n, RANK)) * decay, rng.standard_normal((RANK, n)))
        norm = NormWeights(weight(n, rng), weight(n, rng))
        shape = ProductShape.balanced((n, n), (2, 2))

        def solve(
            sweeps: int, pair: LowRank = pair, shape: ProductShape = shape, norm: NormWeights = norm
        ) -> float:
            solver = JointALS(sweeps=sweeps, tolerance=0.0, trials=0)
            return min(
                seconds(lambda: solver.solve(pair, shape, 4, weights=norm)) for _ in range(3)
            )

        sweep = (solve(9) - solve(1)) / 8
        layers = make_layers({"layer": pair}, {"layer": norm})
        whole = seconds(
            lambda layers=layers: fit_layers(layers, CompressionPlan(ratio=RATIO).budget(layers))
        )
        rows.append({"width": n, "seconds_sweep": sweep, "seconds_layer": whole})
        print(rows[-1], flush=True)
    return rows


def fitted(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Least squares of relative errors of a + b·n."""
    n, t = (np.array([row[name] for row in rows], dtype=float) for name in ("width", key))
    design = np.stack([np.ones_like(n), n], axis=1) / t[:, None]
    (a, b), *_ = np.linalg.lstsq(design, np.ones_like(t), rcond=None)
    return {"a": float(a), "b": float(b), "worst": float(np.max(np.abs(design @ [a, b] - 1.0)))}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--widths", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "route_cost.json")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    runs = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            runs.append(frobenius(Path(folder), options.blocks, options.seed))
        print(json.dumps(runs[-1]), flush=True)
    runs.sort(key=lambda run: run["ratio"])
    record: dict[str, Any] = {
        "frobenius": runs[len(runs) // 2] | {"all_ratios": [run["ratio"] for run in runs]}
    }
    rows = kfac(options.widths, options.seed)
    record["kfac"] = {
        "eigenpairs": EIGENPAIRS,
        "budget_ratio": RATIO,
        "rows": rows,
        "fits": {key: fitted(rows, key) for key in ("seconds_sweep", "seconds_layer")},
    }
    records.save(options.out, record, seed=options.seed)


if __name__ == "__main__":
    main()
