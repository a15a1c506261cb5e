"""The result of `compress`: a report, and factors that can be written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsrdecomp import markup
from lsrdecomp.checkpoints import Checkpoint, write_lsr
from lsrdecomp.compression.candidates import Materialized
from lsrdecomp.compression.layers import stored_factors
from lsrdecomp.compression.plan import GOALS, CompressionPlan
from lsrdecomp.compression.report import REPORT, LayerReport, Totals, to_json, totals
from lsrdecomp.formats.quantized import CodedProduct


@dataclass(frozen=True, repr=False)
class Compression:
    """The result of `compress`: a report, and the factors ready to be written.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress
    >>> result = compress(files("lsrdecomp.cli") / "demo_adapter", separation_rank=2, inner_shape=(2, 4))
    >>> result.met, result.totals.parameters, result.totals.parameters_before
    (True, 5376, 73728)
    >>> result.layers[0].name, result.layers[0].parameters, result.layers[0].relative_error < 1.0
    ('bert.encoder.layer.3.attention.output.dense', 448, True)
    """

    source: Checkpoint
    plan: CompressionPlan
    layers: tuple[LayerReport, ...]
    chosen: tuple[Materialized, ...] = field(repr=False)
    low_rank_error: float | None = None  # of the best truncated SVD for the same budget, in the plan's norm
    effect: float | None = None  # KL(LoRA ‖ no adapter) in nats an answer, where the statistics are of this LoRA

    @property
    def totals(self) -> Totals:
        return totals(self.layers, self.source.extra_parameters, self.low_rank_error, self.effect)

    @property
    def error(self) -> float:
        """The relative error over all layers, in the norm of the plan."""
        return self.totals.plan_error

    @property
    def met(self) -> bool:
        """Whether every layer meets the plan."""
        return self.totals.missed == 0

    def to_json(self) -> dict[str, Any]:
        """The report with plan and source, as plain values."""
        return to_json(self.layers, self.totals, plan=self.plan.to_json(), source=self.source.path.name)

    def __repr__(self) -> str:
        """Goal, sizes and errors in a few lines, and what to do next."""
        total, goal = self.totals, self.plan.to_json()
        name = next(name for name in GOALS if name in goal)
        left_out = f", {total.dropped} of them left out" if total.dropped else ""
        norm = "Frobenius" if total.functional_error is None else "Fisher"
        svd = "" if total.low_rank_error is None else f"; best truncated SVD of that size {total.low_rank_error:.3g}"
        missed = "" if self.met else f"\n   {total.missed} layers miss the tolerance"
        return (
            f"Compression of {self.source.path.name}, {name} = {goal[name]:,}\n"
            f"   {total.layers} layers{left_out}: {total.parameters:,} of {total.parameters_before:,} parameters "
            f"({total.ratio:.3g} times fewer), {total.bytes:,} bytes as {self.plan.storage}\n"
            f"   relative error {self.error:.3g} in the {norm} norm{svd}{missed}\n"
            "   not on disk before save(directory)"
        )

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        total = self.totals
        pairs = (
            ("layers", f"{total.layers}"),
            ("parameters", f"{total.parameters:,} of {total.parameters_before:,}"),
            ("times fewer", f"{total.ratio:.2f}"),
            ("relative error", f"{total.relative_error:.3g}"),
            ("worst layer", f"{total.worst_layer}, {total.worst_error:.3g}"),
            ("bytes", f"{total.bytes:,}"),
        )
        return markup.facts(f"Compression of {self.source.path.name}", pairs, total.verdict)

    def _report_text(self, record: bool) -> str:
        facts = self.to_json()
        if record:
            return json.dumps(facts, indent=1, allow_nan=False) + "\n"
        return json.dumps({key: value for key, value in facts.items() if key != "layers"}, allow_nan=False) + "\n"

    def save(self, out: str | Path, *, force: bool = False, record: bool = False) -> Path:
        """Write the LSR directory that PEFT opens; other tensors of the source are carried along bit for bit.

        With ``record`` its compression.json tells of every layer what `to_json` tells, else the sums alone.

        Raises `CheckpointError` if ``out`` exists (unless ``force``) or lies in the source; nothing is half written.
        """
        return write_lsr(
            out,
            source=self.source,
            layers=self._float_layers(),
            coded=_Codes({row.name: made for row, made in self._rows() if made.coded}),
            storage=self.plan.float_storage,
            force=force,
            provenance={"plan": self.plan.to_json()},
            dropped=[row.name for row in self.layers if row.structure == "drop"],
            files={REPORT: self._report_text(record)},
        )

    def _rows(self) -> Iterator[tuple[LayerReport, Materialized]]:
        return zip(self.layers, self.chosen, strict=True)

    def _float_layers(self) -> Iterator[tuple[str, Any, Any, float]]:
        """Name, factors of both sides and scale of the layers in floating point, each read when it is written."""
        for row, made in self._rows():
            product = None if made.coded else made.form
            if product is not None:
                yield (row.name, *stored_factors(product), 1.0)


class _Codes(Mapping[str, CodedProduct]):
    """Integer codes by layer name, read from the cache one at a time."""

    def __init__(self, coded: Mapping[str, Materialized]) -> None:
        self._coded = coded

    def __getitem__(self, name: str) -> CodedProduct:
        codes = self._coded[name].codes
        assert codes is not None
        return codes

    def __iter__(self) -> Iterator[str]:
        return iter(self._coded)

    def __len__(self) -> int:
        return len(self._coded)
