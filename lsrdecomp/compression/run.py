"""compress: every layer of a checkpoint under one plan; verify: measure what was written against where it came from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsrdecomp.checkpoints import Checkpoint, LoraLayer, write_lora, write_lsr
from lsrdecomp.checkpoints.provenance import provenance
from lsrdecomp.compression.layer import Candidate, compress_layer, stored_factors
from lsrdecomp.compression.plan import CompressionPlan
from lsrdecomp.compression.report import LayerReport, Totals, to_json, totals
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.precision import precision
from lsrdecomp.product import SeparatedProduct, low_rank_product
from lsrdecomp.separated import SeparatedMatrix
from lsrdecomp.targets import LowRank


@dataclass(frozen=True)
class Compression:
    """The result of `compress`: a report, and the products ready to be written."""

    source: Checkpoint
    plan: CompressionPlan
    layers: tuple[LayerReport, ...]
    products: tuple[SeparatedProduct, ...] = field(repr=False)  # as stored

    @property
    def totals(self) -> Totals:
        return totals(self.layers, self.source.extra_parameters)

    @property
    def met(self) -> bool:
        """Whether every layer meets the plan."""
        return self.totals.missed == 0

    def to_json(self) -> dict[str, Any]:
        """The report with plan and source, as plain values."""
        return to_json(self.layers, self.totals, plan=self.plan.to_json(), source=str(self.source.path))

    def save(self, out: str | Path, *, force: bool = False) -> Path:
        """Write the LSR directory that PEFT opens; other tensors of the source are carried along bit for bit.

        Raises `CheckpointError` if ``out`` exists (unless ``force``) or lies in the source; nothing is half written.
        """
        parts = zip(self.layers, self.products, strict=True)
        record = {layer.name: layer.relative_error for layer in self.layers}
        return write_lsr(
            out,
            source=self.source,
            layers=((layer.name, *stored_factors(product), 1.0) for layer, product in parts),
            storage=self.plan.storage,
            force=force,
            provenance={
                "plan": self.plan.to_json(),
                "relative_error": self.totals.relative_error,
                "relative_errors": record,
            },
        )


def compress(
    checkpoint: Checkpoint, plan: CompressionPlan, *, on_layer: Callable[[LayerReport], Any] | None = None
) -> Compression:
    """Turn each LoRA layer of a checkpoint into a product of two separated matrices.

    Parameters
    ----------
    checkpoint : Checkpoint
        As returned by `lsrdecomp.open_checkpoint`; layers are read one at a time.
    plan : CompressionPlan
    on_layer : callable, optional
        Called with each `LayerReport` as it is done.

    Returns
    -------
    Compression
        Reports and products; nothing is written before `Compression.save`.

    Raises
    ------
    CheckpointError
        Naming file and tensor, if the numbers of a layer cannot be used.
    """
    reports, products = [], []
    for layer in checkpoint.layers:
        begin = time.perf_counter()
        pair = layer_pair(checkpoint, layer)
        try:
            candidate, met = compress_layer(pair, plan)
        except LsrError as error:
            raise CheckpointError(str(error), path=checkpoint.path, tensor=layer.name) from error
        report = _report(layer, pair, candidate, met, plan, time.perf_counter() - begin)
        reports.append(report)
        products.append(candidate.product)
        if on_layer is not None:
            on_layer(report)
    return Compression(checkpoint, plan, tuple(reports), tuple(products))


def layer_pair(checkpoint: Checkpoint, layer: LoraLayer) -> LowRank:
    """ΔW of a LoRA layer with its scale folded into B, in double precision."""
    if not isinstance(layer, LoraLayer):
        raise CheckpointError(
            "is an LSR layer already; compress the LoRA it came from", path=checkpoint.path, tensor=layer.name
        )
    left, right = layer.load()
    return LowRank(left.astype("float64") * layer.scale, right.astype("float64"))


def layer_product(layer: Any) -> SeparatedProduct:
    """ΔW of any layer as a separated product: an LSR layer as stored, a LoRA layer as one term a side."""
    first, second = layer.load()
    if isinstance(layer, LoraLayer):
        return low_rank_product(first.astype("float64") * layer.scale, second.astype("float64"))
    left, right = ([factor.astype("float64") for factor in side] for side in (first, second))
    return SeparatedProduct(
        SeparatedMatrix.from_factors([left[0] * layer.scale, *left[1:]]), SeparatedMatrix.from_factors(right)
    )


def export_lora(
    checkpoint: Checkpoint, out: str | Path, *, storage: str = "float32", profile: str = "peft", force: bool = False
) -> Path:
    """Write the plain LoRA directory of the same ΔW: its inner rank is that of the LSR layers.

    LSR factors expand to LoRA factors, so nothing is lost beyond rounding to ``storage``. Profile "server" pads to one
    uniform rank with the scale in B, for servers that keep one global scale.
    """
    layers = ((layer.name, *layer_product(layer).to_lora()) for layer in checkpoint.layers)
    record = {"derived_from": provenance(checkpoint)}
    return write_lora(
        out, source=checkpoint, layers=layers, storage=storage, profile=profile, force=force, provenance=record
    )


def _report(
    layer: LoraLayer, pair: LowRank, best: Candidate, met: bool, plan: CompressionPlan, seconds: float
) -> LayerReport:
    return LayerReport(
        name=layer.name,
        kind=layer.kind,
        rows=layer.out_features,
        columns=layer.in_features,
        source_rank=layer.rank,
        structure=best.structure,
        shape=str(best.product.product_shape),
        separation_ranks=best.product.separation_ranks,
        parameters_before=layer.parameters,
        parameters=best.parameters,
        bytes=math.ceil(best.parameters * precision(plan.storage).bytes),
        norm=pair.norm,
        relative_error=best.error / pair.norm if pair.norm > 0.0 else best.error,
        condition=best.product.condition,
        storage=plan.storage,
        seconds=seconds,
        met=met,
    )
