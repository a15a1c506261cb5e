"""The result of `compress`: a report, and factors that can be written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsrdecomp.checkpoints import Checkpoint, write_lsr
from lsrdecomp.compression.html_report import summary_html
from lsrdecomp.compression.layer import stored_factors
from lsrdecomp.compression.materialize import Materialized
from lsrdecomp.compression.plan import GOALS, CompressionPlan
from lsrdecomp.compression.report import LayerReport, Totals, to_json, totals
from lsrdecomp.errors import CheckpointError
from lsrdecomp.formats.quantized import CodedProduct
from lsrdecomp.kronecker.product import SeparatedProduct

REPORT = "compression.json"
"""The report in a written directory; `verify` compares with it."""


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
    def met(self) -> bool:
        """Whether every layer meets the plan."""
        return self.totals.missed == 0

    def to_json(self) -> dict[str, Any]:
        """The report with plan and source, as plain values."""
        return to_json(self.layers, self.totals, plan=self.plan.to_json(), source=self.source.path.name)

    def __repr__(self) -> str:
        """Goal, sizes and errors in a few lines, and what to do next."""
        total, goal = self.totals, self.plan.to_json()
        asked = next(name for name in GOALS if name in goal)
        left_out = f", {total.dropped} of them left out" if total.dropped else ""
        norm = "Frobenius" if total.functional_error is None else "K-FAC"
        error = total.relative_error if total.functional_error is None else total.functional_error
        svd = "" if total.low_rank_error is None else f"; best truncated SVD of that size {total.low_rank_error:.3g}"
        missed = "" if self.met else f"\n   {total.missed} layers miss the tolerance"
        return (
            f"Compression of {self.source.path.name}, {asked} = {goal[asked]:,}\n"
            f"   {total.layers} layers{left_out}: {total.parameters:,} of {total.parameters_before:,} parameters "
            f"({total.ratio:.3g} times fewer), {total.bytes:,} bytes as {self.plan.storage}\n"
            f"   relative error {error:.3g} in the {norm} norm{svd}{missed}\n"
            "   not on disk before save(directory)"
        )

    def _repr_html_(self) -> str:
        return summary_html(self)

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
        named = [(layer.name, chosen) for layer, chosen in zip(self.layers, self.chosen, strict=True)]
        return write_lsr(
            out,
            source=self.source,
            layers=(
                (name, *stored_factors(product_of(one)), 1.0)
                for name, one in named
                if one.stored is not None and not one.coded
            ),
            coded=_ReadWhenAsked({name: one for name, one in named if one.coded}),
            storage=self.plan.float_storage,
            force=force,
            provenance={"plan": self.plan.to_json()},
            packed=True,
            dropped=[layer.name for layer in self.layers if layer.structure == "drop"],
            files={REPORT: self._report_text(record)},
        )


class _ReadWhenAsked(Mapping[str, CodedProduct]):
    """Codes by layer name, read from the cache one at a time."""

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


def product_of(chosen: Materialized) -> SeparatedProduct:
    form = chosen.form
    if not isinstance(form, SeparatedProduct):
        structure = chosen.candidate.structure
        raise CheckpointError(f"a candidate of structure {structure!r} has no place in an LSR directory")
    return form
