"""The result of `compress`: a report of every layer, totals, and factors that can be written.

`recorded_errors` reads the errors in the report of a written adapter.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp import markup
from lsrdecomp.lora.files import Checkpoint, write_lsr
from lsrdecomp.lora.files.file_checks import read_json
from lsrdecomp.lora.files.provenance import REPORT, read_provenance
from lsrdecomp.lora.search.candidates import StoredSummary
from lsrdecomp.lora.search.plain_svd import MEASURED_NUMBERS
from lsrdecomp.lora.search.plan import STORAGES, CompressionPlan, goals_of
from lsrdecomp.precision import PRECISIONS
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lsrdecomp.formats.stored import Stored
    from lsrdecomp.lora.search.candidates import Materialized
    from lsrdecomp.lora.search.layers import Layer
    from lsrdecomp.lora.search.plain_svd import PlainForm

FINER_STORAGE = {"int4": "int8 or auto", "int8": "float16", "auto": "float32", "float16": "float32"}
"""Storages in which an adapter may take more bytes, by the plan's."""


CLEARLY_NEARER = 0.95
"""Another storage is named if its error is below this factor of the present one's."""
HEADER_ROOM = 64
"""Bytes of the header that are allowed for each layer where a number of bytes is proposed."""

MIN_FILL = 0.99
"""A file that has this share of the bytes of a plan fills them; by hand."""


