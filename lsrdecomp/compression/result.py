"""The result of `compress`: what each layer became, cost and lost, their sums, and factors that can be written.

`recorded_errors` reads the errors back from disk.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lsrdecomp import markup
from lsrdecomp._renamed import keep_old_attributes
from lsrdecomp.checkpoints import Checkpoint, write_lsr
from lsrdecomp.checkpoints.files import read_json
from lsrdecomp.checkpoints.provenance import read_provenance
from lsrdecomp.compression.settings import GOALS, CompressionPlan
from lsrdecomp.precision import PRECISIONS
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lsrdecomp.compression.candidates import Materialized
    from lsrdecomp.compression.layers import Layer
    from lsrdecomp.formats.stored import Stored

REPORT = "compression.json"
"""The report in a written directory; `verify` compares with it."""


@keep_old_attributes
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
    low_rank_error: float | None = (
        None  # of the best truncated SVD for the same budget, in the plan's norm
    )
    effect: float | None = (
        None  # KL(LoRA ‖ no adapter) in nats an answer, where the statistics are of this LoRA
    )
    # Of one that was measured on its base: what it keeps, and what was measured beside it.
    fidelity: Any = None
    tried: tuple[Any, ...] = ()
    mismatches: tuple[Any, ...] = ()
    truncated_svd: Any = None

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

    def to_json(self, *, every_layer: bool = True) -> dict[str, Any]:
        """The report with plan and source, as plain values: of every layer, or the sums alone."""
        facts = {"plan": self.plan.to_json(), "source": self.source.path.name}
        return to_json(self.layers, self.totals, every_layer=every_layer, **facts)

    def __repr__(self) -> str:
        """Goal, sizes and errors in a few lines, and what to do next."""
        total, goal = self.totals, self.plan.to_json()
        name = next(name for name in GOALS if name in goal)
        left_out = f", {total.dropped} of them left out" if total.dropped else ""
        norm = "Frobenius" if total.functional_error is None else "Fisher"
        svd = (
            ""
            if total.low_rank_error is None
            else f"; best truncated SVD of that size {total.low_rank_error:.3g}"
        )
        missed = "" if self.met else f"\n   {total.missed} layers miss the tolerance"
        return (
            f"Compression of {self.source.path.name}, {name} = {goal[name]:,}\n"
            f"   {total.layers} layers{left_out}: {total.parameters:,} of {total.parameters_before:,} parameters "
            f"({total.ratio:.3g} times fewer), {total.bytes:,} bytes as {self.plan.storage}\n"
            f"   relative error {self.error:.3g} in the {norm} norm{svd}{missed}\n"
            "   not on disk before save(directory)"
        )

    def sentences(self, unit: str = "example") -> Iterator[str]:
        """What one can act on; ``unit`` is what a network answers once for.

        A divergence is estimated where none was measured. Of a form that was trained since, errors
        of its numbers say nothing any more.
        """
        total = self.totals
        extra = f"; {total.extra_parameters:,} numbers of other modules are kept as they are"
        dropped = f" {total.dropped} of {total.layers} layers left out." if total.dropped else ""
        yield (
            f"{total.parameters:,} parameters instead of {total.parameters_before:,}, {total.ratio:.3g} times fewer"
            f"{extra if total.extra_parameters else ''}.{dropped}"
        )
        if self.fidelity is not None and self.fidelity.distilled:
            return
        yield (
            f"Relative Frobenius error {total.relative_error:.3g} over all layers, measured on what is written: "
            "how close the numbers are."
        )
        if total.functional_error is not None:
            words = f"Relative error in the Fisher norm {total.functional_error:.3g}: how close the answers are."
            if self.fidelity is None:  # nothing was measured
                of_all = "" if total.effect is None else f"of {total.effect:.3g} "
                how = (
                    ", to second order and often several times too low"
                    if total.effect is None
                    else ""
                )
                words += f" Estimated divergence from the LoRA's answers: {total.kl:.3g} {of_all}nats per {unit}{how}."
            yield words
        if total.low_rank_error is not None:
            yield f"Truncated SVD at the same budget and in the same norm: {total.low_rank_error:.3g}."

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        total = self.totals
        pairs = [
            ("parameters", f"{total.parameters:,} of {total.parameters_before:,}"),
            *total.facts,
        ]
        return markup.facts(f"Compression of {self.source.path.name}", pairs, total.verdict)

    @one_blas_thread
    def save(self, out: str | Path, *, force: bool = False, record: bool = False) -> Path:
        """Write the LSR directory that PEFT opens; other tensors of the source are carried along bit for bit.

        With ``record`` its compression.json tells of every layer what `to_json` tells, else the
        sums alone.

        Raises `CheckpointError` if ``out`` exists (unless ``force``) or lies in the source; nothing
        is half written.
        """
        return write_lsr(
            out,
            source=self.source,
            layers=self._stored_layers(),
            storage=self.plan.float_storage,
            force=force,
            provenance={"plan": self.plan.to_json()},
            dropped=[row.name for row in self.layers if row.structure == "drop"],
            files={REPORT: report_text(self.to_json(every_layer=record))},
        )

    def _stored_layers(self) -> Iterator[tuple[str, Stored]]:
        """Yield names and layers as they are stored, each read when it is written; integer codes after floats.

        Like numbers side by side make the index small.
        """
        pairs = list(zip(self.layers, self.chosen, strict=True))
        for row, made in sorted(pairs, key=lambda pair: pair[0].storage not in PRECISIONS):
            if made.stored is not None:
                yield row.name, made.stored()


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer, before and after; errors are measured on the tensors as written.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress
    >>> result = compress(files("lsrdecomp.cli") / "demo_adapter", separation_rank=2, inner_shape=(2, 4))
    >>> layer = result.layers[0]
    >>> layer.structure, layer.separation_ranks, layer.shape
    ('LSR', (2, 2), '(24×2 ⊗ 16×4)(2×24 ⊗ 4×16)')
    """

    name: str
    kind: str
    rows: int
    columns: int
    source_rank: int
    structure: str  # "LSR", "low rank", "keep" or "drop"
    shape: str  # the Kronecker sizes of both sides
    separation_ranks: tuple[int, int]
    parameters_before: int
    parameters: int
    bytes: int
    norm: float  # ‖ΔW‖_F
    relative_error: float  # ‖ΔW − ΔŴ‖_F / ‖ΔW‖_F
    functional_norm: float | None  # ‖G^½ ΔW C^½‖_F in the Fisher norm, where there are statistics
    functional_error: float | None  # ‖G^½ (ΔW − ΔŴ) C^½‖_F / ‖G^½ ΔW C^½‖_F
    condition: float  # γ, the larger of the two sides
    storage: str
    met: bool = True  # the plan's tolerance

    @property
    def plan_error(self) -> float:
        """The relative error in the norm that the plan speaks of."""
        return self.relative_error if self.functional_error is None else self.functional_error

    @property
    def terms(self) -> str:
        """Of the out side and of the in side, where they differ; nothing for a layer left out."""
        left, right = self.separation_ranks
        return "" if self.structure == "drop" else f"{left}" if left == right else f"{left}+{right}"


