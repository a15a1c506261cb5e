"""What default BLAS threads cost: commands and `decompose` as a user runs them, and with one.

    python -m benchmarks.cost.threads
    python -m benchmarks.cost.threads --quick --only decompose --out /tmp/threads.json

No variable such as OMP_NUM_THREADS may be set. The commands run on a synthetic LoRA file of 771
layers of SDXL's sizes, once as the environment is and once with OMP_NUM_THREADS=1, in turns, on the
machine as it is, `inspect` and `verify` then beside a busy process on each core. `decompose` runs
in one process, in blocks of calls that take turns: by default, with one thread, and with all
threads throughout ("free": as if the library did not limit them), which says where threads would
pay. CPU seconds include those of BLAS threads that wait for work.

The record is written after each row. Rows that it has are not measured again (but with --again);
those of a quick run are no part of a full one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import record as records
from benchmarks.record import RESULTS, THREAD_VARIABLES
from lsrdecomp.decompose import decompose, decompose_each
from lsrdecomp.lora.files.tensors import TensorWriter
from lsrdecomp.threads import OneBlasThread, blas_libraries, one_blas_thread

LAYERS, RANK, SEED = 771, 16, 0
SIZES = (
    *((1280, 1280),) * 5,
    *((1280, 2048),) * 2,
    *((640, 640), (10240, 1280), (1280, 5120)),
)
"""Shapes of layers, in turns: a transformer block of SDXL in short."""

PAUSE = 0.1
"""Seconds after a block of calls in which BLAS threads that still wait for work count to it."""

Row = dict[str, Any]


def main() -> None:
    """Measure what is asked for and has no row yet."""
    options = arguments()
    found = [name for name in THREAD_VARIABLES if name in os.environ]
    if found:
        raise SystemExit(f"{', '.join(found)} must not be set: this measures what users get")
    known = records.load(options.out)
    rows = known.get("rows", [])
    if not options.quick:
        rows = [row for row in rows if not row["quick"]]
    if options.again:
        rows = [row for row in rows if row["part"] not in options.only]
    done = [row["case"] for row in rows]
    repeats = 1 if options.quick else options.repeats
    for part in options.only:
        for case, measure in PARTS[part](options.quick):
            if case in done:
                continue
            row = {"part": part, "case": case, "quick": options.quick, **measure(repeats)}
            row["load"] = round(os.getloadavg()[0], 1)
            print(json.dumps(row), flush=True)
            rows.append(row)
            record = known | {"layers": LAYERS, "rank": RANK, "repeats": repeats, "rows": rows}
            records.save(options.out, record, "threadpoolctl", seed=SEED)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="few sizes, each once")
    parser.add_argument("--repeats", type=int, default=5, help="turns, of which the median counts")
    parser.add_argument("--again", action="store_true", help="measure rows that are there again")
    parser.add_argument("--out", type=Path, default=RESULTS / "threads.json")
    return parser.parse_args()


# Commands


def commands(quick: bool) -> Iterator[tuple[str, Callable[[int], Row]]]:
    """Yield a case for each command, on the machine as it is and beside busy processes."""
    layers = LAYERS // 10 if quick else LAYERS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lora, small, scratch = (folder / f"{n}.safetensors" for n in ("lora", "small", "scratch"))
        write(lora, layers)
        compress = ("compress", str(lora), "--ratio", "4")
        run((*compress, "--out", str(small)), {})
        verbs = {
            "inspect": ("inspect", str(lora)),
            "verify": ("verify", str(lora), str(small)),
            "compress --ratio 4": (*compress, "--out", str(scratch), "--force"),
            "curve": ("curve", str(lora)),
        }
        for beside, busy, told in (
            ("as it is", nullcontext, tuple(verbs)),
            ("busy", busy_cores, ("inspect", "verify")),
        ):
            for verb in told:
                command = verbs[verb]

                def measure(
                    repeats: int,
                    command: tuple[str, ...] = command,
                    busy: Callable[[], AbstractContextManager[None]] = busy,
                ) -> Row:
                    with busy():
                        return compare_command(command, repeats)

                yield f"{verb}, {layers} layers, {beside}", measure


def write(path: Path, layers: int) -> None:
    """Write a LoRA file of ComfyUI's keys in float16.

    Layers of one size are multiples of each other.
    """
    rng = np.random.default_rng(SEED)
    spectrum = 0.1 * 0.8 ** np.arange(RANK)
    pairs = {
        (m, n): (rng.standard_normal((m, RANK)) * spectrum, rng.standard_normal((RANK, n)))
        for m, n in dict.fromkeys(SIZES)
    }
    with TensorWriter(path.parent) as writer:
        for i in range(layers):
            up, down = pairs[SIZES[i % len(SIZES)]]
            name = f"diffusion_model.blocks.{i}.linear"
            scale = 0.5 ** rng.uniform(0, 4)
            writer.add(f"{name}.lora_up.weight", (scale * up).astype(np.float16))
            writer.add(f"{name}.lora_down.weight", down.astype(np.float16))
            writer.add(f"{name}.alpha", np.array(float(RANK), np.float16))
        writer.write(path, {})


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep each core busy with a process that computes for nobody."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(command: tuple[str, ...], variables: dict[str, str]) -> tuple[float, float]:
    """Return CPU seconds and wall seconds of a command."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "lsrdecomp", *command, "--quiet"],
        stdout=subprocess.DEVNULL,
        env={**os.environ, **variables},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 3):
        raise SystemExit(f"lsrdecomp {' '.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - begin


def compare_command(command: tuple[str, ...], repeats: int) -> Row:
    """Return medians of a command as it is and with one thread, which take turns."""
    modes = {"default": {}, "one": {"OMP_NUM_THREADS": "1"}}
    seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    for _ in range(repeats):
        for mode, variables in modes.items():
            seconds[mode].append(run(command, variables))
    return ratios(seconds)


def ratios(seconds: dict[str, list[tuple[float, float]]]) -> Row:
    """Return medians of (CPU, wall) seconds of each mode, and how they compare with one thread."""
    row: Row = {}
    for mode, pairs in seconds.items():
        cpu, wall = (median(values) for values in zip(*pairs, strict=True))
        row[mode] = {"cpu_seconds": round(cpu, 6), "wall_seconds": round(wall, 6)}
    for mode in seconds:
        if mode == "one":
            continue
        for kind in ("cpu", "wall"):
            ratio = row[mode][f"{kind}_seconds"] / row["one"][f"{kind}_seconds"]
            row[f"{kind}_{mode}_over_one"] = round(ratio, 3)
    return row


# Decompositions


def decompositions(quick: bool) -> Iterator[tuple[str, Callable[[int], Row]]]:
    """Yield a case for each size and number of terms, of Gaussian matrices."""
    rng = np.random.default_rng(SEED)
    sizes = (16, 64, 256, 1024) if quick else (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    for size in sizes:
        matrix = rng.standard_normal((size, size))
        for rank in (1, 4, 16, 64):
            yield f"{size}² rank {rank}", timed(lambda m=matrix, r=rank: decompose(m, rank=r))
    for count, size in ((64, 32), (16, 128), (4, 512)):
        stack = rng.standard_normal((count, size, size))
        yield (
            f"batch of {count} of {size}² rank 4",
            timed(lambda s=stack: decompose_each(s, rank=4)),
        )
    for side in (4, 8):
        matrix = rng.standard_normal((side**3, side**3))
        shape = ((side, side),) * 3
        yield (
            f"three factors, {side**3}² rank 4",
            timed(lambda m=matrix, s=shape: decompose(m, s, rank=4)),
        )


def timed(call: Callable[[], object]) -> Callable[[int], Row]:
    """Return what measures a call by default, with one thread and with all threads."""

    def measure(repeats: int) -> Row:
        for _ in range(2):  # the first call also imports
            begin = time.perf_counter()
            with one_blas_thread:
                call()
            once = time.perf_counter() - begin
        calls = max(1, min(100, round(0.2 / once)))
        modes = {"default": nullcontext, "one": one_thread, "free": free_threads}
        seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
        for _ in range(repeats):
            for mode, context in modes.items():
                with context():
                    seconds[mode].append(block(call, calls))
        return {"calls": calls, **ratios(seconds)}

    return measure


def block(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Return CPU and wall seconds of one call, of so many."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
    wall = time.perf_counter() - wall
    time.sleep(PAUSE)
    return (time.process_time() - cpu) / calls, wall / calls


@contextmanager
def one_thread() -> Iterator[None]:
    """Have one thread as if the environment had said so."""
    before = {library: library.threads for library in blas_libraries()}
    for library in before:
        library.set_threads(1)
    try:
        yield
    finally:
        for library, count in before.items():
            library.set_threads(count)


def free_threads() -> AbstractContextManager[object]:
    """Have the caller's threads everywhere, as if the library did not limit them."""
    return patch.object(OneBlasThread, "_limit", lambda *_: None)


PARTS = {"commands": commands, "decompose": decompositions}

if __name__ == "__main__":
    main()