@dataclass(frozen=True, repr=False)
class Compression:
    """The result of `compress`: a report, and the factors ready to be written.

    Attributes
    ----------
    source : Checkpoint
    plan : CompressionPlan
    layers : tuple of LayerReport
    chosen : tuple of Materialized
        The factors of each layer.
    low_rank_error : float, optional
        Relative error of the best truncated SVD for the same budget, in the plan's norm.
    effect : float, optional
        KL(LoRA ‖ no adapter) in nats per prediction, if the statistics are of this LoRA.
    fidelity : Fidelity, optional
        The share of the LoRA's effect that is kept, if that was measured on a base.
    tried, mismatches, answers, truncated_svd
        Other measurements on the base: other sizes, texts answered differently, the answers to
        some texts, differing ones first, truncated SVD.
    file_bytes : int, optional
        Bytes of weight file and config, for a plan of bytes that was filled.
    is_nearest : bool
        Whether nothing that was tried is nearer, however much the plan allows.
    solved_layers : int, optional
        Number of layers for which LSR products were solved. In the others truncated SVD is nearer,
        as their singular values tell (`lsrdecomp.lora.search.screening`).
    plain_form : PlainForm, optional
        If present, ``low_rank_error`` is that of plain truncated SVD in as many bytes and this
        form, the best of all; else it is with as many parameters.
    notes : tuple of str
        What makes the result doubtful, such as texts that are unlike those of the statistics.
    settings : Mapping
        The settings of the run that differ from their defaults, by the names of `compress`.
    resolved : Mapping
        Of the settings that are names or paths, what they stood for: the full name of a base on the
        hub, or an absolute path.
    created : str
        The day of the run, as 2026-01-31.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress
    >>> demo = files("lsrdecomp.cli") / "demo_adapter"
    >>> result = compress(demo, separation_rank=2, inner_shape=(2, 4))
    >>> dict(result.settings)
    {'separation_rank': 2, 'inner_shape': [2, 4], 'storage': 'float32'}
    >>> result.met, result.totals.parameters, result.totals.parameters_before
    (True, 5376, 73728)
    >>> result.layers[0].name, result.layers[0].parameters, result.layers[0].relative_error < 1.0
    ('bert.encoder.layer.3.attention.output.dense', 448, True)
    """

    source: Checkpoint
    plan: CompressionPlan
    layers: tuple[LayerReport, ...]
    chosen: tuple[Materialized, ...] = field(repr=False)
    low_rank_error: float | None = None
    effect: float | None = None
    fidelity: Any = None
    tried: tuple[Any, ...] = ()
    mismatches: tuple[Any, ...] = ()
    answers: tuple[Any, ...] = ()
    truncated_svd: Any = None
    file_bytes: int | None = None
    is_nearest: bool = False
    solved_layers: int | None = None
    plain_form: PlainForm | None = None
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    resolved: Mapping[str, str] = field(default_factory=dict, repr=False)
    created: str = field(default_factory=lambda: today().isoformat(), repr=False)

    @property
    def totals(self) -> Totals:
        """Sizes and errors of all layers together."""
        return totals(self.layers, self.source.extra_parameters, self.low_rank_error, self.effect)

    @property
    def error(self) -> float:
        """The relative error over all layers, in the norm of the plan."""
        return self.totals.plan_error

    @property
    def met(self) -> bool:
        """True if every layer meets the plan."""
        return self.totals.missed == 0

    @property
    def estimates_plain_svd(self) -> bool:
        """True if plain truncated SVD in as many bytes is estimated from a sample of layers.

        So it is beside floats, whose storage was not chosen by bytes, and for large adapters.
        """
        is_small = self.source.adapter_parameters <= MEASURED_NUMBERS
        in_bytes = self.plan.bytes is not None or self.plan.storage in STORAGES
        return not (is_small and in_bytes)

    @property
    def better_bytes(self) -> int | None:
        """Bytes, for a plan of bytes, in which another storage keeps more than this one.

        None where the storage was chosen by bytes, and where no other keeps more.
        """
        if self.plain_form is None or self.low_rank_error is None or self.plan.bytes is not None:
            return None
        if self.low_rank_error >= CLEARLY_NEARER * self.error:
            return None
        return self.totals.bytes + self.source.extra_bytes + HEADER_ROOM * len(self.layers)

    @property
    def unfilled(self) -> str | None:
        """Why the files have fewer bytes than a plan of bytes allows, as a sentence.

        None for another plan, and for files that have at least `MIN_FILL` of the bytes.
        """
        allowed = self.plan.bytes
        if allowed is None or self.file_bytes is None:
            return None
        if self.file_bytes >= MIN_FILL * allowed:
            return None
        text = f"The files have {self.file_bytes:,} of {allowed:,} bytes"
        storage = self.plan.storage
        if not self.is_nearest:
            return f"{text}: the next larger choice for any layer does not fit."
        if self.error == 0.0:
            return f"{text}: they hold all of the adapter."
        finer = FINER_STORAGE.get(str(storage))
        advice = f"; with storage {finer} more bytes lower the error" if finer else ""
        return f"{text}: in {storage} nothing larger is nearer{advice}."

    def to_json(self, *, every_layer: bool = True) -> dict[str, Any]:
        """Return plan, source and report as JSON values, with or without a row for each layer."""
        return to_json(
            self.layers,
            self.totals,
            every_layer=every_layer,
            plan=self.plan.to_json(),
            source=self.source.path.name,
            settings=dict(self.settings),
            created=self.created,
            **({"resolved": dict(self.resolved)} if self.resolved else {}),
            **({"notes": list(self.notes)} if self.notes else {}),
            **({"unfilled": self.unfilled} if self.unfilled else {}),
            **({} if self.solved_layers is None else {"solved_layers": self.solved_layers}),
        )

    def command_line(
        self, adapter: object = None, out: object = "OUT", *, program: str = "lsrdecomp"
    ) -> str:
        """Return the line that repeats the run; nothing for a result of other functions.

        Parameters
        ----------
        adapter, out : path, optional
            The adapter and the output as they were typed; absent, the path of the source, and OUT.
        program : str
            The command as it is typed.
        """
        if not self.settings:
            return ""
        source = self.source.path if adapter is None else adapter
        words = [program, "compress", shlex.quote(str(source))]
        for name, value in self.settings.items():
            words.append(f"--{name.replace('_', '-')}")
            if isinstance(value, list):
                words.append("x".join(map(str, value)))
            elif isinstance(value, float):
                words.append(f"{value:.12g}")
            elif value is not True:
                words.append(shlex.quote(str(value)))
        return " ".join([*words, "--out", shlex.quote(str(out))])

    def __repr__(self) -> str:
        """Return goal, sizes and errors in a few lines, and what to do next."""
        total = self.totals
        plan = self.plan.to_json()
        (goal,) = goals_of(plan)
        left_out = f", {total.dropped} of them left out" if total.dropped else ""
        norm = "Frobenius" if total.functional_error is None else "Fisher"
        svd = ""
        if self.better_bytes is not None:
            svd = f"\n   {self._better_storage(f'bytes={self.better_bytes}')}"
        elif total.low_rank_error is not None:
            which = "best" if self.plain_form is None else "plain"
            svd = f"; {which} truncated SVD of that size {self._rival_error}"
        missed = "" if self.met else f"\n   {total.missed} layers miss the tolerance"
        return (
            f"Compression of {self.source.path.name}, {goal} = {plan[goal]:,}\n"
            f"   {total.layers} layers{left_out}: "
            f"{total.parameters:,} of {total.parameters_before:,} parameters "
            f"({total.ratio:.3g} times fewer), {total.bytes:,} bytes as {self.plan.storage}\n"
            f"   relative error {self.error:.3g} in the {norm} norm{svd}{missed}\n"
            "   not on disk before save(directory)"
        )

    def sentences(self, unit: str = "example") -> Iterator[str]:
        """Yield the results as sentences; ``unit`` is what a prediction is made for.

        A divergence is estimated unless one was measured. For a trained adapter errors of the
        numbers are left out, since they say nothing about its outputs.
        """
        total = self.totals
        yield self._size_sentence()
        if self.unfilled is not None:
            yield self.unfilled
        if not any(layer.norm for layer in self.layers):
            yield "Every layer is zero, and is written as zeros of rank 1."
            return
        if self.fidelity is not None and self.fidelity.distilled:
            return
        text = f"Weight error {total.relative_error:.3g} (relative, Frobenius norm)"
        if total.functional_error is not None:
            yield f"{text}: not minimized; it may exceed 1 while most of the effect is kept."
            yield self._fisher_sentence(unit)
        else:
            yield f"{text}, measured on the stored numbers."
        if self.plain_form is not None and self.better_bytes is None:
            yield (
                f"Truncated SVD in as many bytes: {self._rival_error} in the same norm "
                f"({self.plain_form.name}, the best of its storages)."
            )
        elif self.plain_form is None and total.low_rank_error is not None:
            rival = "Truncated SVD with as many parameters"
            if self.plan.bytes is not None:
                rival = "Truncated SVD in as many bytes"
            elif self.plan.rtol is not None or self.plan.kl is not None:
                rival = "Truncated SVD at the same budget"
            yield f"{rival}: {total.low_rank_error:.3g} in the same norm."
        yield from self._solved_sentence()
        if self.better_bytes is not None:
            better = self._better_storage(f"--bytes {self.better_bytes}")
            yield f"{better[0].upper()}{better[1:]}."

    def _better_storage(self, request: str) -> str:
        """Return what a storage that is chosen by bytes keeps, and how it is requested."""
        assert self.plain_form is not None
        return (
            f"in {self.plain_form.storage} the same bytes leave an error of {self._rival_error}, "
            f"not {self.error:.3g}: {request}"
        )

    @property
    def _rival_error(self) -> str:
        """The error of truncated SVD, with a word if it is an estimate."""
        is_estimate = self.plain_form is not None and self.estimates_plain_svd
        return f"{'about ' if is_estimate else ''}{self.low_rank_error:.3g}"

    def _solved_sentence(self) -> Iterator[str]:
        """Yield in how many layers LSR products were solved, unless that is in all."""
        layers = len(self.layers)
        if self.plan.structure == "lsr":
            yield self._structure_sentence()
        elif self.solved_layers == 0:
            yield (
                f"Truncated SVD in all {layers} layers, for which no LSR product was solved: "
                "without a base only the weights can be matched."
            )
        elif self.solved_layers is not None and self.solved_layers < layers:
            yield (
                f"LSR products were solved for {self.solved_layers} of {layers} layers; in the "
                "others truncated SVD is nearer, as their singular values tell."
            )

    def _structure_sentence(self) -> str:
        """Return what products in every layer keep, beside truncated SVDs."""
        in_lsr = sum(row.structure == "LSR" for row in self.layers)
        text = (
            f"Kronecker products in {in_lsr} of {len(self.layers)} layers, to be fine-tuned: they "
            f"keep {_kept(self.error)} of the squared norm of the updates"
        )
        if self.low_rank_error is not None:
            text += f", where truncated SVD keeps {_kept(self.low_rank_error)}"
        return f"{text}."

    def _size_sentence(self) -> str:
        total = self.totals
        text = (
            f"{total.parameters:,} parameters instead of {total.parameters_before:,}, "
            f"{total.ratio:.3g} times fewer"
        )
        if total.extra_parameters:
            text += f"; {total.extra_parameters:,} of heads and other saved modules are copied"
        text += "."
        if total.dropped:
            text += f" {total.dropped} of {total.layers} layers left out."
        return text

    def _fisher_sentence(self, unit: str) -> str:
        total = self.totals
        text = (
            f"Output error (Fisher norm) {total.functional_error:.3g}: "
            "a proxy for the change of the outputs, and what was minimized."
        )
        if self.fidelity is not None:  # the change itself was measured
            return text
        estimate = f" Estimated KL to the LoRA: {total.kl:.3g} nats per {unit}"
        if total.effect is None:
            return f"{text}{estimate} (to second order; often several times too low)."
        return f"{text}{estimate}, {total.effect:.3g} without an adapter."

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        total = self.totals
        parameters = f"{total.parameters:,} of {total.parameters_before:,}"
        pairs = [("parameters", parameters), *total.facts]
        return markup.facts(f"Compression of {self.source.path.name}", pairs, total.verdict)

    @one_blas_thread
    def save(
        self, out: str | Path, *, force: bool = False, record: bool = False, bare: bool = False
    ) -> Path:
        """Write the LSR directory that PEFT opens.

        Other tensors of the source are copied bit for bit. With ``record`` its compression.json
        has a row for every layer, else only the totals. With ``bare`` there is none, nor README.md
        and SHA256SUMS: only the weight file and its config.

        Raises `CheckpointError` if ``out`` exists (unless ``force``) or lies in the source. The
        directory is written wholly or not at all.
        """
        return write_lsr(
            out,
            source=self.source,
            layers=self._stored_layers(),
            storage=self.plan.float_storage,
            force=force,
            provenance={"plan": self.plan.to_json()},
            dropped=[row.name for row in self.layers if row.structure == "drop"],
            files={REPORT: report_text(self.to_json(every_layer=record), directory=Path(out))},
            bare=bare,
        )

    def _stored_layers(self) -> Iterator[tuple[str, Stored]]:
        """Yield names and stored layers, each read when it is written.

        Layers in integer codes come after those in floats, which makes the index of the file small.
        """
        pairs = list(zip(self.layers, self.chosen, strict=True))
        for row, materialized in sorted(pairs, key=lambda pair: pair[0].storage not in PRECISIONS):
            if materialized.stored is not None:
                yield row.name, materialized.stored()


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer before and after compression; errors are those of the tensors as written.

    Attributes
    ----------
    name, kind : str
    rows, columns, source_rank : int
        Size and rank of the LoRA's layer.
    structure : str
        ``"LSR"``, ``"low rank"``, ``"keep"``, ``"drop"``, or the name of another structure.
    shape : str
        The Kronecker sizes of both sides.
    separation_ranks : (int, int)
        Terms of the output side and of the input side.
    parameters_before, parameters, bytes : int
    norm : float
        ‖ΔW‖_F.
    relative_error : float
        ‖ΔW − ΔŴ‖_F / ‖ΔW‖_F.
    functional_norm : float, optional
        ‖G^½ ΔW C^½‖_F in the Fisher norm, where there are statistics.
    functional_error : float, optional
        ‖G^½ (ΔW − ΔŴ) C^½‖_F / ‖G^½ ΔW C^½‖_F.
    condition : float
        γ of the product: rounding its factors costs about γ·μ·‖ΔW‖_F (`SeparatedProduct`).
    storage : str
    met : bool
        Whether the layer is within the plan's tolerance.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress
    >>> demo = files("lsrdecomp.cli") / "demo_adapter"
    >>> layer = compress(demo, separation_rank=2, inner_shape=(2, 4)).layers[0]
    >>> layer.structure, layer.separation_ranks, layer.shape
    ('LSR', (2, 2), '(24×2 ⊗ 16×4)(2×24 ⊗ 4×16)')
    """

    name: str
    kind: str
    rows: int
    columns: int
    source_rank: int
    structure: str
    shape: str
    separation_ranks: tuple[int, int]
    parameters_before: int
    parameters: int
    bytes: int
    norm: float
    relative_error: float
    functional_norm: float | None
    functional_error: float | None
    condition: float
    storage: str
    met: bool = True

    @property
    def plan_error(self) -> float:
        """The relative error in the norm that the plan speaks of."""
        return self.relative_error if self.functional_error is None else self.functional_error

    @property
    def terms(self) -> str:
        """Terms of both sides, such as ``"3"`` or ``"3+2"``; nothing for a layer left out."""
        if self.structure == "drop":
            return ""
        left, right = self.separation_ranks
        return f"{left}" if left == right else f"{left}+{right}"


@dataclass(frozen=True, slots=True)
class Totals:
    """Sizes and errors of all layers together.

    Attributes
    ----------
    layers, dropped : int
        Number of layers, and of those left out.
    parameters_before, parameters : int
    extra_parameters : int
        Parameters of heads and other saved modules, which are copied unchanged.
    bytes : int
        Bytes of the factors, without headers and copied tensors.
    relative_error : float
        (Σ‖ΔW − ΔŴ‖²)^½ / (Σ‖ΔW‖²)^½.
    functional_error : float, optional
        The same in the Fisher norm.
    kl : float, optional
        Estimated divergence from the LoRA's outputs, in nats per prediction; see `totals`.
    worst_error : float
        Relative error of the layer ``worst_layer``, in the norm of the plan.
    missed : int
        Number of layers above the plan's tolerance.
    low_rank_error : float, optional
        Relative error of the best truncated SVD for the same budget, in the norm of the plan.
    effect : float, optional
        KL(LoRA ‖ no adapter) in nats per prediction, if calibration measured it.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress
    >>> demo = files("lsrdecomp.cli") / "demo_adapter"
    >>> total = compress(demo, separation_rank=2, inner_shape=(2, 4)).totals
    >>> total.parameters_before, total.parameters, round(total.ratio, 1)
    (73728, 5376, 13.7)
    """

    layers: int
    dropped: int
    parameters_before: int
    parameters: int
    extra_parameters: int
    bytes: int
    relative_error: float
    functional_error: float | None
    kl: float | None
    worst_error: float
    worst_layer: str
    missed: int
    low_rank_error: float | None
    effect: float | None

    @property
    def ratio(self) -> float:
        """Parameters before, divided by parameters after."""
        return self.parameters_before / self.parameters if self.parameters else math.inf

    @property
    def plan_error(self) -> float:
        """The relative error over all layers in the norm that the plan speaks of."""
        return self.relative_error if self.functional_error is None else self.functional_error

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Names and values to show on a page or in a notebook."""
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
        """A sentence that says whether the plan is met."""
        if self.missed:
            return f"{self.missed} of {self.layers} layers miss the tolerance."
        return "Every layer meets the plan."


