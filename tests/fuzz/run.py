"""Fuzz every reader: python tests/fuzz/run.py --executions N [--only READER] [--finds FOLDER].

With atheris installed the executions are guided by coverage, else they are blind mutations of the
seeds. Exit code 1 if anything was found; each find is a file to replay with harness.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def guided(name: str, executions: int, finds: Path, seed: int) -> tuple[int, bool]:
    """Executions done, and whether something was found."""
    from harness import FOLDER, memory_folder

    command = [
        sys.executable,
        str(HERE / "harness.py"),
        name,
        f"-runs={executions}",
        f"-seed={seed}",
    ]
    command += [f"-artifact_prefix={finds}/{name}-", "-print_final_stats=1"]
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        environment = {**os.environ, FOLDER: folder}
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env=environment
        )
    counted = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-3000:] + done.stderr[-5000:])
    return int(counted[1]) if counted else 0, done.returncode != 0


def blind(name: str, executions: int, finds: Path, seed: int) -> tuple[int, bool]:
    """The same without a fuzzer."""
    from harness import memory_folder
    from mutation import mutated
    from readers import MOST_BYTES, READERS

    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        inputs = mutated(READERS[name].seeds(), seed, MOST_BYTES)
        for done, content in enumerate(itertools.islice(inputs, executions)):
            try:
                READERS[name](content, Path(folder))
            except Exception:  # noqa: BLE001 – any error is what this looks for
                traceback.print_exc()
                (finds / f"{name}-crash").write_bytes(content)
                return done + 1, True
    return executions, False


def main() -> int:
    """The command line."""
    from readers import READERS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--executions", type=int, default=100_000, help="in total, shared evenly among the readers"
    )
    parser.add_argument("--only", choices=READERS, action="append")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--finds", type=Path, default=Path("fuzz-finds"))
    options = parser.parse_args()
    names = options.only or list(READERS)
    fuzz = guided if find_spec("atheris") else blind
    options.finds.mkdir(exist_ok=True)
    total, found = 0, []
    for name in names:
        begun = time.perf_counter()
        done, bad = fuzz(name, -(-options.executions // len(names)), options.finds, options.seed)
        total += done
        found += [name] if bad else []
        note = ", FOUND" if bad else ""
        seconds = time.perf_counter() - begun
        print(f"{name}: {done:,} executions, {seconds:.0f} s{note}", flush=True)
    print(f"{total:,} executions ({fuzz.__name__}); finds: {', '.join(found) or 'none'}")
    if not any(options.finds.iterdir()):
        options.finds.rmdir()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