@dataclass(frozen=True, slots=True)
class Totals:
    """All layers together.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress
    >>> result = compress(files("lsrdecomp.cli") / "demo_adapter", separation_rank=2, inner_shape=(2, 4))
    >>> result.totals.parameters_before, result.totals.parameters, round(result.totals.ratio, 1)
    (73728, 5376, 13.7)
    """

    layers: int
    dropped: int
    parameters_before: int
    parameters: int
    extra_parameters: int  # heads and other saved modules, carried along untouched
    bytes: int  # of the factors, without headers and extras
    relative_error: float  # (Σ‖ΔW − ΔŴ‖²)^½ / (Σ‖ΔW‖²)^½
    functional_error: float | None  # the same in the Fisher norm
    kl: float | None  # estimated divergence from the LoRA's answers, nats an answer; see `totals`
    worst_error: float  # of a layer, in the norm of the plan
    worst_layer: str
    missed: int  # layers above the tolerance
    low_rank_error: (
        float | None
    )  # the best truncated SVD found for the same budget, in the norm of the plan
    effect: float | None  # KL(LoRA ‖ no adapter) in nats an answer, where calibration measured it

    @property
    def ratio(self) -> float:
        """How many times fewer parameters."""
        return self.parameters_before / self.parameters if self.parameters else math.inf

    @property
    def plan_error(self) -> float:
        """The relative error over all layers in the norm that the plan speaks of."""
        return self.relative_error if self.functional_error is None else self.functional_error

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What a page or a notebook shows: words and values."""
        pairs = [
            ("times fewer parameters", f"{self.ratio:.2f}"),
            ("relative error, all layers", f"{self.relative_error:.3g}"),
            ("worst layer", f"{self.worst_error:.3g}"),
            ("bytes of factors", f"{self.bytes:,}"),
        ]
        if self.functional_error is not None:
            pairs.insert(1, ("error in the Fisher norm", f"{self.functional_error:.3g}"))
        if self.low_rank_error is not None:
            pairs.append(("truncated SVD in the same size", f"{self.low_rank_error:.3g}"))
        if self.extra_parameters:
            pairs.append(("numbers kept as they are", f"{self.extra_parameters:,}"))
        return pairs

    @property
    def verdict(self) -> str:
        """Whether the plan is met, in a sentence."""
        if self.missed:
            return f"{self.missed} of {self.layers} layers miss the tolerance."
        return "Every layer meets the plan."


def report_layer(
    source_layer: Any,
    layer: Layer,
    stored: Stored | None,
    *,
    structure: str,
    storage: str = "",
    error: float | None = None,
    met: bool = True,
) -> LayerReport:
    """Return the row of a layer: the one place where one is made.

    Parameters
    ----------
    source_layer : LoraLayer
        As it stands in the source.
    layer : Layer
        The same with its norm.
    stored : Stored, optional
        As it is written; None if it was left out.
    structure, met
        As in the row.
    storage : str
        Of a layer left out, that of the others.
    error : float, optional
        ‖G^½ (ΔW − ΔŴ) C^½‖_F, absolute, where it was measured before.
    """
    product = None if stored is None else stored.dequantized()
    norm, size, functional = layer.pair.norm, math.sqrt(layer.squared_norm), not layer.is_frobenius
    if error is None:
        error = size if product is None else math.sqrt(layer.squared_error(product))
    frobenius = error
    if functional:
        frobenius = norm if product is None else layer.pair.residual_norm(product)
    return LayerReport(
        name=layer.name,
        kind=source_layer.layer_type,
        rows=source_layer.out_features,
        columns=source_layer.in_features,
        source_rank=source_layer.rank,
        structure=structure,
        shape="–" if stored is None else str(stored.shape),
        separation_ranks=(0, 0) if product is None else product.separation_ranks,
        parameters_before=source_layer.parameters,
        parameters=0 if stored is None else stored.parameters,
        bytes=0 if stored is None else stored.bytes,
        norm=norm,
        relative_error=frobenius / norm if norm > 0.0 else frobenius,
        functional_norm=size if functional else None,
        functional_error=(error / size if size > 0.0 else error) if functional else None,
        condition=1.0 if product is None else product.condition,
        storage=storage if stored is None else stored.storage,
        met=met,
    )


def totals(
    layers: Sequence[LayerReport],
    extra_parameters: int = 0,
    low_rank_error: float | None = None,
    effect: float | None = None,
) -> Totals:
    """Sum up; relative errors combine through the absolute ones.

    The divergence is the squared error in the Fisher norm times ``effect``, KL(LoRA ‖ no adapter)
    as measured in calibration. Without one it is the norm's own second-order value ½ Σ‖G^½ (ΔW −
    ΔŴ) C^½‖², which is several times too low where a LoRA changes much.
    """
    functional = all(layer.functional_error is not None for layer in layers)
    worst = max(layers, key=lambda layer: layer.plan_error)
    lost = [(layer.functional_norm or 0.0) * (layer.functional_error or 0.0) for layer in layers]
    error = _share(lost, [layer.functional_norm or 0.0 for layer in layers])
    kl = 0.5 * math.fsum(value**2 for value in lost) if effect is None else error**2 * effect
    return Totals(
        layers=len(layers),
        dropped=sum(layer.structure == "drop" for layer in layers),
        parameters_before=sum(layer.parameters_before for layer in layers),
        parameters=sum(layer.parameters for layer in layers),
        extra_parameters=extra_parameters,
        bytes=sum(layer.bytes for layer in layers),
        relative_error=_share(
            [x.norm * x.relative_error for x in layers], [x.norm for x in layers]
        ),
        functional_error=error if functional else None,
        kl=kl if functional else None,
        worst_error=worst.plan_error,
        worst_layer=worst.name,
        missed=sum(not layer.met for layer in layers),
        low_rank_error=low_rank_error,
        effect=effect,
    )


def to_json(
    layers: Sequence[LayerReport], summary: Totals, *, every_layer: bool, **facts: Any
) -> dict[str, Any]:
    """Plain values for a JSON file: of every layer, or the sums alone."""
    ratio = summary.ratio if math.isfinite(summary.ratio) else None
    rows = {"layers": [asdict(layer) for layer in layers]} if every_layer else {}
    return {**facts, "totals": {**asdict(summary), "ratio": ratio}, **rows}


def report_text(report: dict[str, Any]) -> str:
    """`to_json` as the text of the record: a line a value where it has every layer, else in few bytes."""
    return json.dumps(report, indent=1 if "layers" in report else None, allow_nan=False) + "\n"


def recorded_errors(written: Checkpoint) -> dict[str, Any]:
    """``{"total": …, "layers": {name: …}}``, relative errors as far as a written adapter records them.

    The report of a directory holds them, and an export of that directory repeats them in its
    header.
    """
    path = written.weights.parent / REPORT
    if path.is_file():
        report = read_json(path)
        layers = report.get("layers")
        rows = [mapping(row) for row in layers] if isinstance(layers, list) else []
        errors = {
            row["name"]: row["relative_error"]
            for row in rows
            if {"name", "relative_error"} <= row.keys()
        }
        total = mapping(report.get("totals")).get("relative_error")
    else:
        record = mapping(read_provenance(written).get("recorded"))
        errors, total = mapping(record.get("layers")), record.get("total")
    numbers = {
        str(name): float(error) for name, error in errors.items() if isinstance(error, int | float)
    }
    return {"total": float(total) if isinstance(total, int | float) else None, "layers": numbers}


def _share(lost: list[float], sizes: list[float]) -> float:
    size = math.hypot(*sizes)
    return math.hypot(*lost) / size if size > 0.0 else math.hypot(*lost)


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one: files may say anything."""
    return value if isinstance(value, dict) else {}