def report_layer(
    source_layer: Any,
    layer: Layer,
    stored: Callable[[], Stored] | None,
    *,
    structure: str,
    storage: str = "",
    error: float | None = None,
    summary: StoredSummary | None = None,
    met: bool = True,
) -> LayerReport:
    """Return the report of a layer.

    Parameters
    ----------
    source_layer : LoraLayer
        The layer of the LoRA.
    layer : Layer
        The same layer with its norm.
    stored : callable, optional
        Reads the layer as it is written; None if it was left out.
    structure, met
        As in `LayerReport`.
    storage : str
        Storage to report for a layer that was left out.
    error : float, optional
        Absolute error in the layer's norm, ‖G^½ (ΔW − ΔŴ) C^½‖_F, if it was measured already.
    summary : StoredSummary, optional
        Sizes of the layer as it is written, if they are known already.
    """
    norm = layer.frobenius_norm
    norm_of_plan = math.sqrt(layer.squared_norm)
    # The numbers are read only where they are needed: an adapter may have many.
    product = None
    if stored is not None and (error is None or summary is None or not layer.is_frobenius):
        as_written = stored()
        product = as_written.dequantized()
        summary = summary or StoredSummary.of(as_written, product)
    if error is None:
        error = norm_of_plan if product is None else math.sqrt(layer.squared_error(product))
    if layer.is_frobenius:
        frobenius_error = error
        functional_norm = None
        functional_error = None
    else:
        frobenius_error = norm if product is None else layer.pair.residual_norm(product)
        functional_norm = norm_of_plan
        functional_error = _ratio(error, norm_of_plan)
    return LayerReport(
        name=layer.name,
        kind=source_layer.layer_type,
        rows=source_layer.out_features,
        columns=source_layer.in_features,
        source_rank=source_layer.rank,
        structure=structure,
        shape="–" if summary is None else summary.shape,
        separation_ranks=(0, 0) if summary is None else summary.separation_ranks,
        parameters_before=source_layer.parameters,
        parameters=0 if summary is None else summary.parameters,
        bytes=0 if summary is None else summary.bytes,
        norm=norm,
        relative_error=_ratio(frobenius_error, norm),
        functional_norm=functional_norm,
        functional_error=functional_error,
        condition=1.0 if summary is None else summary.condition,
        storage=storage if summary is None else summary.storage,
        met=met,
    )


