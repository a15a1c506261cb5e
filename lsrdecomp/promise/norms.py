"""Statistics of the base around an adapter, on the texts of a bench: the norm in which forms are searched."""

from __future__ import annotations

import shutil
from pathlib import Path

from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.calibration.questions import TOKEN_HEADS
from lsrdecomp.checkpoints.files import sha256
from lsrdecomp.checkpoints.statistics import METADATA, Statistics, read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.promise.bench import Bench

SAMPLES = 512
"""Examples that calibration reads at most, and half of that where each asks for many tokens."""


def calibrated(bench: Bench, out: Path, written: Path | None = None) -> Statistics:
    """Statistics of the layers that the LoRA adapts, on texts that are not held out.

    With the LoRA active, or with a compressed form of it, as ``written``. Those that a run before finished are taken.
    """
    source, texts = bench.source, bench.calibration[: SAMPLES // 2 if bench.source.head in TOKEN_HEADS else SAMPLES]
    digest = source.adapter_sha256 if written is None else sha256(written / WEIGHTS)
    asked = {"seed": bench.seed, "samples": len(texts), "base": source.name, "modules": list(source.modules)}
    asked |= {"adapter": digest}
    if (out / METADATA).exists():
        settings = read_statistics(out).metadata.get("settings", {})
        if any(settings.get(name) != value for name, value in asked.items()):
            shutil.rmtree(out)
    if not (out / METADATA).exists():
        stage = "calibrating" if written is None else "calibrating with the compressed adapter"
        bench.say(stage)
        calibrate(
            (source if written is None else bench.open(written)).model,
            bench.batches(texts),
            modules=source.modules,
            out=out,
            seed=bench.seed,
            samples=len(texts),
            head=source.head,
            base=source.name,
            adapter_base=source.adapter_base,
            adapter=digest,
            on_batch=lambda now: bench.say(stage, now.examples, now.samples, "examples"),
        )
    return read_statistics(out)
