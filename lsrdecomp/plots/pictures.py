"""Pictures of what `analysis` computed: each function draws on axes and returns them; it computes and saves nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lsrdecomp.analysis import ErrorCurve, LayerGrid, Limit, ParetoPoint, Spectrum
from lsrdecomp.errors import needs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from matplotlib.axes import Axes

    from lsrdecomp.solvers.base import Sweep

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, told apart with any colour vision."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""A second sign beside the colour, for print without colour."""
GREY = "0.45"
TEXT = 8.5
"""Points, for words within the axes."""


def plot_error_curves(
    curves: ErrorCurve | Iterable[ErrorCurve],
    *,
    against: str = "parameters",
    storage: str = "float16",
    storages: Sequence[str] = (),
    limits: Iterable[Limit] = (),
    ax: Axes | None = None,
) -> Axes:
    """Relative error against separation rank, parameters or bytes, one line a curve.

    Parameters
    ----------
    curves : ErrorCurve or iterable of them
    against : "parameters", "ranks" or "bytes"
    storage : str
        Element type that turns parameters into bytes.
    storages : sequence of str
        Element types whose rounding floor γ·μ is drawn as a dotted line.
    limits : iterable of Limit
        Reference lines on the axis of bytes.
    ax : matplotlib Axes, optional

    Returns
    -------
    Axes

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.analysis import error_curves
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> axes = plot_error_curves(error_curves(hilbert, ["4x4, 4x4", "16x1, 1x16"]), storages=["float16"])
    >>> axes.get_xlabel(), [line.get_label() for line in axes.get_lines()[:2]]
    ('parameters', ['4×4 ⊗ 4×4', '16×1 ⊗ 1×16'])
    """
    ax = ax if ax is not None else new_axes()
    drawn = [curves] if isinstance(curves, ErrorCurve) else list(curves)
    for i, curve in enumerate(drawn):
        x, y = _positive(_sizes(curve, against, storage), curve.relative_errors)
        _line(ax, x, y, i, curve.label)
    ax.set_yscale("log")
    if against != "ranks":
        ax.set_xscale("log")
    _floors(ax, drawn, storages)
    if against == "bytes" and drawn and not storages:
        ax.set_ylim(bottom=0.5 * max(curve.floor(storage) for curve in drawn))
    if any(errors := [error for curve in drawn for error in curve.relative_errors]):
        ax.set_ylim(
            top=1.6 * max(errors)
        )  # margins of a logarithmic axis grow with what lies below the picture
    for limit in limits:
        _reference(ax, limit)
    words = {"ranks": "separation rank s", "bytes": f"bytes in {storage}"}
    dress(ax, words.get(against, against), "relative Frobenius error")
    name_lines(ax)
    return ax


def plot_pareto(
    points: Sequence[ParetoPoint], *, size: str = "parameters", ax: Axes | None = None
) -> Axes:
    """The Pareto front as steps; each run of points of one curve has that curve's name.

    Parameters
    ----------
    points : sequence of ParetoPoint
    size : str
        What the sizes count, as the axis says it.
    ax : Axes, optional
        Absent, one of a new figure.

    Returns
    -------
    Axes

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.analysis import error_curves, pareto_front
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> axes = plot_pareto(pareto_front(error_curves(hilbert, ["4x4, 4x4", "16x1, 1x16"])))
    >>> axes.get_xlabel(), axes.get_yscale()
    ('parameters', 'log')
    """
    ax = ax if ax is not None else new_axes()
    shown = [point for point in points if point.size > 0 and point.relative_error > _LEAST]
    ax.step(
        [p.size for p in shown],
        [p.relative_error for p in shown],
        where="post",
        color=GREY,
        linewidth=1.0,
        zorder=1,
    )
    labels = list(dict.fromkeys(point.label for point in shown))
    for i, label in enumerate(labels):
        own = [point for point in shown if point.label == label]
        x, y = [p.size for p in own], [p.relative_error for p in own]
        ax.plot(
            x,
            y,
            linestyle="none",
            marker=MARKERS[i % 7],
            markersize=5,
            color=COLOURS[i % 7],
            label=label,
        )
    ax.set(xscale="log", yscale="log")
    dress(ax, size, "relative Frobenius error")
    name_lines(ax)
    return ax


def plot_spectra(spectra: Spectrum | Iterable[Spectrum], *, ax: Axes | None = None) -> Axes:
    """Singular values of rearrangements, relative to the largest, against their number.

    Parameters
    ----------
    spectra : Spectrum or iterable of them
    ax : Axes, optional
        Absent, one of a new figure.

    Returns
    -------
    Axes

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.analysis import rearranged_spectrum
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> plot_spectra([rearranged_spectrum(hilbert, "4x4, 4x4")]).get_ylabel()
    'λ_k / λ_1'
    """
    ax = ax if ax is not None else new_axes()
    for i, spectrum in enumerate([spectra] if isinstance(spectra, Spectrum) else spectra):
        x, y = _positive(range(1, len(spectrum.values) + 1), spectrum.relative)
        _line(ax, x, y, i, spectrum.label)
    ax.set_yscale("log")
    dress(ax, "term k", "λ_k / λ_1")
    name_lines(ax)
    return ax


