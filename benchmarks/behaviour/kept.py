"""Do shares that are measured on held-out texts hold on others, and what does distilling bring?

    python -m benchmarks.behaviour.kept --data GLUE --only draws
    python -m benchmarks.behaviour.kept --data GLUE --only distil [--ratios 96 48] [--seeds 0]

The adapter is the one that ships with the package, a LoRA of SST-2 on all-MiniLM-L6-v2, and so are
its statistics. For the draws, versions of eight sizes answer 1,000 texts of the train split once.
Forty times some of these texts are drawn to choose the smallest version that keeps a share, others
to measure what it keeps, and the rest say what it keeps on texts that took no part. ``apart`` is
so, ``same`` where the texts that measure have also chosen. A share holds if it lies within two
standard errors of the difference. To distil, a version of each structure and ratio is trained on
texts of the train split and judged on the dev split, by divergence from the LoRA's answers and by
labels. Rows are added as they come; a run that was stopped goes on. One thread.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import record as records
from benchmarks.cost.one_command import encoder
from benchmarks.record import RESULTS
from lsrdecomp.calibration.behaviour import Behaviour
from lsrdecomp.calibration.dataset import TextPair, task_texts
from lsrdecomp.calibration.divergence import Reference, ratio_standard_error, without_delta
from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.checkpoints.statistics import read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.compress import search_adapter
from lsrdecomp.compression.measured_settings import EvaluatorSettings
from lsrdecomp.compression.settings import CompressionPlan, Search
from lsrdecomp.fidelity.distil import distil
from lsrdecomp.fidelity.evaluate import Evaluator
from lsrdecomp.training.dataset import score_outputs
from lsrdecomp.training.record import Scores
from lsrdecomp.training.tasks import TASKS

TASK = TASKS["SST-2"]
PACKAGE = Path(str(files("lsrdecomp.cli")))
LORA = PACKAGE / "demo_adapter"
STRUCTURES = {"LSR": Search(), "SVD": Search(orders=())}


@dataclass(frozen=True)
class DrawSettings:
    """How texts are drawn for a share and for what it is held to, as `compress --keep` does it."""

    draws: int = 40
    texts: int = 1000  # of the train split, each answered once by every version
    choosing: int = 64  # selection texts of a draw; `compress` has as many for a classifier
    measuring: int = 128  # held-out texts of a draw; likewise
    asked: tuple[float, ...] = (0.6, 0.7, 0.8, 0.9)  # shares to keep, in turns
    ratios: tuple[float, ...] = (96.0, 68.0, 48.0, 34.0, 24.0, 17.0, 12.0, 8.0)


@dataclass(frozen=True)
class DistilSettings:
    """How versions are distilled."""

    steps: int = 200
    texts: int = 4096  # of the train split; a seed draws them
    max_length: int = 128


def main(given: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="directory of GLUE's tasks")
    parser.add_argument("--out", type=Path, default=RESULTS / "promise.json")
    parser.add_argument("--work", type=Path, default=Path("promise-work"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ratios", type=float, nargs="+", default=[96.0, 48.0])
    parser.add_argument("--only", choices=("draws", "distil"))
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    record = {"rows": []} | records.load(arguments.out)
    texts = task_texts(TASK.read(arguments.data, "train"))
    if arguments.only != "distil" and "draws" not in record:
        record |= measured_draws(texts, arguments.work, DrawSettings())
        save(arguments.out, record)
    if arguments.only != "draws":
        for row in distilled_rows(arguments, texts, record["rows"], DistilSettings()):
            record["rows"].append(row)
            save(arguments.out, record)


def save(path: Path, record: dict[str, Any]) -> None:
    records.save(path, record, "torch", "transformers", "peft", seed=None)


def compressed(structure: str, ratios: Sequence[float], work: Path) -> dict[float, Path]:
    """Return the adapter at each ratio, made by one search of this structure."""
    out = {ratio: work / f"{structure}-{ratio:g}" for ratio in ratios}
    if all(path.exists() for path in out.values()):
        return out
    searched = search_adapter(
        open_checkpoint(LORA),
        [CompressionPlan(ratio=ratio) for ratio in ratios],
        statistics=read_statistics(PACKAGE / "demo_statistics"),
        search=STRUCTURES[structure],
    )
    for ratio, path in out.items():
        searched.compress(CompressionPlan(ratio=ratio), fill=False).save(path, force=True)
    return out


def measured_draws(texts: list[TextPair], work: Path, settings: DrawSettings) -> dict[str, Any]:
    """Let every version answer some texts, and draw from them."""
    held_out = 8  # the fewest; the evaluator's own held-out texts are not used
    sample = random.Random(100).sample(texts, settings.texts + 64)
    answering, others = sample[: settings.texts], sample[settings.texts :]
    evaluator = Evaluator(str(encoder()), LORA, others, EvaluatorSettings(held_out=held_out))
    answering.sort(key=lambda text: len(text[0]))
    reference = Reference(evaluator.source, evaluator.batches(answering, 64))
    losses = {}
    for ratio, version in compressed("LSR", settings.ratios, work).items():
        losses[ratio], *_ = reference.compare_examples(evaluator.base.with_adapter(version))
    rows = list(drawn(losses, reference.effects, settings))
    for way in ("apart", "same"):
        print(f"{way}: {sum(row[way]['holds'] for row in rows)} of {len(rows)} shares hold")
    about = {
        "choosing": settings.choosing,
        "measuring": settings.measuring,
        "texts": settings.texts,
    }
    return {"draws_about": about, "draws": rows}


def drawn(
    losses: dict[float, torch.Tensor], effects: torch.Tensor, settings: DrawSettings
) -> Iterator[dict[str, Any]]:
    """Draw from what versions lose, (texts,) by ratio, and from the LoRA's effect, (texts,)."""
    ends = [settings.measuring, settings.measuring + settings.choosing]

    def share(ratio: float, texts: torch.Tensor) -> float:
        return 1.0 - float(losses[ratio][texts].sum() / effects[texts].sum())

    def standard_error(ratio: float, texts: torch.Tensor) -> float:
        return ratio_standard_error(losses[ratio][texts], effects[texts]) or 0.0

    for draw in range(settings.draws):
        asked = settings.asked[draw % len(settings.asked)]
        order = np.random.default_rng(draw).permutation(len(effects))
        measuring, choosing, fresh = map(torch.from_numpy, np.split(order, ends))
        row: dict[str, Any] = {"draw": draw, "keep": asked}
        for way, choosers in (("apart", choosing), ("same", measuring)):
            enough = [ratio for ratio in losses if share(ratio, choosers) >= asked]
            ratio = max(enough, default=min(losses))
            kept, fresh_kept = share(ratio, measuring), share(ratio, fresh)
            error, fresh_error = standard_error(ratio, measuring), standard_error(ratio, fresh)
            row[way] = {
                "ratio": ratio,
                "kept": kept,
                "error": error,
                "fresh": fresh_kept,
                "fresh_error": fresh_error,
                "holds": abs(fresh_kept - kept) <= 2.0 * math.hypot(error, fresh_error),
            }
        yield row


