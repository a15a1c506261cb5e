"""One compressed form of a LoRA, by `compress` or as a direct sum, to be judged and trained on."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.lab.recover.plan import Structure
from benchmarks.lab.structures.direct import DirectSum, direct_sums_of
from benchmarks.lab.structures.fit import make_layers
from lsrdecomp import compress
from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.allocation import PartOptions, within_cost
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.lora.files import Checkpoint, open_checkpoint
from lsrdecomp.lora.files.statistics import Statistics as StoredStatistics
from lsrdecomp.lora.files.writing import WEIGHTS, new_directory, new_file
from lsrdecomp.lora.peft import DirectConfig
from lsrdecomp.lora.search.layers import StatisticsByLayer, layer_pair
from lsrdecomp.lora.search.plan import CompressionPlan, Search
from lsrdecomp.lora.train.finetune_record import Scores

PEFT_PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
SHAPES = {
    "lsr": (
        *("r", "inner_shape", "order", "separation_rank", "lsr_alpha"),
        *("rank_pattern", "alpha_pattern", "separation_rank_pattern", "shape_pattern"),
    ),
    "direct": ("separation_rank", "separation_rank_pattern", "shape_pattern", "alpha"),
}
"""PartOptions of a method that say what its factors look like."""


@dataclass(frozen=True, slots=True)
class CompressedPoint:
    """What a LoRA was compressed to, and how it answers without any training."""

    parameters: int
    bytes: int  # of the factors as stored, without header and head
    file_bytes: int
    structures: Mapping[str, int]  # what the layers became
    relative_error: float | None  # in the Frobenius norm, over all layers
    functional_error: float | None  # in the Fisher norm, where that was asked for
    cpu_seconds: float
    scores: Scores | None = None

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        with new_file(path) as part:
            part.write_text(
                json.dumps(asdict(self), indent=2, allow_nan=False) + "\n", encoding="utf-8"
            )

    @classmethod
    def read(cls, path: Path) -> CompressedPoint:
        """What `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            **{**values, "scores": None if values["scores"] is None else Scores(**values["scores"])}
        )


def compress_lora(
    lora: Path,
    structure: Structure,
    budget: int,
    statistics: StatisticsByLayer | None,
    out: Path,
    search: Search | None = None,
) -> CompressedPoint:
    """Compress a LoRA directory to ``budget`` parameters a matrix on average, written to ``out``.

    Raises
    ------
    BudgetError
        If nothing of the adapter fits.
    """
    checkpoint, begin = open_checkpoint(lora), time.process_time()
    own = statistics if structure.functional else None
    total = budget * len(checkpoint.layers)
    if structure.direct:
        chosen = direct_sums(checkpoint, total, own)
        _write_direct(checkpoint, chosen, out)
        parameters = sum(candidate.parameters for candidate in chosen.values())
        done = CompressedPoint(parameters, 4 * parameters, 0, _count(chosen), None, None, 0.0)
    else:
        plan = CompressionPlan(
            **(structure.goal or {"parameters": total}), storage=structure.storage
        )
        wide = search if search is not None and structure.search.orders else structure.search
        if plan.separation_rank is not None:  # terms that are given are not searched for
            wide = None
        result = compress(checkpoint, plan, statistics=own, search=wide)
        result.save(out)
        sums = result.totals
        kinds = dict(Counter(layer.structure for layer in result.layers))
        errors = (sums.relative_error, sums.functional_error)
        done = CompressedPoint(sums.parameters, sums.bytes, 0, kinds, *errors, 0.0)
    seconds = round(time.process_time() - begin, 1)
    return replace(done, file_bytes=(out / WEIGHTS).stat().st_size, cpu_seconds=seconds)


def direct_sums(
    checkpoint: Checkpoint, budget: int, statistics: StatisticsByLayer | None
) -> dict[str, DirectSum]:
    """Choose direct Kronecker sums in the most even shapes, one budget over all; by layer name.

    Raises
    ------
    BudgetError
        If no layer fits.
    CheckpointError
        If the statistics are of another base.
    """
    if isinstance(statistics, StoredStatistics):
        statistics.check_base(checkpoint.config.get("base_model_name_or_path"))
    layers = make_layers(
        {layer.name: layer_pair(checkpoint, layer) for layer in checkpoint.layers}, statistics
    )
    table = []
    for layer in layers:
        most = max(1, layer.parameters // KroneckerShape.balanced(layer.pair.shape).parameters(1))
        table.append(direct_sums_of(layer, {2**k for k in range(12) if 2**k <= most}))
    options = [
        PartOptions.of(
            [0, *(s.parameters for s in sums)],
            [layer.squared_norm, *(s.squared_error for s in sums)],
        )
        for layer, sums in zip(layers, table, strict=True)
    ]
    picked = within_cost(options, budget)  # 0: the layer is left out
    chosen = {
        layer.name: sums[k - 1]
        for layer, sums, k in zip(layers, table, picked, strict=True)
        if k > 0
    }
    if not chosen:
        least = min(each.parameters for sums in table for each in sums)
        raise BudgetError(
            f"the smallest direct sum has {least:,} parameters, the budget is {budget:,}; allow "
            "more"
        )
    return chosen


def shape_settings(directory: Path, method: str) -> dict[str, Any]:
    """Settings of a run that trains an adapter of the shapes of this one from scratch."""
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    if config.get("peft_type") == "LSR":  # sizes of packed layers stand in the weight file
        config = open_checkpoint(directory).config
    options = {name: config[name] for name in SHAPES[method] if config.get(name) is not None}
    layers = config.get("layers_to_transform")
    return {
        "method": method,
        "options": options,
        "target_modules": config["target_modules"],
        "layers": layers,
    }


def _write_direct(checkpoint: Checkpoint, chosen: Mapping[str, DirectSum], out: Path) -> None:
    tensors = {name: np.asarray(tensor.read()) for name, tensor in checkpoint.extras.items()}
    ranks, shapes = {}, {}
    for name, direct in chosen.items():
        form = direct.form
        share = np.asarray(form.weights) ** (1.0 / form.order)
        for index, factor in enumerate(form.factors, start=1):
            scaled = np.asarray(share[:, None, None] * np.asarray(factor), dtype=np.float32)
            tensors[f"{PEFT_PREFIX}{name}.dlsr_W.factor_{index}"] = np.ascontiguousarray(scaled)
        ranks[f"^{name}$"], shapes[f"^{name}$"] = (
            len(share),
            [list(pair) for pair in form.kronecker_shape.factors],
        )
    config = DirectConfig(
        target_modules=list(chosen),
        separation_rank=1,
        separation_rank_pattern=ranks,
        shape_pattern=shapes,
        task_type="SEQ_CLS",
        modules_to_save=sorted(
            {name.removeprefix(PEFT_PREFIX).split(".")[0] for name in checkpoint.extras}
        )
        or None,
        inference_mode=True,
    )
    with new_directory(out, inputs=[checkpoint.path]) as part:
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(str(part))


def _count(chosen: Mapping[str, DirectSum]) -> dict[str, int]:
    return dict(
        Counter(f"direct, {direct.form.separation_rank} terms" for direct in chosen.values())
    )
