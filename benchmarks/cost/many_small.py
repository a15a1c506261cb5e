"""What a store of many small adapters holds and costs: bytes of files, on disk and packed, opening.

python -m benchmarks.cost.many_small small/ --lora my-lora/ --count 10000

``small/`` is what `lsrdecomp compress --bare` wrote. It is copied ``--count`` times, each into a
directory of its own; every copy is then opened and its factors are read. The LoRA itself is opened
a hundred times for comparison. Times are CPU seconds of this process, with one thread.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.lora.files import open_checkpoint

OF_LORA = 100
"""Times that the LoRA itself is opened."""


def opening_seconds(folders: Iterable[Path]) -> float:
    """Return the CPU seconds in which adapters are opened and their numbers are read."""
    start = time.process_time()
    for folder in folders:
        checkpoint = open_checkpoint(folder)
        for layer in checkpoint.layers:
            layer.load()
    return time.process_time() - start


def main() -> None:
    """Copy, pack, open."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("small", type=Path)
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "many_small.json")
    arguments = parser.parse_args()
    files = sorted(path for path in arguments.small.iterdir() if path.is_file())
    with tempfile.TemporaryDirectory() as store:
        folders = [Path(store) / f"person-{number:07}" for number in range(arguments.count)]
        packed = Path(store) / "all.zip"
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for folder in folders:
                shutil.copytree(arguments.small, folder)
                for file in files:
                    archive.write(file, f"{folder.name}/{file.name}")
        copies = [path for folder in folders for path in folder.iterdir()]
        result: dict[str, Any] = {
            "count": arguments.count,
            "bytes": sum(path.stat().st_size for path in files),
            "bytes_of_lora": sum(path.stat().st_size for path in arguments.lora.iterdir()),
            "bytes_on_disk": sum(512 * path.stat().st_blocks for path in copies) / len(folders),
            "bytes_packed": packed.stat().st_size / len(folders),
            "milliseconds_to_open": 1000 * opening_seconds(folders) / len(folders),
            "milliseconds_to_open_lora": 1000
            * opening_seconds([arguments.lora] * OF_LORA)
            / OF_LORA,
        }
    records.save(arguments.out, result, seed=None)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