def plot_sweeps(
    sweeps: Mapping[str, Sequence[Sweep]], *, quantity: str = "condition", ax: Axes | None = None
) -> Axes:
    """How γ ("condition") or the error ("relative_error") went along the sweeps of solvers, one line a solve.

    Parameters
    ----------
    sweeps : mapping of str to sequence of Sweep
        By the name of each solve.
    quantity : str
        ``"condition"`` or ``"relative_error"``.
    ax : Axes, optional
        Absent, one of a new figure.

    Returns
    -------
    Axes

    Examples
    --------
    >>> from lsrdecomp.solvers import Sweep
    >>> sweeps = [Sweep(1, 0.5, condition=1.0), Sweep(2, 0.2, condition=1.4), Sweep(3, 0.1, condition=1.5)]
    >>> plot_sweeps({"a solve": sweeps}).get_ylabel()
    'condition γ'
    """
    ax = ax if ax is not None else new_axes()
    for i, (label, steps) in enumerate(sweeps.items()):
        values = [getattr(step, quantity) for step in steps]
        x, y = _positive(
            [step.index + 1 for step in steps], [v if math.isfinite(v) else 0.0 for v in values]
        )
        _line(ax, x, y, i, label, marker=len(x) <= 40)
    ax.set_yscale("log")
    dress(ax, "sweep", "condition γ" if quantity == "condition" else "relative Frobenius error")
    name_lines(ax)
    return ax


