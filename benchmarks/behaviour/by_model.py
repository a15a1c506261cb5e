"""What LSR and truncated SVD keep of a LoRA as compressed, model by model, at equal parameters.

    python -m benchmarks.behaviour.by_model NAME --base BASE --lora LORA --data TEXTS \\
        [--texts 400] [--ratios 96 48 19.2] [--out by_model.json]
    python -m benchmarks.behaviour.by_model MiniLM --data SST-2/train.tsv

The first ``--texts`` of a draw from TEXTS are what `lsrdecomp compress --base --data` would be
given: some measure the norm, others, which nothing else saw, the share of the LoRA's effect that is
kept. Both structures get the same norm and the same parameters. Without ``--lora`` it is the
adapter that ships, on all-MiniLM-L6-v2. Rows are added as they come; those of a name that are there
are not made again.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from benchmarks import record as records
from benchmarks.cost.one_command import encoder
from benchmarks.record import RESULTS
from lsrdecomp.lora.base.texts import read_data
from lsrdecomp.lora.files import Journal, open_checkpoint
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.measure.evaluator import Evaluator
from lsrdecomp.lora.search.plan import CompressionPlan, Search
from lsrdecomp.lora.search.searched import search_adapter

SEARCHES = {"LSR": Search(), "truncated SVD": Search(orders=())}


def drawn(source: Path, folder: Path, count: int, seed: int) -> Path:
    """Write so many texts of a file; of a table with tabs the first column, without its head."""
    lines = source.read_text(encoding="utf-8").splitlines()
    out = folder / "texts.jsonl"
    if source.suffix == ".tsv":
        lines = [line.split("\t")[0].strip() for line in lines[1:]]
        out = folder / "texts.txt"
    texts = random.Random(seed).sample(lines, min(count, len(lines)))
    out.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return out


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="what the table calls the model")
    parser.add_argument("--base", help="as `compress --base` takes it")
    parser.add_argument("--lora", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="texts of the LoRA's task")
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--ratios", type=float, nargs="+", default=[96.0, 48.0, 19.2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "by_model.json")
    arguments = parser.parse_args()
    lora = arguments.lora or Path(str(files("lsrdecomp.cli"))) / "demo_adapter"
    base = arguments.base or str(encoder())
    record: dict[str, Any] = {"rows": []} | records.load(arguments.out)
    done = {(row["model"], row["structure"], row["ratio"], row["seed"]) for row in record["rows"]}
    plans = [CompressionPlan(ratio=ratio) for ratio in arguments.ratios]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts = read_data(drawn(arguments.data, folder, arguments.texts, arguments.seed))
        evaluator = Evaluator(base, lora, texts)
        statistics = evaluator.statistics(Journal(folder / "journal"))
        checkpoint = open_checkpoint(lora)
        for structure, search in SEARCHES.items():
            keys = [(arguments.name, structure, plan.ratio, arguments.seed) for plan in plans]
            if done.issuperset(keys):
                continue
            begin = time.process_time()
            searched = search_adapter(checkpoint, plans, statistics=statistics, search=search)
            for key, plan in zip(keys, plans, strict=True):
                made = searched.compress(plan).save(folder / f"{structure}-{plan.ratio}")
                behaviour = evaluator.measure_held_out(made)
                record["rows"].append(
                    dict(zip(("model", "structure", "ratio", "seed"), key, strict=True))
                    | {
                        "bytes_of_lora": bytes_to_open(next(lora.glob("*.safetensors"))),
                        "bytes": bytes_to_open(made / WEIGHTS),
                        "held_out": behaviour.examples,
                        "effect": behaviour.effect,
                        "kept": behaviour.kept,
                        "error": behaviour.standard_error,
                        "cpu_seconds": round(time.process_time() - begin, 1),
                    }
                )
                print(record["rows"][-1], flush=True)
                begin = time.process_time()
            packages = ("torch", "transformers", "peft")
            record = records.save(arguments.out, record, *packages, seed=arguments.seed)


if __name__ == "__main__":
    main()
