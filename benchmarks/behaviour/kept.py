"""Do shares that are measured on held-out texts hold on others?

    python -m benchmarks.behaviour.kept --data GLUE

The adapter is the one that ships with the package, a LoRA of SST-2 on all-MiniLM-L6-v2, and so are
its statistics. Versions of twenty sizes answer 1,000 texts of the train split once. A hundred times
some of these texts are drawn to choose the smallest version that keeps a share, others to measure
what it keeps, and the rest say what it keeps on texts that took no part. There are three ways:

- ``replaced``, as `compress` does it from 240 texts on: where the texts that measure show less than
  was asked, a larger version takes the place of the first;
- ``apart``: the first is kept, whatever they show;
- ``same``: the texts that measure choose, too.

A share holds if it lies within two standard errors of the difference. One thread, a few minutes.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import record as records
from benchmarks.cost.one_command import encoder
from benchmarks.lab.tasks import TASKS
from benchmarks.record import RESULTS
from lsrdecomp.lora.base.dataset import TextPair
from lsrdecomp.lora.base.divergence import Reference, ratio_standard_error
from lsrdecomp.lora.compress.compress_lora import MAX_REPLACEMENTS
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.statistics import read_statistics
from lsrdecomp.lora.measure.evaluator import Evaluator
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings
from lsrdecomp.lora.search.plan import CompressionPlan
from lsrdecomp.lora.search.searched import search_adapter
from lsrdecomp.lora.train.labelled import texts_of

PACKAGE = Path(str(files("lsrdecomp.cli")))
LORA = PACKAGE / "demo_adapter"
WAYS = ("replaced", "apart", "same")
"""How a version is chosen; see above."""


@dataclass(frozen=True)
class DrawSettings:
    """How texts are drawn for a share and for what it is held to, as `compress --keep` does it."""

    draws: int = 100
    texts: int = 1000  # of the train split, each answered once by every version
    choosing: int = 64  # selection texts of a draw; `compress` has as many for a classifier
    measuring: int = 128  # held-out texts of a draw; likewise
    asked: tuple[float, ...] = (0.6, 0.7, 0.8, 0.9)  # shares to keep, in turns
    # Numbers of the LoRA to those of a version, an eighth apart.
    ratios: tuple[float, ...] = tuple(round(96.0 * 0.88**step, 1) for step in range(20))


def main(given: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="directory of GLUE's tasks")
    parser.add_argument("--out", type=Path, default=RESULTS / "promise.json")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    settings = DrawSettings()
    losses, effects = answered(texts_of(TASKS["SST-2"].read(arguments.data, "train")), settings)
    rows = list(drawn(losses, effects, settings))
    for way in WAYS:
        print(f"{way}: {sum(row[way]['holds'] for row in rows)} of {len(rows)} shares hold")
    about = {
        "choosing": settings.choosing,
        "measuring": settings.measuring,
        "texts": settings.texts,
    }
    record = {"base": "all-MiniLM-L6-v2", "draws_about": about, "draws": rows}
    records.save(arguments.out, record, "torch", "transformers", "peft", seed=None)


def answered(
    texts: list[TextPair], settings: DrawSettings
) -> tuple[dict[float, torch.Tensor], torch.Tensor]:
    """Return what the version of each ratio loses of each text, and the LoRA's effect on it."""
    sample = random.Random(100).sample(texts, settings.texts + 64)
    answering, others = sample[: settings.texts], sample[settings.texts :]
    # The evaluator wants texts of its own, which are not used.
    evaluator = Evaluator(str(encoder()), LORA, others, EvaluatorSettings(held_out=8))
    answering.sort(key=lambda text: len(text[0]))
    reference = Reference(evaluator.source, evaluator.batches(answering, 64))
    plans = {ratio: CompressionPlan(ratio=ratio) for ratio in settings.ratios}
    searched = search_adapter(
        open_checkpoint(LORA),
        list(plans.values()),
        statistics=read_statistics(PACKAGE / "demo_statistics"),
    )
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        for ratio, plan in plans.items():
            version = searched.compress(plan, fill=False).save(Path(folder) / f"{ratio:g}")
            losses[ratio], *_ = reference.compare_examples(evaluator.base.with_adapter(version))
    return losses, reference.effects


def drawn(
    losses: dict[float, torch.Tensor], effects: torch.Tensor, settings: DrawSettings
) -> Iterator[dict[str, Any]]:
    """Draw from what versions lose, (texts,) by ratio, and from the LoRA's effect, (texts,)."""
    ends = [settings.measuring, settings.measuring + settings.choosing]

    def share(ratio: float, texts: torch.Tensor) -> float:
        return 1.0 - float(losses[ratio][texts].sum() / effects[texts].sum())

    def standard_error(ratio: float, texts: torch.Tensor) -> float:
        return ratio_standard_error(losses[ratio][texts], effects[texts]) or 0.0

    def smallest(least_share: float, texts: torch.Tensor) -> float:
        enough = [ratio for ratio in losses if share(ratio, texts) >= least_share]
        return max(enough, default=min(losses))

    for draw in range(settings.draws):
        asked = settings.asked[draw % len(settings.asked)]
        order = np.random.default_rng(draw).permutation(len(effects))
        measuring, choosing, fresh = map(torch.from_numpy, np.split(order, ends))
        # 1. Choose a version in each way.
        chosen = {"apart": smallest(asked, choosing), "same": smallest(asked, measuring)}
        last = best = chosen["apart"]
        for _ in range(MAX_REPLACEMENTS):
            kept = share(last, measuring)
            if kept >= asked:
                break
            excess_loss = share(last, choosing) - kept
            last = smallest(asked + excess_loss, choosing)
            best = max(best, last, key=lambda ratio: share(ratio, measuring))
        chosen["replaced"] = best
        # 2. Hold what is measured of it to what the other texts show.
        row: dict[str, Any] = {"draw": draw, "keep": asked}
        for way in WAYS:
            ratio = chosen[way]
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


if __name__ == "__main__":
    main()