class Judge:
    """The dev split: divergence from the LoRA's answers, and the labels."""

    def __init__(self, data: Path, evaluator: Evaluator, max_length: int) -> None:
        self.evaluator = evaluator
        examples = sorted(TASK.read(data, "dev"), key=lambda example: len(example.choices[0][0]))
        texts = [text for text, _ in task_texts(examples)]
        self.labels = np.array([example.label for example in examples])
        self.batches = []
        for start in range(0, len(texts), 64):
            read = evaluator.source.tokenizer(
                texts[start : start + 64],
                padding=True,
                truncation=True,
                max_length=max_length,
                return_tensors="pt",
            )
            self.batches.append(dict(read))
        self.reference = Reference(evaluator.source, self.batches)
        self.lora = self._scores(evaluator.source)
        with without_delta(evaluator.source.model):
            self.none = self._scores(evaluator.source)
        self.gain = _loss(self.none) - _loss(self.lora)

    def _scores(self, base: Any) -> Scores:
        with torch.no_grad():
            logits = torch.cat([base.model(**batch).logits for batch in self.batches])
        return score_outputs(TASK, logits.numpy(), self.labels)

    def judge(self, version: Path) -> dict[str, Any]:
        opened = self.evaluator.base.with_adapter(version)
        behaviour: Behaviour = self.reference.compare(opened)
        scores = self._scores(opened)
        return {
            "dev_kept": behaviour.kept,
            "dev_error": behaviour.standard_error,
            "label_share": (_loss(self.none) - _loss(scores)) / self.gain,
            "accuracy": scores.accuracy,
        }


def _loss(scores: Scores) -> float:
    assert scores.loss is not None  # a classification has one
    return scores.loss


def distilled_rows(
    arguments: argparse.Namespace,
    texts: list[TextPair],
    done: list[dict[str, Any]],
    settings: DistilSettings,
) -> Iterator[dict[str, Any]]:
    """Distil each structure at each ratio, and judge it before and after."""
    some = random.Random(0).sample(texts, 512)
    judge = Judge(arguments.data, Evaluator(str(encoder()), LORA, some), settings.max_length)
    keys = [
        {"structure": structure, "ratio": ratio, "seed": seed, "steps": settings.steps}
        for seed in arguments.seeds
        for ratio in arguments.ratios
        for structure in STRUCTURES
    ]
    for key in keys:
        if any(key.items() <= row.items() for row in done):
            continue
        version = compressed(key["structure"], [key["ratio"]], arguments.work)[key["ratio"]]
        out = version.with_name(f"{version.name}-{key['seed']}")
        begun = time.process_time()
        distil(
            version,
            base=str(encoder()),
            data=random.Random(key["seed"]).sample(texts, settings.texts),
            teacher=LORA,
            steps=settings.steps,
            max_length=settings.max_length,
            out=out,
            seed=key["seed"],
            force=True,
        )
        seconds = round(time.process_time() - begun, 1)
        yield {
            **key,
            "cpu_seconds": seconds,
            "before": judge.judge(version),
            "after": judge.judge(out),
            "bytes": (out / WEIGHTS).stat().st_size,
        }


if __name__ == "__main__":
    main()
