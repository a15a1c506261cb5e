"""The report of a compression as one HTML file, which opens without a network."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import LsrError
from lsrdecomp.lora.files.layer_names import common_prefix
from lsrdecomp.lora.files.provenance import installed_version
from lsrdecomp.lora.search.plan import goals_of
from lsrdecomp.markup import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lsrdecomp.analysis import ErrorCurve
    from lsrdecomp.lora.search.result import Compression, LayerReport


def html_report(
    compression: Compression,
    curves: Sequence[ErrorCurve] = (),
    *,
    out: Path | None = None,
    unit: str = "example",
    command: str | None = None,
) -> str:
    """Return one self-contained page: goal and result, a chart, answers, layers, provenance.

    The chart needs matplotlib; without it the page says so in its place.

    Parameters
    ----------
    compression : Compression
        As `lsrdecomp.compress` returns it.
    curves : sequence of ErrorCurve
        Of the whole adapter, as `adapter_curves` returns them, for a result that was not measured
        on a base; none: no chart. The chart of a measured result is of what its versions keep.
    out : Path, optional
        The directory that was written, to list its files.
    unit : str
        What the network predicts once for, "example" or "token"; a measured fidelity knows it
        itself.
    command : str, optional
        The line that repeats the run, as it was typed; absent, it is made of the settings.

    Returns
    -------
    str
        The page. It holds no address to load anything from, and forbids its own script to.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress
    >>> demo = files("lsrdecomp.cli") / "demo_adapter"
    >>> result = compress(demo, separation_rank=2, inner_shape=(2, 2))
    >>> page = html_report(result)
    >>> page.startswith("<!doctype html>"), "demo_adapter" in page
    (True, True)
    """
    from jinja2 import Environment

    chart, chart_missing = _chart(compression, curves)
    costs = _costs(compression.layers)
    layers = sorted(compression.layers, key=lambda layer: -costs[layer.name])
    # Names of layers and files are strangers' words: all are escaped.
    page = Environment(autoescape=True, trim_blocks=True).from_string(asset("report.html.jinja"))
    return page.render(
        name=Path(str(compression.source.path)).name,
        headline=_headline(compression),
        warnings=[*compression.notes, *([] if compression.met else [compression.totals.verdict])],
        tiles=_tiles(compression, unit),
        fidelity=compression.fidelity,
        chart=chart,
        chart_missing=chart_missing,
        tried=compression.tried,
        truncated_svd=compression.truncated_svd,
        answers=compression.answers,
        sentences=list(compression.sentences(unit)),
        tables=[_cost_columns(compression, costs), _structure_columns()],
        layers=layers,
        prefix=common_prefix([layer.name for layer in compression.layers]),
        files=_sizes(out),
        directory=repr(out.name) if out is not None else "",
        command=compression.command_line() if command is None else command,
        provenance=_provenance(compression),
        style=asset("report.css"),
        script=asset("report.js"),
    )


def _headline(compression: Compression) -> str:
    """Return what was asked for and what came of it, as a sentence."""
    total, fidelity, plan = compression.totals, compression.fidelity, compression.plan
    asked = _goal_text(compression)
    if fidelity is None:
        return (
            f"{asked}: {total.parameters:,} of {total.parameters_before:,} parameters "
            f"({total.ratio:.3g} times fewer), as {plan.storage}."
        )
    error = "" if fidelity.standard_error is None else f" ± {100 * fidelity.standard_error:.1f}"
    answers = ""
    if fidelity.requested_answers is not None:
        answers = f"gives {fidelity.n_matching} of {fidelity.answered} and "
    return (
        f"{asked}: it {answers}keeps {100 * fidelity.kept:.1f}{error} % on {fidelity.texts}, "
        f"in {size_text(fidelity.bytes_after)} of "
        f"{size_text(fidelity.bytes_before)}."
    )


def _goal_text(compression: Compression) -> str:
    """Return the goal of a run as the beginning of a sentence."""
    fidelity, plan = compression.fidelity, compression.plan
    if fidelity is not None and fidelity.requested is not None:
        return f"Asked for {100 * fidelity.requested:.3g} % of the LoRA's effect"
    if fidelity is not None and fidelity.requested_answers is not None:
        return f"Asked for {100 * fidelity.requested_answers:.3g} % of the LoRA's whole answers"
    (goal,) = goals_of(plan.to_json())
    value = getattr(plan, goal)
    texts = {
        "ratio": f"{value:g} times fewer parameters",
        "parameters": f"{value:,.0f} parameters",
        "bytes": f"at most {value:,.0f} bytes",
        "rtol": f"a relative error of {value:g} in every layer",
        "energy": f"{100 * value:g} % of the squared singular values of every layer",
        "max_rank": f"a rank of at most {value:g} in every layer",
        "separation_rank": f"{value} terms in every layer",
        "kl": f"a KL of {value:g} nats",
    }
    return f"Asked for {texts[goal]}"


def _chart(compression: Compression, curves: Sequence[ErrorCurve]) -> tuple[str, str]:
    """Return the chart, and why there is none where it could not be drawn."""
    fidelity, tried, svd = compression.fidelity, compression.tried, compression.truncated_svd
    try:
        from lsrdecomp.lora.compress.report_charts import Series, error_charts, share_charts

        if fidelity is None:
            total = compression.totals
            here = (float(total.parameters), total.relative_error)
            return error_charts(curves, here, total.parameters_before), ""
        # One point a version: what was written has its circle, what was trained its last share.
        others = [one for one in tried if one.parameters != compression.totals.parameters]
        series = []
        for label, is_trained in (("LSR, as compressed", False), ("LSR, distilled", True)):
            points = sorted(
                (float(one.bytes), share)
                for one in others
                if bool(one.steps) == is_trained
                and (share := one.distilled if is_trained else one.kept) is not None
            )
            if points:
                series.append(Series(label, points))
        if svd is not None and svd.kept is not None:
            series.append(Series("truncated SVD", [(float(svd.bytes), svd.kept)]))
        written = (float(fidelity.bytes_after), fidelity.kept, fidelity.standard_error or 0.0)
        return share_charts(series, written, fidelity.requested), ""
    except LsrError as error:
        return "", str(error)


def _tiles(compression: Compression, unit: str) -> list[tuple[str, str]]:
    """Return a few figures to see first, each with what it is."""
    total, fidelity = compression.totals, compression.fidelity
    parameters = ("parameters", f"{total.parameters:,} of {total.parameters_before:,}")
    if fidelity is not None:
        before, after = fidelity.bytes_before, fidelity.bytes_after
        tiles = []
        if fidelity.answered:
            matching = f"{fidelity.n_matching} of {fidelity.answered}"
            tiles.append(("whole answers are the LoRA's", matching))
        if fidelity.prompt_kept is not None:
            prompt_kept = f"{100 * fidelity.prompt_kept:.1f} %"
            tiles.append(("kept of what depends on the prompt", prompt_kept))
        tiles += [
            ("kept of the LoRA's effect", f"{100 * fidelity.kept:.1f} %"),
            ("weight file and config", f"{size_text(before)} → {size_text(after)}"),
            parameters,
            (f"KL to the LoRA, nats per {fidelity.unit}", f"{fidelity.kl:.3g}"),
        ]
        if fidelity.agreement is not None and fidelity.unit == "token":
            tiles.append(("top prediction agrees", f"{100 * fidelity.agreement:.0f} %"))
        return tiles
    tiles = [parameters]
    if total.functional_error is None:
        norm = "weight error"
    else:
        norm = "output error (est.)"
        tiles.append((norm, f"{total.functional_error:.3g}"))
        if total.kl is not None:
            tiles.append((f"estimated KL, nats per {unit}", f"{total.kl:.3g}"))
    tiles.append(("weight error", f"{total.relative_error:.3g}"))
    if total.low_rank_error is not None:
        tiles.append((f"{norm} of truncated SVD", f"{total.low_rank_error:.3g}"))
    prefix = common_prefix([layer.name for layer in compression.layers])
    worst = total.worst_layer[len(prefix) :]
    tiles.append((f"largest {norm} of a layer: {worst}", f"{total.worst_error:.3g}"))
    return tiles


def _costs(layers: Sequence[LayerReport]) -> dict[str, float]:
    """Return the share of each layer in the squared error over all layers, in the plan's norm."""
    squares = {}
    for layer in layers:
        is_frobenius = layer.functional_error is None
        norm = layer.norm if is_frobenius else layer.functional_norm or 0.0
        squares[layer.name] = (norm * layer.plan_error) ** 2
    total = sum(squares.values()) or 1.0
    return {name: square / total for name, square in squares.items()}


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """A column of a table: head and class, and of a layer what it sorts by and shows."""

    head: str
    kind: str  # "", "text", or "bar", which draws the value as a share of the largest
    value: Callable[[LayerReport], Any]
    text: Callable[[LayerReport], str]