def totals(
    layers: Sequence[LayerReport],
    extra_parameters: int = 0,
    low_rank_error: float | None = None,
    effect: float | None = None,
) -> Totals:
    """Return the totals of all layers; relative errors are combined through absolute ones.

    The divergence is estimated as the squared relative error in the Fisher norm times ``effect``,
    KL(LoRA ‖ no adapter) as calibration measured it. Without that it is the second-order estimate
    ½ Σ‖G^½ (ΔW − ΔŴ) C^½‖², which is several times too low where a LoRA changes much.
    """
    norms = [layer.norm for layer in layers]
    errors = [layer.norm * layer.relative_error for layer in layers]
    worst = max(layers, key=lambda layer: layer.plan_error)
    functional_error = kl = None
    if all(layer.functional_error is not None for layer in layers):
        functional_norms = [layer.functional_norm or 0.0 for layer in layers]
        lost = [
            norm * (x.functional_error or 0.0)
            for norm, x in zip(functional_norms, layers, strict=True)
        ]
        functional_error = _ratio(math.hypot(*lost), math.hypot(*functional_norms))
        if effect is None:
            kl = 0.5 * math.fsum(value**2 for value in lost)
        else:
            kl = functional_error**2 * effect
    return Totals(
        layers=len(layers),
        dropped=sum(layer.structure == "drop" for layer in layers),
        parameters_before=sum(layer.parameters_before for layer in layers),
        parameters=sum(layer.parameters for layer in layers),
        extra_parameters=extra_parameters,
        bytes=sum(layer.bytes for layer in layers),
        relative_error=_ratio(math.hypot(*errors), math.hypot(*norms)),
        functional_error=functional_error,
        kl=kl,
        worst_error=worst.plan_error,
        worst_layer=worst.name,
        missed=sum(not layer.met for layer in layers),
        low_rank_error=low_rank_error,
        effect=effect,
    )