def plot_shares(
    shares: Mapping[str, Iterable[tuple[float, float]]],
    *,
    whole: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Share of what an adapter does that is kept, against its size; a line for each way of making it smaller.

    Parameters
    ----------
    shares : mapping of label to (parameters, share) pairs
        Shares as fractions, 1 for all of it.
    whole : float, optional
        Parameters of the adapter that they were made from: a line at 1 says so.
    ax : Axes, optional
        Absent, one of a new figure.

    Returns
    -------
    Axes

    Examples
    --------
    >>> axes = plot_shares({"LSR": [(96, 0.9), (48, 0.8)], "SVD": [(96, 0.6), (48, 0.2)]}, whole=4608)
    >>> axes.get_xscale(), [text.get_text() for text in axes.texts if "LoRA" in text.get_text()]
    ('log', ['the LoRA itself, 4,608 parameters'])
    """
    ax = ax if ax is not None else new_axes()
    ax.set_xscale("log")
    for i, (label, points) in enumerate(shares.items()):
        x, y = zip(*sorted(points), strict=True)
        _line(ax, x, y, i, label)
    if whole is not None:
        ax.axhline(1.0, color=GREY, linewidth=0.8)
        ax.annotate(
            f"the LoRA itself, {whole:,} parameters",
            (0.01, 1.01),
            xycoords=("axes fraction", "data"),
            fontsize=TEXT,
        )
    ax.set_ylim(0.0, 1.1)
    dress(ax, "parameters", "share of what it does that is kept")
    name_lines(ax)
    return ax


def plot_layer_grid(grid: LayerGrid, *, ax: Axes | None = None) -> Axes:
    """A figure for every layer as a heat map: blocks down, modules across, values written where they fit.

    Parameters
    ----------
    grid : LayerGrid
    ax : Axes, optional
        Absent, one of a new figure.

    Returns
    -------
    Axes

    Examples
    --------
    >>> from lsrdecomp.analysis import layer_grid
    >>> axes = plot_layer_grid(layer_grid({"h.0.attn.q": 0.1, "h.1.attn.q": 0.2, "h.1.mlp.up": 0.3}))
    >>> [tick.get_text() for tick in axes.get_xticklabels()], [text.get_text() for text in axes.texts]
    (['attn.q', 'mlp.up'], ['0.1', '0.2', '0.3'])
    """
    import numpy as np

    values = np.asarray(grid.values, dtype=float)
    rows, columns = values.shape
    if ax is None:
        ax = new_axes(min(12.0, 2.6 + 0.9 * columns), min(12.0, 1.8 + 0.32 * rows))
    image = ax.imshow(np.ma.masked_invalid(values), aspect="auto", cmap="cividis")
    ax.set_xticks(
        range(columns), grid.modules, rotation=30, ha="right", rotation_mode="anchor", fontsize=TEXT
    )
    step = max(1, math.ceil(rows / 40))
    ax.set_yticks(range(0, rows, step), grid.blocks[::step], fontsize=TEXT)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if rows * columns <= _WRITTEN_CELLS:
        for (i, j), value in np.ndenumerate(values):
            if math.isfinite(value):
                shade = float(np.interp(value, image.get_clim(), (0.0, 1.0)))
                ax.text(
                    j,
                    i,
                    f"{value:.2g}",
                    ha="center",
                    va="center",
                    fontsize=TEXT - 1,
                    color="w" if shade < 0.5 else "k",
                )
    figure = ax.get_figure(root=True)
    if figure is not None:
        figure.colorbar(image, ax=ax, label=grid.quantity, fraction=0.05, pad=0.02)
    return ax


def save_figure(ax: Axes, path: Any, form: str | None = None) -> None:
    """Write the figure of ``ax`` as PNG or SVG, by ``form`` or the ending of ``path``, without a date inside.

    Parameters
    ----------
    ax : Axes
    path : path or binary file
    form : str, optional
        ``"png"`` or ``"svg"``.

    Examples
    --------
    >>> import io
    >>> from lsrdecomp.analysis import Spectrum
    >>> picture = io.BytesIO()
    >>> save_figure(plot_spectra([Spectrum("mine", (1.0, 0.1, 0.01))]), picture, "png")
    >>> picture.getvalue()[1:4]
    b'PNG'
    """
    figure = ax.get_figure(root=True)
    form = form or str(path).rpartition(".")[2]
    metadata = {"Date": None} if form == "svg" else None
    figure.savefig(path, format=form, dpi=150, bbox_inches="tight", metadata=metadata)  # type: ignore[union-attr]


_LEAST = 1e-16
"""Errors below double rounding are not drawn on a logarithmic axis."""
_WRITTEN_CELLS = 150


def _line(
    ax: Axes, x: Sequence[float], y: Sequence[float], i: int, label: str, marker: bool = True
) -> None:
    sign = MARKERS[i % len(MARKERS)] if marker else ""
    ax.plot(
        x,
        y,
        marker=sign,
        markersize=3.5,
        linewidth=1.5,
        color=COLOURS[i % len(COLOURS)],
        label=label,
    )


def _floors(ax: Axes, curves: Sequence[ErrorCurve], storages: Sequence[str]) -> None:
    if not (curves and storages):
        return
    floors = {storage: max(curve.floor(storage) for curve in curves) for storage in storages}
    for storage, floor in floors.items():
        ax.axhline(floor, linestyle=":", linewidth=1.0, color=GREY, zorder=1)
        ax.annotate(
            f"{storage} rounding", (0.01, floor), xycoords=("axes fraction", "data"), va="bottom", fontsize=TEXT - 0.5,
            color="0.3",
        )  # fmt: skip
    ax.set_ylim(
        bottom=0.5 * min(floors.values())
    )  # below the finest floor there is nothing left to store


def _reference(ax: Axes, limit: Limit) -> None:
    low, high = ax.get_xlim()
    x, y = _positive(limit.bytes, limit.relative_errors)
    inside = [(a, b) for a, b in zip(x, y, strict=True) if low <= a <= high]
    x, y = [a for a, _ in inside], [b for _, b in inside]
    ax.plot(x, y, linestyle="--", linewidth=1.0, color=GREY, label=limit.label)


def _sizes(curve: ErrorCurve, against: str, storage: str) -> Sequence[float]:
    if against not in ("parameters", "ranks", "bytes"):
        raise ValueError(f"against: expected parameters, ranks or bytes, got {against!r}")
    sizes: Sequence[float] = curve.bytes(storage) if against == "bytes" else getattr(curve, against)
    return sizes


def _positive(x: Iterable[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Points a log–log plot can show: errors above double rounding, counts above zero."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if a > 0 and b > _LEAST]
    return [a for a, _ in points], [b for _, b in points]


# -- what all pictures share -----------------------------------------------------------------------


def new_axes(width: float = 6.4, height: float = 4.2) -> Axes:
    """Axes of a figure of their own, which no window shows."""
    with needs("a picture", "plots"):
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").subplots()


def dress(ax: Axes, xlabel: str, ylabel: str) -> None:
    """The one style: light grid, no box, labels with units."""
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(True, which="major", linewidth=0.4, alpha=0.5)
    ax.spines[["top", "right"]].set_visible(False)
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if ax.get_xscale() == "linear":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        if axis.get_scale() == "log":
            decades = math.log10(high / low) if 0.0 < low < high else 1.0  # nothing is drawn yet
            axis.set_minor_formatter(NullFormatter())
            if decades < 3.0:
                axis.set_major_locator(
                    LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.0 else (1.0, 3.0))
                )
            if axis is ax.xaxis or decades < 3.0:
                axis.set_major_formatter(FuncFormatter(lambda value, _: _count(value)))


def name_lines(ax: Axes) -> None:
    """A legend in the colours of the lines, where it covers least."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=TEXT, labelcolor="linecolor")


def _count(value: float) -> str:
    """500, 20k, 3M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:g}{letter}"
    return f"{value:,g}"
