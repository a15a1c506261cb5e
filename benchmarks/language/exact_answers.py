"""How many answers are right to the last token: as compressed, distilled, and distilled further.

    python -m benchmarks.language.exact_answers TASK --lora DIR [--ratios 48 96] \\
        [--own 0 0.5] --work RUNS

TASK holds train.jsonl and held.jsonl, as `benchmarks.language.tasks` writes them; the base is
SmolLM2 in float32. ``--own`` is the share of the steps after the first 15 in which the form learns
from the LoRA's answers to what the form itself says greedily to the prompts (on-policy [1]_), in
place of the completions of the data. A row for the LoRA, for each ratio and for each share is added
to `results/exact_answers.json` as it comes; those that are there are not made again. Ten to twenty
minutes a row on one core.

.. [1] R. Agarwal et al., On-policy distillation of language models, ICLR 2024. arXiv:2306.13649
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import record as records
from benchmarks.language.judge import Judge
from benchmarks.record import RESULTS
from lsrdecomp.calibration.base_model import Base
from lsrdecomp.calibration.dataset import read_examples
from lsrdecomp.calibration.distil import distil_factors
from lsrdecomp.calibration.heads import Batch
from lsrdecomp.calibration.teacher import DistillationData, TeacherBatch, teacher_batch
from lsrdecomp.checkpoints import Journal, open_checkpoint
from lsrdecomp.compression.compress import search_adapter
from lsrdecomp.compression.measured_settings import EvaluatorSettings
from lsrdecomp.compression.settings import CompressionPlan
from lsrdecomp.fidelity.evaluate import Evaluator
from lsrdecomp.training.record import commit

TEXTS, HELD_OUT, LONGEST = 496, 48, 256
RATE, FIRST, MORE = 0.1, 15, 8
"""Rate of all trainings; steps before own continuations, which say little before; tokens beyond the
longest answer."""


@dataclass(frozen=True)
class OwnContinuations(DistillationData):
    """Batches of which a share holds what the student says, with the teacher's logits on that."""

    student: Base = field(kw_only=True)
    share: float = field(kw_only=True)
    asked: list[int] = field(default_factory=list)  # batches so far

    def teacher_batches(self, index: int) -> list[TeacherBatch]:
        """One batch; the first goes to no step."""
        self.asked.append(index)
        step = len(self.asked) - 2
        if step < FIRST or (step * self.share) % 1.0 >= self.share:
            return super().teacher_batches(index)
        return [
            teacher_batch(self.teacher, continued(self.student, batch))
            for batch in self.batches[index]
        ]


@torch.no_grad()
def continued(student: Base, batch: Batch) -> Batch:
    """The prompts of a batch with what the student says to them, which are its answers."""
    tokenizer, model = student.tokenizer, student.model
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    rows = zip(batch["input_ids"], batch["loss_mask"], strict=True)
    prompts = [ids[: int(mask.argmax())].tolist() for ids, mask in rows]
    width = max(map(len, prompts))
    read = {
        "input_ids": torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ),
    }
    new_tokens = int(batch["loss_mask"].sum(1).max()) + MORE
    written = model.generate(  # type: ignore[operator]
        **read, max_new_tokens=new_tokens, do_sample=False, pad_token_id=pad, eos_token_id=end
    )
    said = [row[: row.index(end) + 1] if end in row else row for row in written[:, width:].tolist()]
    longest = max(len(prompt) + len(words) for prompt, words in zip(prompts, said, strict=True))

    def padded(parts: Iterator[list[int]], fill: int = 0) -> torch.Tensor:
        return torch.tensor([part + [fill] * (longest - len(part)) for part in parts])

    both = list(zip(prompts, said, strict=True))
    return {
        "input_ids": padded((prompt + words for prompt, words in both), pad),
        "attention_mask": padded([1] * len(prompt + words) for prompt, words in both),
        "loss_mask": padded([0] * len(prompt) + [1] * len(words) for prompt, words in both),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the rows that are not there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", type=Path)
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument(
        "--held", type=Path, help="problems to judge by; absent, the task's held.jsonl"
    )
    parser.add_argument("--ratios", type=float, nargs="+", default=[48.0, 96.0])
    parser.add_argument("--own", type=float, nargs="+", default=[0.0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "exact_answers.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # Statistics are read from it as they are needed.
    with Journal(options.work / "journal") as journal:
        make_rows(options, journal)


def make_rows(options: argparse.Namespace, journal: Journal) -> None:
    """Those of the task that the record has not."""
    record = {"rows": []} | records.load(options.out)

    def rows(**key: Any) -> list[dict[str, Any]]:
        return [row for row in record["rows"] if key.items() <= row.items()]

    def add(row: dict[str, Any]) -> None:
        print(row, flush=True)
        record["rows"].append(row | {"commit": commit()})
        records.save(options.out, record, "torch", "transformers", "peft", seed=0)

    # 1. The base with the LoRA, its answers to the problems, and the norm.
    task = {"task": options.task.name}
    texts = random.Random(0).sample(read_examples(options.task / "train.jsonl"), TEXTS)
    evaluator = Evaluator(options.base, options.lora, texts, EvaluatorSettings(held_out=HELD_OUT))
    held = options.held or options.task / "held.jsonl"
    judge = Judge(evaluator.source, held, examples=10_000, max_length=LONGEST, mixed=False)
    if not rows(**task, form="LoRA"):
        add({**task, "form": "LoRA", "problems": len(judge.examples), **judge.judge(None)})
    source, plans = (
        open_checkpoint(options.lora),
        [CompressionPlan(ratio=ratio) for ratio in options.ratios],
    )
    searched = search_adapter(source, plans, statistics=evaluator.statistics(journal))
    for ratio, plan in zip(options.ratios, plans, strict=True):
        # 2. A form as compressed.
        form, about = options.work / f"{ratio:g}", {**task, "form": f"1/{ratio:g}"}
        shutil.rmtree(form, ignore_errors=True)
        searched.compress(plan).save(form)
        if not rows(**about, steps=0):
            add({**about, "steps": 0, **judge.judge(evaluator.base.with_adapter(form))})
        # 3. Distilled, with own continuations or without.
        for share in options.own:
            key = {**about, "steps": options.steps, "own": share}
            if rows(**key):
                continue
            student, data = (
                evaluator.base.with_adapter(form),
                evaluator.distillation_data(options.steps),
            )
            since = time.process_time()
            if share:
                parts = data.teacher, data.batches, data.validation
                data = OwnContinuations(*parts, student=student, share=share)
            training = distil_factors(student, data, steps=options.steps, rate=RATE)
            seconds = round(time.process_time() - since, 1)
            add({**key, "cpu_seconds": seconds, "checks": training.checks, **judge.judge(student)})


if __name__ == "__main__":
    main()
