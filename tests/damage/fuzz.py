"""Fuzz every reader: python tests/damage/fuzz.py --executions N [--only READER] [--finds FOLDER].

It starts from sound contents, from what was found before and from the contents of the faults. With
atheris installed the executions are guided by coverage, else they are blind mutations. Exit code 1
if anything was found; each find is a file to replay with harness.py.
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
sys.path.insert(0, str(HERE.parent))


def guided(name: str, executions: int, finds: Path, seed: int) -> tuple[int, bool]:
    """Fuzz by coverage; return how many executions were done, and whether something was found."""
    from damage.harness import FOLDER, memory_folder

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
    """Fuzz by blind mutation, with the same return."""
    from damage import MAX_BYTES, READERS, corpus, mutated
    from damage.harness import memory_folder

    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        inputs = mutated(corpus(name), seed, MAX_BYTES)
        for done, content in enumerate(itertools.islice(inputs, executions)):
            try:
                READERS[name](content, Path(folder))
            except Exception:  # noqa: BLE001 – any error is what this looks for
                traceback.print_exc()
                (finds / f"{name}-crash").write_bytes(content)
                return done + 1, True
    return executions, False


def main() -> int:
    """Run the command line."""
    from damage import READERS

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
    executions = -(-options.executions // len(names))
    total = 0
    found = []
    for name in names:
        start = time.perf_counter()
        done, has_find = fuzz(name, executions, options.finds, options.seed)
        seconds = time.perf_counter() - start
        total += done
        note = ""
        if has_find:
            found.append(name)
            note = ", FOUND"
        print(f"{name}: {done:,} executions, {seconds:.0f} s{note}", flush=True)
    print(f"{total:,} executions ({fuzz.__name__}); finds: {', '.join(found) or 'none'}")
    if not any(options.finds.iterdir()):
        options.finds.rmdir()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
