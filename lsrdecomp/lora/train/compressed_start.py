"""Start of a run from a LoRA that is compressed first, by statistics of its training examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lsrdecomp.lora.base.calibrate import calibrate
from lsrdecomp.lora.base.open_bases import load_base
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.statistics import METADATA, read_statistics
from lsrdecomp.lora.search.plan import CompressionPlan, Resources
from lsrdecomp.lora.search.searched import search_adapter
from lsrdecomp.lora.train.finetune_record import ADAPTER

if TYPE_CHECKING:
    from pathlib import Path

    from lsrdecomp.lora.train.finetune_settings import FinetuneSettings
    from lsrdecomp.lora.train.run_data import Dataset


def compressed_start(
    settings: FinetuneSettings,
    dataset: Dataset,
    directory: Path,
    *,
    max_examples: int | None = None,
) -> FinetuneSettings:
    """Compress the LoRA in ``init`` by ``ratio``, and return settings with the result as ``init``.

    Parameters
    ----------
    settings : FinetuneSettings
    dataset : Dataset
    directory : Path
        Where adapter and statistics are written. Existing files are not made again.
    max_examples : int, optional
        Training examples that the statistics are of, each of which costs a pass forward and back;
        128 of a language model, which each have many predictions, and 512 of a classifier if None.
    """
    if max_examples is None:
        max_examples = 128 if settings.is_language else 512
    adapter = directory / ADAPTER
    if not adapter.exists():
        statistics = directory / "statistics"
        if not (statistics / METADATA).exists():
            _calibrate(settings, dataset, statistics, min(max_examples, len(dataset.train)))
        plan = CompressionPlan(ratio=settings.ratio, storage=settings.storage or "float32")
        lora = open_checkpoint(str(settings.init))
        searched = search_adapter(
            lora,
            [plan],
            statistics=read_statistics(statistics),
            resources=Resources(device=_gpu(settings)),
        )
        searched.compress(plan).save(adapter)
    return settings.replace(init=str(adapter), ratio=None)


def _calibrate(
    settings: FinetuneSettings, dataset: Dataset, statistics: Path, samples: int
) -> None:
    """Measure the statistics of the base with the LoRA, on training examples."""
    base = load_base(
        dataset.base,
        str(settings.init),
        dtype="bfloat16" if settings.precision == "bfloat16" else "float32",
        device=_gpu(settings) or "cpu",
        trust_remote_code=settings.trust_remote_code,
    )
    batches = dataset.calibration_batches(base, size=settings.batch, seed=settings.seed)
    calibrate(base, batches, out=statistics, seed=settings.seed, samples=samples, effect=False)


def _gpu(settings: FinetuneSettings) -> str | None:
    """Return the GPU that the run will train on; None without one."""
    on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    return "cuda" if on_gpu else None
