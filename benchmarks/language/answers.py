"""What compressed versions of a LoRA answer: whole answers, their wording, and on other tasks.

    python -m benchmarks.language.answers TASK --lora DIR --held held.jsonl [--other held.jsonl]
        [--bleu 32] [--versions NAME=DIRECTORY ...]

A share of divergence is a mean over tokens. A version is also judged by whole answers: by how many
held-out answers would come out of greedy decoding word for word (``exact``; every token must be the
likeliest), by BLEU and chrF of what it writes greedily to some of the prompts, and by how far it is
from the LoRA on prompts of another task, where any change is a side effect. Rows are of the base
without an adapter, of the LoRA, and of each directory; they are added to `results/answers.json` as
they come, and those that are there are not made again.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks import record as records
from benchmarks.language.judge import Judge, overlaps, said
from benchmarks.record import RESULTS
from lsrdecomp.lora.base.base_model import Base
from lsrdecomp.lora.base.divergence import without_delta
from lsrdecomp.lora.base.open_bases import load_base
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.writing import WEIGHTS

NO_ADAPTER = "no adapter"
LORA = "the LoRA"
MAX_LENGTH = 256
"""Tokens of a prompt with its answer, at most."""
NEW_TOKENS = 56
"""Tokens that are written to a prompt, at most."""

Row = dict[str, Any]


def main() -> None:
    """Judge what has no row yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", help="name of the task in the record")
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--held", type=Path, required=True, help="texts of the task")
    parser.add_argument("--examples", type=int, default=300, help="of them, at most")
    parser.add_argument("--other", type=Path, help="texts of another task")
    parser.add_argument("--bleu", type=int, default=0, help="prompts that are answered in full")
    parser.add_argument(
        "--versions", nargs="+", default=[], type=named_directory, metavar="NAME=DIRECTORY"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "answers.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"rows": []} | records.load(arguments.out)
    done = {(row["task"], row["name"]) for row in record["rows"]}
    judges = Judges(arguments)
    for name, directory in [(NO_ADAPTER, None), (LORA, None), *arguments.versions]:
        if (arguments.task, name) in done:
            continue
        row = {"task": arguments.task, "name": name, **judges.row(name, directory)}
        print(row, flush=True)
        record = {**record, "rows": [*record["rows"], row]}
        packages = ("torch", "transformers", "peft", "sacrebleu")
        record = records.save(arguments.out, record, *packages, seed=None)


def named_directory(text: str) -> tuple[str, Path]:
    """Read ``NAME=DIRECTORY``."""
    name, _, directory = text.partition("=")
    if not Path(directory).is_dir():
        raise argparse.ArgumentTypeError(f"{directory!r} is no directory")
    return name, Path(directory)


class Judges:
    """The LoRA's answers on its own task and on another, with which versions are compared."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.base = arguments.base
        self.n_written = arguments.bleu
        self.source = load_base(arguments.base, arguments.lora)
        self.lora_bytes = bytes_to_open(next(arguments.lora.glob("*.safetensors")))
        options = {"examples": arguments.examples, "max_length": MAX_LENGTH, "mixed": False}
        self.own = Judge(self.source, arguments.held, **options)
        self.other = None
        if arguments.other is not None:
            self.other = Judge(self.source, arguments.other, **options)

    def row(self, name: str, directory: Path | None) -> Row:
        """Judge the base alone, the LoRA, or a version of it."""
        if directory is not None:
            version = load_base(self.base, directory)
            return {"bytes": bytes_to_open(directory / WEIGHTS), **self._judged(version)}
        if name == LORA:
            return {"bytes": self.lora_bytes, **self._judged(self.source)}
        with without_delta(self.source.model):
            return {"bytes": 0, **self._judged(self.source)}

    def _judged(self, version: Base) -> Row:
        own = self.own.judge(version)
        n_examples = len(self.own.examples)
        row = {
            "examples": n_examples,
            "loss": own["loss"],
            "kept": 1.0 - own["kl"] / own["effect"],
            "agreement": own["agreement"],
            "exact": own["exact"],
            "exact_error": math.sqrt(own["exact"] * (1.0 - own["exact"]) / n_examples),
        }
        if self.other is not None:
            other = self.other.judge(version)
            row |= {"other_kl": other["kl"], "other_effect": other["effect"]}
        if self.n_written:
            examples = self.own.examples[: self.n_written]
            texts = said(version, examples, new_tokens=NEW_TOKENS)
            row |= overlaps(texts, examples)
        return row


if __name__ == "__main__":
    main()
