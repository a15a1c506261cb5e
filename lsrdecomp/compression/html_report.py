"""The report of a compression as one HTML file: opens without a network, light or dark, on phone and desk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from lsrdecomp import markup
from lsrdecomp.analysis import ErrorCurve
from lsrdecomp.compression.report import LayerReport, Totals
from lsrdecomp.compression.svg_curves import svg_curves


class Reported(Protocol):
    """What the report needs of a `Compression`."""

    @property
    def source(self) -> Any: ...
    @property
    def plan(self) -> Any: ...
    @property
    def layers(self) -> tuple[LayerReport, ...]: ...
    @property
    def totals(self) -> Totals: ...


def html_report(compression: Reported, curves: Sequence[ErrorCurve] = (), *, out: Path | None = None) -> str:
    """One self-contained page: summary, curves, a table of layers that sorts, what was written, provenance.

    Parameters
    ----------
    compression : Compression
        As `lsrdecomp.compression.compress.compress` returns it.
    curves : sequence of ErrorCurve
        Of the whole adapter, as `adapter_curves` returns them; none: no picture.
    out : Path, optional
        The directory that was written, to list its files.

    Returns
    -------
    str
        The page. It holds no address to load anything from, and forbids its own script to.
    """
    total, source = compression.totals, compression.source
    name = Path(str(source.path)).name
    body = "".join(
        (
            f"<header><h1>{escape(name)}</h1><p>{escape(_sentence(total))}</p></header>",
            _tiles(compression.layers, total),
            _picture(curves, total),
            _layer_table(compression.layers, total),
            _written(out),
            _provenance(source, compression.plan),
        )
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: compressed</title><style>{_asset('report.css')}</style></head>"
        f"<body><main>{body}</main><script>{_asset('report.js')}</script></body></html>\n"
    )


def summary_html(compression: Reported) -> str:
    """A few lines for a notebook: the totals of a compression, and where its error is largest."""
    total = compression.totals
    pairs = (
        ("layers", f"{total.layers}"),
        ("parameters", f"{total.parameters:,} of {total.parameters_before:,}"),
        ("times fewer", f"{total.ratio:.2f}"),
        ("relative error", f"{total.relative_error:.3g}"),
        ("worst layer", f"{total.worst_layer}, {total.worst_error:.3g}"),
        ("bytes", f"{total.bytes:,}"),
    )
    return markup.facts(f"Compression of {compression.source.path}", pairs, _verdict(total))


def _sentence(total: Totals) -> str:
    functional = "" if total.functional_error is None else f" ({total.functional_error:.3g} in the K-FAC norm)"
    return (
        f"{total.parameters:,} parameters instead of {total.parameters_before:,}, {total.ratio:.2f} times fewer, at "
        f"relative Frobenius error {total.relative_error:.3g}{functional} over all layers. {_verdict(total)}"
    )


def _verdict(total: Totals) -> str:
    if total.missed:
        return f"{total.missed} of {total.layers} layers miss the tolerance."
    return "Every layer meets the plan."


def _tiles(layers: Sequence[LayerReport], total: Totals) -> str:
    kinds: dict[str, int] = {}
    for layer in layers:
        kinds[layer.structure] = kinds.get(layer.structure, 0) + 1
    tiles = [
        ("times fewer parameters", f"{total.ratio:.2f}"),
        ("relative error, all layers", f"{total.relative_error:.3g}"),
        ("worst layer", f"{total.worst_error:.3g}"),
        ("bytes of factors", f"{total.bytes:,}"),
        ("structures", ", ".join(f"{count} {kind}" for kind, count in kinds.items())),
    ]
    if total.functional_error is not None:
        tiles.insert(1, ("error in the K-FAC norm", f"{total.functional_error:.3g}"))
    if total.kl is not None:
        tiles.insert(2, ("estimated KL, nats an example", f"{total.kl:.3g}"))
    if total.low_rank_error is not None:
        tiles.append(("truncated SVD in the same size", f"{total.low_rank_error:.3g}"))
    if total.extra_parameters:
        tiles.append(("numbers kept as they are", f"{total.extra_parameters:,}"))
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for words, value in tiles)
    return f'<section class="tiles">{cells}</section>'


def _picture(curves: Sequence[ErrorCurve], total: Totals) -> str:
    svg = svg_curves(curves, (total.parameters, total.relative_error), total.parameters_before) if curves else ""
    if not svg:
        return ""
    note = (
        "Each curve cuts every layer alike; nothing is rounded. The dot is what was written, measured as stored. "
        "Frobenius error is not behaviour: a small change of the model may cost much or little of it."
    )
    caption = f"<figcaption>{escape(note)}</figcaption>"
    return f"<section><h2>Error against parameters</h2><figure>{svg}{caption}</figure></section>"


COLUMNS = (
    ("layer", ""),
    ("matrix", "wide"),
    ("rank", "wide"),
    ("structure", "text wide"),
    ("sizes", "text wide"),
    ("terms", "wide"),
    ("parameters", ""),
    ("of LoRA", "wide"),
    ("relative error", ""),
    ("γ", "wide"),
)
FUNCTIONAL = ("K-FAC error", "")
"""The column beside the relative error where a plan has statistics."""


def _layer_table(layers: Sequence[LayerReport], total: Totals) -> str:
    functional = total.functional_error is not None
    error = (("relative error", "wide"), FUNCTIONAL)
    columns = (*COLUMNS[:-2], *error, COLUMNS[-1]) if functional else COLUMNS
    worst = max(layer.relative_error for layer in layers)
    head = "".join(
        f'<th scope="col" class="{kind}" aria-sort="none"><button type="button">{name}</button></th>'
        for name, kind in columns
    )
    common = _common_prefix([layer.name for layer in layers])
    rows = "".join(_layer_row(layer, len(common), worst, functional) for layer in layers)
    note = "γ is the larger condition of the two sides; errors are measured on the factors as stored."
    if common:
        note = f"Names begin with {common} here left out. {note}"
    return (
        f'<section><h2>{total.layers} layers</h2><div class="scroll"><table id="layers"><thead><tr>{head}</tr></thead>'
        f'<tbody>{rows}</tbody></table></div><p class="note">{escape(note)} Click a heading to sort.</p></section>'
    )


def _layer_row(layer: LayerReport, cut: int, worst: float, functional: bool) -> str:
    left, right = layer.separation_ranks
    share = 100.0 * layer.relative_error / worst if worst > 0.0 else 0.0
    missed, folded = "" if layer.met else " missed", " wide" if functional else ""
    percent = 100.0 * layer.parameters / layer.parameters_before if layer.parameters_before else 0.0
    cells = (
        f'<td data-v="{escape(layer.name)}" class="name">{escape(layer.name[cut:]).replace(".", ".<wbr>")}</td>',
        _cell(layer.rows * layer.columns, f"{layer.rows}×{layer.columns}", "wide"),
        _cell(layer.source_rank, f"{layer.source_rank}", "wide"),
        _cell(layer.structure, layer.structure, "text wide"),
        _cell(layer.shape, layer.shape, "text wide"),
        _cell(left + right, f"{left}" if left == right else f"{left} + {right}", "wide"),
        _cell(layer.parameters, f"{layer.parameters:,}", ""),
        _cell(percent, f"{percent:.0f} %", "wide"),
        f'<td data-v="{layer.relative_error!r}" class="bar{missed}{folded}" style="--share:{share:.0f}%">'
        f"{layer.relative_error:.3g}{' !' if missed else ''}</td>",
        *([_optional(layer.functional_error)] if functional else []),
        _cell(layer.condition if math.isfinite(layer.condition) else 1e300, f"{layer.condition:.3g}", "wide"),
    )
    return f"<tr>{''.join(cells)}</tr>"


def _optional(value: float | None) -> str:
    return _cell("", "–", "") if value is None else _cell(value, f"{value:.3g}", "")


def _common_prefix(names: Sequence[str]) -> str:
    """Leading modules that all names share, with the dot; none for one name."""
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) + "." if shared and len(names) > 1 else ""


def _cell(value: object, text: str, kind: str) -> str:
    return f'<td data-v="{escape(str(value))}" class="{kind}">{escape(text)}</td>'


def _written(out: Path | None) -> str:
    if out is None:
        return ""
    sizes = [(path.name, f"{path.stat().st_size:,} bytes") for path in sorted(out.iterdir()) if path.is_file()]
    code = (
        "import lsrdecomp.adapters\nfrom peft import PeftModel\n\n"
        f"model = PeftModel.from_pretrained(base, {out.name!r})"
    )
    return f"<section><h2>What was written</h2>{_facts(sizes)}<pre>{escape(code)}</pre></section>"


def _provenance(source: Any, plan: Any) -> str:
    pairs = [
        ("source", f"{source.weights.name}, {source.format}"),
        ("SHA-256 of the source", source.source_sha256),
        *(("plan: " + key, _plain(value)) for key, value in plan.to_json().items()),
        *((package, _version(package)) for package in ("lsrdecomp", "numpy")),
        *(("note", note) for note in source.notes),
    ]
    return f"<section><h2>Provenance</h2>{_facts(pairs)}</section>"


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return f"<dl>{rows}</dl>"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return " × ".join(map(str, value))
    return str(value)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _asset(name: str) -> str:
    return (files("lsrdecomp.compression") / name).read_text(encoding="utf-8")