def _cost_columns(compression: Compression, costs: dict[str, float]) -> list[ReportColumn]:
    """Return the columns that every reader needs; the bar is in the norm that was minimized."""

    def mark(layer: LayerReport) -> str:
        return "" if layer.met else " !"

    columns = [
        ReportColumn(
            "parameters",
            "",
            lambda x: x.parameters,
            lambda x: f"{x.parameters:,} of {x.parameters_before:,}",
        ),
        ReportColumn(
            "part of the error",
            "",
            lambda x: costs[x.name],
            lambda x: f"{100 * costs[x.name]:.1f} %",
        ),
    ]
    if compression.totals.functional_error is None:
        columns.append(
            ReportColumn(
                "weight error",
                "bar",
                lambda x: x.relative_error,
                lambda x: f"{x.relative_error:.3g}{mark(x)}",
            )
        )
        return columns
    columns.append(
        ReportColumn(
            "output error (est.)",
            "bar",
            lambda x: x.functional_error,
            lambda x: f"{x.functional_error:.3g}{mark(x)}",
        )
    )
    columns.append(
        ReportColumn(
            "weight error", "wide", lambda x: x.relative_error, lambda x: f"{x.relative_error:.3g}"
        )
    )
    return columns


def _structure_columns() -> list[ReportColumn]:
    """Return the columns for those who want to know how a layer is written."""
    return [
        ReportColumn("matrix", "", lambda x: x.rows * x.columns, lambda x: f"{x.rows}×{x.columns}"),
        ReportColumn("rank", "", lambda x: x.source_rank, lambda x: f"{x.source_rank}"),
        ReportColumn("structure", "text", lambda x: x.structure, lambda x: x.structure),
        ReportColumn("sizes", "text", lambda x: x.shape, lambda x: x.shape),
        ReportColumn("terms", "", lambda x: sum(x.separation_ranks), lambda x: x.terms),
        ReportColumn("storage", "text", lambda x: x.storage, lambda x: x.storage),
        ReportColumn("γ", "", lambda x: min(x.condition, 1e300), lambda x: f"{x.condition:.3g}"),
    ]


def _sizes(out: Path | None) -> list[tuple[str, str]]:
    if out is None:
        return []
    return [
        (path.name, f"{path.stat().st_size:,} bytes")
        for path in sorted(out.iterdir())
        if path.is_file()
    ]


def _provenance(compression: Compression) -> list[tuple[str, str]]:
    """Return where a result comes from: the run, its settings, source and versions."""
    source, fidelity = compression.source, compression.fidelity
    rows = [("date", compression.created)]
    rows += [(name, _plain(value)) for name, value in compression.settings.items()]
    if not compression.settings:
        rows += [(name, _plain(value)) for name, value in compression.plan.to_json().items()]
    if fidelity is not None:
        rows.append(("measured on", fidelity.texts))
    return [
        *rows,
        ("source", f"{source.weights.name}, {source.format}"),
        ("SHA-256 of the source", source.source_sha256),
        *((package, installed_version(package)) for package in ("lsrdecomp", "numpy")),
        *(("note", note) for note in source.notes),
    ]


def _plain(value: object) -> str:
    return " × ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def asset(name: str) -> str:
    """Return a template or style of this folder."""
    return (files("lsrdecomp.lora.compress") / name).read_text(encoding="utf-8")