def to_json(
    layers: Sequence[LayerReport], summary: Totals, *, every_layer: bool, **others: Any
) -> dict[str, Any]:
    """Return a report as JSON values, with or without a row for each layer."""
    sums = asdict(summary)
    sums["ratio"] = summary.ratio if math.isfinite(summary.ratio) else None
    report = {**others, "totals": sums}
    if every_layer:
        report["layers"] = [asdict(layer) for layer in layers]
    return report


def report_text(report: dict[str, Any], *, directory: Path | None = None) -> str:
    """Return a report as JSON: indented if it lists layers, else in few bytes.

    For a directory, which people pass on, absolute paths become such that start from it.
    """
    indent = 1 if "layers" in report else None
    told = report if directory is None else _from_directory(report, directory.absolute())
    return json.dumps(told, indent=indent, allow_nan=False) + "\n"


def _from_directory(value: Any, directory: Path) -> Any:
    """Return JSON values with absolute paths as they are from a directory.

    Of a path that shares no folder with it only the name stays.
    """
    if isinstance(value, dict):
        return {name: _from_directory(each, directory) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_from_directory(each, directory) for each in value]
    if not (isinstance(value, str) and Path(value).is_absolute()):
        return value
    path = Path(value)
    if path.parts[:2] != directory.parts[:2]:
        return path.name
    return Path(os.path.relpath(path, directory)).as_posix()


