"""What a LoRA is worth to a small adapter: LSR made from it and trained on, or from scratch.

    python -m benchmarks.language.from_lora TASK --lora DIR [--seeds 0 1 2] \\
        [--only ARM ...] --work RUNS

TASK holds train.jsonl and held.jsonl, as `benchmarks.language.tasks` writes them; the base is
SmolLM2. All arms see the same examples in the same order and are judged by the loss on held-out
answers. Finished runs in RUNS are not done again; four to six minutes an arm and seed on one core
of a CPU. Writes the rows of its task in `results/from_lora.json`;
`benchmarks.language.from_lora_picture` draws them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.writers.write_lsr import pack_lsr
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.search.layers import layer_product
from lsrdecomp.lora.search.quantize import coded_product
from lsrdecomp.lora.train.finetune_record import ADAPTER, RECORD, FinetuneRecord, read_record
from lsrdecomp.lora.train.finetune_run import evaluate, finetune
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

ARMS: dict[str, dict[str, Any]] = {
    "LSR from the LoRA": {"init": "LORA", "ratio": 48.0, "measure_start": True},
    "LSR from scratch": {
        "method": "lsr",
        "options": {"inner_shape": [2, 2], "separation_rank": 1},
    },
    "LoRA from scratch, as small": {"options": {"r": 1}, "layers": [25, 26, 27, 28, 29]},
    "LoRA from scratch, r = 2": {"options": {"r": 2}},
}
"""What each arm changes. Each learns at the rate that `lsrdecomp finetune` takes by default."""


def main(arguments: list[str] | None = None) -> None:
    """Run what is asked for and not done, and write the record of all that is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", type=Path)
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--precision", choices=("float32", "bfloat16-autocast"), default="float32")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "from_lora.json")
    options = parser.parse_args(arguments)
    common = {
        "base": options.base,
        "data": str(options.task / "train.jsonl"),
        "dev_data": str(options.task / "held.jsonl"),
        "steps": options.steps,
        "batch": 8,
        "precision": options.precision,
        "log_every": 0,
        "samples": 0,
    }
    start = FinetuneSettings.from_mapping(common | {"method": "lora"})  # a new LoRA is the base
    losses = {
        "base": evaluate(start).loss,
        "lora": evaluate(start.replace(init=str(options.lora))).loss,
    }
    task, out = options.task.name, options.out
    before = {"tasks": {}, "rows": []} | records.load(out)
    facts = {
        "steps": options.steps,
        "batch": 8,
        "lora_parameters": open_checkpoint(options.lora).adapter_parameters,
    }
    tasks = before["tasks"] | {task: {**facts, **losses}}
    rows: dict[tuple[str, str, int], dict[str, Any]] = {
        (r["task"], r["arm"], r["seed"]): r for r in before["rows"]
    }
    for seed in options.seeds:
        for arm in options.only:
            changes = {**ARMS[arm], "seed": seed}
            if "init" in changes:
                changes["init"] = str(options.lora)
            record = run(
                FinetuneSettings.from_mapping(common | changes), options.work / f"{arm}-{seed}"
            )
            in_bits = (
                rounded(options.work / f"{arm}-{seed}", record) if arm.startswith("LSR") else None
            )
            rows[task, arm, seed] = {"task": task, **row(arm, seed, record), "int4": in_bits}
            print(rows[task, arm, seed], flush=True)
            results = before | {"tasks": tasks, "rows": list(rows.values())}
            records.save(out, results, "torch", "transformers", "peft", seed=options.seeds)


def run(settings: FinetuneSettings, out: Path) -> FinetuneRecord:
    """A finished run, or a new one."""
    if (out / RECORD).exists():
        return read_record(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    return finetune(settings, out)


def rounded(out: Path, record: FinetuneRecord) -> dict[str, Any]:
    """Return bytes and loss of a run's adapter in four bits, as ``--storage int4`` writes it."""
    trained = open_checkpoint(out / ADAPTER)
    codes = {layer.name: coded_product(layer_product(layer), 4) for layer in trained.layers}
    with TemporaryDirectory() as folder:
        path = pack_lsr(trained, Path(folder) / ADAPTER, stored=codes)
        judged = evaluate(record.settings.replace(init=str(path), ratio=None, options={}))
        return {"bytes": (path / WEIGHTS).stat().st_size, "loss": judged.loss}


def row(arm: str, seed: int, record: FinetuneRecord) -> dict[str, Any]:
    """The figures of a run; ``start`` is the loss of the compressed LoRA before it is trained."""
    return {
        "arm": arm,
        "seed": seed,
        "parameters": record.adapter_parameters,
        "start": None if record.start is None else record.start.loss,
        "loss": record.dev.loss,
        "token_accuracy": record.dev.accuracy,
        "bytes": record.file_bytes,
        "train_seconds": round(record.wall_seconds, 1),
        "learning_rate": record.settings.learning_rate,
    }


if __name__ == "__main__":
    main()
