"""What it costs to cut a LoRA file of 1,500 layers: CPU seconds and peak memory of the command.

The files are synthetic (spectra that fall by a tenth a component, float16, rank 64), with layers of
SDXL's and Wan's sizes.

    python -m benchmarks.cost.resize --layers 1500
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.lora.files.tensors import TensorWriter

SIZES = {
    "sdxl": ((640, 640), (1280, 1280), (1280, 2048), (10240, 1280), (1280, 5120)),
    "wan": ((5120, 5120), (5120, 5120), (5120, 5120), (5120, 5120), (13824, 5120)),
}
RANK, RATIO, SEED = 64, 4, 0
RESULT = RESULTS / "resize.json"


def write(path: Path, model: str, layers: int) -> None:
    """A file of ComfyUI's keys; layers of one size are multiples of each other."""
    rng = np.random.default_rng(SEED)
    halves = {}
    for m, n in SIZES[model]:
        up = rng.standard_normal((m, RANK)) * 0.9 ** np.arange(RANK) * 0.1
        halves[m, n] = up.astype(np.float32), rng.standard_normal((RANK, n)).astype(np.float16)
    with TensorWriter(path.parent) as writer:
        for i in range(layers):
            up, down = halves[SIZES[model][i % len(SIZES[model])]]
            name = f"diffusion_model.blocks.{i}.linear"
            writer.add(f"{name}.lora_up.weight", (up * 0.5 ** rng.uniform(0, 4)).astype(np.float16))
            writer.add(f"{name}.lora_down.weight", down)
            writer.add(f"{name}.alpha", np.array(float(RANK), np.float16))
        writer.write(path, {})


def run(path: Path, *options: str) -> tuple[dict[str, object], float, float]:
    """Figures of the command, its CPU seconds and its peak memory in MB."""
    command = [
        sys.executable,
        "-m",
        "lsrdecomp",
        "compress",
        str(path),
        "--ratio",
        str(RATIO),
        "--quiet",
        *options,
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), seconds, after.ru_maxrss / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=1500)
    layers = parser.parse_args().layers
    rows = []
    for model in SIZES:  # the larger one last: the peak of a process's children only rises
        with tempfile.TemporaryDirectory() as folder:
            path, out = Path(folder) / "style.safetensors", Path(folder) / "small.safetensors"
            write(path, model, layers)
            _, dry, _ = run(path, "--out", str(out), "--dry-run", "--json", "-")
            figures, seconds, memory = run(path, "--out", str(out), "--json", "-")
            sizes = path.stat().st_size, out.stat().st_size
        row = {
            "model": model,
            "layers": layers,
            "rank": RANK,
            "ratio": RATIO,
            "bytes": sizes[0],
            "bytes_after": sizes[1],
        }
        row |= {
            "cpu_seconds": round(seconds, 2),
            "cpu_seconds_dry_run": round(dry, 2),
            "peak_mb": round(memory, 1),
        }
        rows.append(row | {"relative_error": figures["relative_error"]})
        print(rows[-1], flush=True)
    records.save(RESULT, {"rows": rows}, seed=SEED)


if __name__ == "__main__":
    main()
