"""Peak memory and time of `compress` on an adapter of the size of a 70B model, generated on disk.

python -m benchmarks.cost.memory [--work DIR] [--blocks 1 4 80] [--searched 1]

Blocks have seven modules at full width (8192 and 28672, grouped keys and values 1024, r = 64,
bfloat16): 80 of them are 1.66 GB. Each number of blocks is one process, so that peaks are its own.
``--blocks`` solves for `TERMS` terms; ``--searched`` runs the routes that search for shapes (a
tolerance for every layer, one budget over all) with a short search, since a full one takes days
here. What was measured before and is not measured again stays in the results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp import compress
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.tensors import encode_header
from lsrdecomp.lora.search.layers import layer_pair, open_layers
from lsrdecomp.lora.search.plan import CompressionPlan, Search
from lsrdecomp.lora.search.searched import at_given_terms

RANK = 64
TERMS = 4
MODULES = {
    "self_attn.q_proj": (8192, 8192),
    "self_attn.k_proj": (1024, 8192),
    "self_attn.v_proj": (1024, 8192),
    "self_attn.o_proj": (8192, 8192),
    "mlp.gate_proj": (28672, 8192),
    "mlp.up_proj": (28672, 8192),
    "mlp.down_proj": (8192, 28672),
}
PLANS = {
    "terms": CompressionPlan(separation_rank=TERMS, storage="float16"),
    "rtol": CompressionPlan(rtol=0.9, storage="float16"),
    "ratio": CompressionPlan(ratio=50, storage="float16"),
}
SHORT = Search(orders=(2,), rounds=0, inner_rank=2, sweeps=1)


def make_adapter(folder: Path, blocks: int) -> Path:
    """A PEFT directory of Gaussian halves, written tensor by tensor."""
    shapes = {}
    for block in range(blocks):
        for module, (m, n) in MODULES.items():
            name = f"base_model.model.model.layers.{block}.{module}"
            shapes |= {f"{name}.lora_A.weight": (RANK, n), f"{name}.lora_B.weight": (m, RANK)}
    targets = sorted(module.rpartition(".")[2] for module in MODULES)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "70b-class"})
    )
    rng = np.random.default_rng(0)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(
            encode_header(
                {name: ("bfloat16", shape) for name, shape in shapes.items()}, {"format": "pt"}
            )
        )
        for shape in shapes.values():
            file.write(
                rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16).tobytes()
            )
    return folder


def peak() -> int:
    """Return the most bytes this process held.

    Read from Linux itself, since ``ru_maxrss`` counts what the parent held as well.
    """
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def measure(adapter: Path, plan: str) -> dict[str, Any]:
    """One compression in this process: peaks before it, after solving and after writing."""
    imported = peak()
    begun = time.perf_counter()
    checkpoint = open_checkpoint(adapter)
    result = compress(checkpoint, PLANS[plan], search=None if plan == "terms" else SHORT)
    solved, solving = peak(), time.perf_counter() - begun
    with tempfile.TemporaryDirectory(dir=adapter.parent) as folder:
        out = result.save(Path(folder) / "out")
        written = (out / "adapter_model.safetensors").stat().st_size
    return {
        "plan": PLANS[plan].to_json(),
        "layers": len(checkpoint.layers),
        "source_bytes": checkpoint.weights.stat().st_size,
        "largest_layer_float64_bytes": 8 * max(layer.parameters for layer in checkpoint.layers),
        "written_bytes": written,
        "peak_after_import": imported,
        "peak_after_solving": solved,
        "peak_after_writing": peak(),
        "seconds_solving": solving,
        "seconds_in_all": time.perf_counter() - begun,
        "relative_error": result.totals.relative_error,
    }


def times(adapter: Path) -> list[dict[str, Any]]:
    """Time two thin QRs with their reading, and solving `TERMS` terms, for a layer of each size."""
    found = []
    for layer in {layer.shape: layer for layer in open_checkpoint(adapter).layers}.values():
        checkpoint = open_checkpoint(adapter)
        base, solve = [], []
        for _ in range(3):
            begun = time.perf_counter()
            pair = layer_pair(checkpoint, layer)
            np.linalg.qr(pair.left)
            np.linalg.qr(pair.right.T)
            base.append(time.perf_counter() - begun)
        for _ in range(2):
            chosen = [one for one in open_layers(checkpoint) if one.name == layer.name]
            begun = time.perf_counter()
            at_given_terms(chosen, TERMS, None, "float16")
            solve.append(time.perf_counter() - begun)
        found.append(
            {
                "rows": layer.out_features,
                "columns": layer.in_features,
                "read_and_qr_seconds": min(base),
                "compress_seconds": min(solve),
                "ratio": min(solve) / min(base),
            }
        )
    return found


def child(adapter: Path, job: str) -> Any:
    """`measure` or `times` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.cost.memory", "--child", str(adapter), job]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _order(run: dict[str, Any]) -> tuple[str, int]:
    return run["route"], run["blocks"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, nargs="*", default=[1, 4, 80])
    parser.add_argument("--searched", type=int, nargs="*", default=[1])
    parser.add_argument("--times", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.json")
    parser.add_argument("--child", nargs=2, metavar=("ADAPTER", "JOB"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        adapter, job = Path(options.child[0]), options.child[1]
        print(json.dumps(times(adapter) if job == "times" else measure(adapter, job)))
        return
    record: dict[str, Any] = {"runs": []} | records.load(options.out)
    jobs = [(1, "times")] if options.times else []
    jobs += [(n, "terms") for n in options.blocks]
    jobs += [(n, plan) for n in options.searched for plan in ("rtol", "ratio")]
    for blocks, job in jobs:
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            found = child(make_adapter(Path(folder) / "adapter", blocks), job)
        if job == "times":
            record["times"] = found
        else:
            others = [
                run for run in record["runs"] if (run["route"], run["blocks"]) != (job, blocks)
            ]
            record["runs"] = sorted(
                [*others, {"route": job, "blocks": blocks, **found}], key=_order
            )
        print(blocks, job, json.dumps(found), flush=True)
        records.save(options.out, record, seed=None)


if __name__ == "__main__":
    main()
