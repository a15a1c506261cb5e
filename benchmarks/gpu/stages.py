"""The stages of `script`: what each does, needs and takes, and the record of those that ran."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lsrdecomp as lsr
from benchmarks import record as records
from benchmarks.gpu import language, script
from benchmarks.gpu.needs import METRIC_PACKAGES, Needs
from benchmarks.language.tasks import write_task
from benchmarks.record import RESULTS
from lsrdecomp.lora.search import MeasuredSettings
from lsrdecomp.lora.train.finetune_record import (
    ADAPTER,
    RECORD,
    FinetuneRecord,
    Scores,
    read_record,
)
from lsrdecomp.lora.train.finetune_run import evaluate, finetune
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

LONGEST = 480.0  # seconds of a stage
LOADING = 30.0  # seconds until a model is there
FLOPS = 3e14  # a second, of a large product in bfloat16 on an H100 as training reaches it
STEP = 0.12  # seconds of a training step of SmolLM2, whose launches take longer than its products
TOKEN = 0.035  # seconds of a step of decoding, likewise
SMALL_WEIGHTS, LARGE_WEIGHTS = 1.35e8, 3.2e9


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the plan: purpose, time on one H100, what it needs, and stages it builds on."""

    name: str
    about: str
    seconds: float
    run: Callable[[], dict[str, Any]]
    needs: Needs
    after: tuple[str, ...] = ()


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Show the plan, run what fits, and write the JSON after every stage."""
    options = read_arguments(given)
    stages, budget = plan(options), 60 * options.minutes
    chosen = fitting(stages, budget, options.work)
    print("\n".join(table(stages, chosen, options)))
    if options.plan:
        return {}
    options.work.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    errors: dict[str, str] = {}
    for stage in chosen:
        if done(options.work, stage).exists():
            continue
        lost = [name for name in stage.after if name in errors]
        if lost:
            errors[stage.name] = f"not begun: {lost[0]} failed"
            print(f"\n{stage.name}: left out, for {lost[0]} failed", flush=True)
            continue
        left = budget - (time.monotonic() - begin)
        if stage.seconds > left and not options.small:
            print(f"\n{stage.name}: {left / 60:.1f} minutes are left; the same command goes on.")
            break
        error = run_stage(stage, options)
        if error is not None:
            errors[stage.name] = error
        save(stages, errors, options)
    return save(stages, errors, options)


def run_stage(stage: Stage, options: argparse.Namespace) -> str | None:
    """Run a stage and keep its figures; return its error, if it ended with one."""
    print(f"\n{stage.name}: {stage.about}", flush=True)
    started = time.monotonic()
    try:
        figures = stage.run()
    except Exception as error:  # noqa: BLE001 - the minutes of the other stages are not lost
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        print(f"{stage.name}: failed after {time.monotonic() - started:.0f} s", flush=True)
        return text
    figures |= {
        "seconds": round(time.monotonic() - started, 1),
        "estimated": round(stage.seconds, 1),
    }
    done(options.work, stage).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"{stage.name}: {figures['seconds']} s, estimated {figures['estimated']:.0f}", flush=True)
    return None


def save(
    stages: list[Stage], errors: dict[str, str], options: argparse.Namespace
) -> dict[str, Any]:
    """Write the record of all that is finished, and return it."""
    finished = [stage for stage in stages if done(options.work, stage).exists()]
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "small": options.small,
        "stages": {
            stage.name: json.loads(done(options.work, stage).read_text("utf-8"))
            for stage in finished
        },
        "errors": errors,
    }
    return records.save(options.out, record, "torch", "transformers", "peft", seed=options.seed)


def read_arguments(given: list[str] | None) -> argparse.Namespace:
    """Options; ``--tiny`` changes what they are by default."""
    parser = argparse.ArgumentParser(
        description=script.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--plan", action="store_true", help="show it and do nothing")
    parser.add_argument("--work", type=Path, default=Path("gpu-runs"))
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument(
        "--task",
        type=Path,
        help="directory with train.jsonl and held.jsonl; absent, sums by a seed",
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=300, help="of SmolLM2's LoRA")
    parser.add_argument("--recover", type=int, default=200, help="steps of LSR from it")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ratio", type=float, default=48.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--small", action="store_true", help="small cases of the kernels: a walk through all stages"
    )
    language.add_options(parser)
    options = parser.parse_args(given)
    if options.metric is None:
        # Sums have one right answer; sentences are compared with references.
        options.metric = "exact" if options.task is None else "bleu"
    return options


def plan(options: argparse.Namespace) -> list[Stage]:
    """All stages, the most telling first, each with its estimate for one H100 in bfloat16."""
    small = Small(options)
    task_files = [] if options.task is None else ["train.jsonl", "held.jsonl"]
    of_task = Needs(
        packages=("transformers", "peft"),
        model=options.model,
        files=tuple(("--task", options.task / name) for name in task_files),
        gigabytes=2.0,
    )
    metric = tuple({METRIC_PACKAGES[options.metric]} if options.metric in METRIC_PACKAGES else ())
    judged = replace(of_task, packages=(*of_task.packages, *metric))
    forms = len(options.ratios) * len(options.structures)
    # 1. Seconds of a step: six operations a weight and token with checkpointing, or what launches
    # take.
    step = max(STEP, 6 * SMALL_WEIGHTS * 64 * options.batch / FLOPS)
    large_step = 6 * LARGE_WEIGHTS * options.max_length / 2 * options.batch / FLOPS
    # 2. Seconds of a form's answers: batches after one another, a launch-bound step a token.
    small_answers = LOADING + 12 * 64 * TOKEN
    answers = (
        LOADING + -(-options.test_examples // options.answer_batch) * options.new_tokens * TOKEN
    )
    # 3. The stages, with the sum of these.
    of_small = [
        (
            "lora",
            f"SmolLM2: a LoRA, {options.steps} steps",
            LOADING + options.steps * step,
            small.lora,
            of_task,
            (),
        ),
        (
            "distill",
            f"{options.ratio:g} times smaller, taught by it",
            240 + options.recover * 2 * step,
            small.distill,
            of_task,
            ("lora",),
        ),
        (
            "train",
            "the same size, trained on the task",
            150 + options.recover * step,
            small.train,
            of_task,
            ("lora",),
        ),
        (
            "answers",
            f"{options.metric} of all three on held-out prompts",
            3 * small_answers,
            small.answers,
            judged,
            ("lora", "distill", "train"),
        ),
    ]
    of_large = [
        (
            "large lora",
            f"PEFT's LoRA, r = {options.rank}",
            3 * LOADING + options.llm_steps * large_step,
            language.lora,
            (),
        ),
        (
            "large forms",
            f"{forms} forms of it, a search for each structure",
            420,
            language.forms,
            ("large lora",),
        ),
    ]
    for number, group in enumerate(language.groups(options, LONGEST / answers), start=1):
        about = (
            f"answers of {len(group)} forms, the LoRA's among them"
            if None in group
            else f"of {len(group)} forms"
        )
        run = partial(language.answers, group=group)
        name = f"large answers {number}"
        of_large.append((name, about, len(group) * answers, run, ("large lora", "large forms")))
    return [
        Stage(
            "layers",
            "an LSR layer beside LoRA and LoKr, 1 to 4,096 tokens",
            60,
            partial(layer_table, options),
            Needs(packages=("peft",)),
        ),
        *(Stage(*each) for each in of_small),
        *(
            Stage(name, about, seconds, partial(run, options), language.needs(options), after)
            for name, about, seconds, run, after in of_large
        ),
    ]


def fitting(stages: list[Stage], budget: float, work: Path) -> list[Stage]:
    """Choose the stages that can run and fit into so many seconds, in order; done ones are free."""
    chosen: list[Stage] = []
    left = budget
    impossible = {stage.name for stage in stages if stage.needs.missing(work)}
    for stage in stages:
        if stage.name in impossible or impossible.intersection(stage.after):
            impossible.add(stage.name)
            continue
        cost = 0.0 if done(work, stage).exists() else stage.seconds
        if cost > left:
            break  # what follows builds on it
        chosen.append(stage)
        left -= cost
    return chosen


def done(work: Path, stage: Stage) -> Path:
    """The file that a finished stage leaves."""
    return work / f"{stage.name.replace(' ', '-')}.json"


def table(stages: list[Stage], chosen: list[Stage], options: argparse.Namespace) -> list[str]:
    """The plan in Markdown."""
    lines = [
        f"Plan for {options.minutes:g} minutes on one H100, in bfloat16:",
        "",
        "| stage | what | minutes | |",
    ]
    lines.append("|---|---|---|---|")
    for stage in stages:
        state = ""
        missing = stage.needs.missing(options.work)
        if done(options.work, stage).exists():
            state = "done"
        elif missing:
            state = f"left out: needs {' and '.join(missing)}"
        elif stage not in chosen:
            state = "left out: no time, or what it builds on is left out"
        lines.append(f"| {stage.name} | {stage.about} | {stage.seconds / 60:.1f} | {state} |")
    total = sum(stage.seconds for stage in chosen if not done(options.work, stage).exists())
    longest = max(LONGEST, *(stage.seconds for stage in stages))
    return [*lines, "", f"{total / 60:.0f} minutes; no stage is longer than {longest / 60:.0f}."]


def layer_table(options: argparse.Namespace) -> dict[str, Any]:
    """Stage 1: `benchmarks.adapters.layers`."""
    # Imported here because PEFT comes with it, and may be missing.
    from benchmarks.adapters import layers

    sizes = (
        ["--widths", "16", "--tokens", "1", "8", "--rounds", "1"]
        if options.small
        else ["--dtype", "bfloat16"]
    )
    return layers.main(
        ["--device", options.device, "--out", str(options.work / "layers.json"), *sizes]
    )


class Small:
    """The stages of SmolLM2: a LoRA, and LSR of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, options.work

    @property
    def task(self) -> Path:
        """The directory of the task; sums of prices where none was given, written once."""
        if self.options.task is not None:
            return Path(self.options.task)
        if not (self.work / "arithmetic" / "held.jsonl").exists():
            write_task("arithmetic", self.work, self.work)
        return self.work / "arithmetic"

    @property
    def common(self) -> FinetuneSettings:
        """Settings of every run on the task."""
        return FinetuneSettings.from_mapping(
            {
                "base": self.options.model,
                "data": str(self.task / "train.jsonl"),
                "dev_data": str(self.task / "held.jsonl"),
                "learning_rate": 2e-3,
                "batch": self.options.batch,
                "steps": self.options.steps,
                "seed": self.options.seed,
                "precision": "bfloat16",
                "device": self.options.device,
                "save_every": 100,
                "samples": 0,
                "log_every": 0,
            }
        )

    def lora(self) -> dict[str, Any]:
        """Stage 3."""
        return arm(trained(self.common.replace(measure_start=True), self.work / "lora"))

    def distill(self) -> dict[str, Any]:
        """Stage 4: compressed by the task, and the factors taught by the LoRA's own answers."""
        target = self.work / "distilled"
        if not target.exists():
            result = lsr.compress(
                str(self.work / "lora" / ADAPTER),
                base=self.options.model,
                data=str(self.task / "train.jsonl"),
                ratio=self.options.ratio,
                distill=self.options.recover,
                device="cuda" if self.options.device == "cuda" else None,
                settings=MeasuredSettings(
                    held_out=8 if self.options.small else 128, dtype="bfloat16"
                ),
            )
            result.save(target)
        return {"parameters": sum(layer.parameters for layer in lsr.open_checkpoint(target).layers)}

    def train(self) -> dict[str, Any]:
        """Stage 5: `finetune --init lora --ratio`."""
        start = {
            "init": str(self.work / "lora" / ADAPTER),
            "ratio": self.options.ratio,
            "method": "lsr",
        }
        settings = self.common.replace(
            **start, steps=self.options.recover, learning_rate=5e-3, measure_start=True
        )
        return arm(trained(settings, self.work / "trained"))

    def answers(self) -> dict[str, Any]:
        """Stage 6: the loss and BLEU of every form."""
        places = {"LoRA": self.work / "lora" / ADAPTER, "distilled": self.work / "distilled"}
        places["trained on"] = self.work / "trained" / ADAPTER
        judged = {}
        for name, adapter in places.items():
            method = "lora" if name == "LoRA" else "lsr"
            settings = self.common.replace(
                init=str(adapter), method=method, metric=self.options.metric
            )
            judged[name] = scored(evaluate(settings))
        return judged


def trained(settings: FinetuneSettings, out: Path) -> FinetuneRecord:
    """A finished run, or a new one."""
    return read_record(out) if (out / RECORD).exists() else finetune(settings, out)


def arm(record: FinetuneRecord) -> dict[str, Any]:
    """The figures of a run."""
    return {
        "parameters": record.adapter_parameters,
        "file_bytes": record.file_bytes,
        "steps": record.steps,
        "step_seconds": round(record.step_seconds, 5),
        "peak_bytes": record.peak_bytes,
        "start": None if record.start is None else scored(record.start),
        **scored(record.dev),
    }


def scored(scores: Scores) -> dict[str, Any]:
    """Scores, flat."""
    return {**scores.metrics, "loss": scores.loss}