def recorded_errors(written: Checkpoint) -> dict[str, Any]:
    """Return the relative errors that are recorded in a written adapter.

    They are in the report of a directory, and in the header of a file that was exported from it.

    Returns
    -------
    dict
        ``{"total": …, "layers": {name: …}}``; the total is None if none is recorded.
    """
    path = written.weights.parent / REPORT
    if path.is_file():
        report = read_json(path)
        total = mapping(report.get("totals")).get("relative_error")
        errors = {}
        layers = report.get("layers")
        for row in layers if isinstance(layers, list) else []:
            error = mapping(row).get("relative_error")
            if "name" in mapping(row):
                errors[row["name"]] = error
    else:
        record = mapping(read_provenance(written).get("recorded"))
        total = record.get("total")
        errors = mapping(record.get("layers"))
    numbers = {}
    for name, error in errors.items():
        if isinstance(error, int | float):
            numbers[str(name)] = float(error)
    return {"total": float(total) if isinstance(total, int | float) else None, "layers": numbers}


def today() -> date:
    """Return the date in UTC; that of ``SOURCE_DATE_EPOCH`` where builds are to be repeated."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdecimal():
        return datetime.fromtimestamp(int(epoch), UTC).date()
    return datetime.now(UTC).date()


def _kept(relative_error: float) -> str:
    """Return the share of a squared norm that a relative error leaves."""
    return f"{100.0 * (1.0 - relative_error**2):.1f} %"


def _ratio(lost: float, size: float) -> float:
    """Return an error relative to a norm; the error itself if the norm is zero."""
    return lost / size if size > 0.0 else lost


def mapping(value: Any) -> dict[str, Any]:
    """Return the value if it is a JSON object, else an empty one: files may hold anything."""
    return value if isinstance(value, dict) else {}
