"""The report of a compression as one HTML file, which opens without a network."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.names import common_prefix
from lsrdecomp.checkpoints.provenance import installed_version
from lsrdecomp.compression.svg_curves import Line, svg_curves, svg_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lsrdecomp.analysis import ErrorCurve
    from lsrdecomp.compression.result import Compression, LayerReport


def html_report(
    compression: Compression,
    curves: Sequence[ErrorCurve] = (),
    *,
    out: Path | None = None,
    unit: str = "example",
) -> str:
    """Return one self-contained page: summary, curves, a table of layers that sorts, provenance.

    Parameters
    ----------
    compression : Compression
        As `lsrdecomp.compress` returns it.
    curves : sequence of ErrorCurve
        Of the whole adapter, as `adapter_curves` returns them, for a result that was not measured
        on a base; none: no picture. The picture of one that was measured is of what its forms kept.
    out : Path, optional
        The directory that was written, to list its files.
    unit : str
        What the network answers once for, "example" or "token"; a measured fidelity knows it
        itself.

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

    # A measured result is drawn by what its forms kept, any other by the errors of all sizes.
    total, source = compression.totals, compression.source
    shares = _shares(compression)
    here = (total.parameters, total.relative_error)
    # Names of layers and files are strangers' words: all are escaped.
    page = Environment(autoescape=True, trim_blocks=True).from_string(_asset("report.html.jinja"))
    return page.render(
        name=Path(str(source.path)).name,
        sentences=[*compression.sentences(unit), total.verdict],
        fidelity=compression.fidelity,
        tiles=_tiles(compression, unit),
        shares=shares,
        truncated_svd=compression.truncated_svd,
        mismatches=compression.mismatches,
        svg=svg_curves(curves, here, total.parameters_before) if curves and not shares else "",
        columns=_columns(total.functional_error is not None),
        layers=compression.layers,
        worst=max(layer.relative_error for layer in compression.layers) or 1.0,
        prefix=common_prefix([layer.name for layer in compression.layers]),
        files=_sizes(out),
        directory=repr(out.name) if out is not None else "",
        provenance=_provenance(source, compression.plan),
        style=_asset("report.css"),
        script=_asset("report.js"),
    )


def _shares(compression: Compression) -> str:
    """Return the picture of what the measured sizes kept; nothing where none was measured."""
    fidelity, tried, rival = compression.fidelity, compression.tried, compression.truncated_svd
    if fidelity is None:
        return ""
    lines = [
        Line(
            label,
            sorted(
                (float(form.bytes), getattr(form, share))
                for form in tried
                if getattr(form, share) is not None
            ),
        )
        for label, share in (("untrained", "kept"), ("trained", "distilled"))
    ]
    if rival is not None:
        lines.append(Line("truncated SVD in bits", [(float(rival.bytes), rival.kept)]))
    return svg_shares(lines, (fidelity.bytes_after, fidelity.kept))


def _tiles(compression: Compression, unit: str) -> list[tuple[str, str]]:
    total, fidelity = compression.totals, compression.fidelity
    kinds = Counter(layer.structure for layer in compression.layers)
    tiles = [
        *total.facts,
        ("structures", ", ".join(f"{count} {kind}" for kind, count in kinds.items())),
    ]
    if fidelity is not None:
        tiles.insert(0, ("kept of the LoRA's effect", f"{100 * fidelity.kept:.1f} %"))
    elif total.kl is not None:
        tiles.insert(2, (f"estimated KL, nats per {unit}", f"{total.kl:.3g}"))
    return tiles


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """A column of the table: head and classes, and of a layer what it sorts by and shows."""

    head: str
    kind: str
    value: Callable[[LayerReport], object]
    text: Callable[[LayerReport], str]


def _columns(functional: bool) -> list[ReportColumn]:
    def percent(layer: LayerReport) -> float:
        return (
            100.0 * layer.parameters / layer.parameters_before if layer.parameters_before else 0.0
        )

    fisher = ReportColumn(
        "Fisher error", "", lambda x: x.functional_error, lambda x: f"{x.functional_error:.3g}"
    )
    return [
        ReportColumn(
            "matrix", "wide", lambda x: x.rows * x.columns, lambda x: f"{x.rows}×{x.columns}"
        ),
        ReportColumn("rank", "wide", lambda x: x.source_rank, lambda x: f"{x.source_rank}"),
        ReportColumn("structure", "text wide", lambda x: x.structure, lambda x: x.structure),
        ReportColumn("sizes", "text wide", lambda x: x.shape, lambda x: x.shape),
        ReportColumn("terms", "wide", lambda x: sum(x.separation_ranks), lambda x: x.terms),
        ReportColumn("parameters", "", lambda x: x.parameters, lambda x: f"{x.parameters:,}"),
        ReportColumn("of LoRA", "wide", percent, lambda x: f"{percent(x):.0f} %"),
        ReportColumn(
            "relative error",
            "bar wide" if functional else "bar",
            lambda x: x.relative_error,
            lambda x: f"{x.relative_error:.3g}{'' if x.met else ' !'}",
        ),
        *([fisher] if functional else []),
        ReportColumn(
            "γ", "wide", lambda x: min(x.condition, 1e300), lambda x: f"{x.condition:.3g}"
        ),
    ]


def _sizes(out: Path | None) -> list[tuple[str, str]]:
    if out is None:
        return []
    return [
        (path.name, f"{path.stat().st_size:,} bytes")
        for path in sorted(out.iterdir())
        if path.is_file()
    ]


def _provenance(source: Any, plan: Any) -> list[tuple[str, str]]:
    return [
        ("source", f"{source.weights.name}, {source.format}"),
        ("SHA-256 of the source", source.source_sha256),
        *(("plan: " + key, _plain(value)) for key, value in plan.to_json().items()),
        *((package, installed_version(package)) for package in ("lsrdecomp", "numpy")),
        *(("note", note) for note in source.notes),
    ]


def _plain(value: object) -> str:
    return " × ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _asset(name: str) -> str:
    return (files("lsrdecomp.compression") / name).read_text(encoding="utf-8")
