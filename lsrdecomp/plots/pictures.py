"""Pictures of what `analysis` computed.

Each function draws on axes and returns them; it computes and saves nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from lsrdecomp.analysis import ErrorCurve, LayerGrid, Limit, ParetoPoint, Spectrum
from lsrdecomp.errors import ArgumentError, needs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage
    from numpy.typing import NDArray

    from lsrdecomp.solvers.solver import Sweep

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, told apart with any colour vision."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""A second sign beside the colour, for print without colour."""
METHOD_NAMES = (
    "LSR",
    "truncated SVD",
    "Uni-LoRA",
    "Fisher cores",
    "LoRAQuant's split",
    "LoRA-XS",
    "rank one in int4",
)
"""Ways to make a LoRA smaller, as pictures and pages name them, in the order of both.

Each has the colour and the marker of its place.
"""
GREY = "0.45"
FONT_SIZE = 8.5
"""Points of the words within the axes."""
MOST_NAMED_LINES = 5
"""Above so many lines labels at their ends would be a crowd."""
LINE_NAME = "line name"
"""Group of the labels at lines, by which others find them."""
DOUBLE_ROUNDING = 1e-16
"""Relative errors below it are not drawn on a logarithmic axis."""


def plot_error_curves(
    curves: ErrorCurve | Iterable[ErrorCurve],
    *,
    against: str = "parameters",
    storage: str = "float16",
    storages: Sequence[str] = (),
    limits: Iterable[Limit] = (),
    labels: Sequence[str] = (),
    ax: Axes | None = None,
) -> Axes:
    """Draw relative errors against separation rank, parameters or bytes, one line a curve.

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
    labels : sequence of str
        Names of the curves; absent, their shapes, numbered where two are alike.
    ax : matplotlib Axes, optional

    Returns
    -------
    Axes

    Raises
    ------
    ArgumentError
        If there are not as many labels as curves.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.analysis import error_curves
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> curves = error_curves(hilbert, ["4x4, 4x4", "16x1, 1x16"])
    >>> axes = plot_error_curves(curves, storages=["float16"])
    >>> axes.get_xlabel(), [line.get_label() for line in axes.get_lines()[:2]]
    ('parameters, log scale', ['4×4 ⊗ 4×4', '16×1 ⊗ 1×16'])
    """
    ax = ax if ax is not None else new_axes()
    listed = [curves] if isinstance(curves, ErrorCurve) else list(curves)
    # 1. The curves, on logarithmic axes.
    names = _labels(listed, labels)
    for curve, label, place in zip(listed, names, places(names), strict=True):
        x, y = _positive(_sizes(curve, against, storage), curve.relative_errors)
        _line(ax, x, y, place, label)
    ax.set_yscale("log")
    if against != "ranks":
        ax.set_xscale("log")
    # 2. Where rounding stops them: below it there is nothing to see.
    _floors(ax, listed, storages)
    if against == "bytes" and listed and not storages:
        ax.set_ylim(bottom=0.5 * max(curve.floor(storage) for curve in listed))
    # 3. The top: margins of a logarithmic axis grow with what lies below the picture.
    largest = max((max(curve.relative_errors, default=0.0) for curve in listed), default=0.0)
    if largest > 0.0:
        ax.set_ylim(top=1.6 * largest)
    # 4. Reference lines within these axes, and names.
    for limit in limits:
        _reference(ax, limit)
    words = {"ranks": "separation rank s", "bytes": f"bytes in {storage}"}
    dress(ax, words.get(against, against), "relative Frobenius error")
    name_lines(ax)
    return ax


def _labels(curves: Sequence[ErrorCurve], labels: Sequence[str]) -> list[str]:
    """Return a name for each curve: those that were given, or their shapes, told apart."""
    if labels and len(labels) != len(curves):
        raise ArgumentError(f"labels: {len(labels)} names for {len(curves)} curves")
    if labels:
        return list(labels)
    names = [curve.label for curve in curves]
    counts = Counter(names)
    seen: Counter[str] = Counter()
    told_apart = []
    for name in names:
        seen[name] += 1
        told_apart.append(f"{name} ({seen[name]})" if counts[name] > 1 else name)
    return told_apart


def plot_pareto(
    points: Sequence[ParetoPoint], *, size: str = "parameters", ax: Axes | None = None
) -> Axes:
    """Draw a Pareto front as steps; each run of points of one curve has that curve's name.

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
    ('parameters, log scale', 'log')
    """
    ax = ax if ax is not None else new_axes()
    shown = [point for point in points if point.size > 0 and point.relative_error > DOUBLE_ROUNDING]
    ax.step(*_sizes_and_errors(shown), where="post", color=GREY, linewidth=1.0, zorder=1)
    labels = list(dict.fromkeys(point.label for point in shown))
    for i, label in zip(places(labels), labels, strict=True):
        run = [point for point in shown if point.label == label]
        x, y = _sizes_and_errors(run)
        marker = _cycled(MARKERS, i)
        colour = _cycled(COLOURS, i)
        ax.plot(x, y, marker=marker, linestyle="none", markersize=5, color=colour, label=label)
    ax.set(xscale="log", yscale="log")
    dress(ax, size, "relative Frobenius error")
    name_lines(ax)
    return ax


def plot_spectra(spectra: Spectrum | Iterable[Spectrum], *, ax: Axes | None = None) -> Axes:
    """Draw singular values of rearrangements, relative to the largest, against their number.

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
    'λ_k / λ_1, log scale'
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
    """Draw how γ or the error went along the sweeps of solvers, one line a solve.

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
    >>> sweeps = [Sweep(1, 0.5, condition=1.0), Sweep(2, 0.2, condition=1.4)]
    >>> plot_sweeps({"a solve": sweeps}).get_ylabel()
    'condition γ, log scale'
    """
    ax = ax if ax is not None else new_axes()
    for i, (label, steps) in enumerate(sweeps.items()):
        numbers = [step.index + 1 for step in steps]
        values = [getattr(step, quantity) for step in steps]
        x, y = _positive(numbers, [value if math.isfinite(value) else 0.0 for value in values])
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
    """Draw the kept share of an adapter's effect against its size.

    Each way of making it smaller is a line, in the colour of its method: solid where the label says
    distilled or trained, dashed where it does not.

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
    >>> shares = {"LSR": [(96, 0.9), (48, 0.8)], "SVD": [(96, 0.6), (48, 0.2)]}
    >>> axes = plot_shares(shares, whole=4608)
    >>> axes.get_xscale(), [text.get_text() for text in axes.texts if "LoRA" in text.get_text()]
    ('log', ['the LoRA itself, 4,608 parameters'])
    """
    ax = ax if ax is not None else new_axes()
    ax.set_xscale("log")
    for label, points in shares.items():
        x, y = zip(*sorted(points), strict=True)
        ax.plot(x, y, label=label, **_unlike(ax, line_style(label)))
    if whole is not None:
        ax.axhline(1.0, color=GREY, linewidth=0.8)
        ax.annotate(
            f"the LoRA itself, {whole:,} parameters",
            (0.01, 1.01),
            xycoords=("axes fraction", "data"),
            fontsize=FONT_SIZE,
        )
    ax.set_ylim(0.0, 1.1)
    dress(ax, "parameters", "share of the LoRA's effect that is kept")
    name_lines(ax)
    return ax


def plot_layer_grid(grid: LayerGrid, *, max_written: int = 150, ax: Axes | None = None) -> Axes:
    """Draw a figure for every layer as a heat map: blocks down, modules across.

    Parameters
    ----------
    grid : LayerGrid
    max_written : int
        Cells up to which their values are written into them; by hand.
    ax : Axes, optional
        Absent, one of a new figure.

    Returns
    -------
    Axes

    Examples
    --------
    >>> from lsrdecomp.analysis import layer_grid
    >>> grid = layer_grid({"h.0.attn.q": 0.1, "h.1.attn.q": 0.2, "h.1.mlp.up": 0.3})
    >>> axes = plot_layer_grid(grid)
    >>> [tick.get_text() for tick in axes.get_xticklabels()]
    ['attn.q', 'mlp.up']
    >>> [text.get_text() for text in axes.texts]
    ['0.1', '0.2', '0.3']
    """
    import numpy as np

    values = np.asarray(grid.values, dtype=float)
    rows, columns = values.shape
    if ax is None:
        ax = new_axes(min(12.0, 2.6 + 0.9 * columns), min(12.0, 1.8 + 0.32 * rows))
    image = ax.imshow(np.ma.masked_invalid(values), aspect="auto", cmap="cividis")
    ax.set_xticks(
        range(columns),
        grid.modules,
        rotation=30,
        ha="right",
        rotation_mode="anchor",
        fontsize=FONT_SIZE,
    )
    step = max(1, math.ceil(rows / 40))
    ax.set_yticks(range(0, rows, step), grid.blocks[::step], fontsize=FONT_SIZE)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if rows * columns <= max_written:
        _write_values(ax, image, values)
    figure = ax.get_figure(root=True)
    if figure is not None:
        figure.colorbar(image, ax=ax, label=grid.quantity, fraction=0.05, pad=0.02)
    return ax


def save_figure(ax: Axes, path: Any, file_format: str | None = None) -> None:
    """Write the figure of ``ax`` as PNG or SVG, without a date inside.

    Parameters
    ----------
    ax : Axes
    path : path or binary file
    file_format : str, optional
        ``"png"`` or ``"svg"``; absent, the ending of ``path``.

    Examples
    --------
    >>> import io
    >>> from lsrdecomp.analysis import Spectrum
    >>> picture = io.BytesIO()
    >>> save_figure(plot_spectra([Spectrum("mine", (1.0, 0.1, 0.01))]), picture, "png")
    >>> picture.getvalue()[1:4]
    b'PNG'
    """
    file_format = file_format or str(path).rpartition(".")[2]
    metadata = {"Date": None} if file_format == "svg" else None
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.savefig(path, format=file_format, dpi=150, bbox_inches="tight", metadata=metadata)


def _line(
    ax: Axes, x: Sequence[float], y: Sequence[float], i: int, label: str, marker: bool = True
) -> None:
    sign = _cycled(MARKERS, i) if marker else ""
    colour = _cycled(COLOURS, i)
    ax.plot(x, y, marker=sign, markersize=3.5, linewidth=1.5, color=colour, label=label)


def line_style(label: str) -> dict[str, Any]:
    """Return colour, marker and line of a method, the same in every picture.

    Parameters
    ----------
    label : str
        It begins with one of `METHOD_NAMES`, and says "distilled" or "trained" where the numbers
        were: then the line is solid and its markers are filled, otherwise it is dashed and they
        are open.

    Examples
    --------
    >>> trained, untrained = line_style("LSR, distilled"), line_style("LSR, as compressed")
    >>> trained["color"] == untrained["color"], trained["linestyle"], untrained["linestyle"]
    (True, '-', '--')
    """
    names = [name for name in METHOD_NAMES if label.startswith(name)]
    place = METHOD_NAMES.index(max(names, key=len)) if names else len(METHOD_NAMES)
    is_trained = "distilled" in label or "trained" in label.replace("untrained", "")
    colour = (*COLOURS, GREY)[place]
    return {
        "color": colour,
        "marker": (*MARKERS, ".")[place],
        "markersize": 5,
        "markerfacecolor": colour if is_trained else "none",
        "linestyle": "-" if is_trained else "--",
        "linewidth": 1.8 if label.startswith("LSR") else 1.3,
    }


def places(labels: Sequence[str]) -> list[int]:
    """Return the place of each line in `COLOURS` and `MARKERS`.

    A method has its own; other lines have the free ones, in order.

    Examples
    --------
    >>> places(["truncated SVD", "4×4 ⊗ 4×4", "2×8 ⊗ 8×2"])
    [1, 0, 2]
    """
    taken = {METHOD_NAMES.index(label) for label in labels if label in METHOD_NAMES}
    free = (place for place in range(len(labels) + len(taken)) if place not in taken)
    return [METHOD_NAMES.index(label) if label in METHOD_NAMES else next(free) for label in labels]


def _unlike(ax: Axes, style: dict[str, Any]) -> dict[str, Any]:
    """Return the style, dotted where axes have a line of that style."""
    drawn = {(line.get_color(), line.get_linestyle()) for line in ax.get_lines()}
    is_new = (style["color"], style["linestyle"]) not in drawn
    return style if is_new else {**style, "linestyle": ":"}


def _cycled(values: Sequence[str], i: int) -> str:
    return values[i % len(values)]


def _sizes_and_errors(points: Sequence[ParetoPoint]) -> tuple[list[int], list[float]]:
    return [point.size for point in points], [point.relative_error for point in points]


def _write_values(ax: Axes, image: AxesImage, values: NDArray[np.float64]) -> None:
    """Write the value of each cell of a heat map, light on dark and dark on light."""
    import numpy as np

    for (i, j), value in np.ndenumerate(values):
        if math.isfinite(value):
            shade = float(np.interp(value, image.get_clim(), (0.0, 1.0)))
            colour = "w" if shade < 0.5 else "k"
            text = f"{value:.2g}"
            ax.text(j, i, text, ha="center", va="center", fontsize=FONT_SIZE - 1, color=colour)


def _floors(ax: Axes, curves: Sequence[ErrorCurve], storages: Sequence[str]) -> None:
    if not (curves and storages):
        return
    floors = {storage: max(curve.floor(storage) for curve in curves) for storage in storages}
    for storage, floor in floors.items():
        ax.axhline(floor, linestyle=":", linewidth=1.0, color=GREY, zorder=1)
        ax.annotate(
            f"{storage} rounding",
            (0.01, floor),
            xycoords=("axes fraction", "data"),
            va="bottom",
            fontsize=FONT_SIZE - 0.5,
            color="0.3",
        )
    # Below the finest floor there is nothing left to store
    ax.set_ylim(bottom=0.5 * min(floors.values()))


def _reference(ax: Axes, limit: Limit) -> None:
    """Draw a limit within the axes as they are."""
    low, high = ax.get_xlim()
    x = []
    y = []
    for size, error in zip(*_positive(limit.bytes, limit.relative_errors), strict=True):
        if low <= size <= high:
            x.append(size)
            y.append(error)
    ax.plot(x, y, linestyle="--", linewidth=1.0, color=GREY, label=limit.label)


def _sizes(curve: ErrorCurve, against: str, storage: str) -> Sequence[float]:
    if against not in ("parameters", "ranks", "bytes"):
        raise ValueError(f"against: expected parameters, ranks or bytes, got {against!r}")
    if against == "bytes":
        return curve.bytes(storage)
    return curve.parameters if against == "parameters" else curve.ranks


def _positive(x: Iterable[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return points that a log–log plot can show: counts above zero, errors above rounding."""
    points = zip(x, y, strict=True)
    shown = [(size, error) for size, error in points if size > 0 and error > DOUBLE_ROUNDING]
    return [size for size, _ in shown], [error for _, error in shown]


# -- what all pictures share -----------------------------------------------------------------------


def new_axes(width: float = 6.4, height: float = 4.2) -> Axes:
    """Return axes of a figure of their own, which no window shows."""
    with needs("a picture", "plots"):
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").subplots()


def dress(ax: Axes, xlabel: str, ylabel: str) -> None:
    """Give axes the one style: light grid, no box, labels with units and with the scale."""
    for axis, label in ((ax.xaxis, xlabel), (ax.yaxis, ylabel)):
        is_logarithmic = label and axis.get_scale() == "log"
        axis.set_label_text(f"{label}, log scale" if is_logarithmic else label)
    ax.grid(True, which="major", linewidth=0.4, alpha=0.5)
    ax.spines[["top", "right"]].set_visible(False)
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if ax.get_xscale() == "linear":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        if axis.get_scale() == "log":
            # Where nothing is drawn yet there is no range
            decades = math.log10(high / low) if 0.0 < low < high else 1.0
            axis.set_minor_formatter(NullFormatter())
            if decades < 3.0:
                steps = (1.0, 2.0, 5.0) if decades < 2.0 else (1.0, 3.0)
                axis.set_major_locator(LogLocator(subs=steps))
            if axis is ax.xaxis or decades < 3.0:
                axis.set_major_formatter(FuncFormatter(lambda value, _: _count(value)))


def name_lines(ax: Axes) -> None:
    """Write each line's label at its end, in its colour; above five lines a legend has them."""
    lines, labels = ax.get_legend_handles_labels()
    pairs: list[tuple[Any, str]] = list(zip(lines, labels, strict=True))
    named = [(line, label) for line, label in pairs if _end(ax, line)]
    if len(named) < len(lines) or len(lines) > MOST_NAMED_LINES:
        ax.legend(frameon=False, fontsize=FONT_SIZE, labelcolor="linecolor")
        return
    # In points: from the end of a line to where its label stands, so that no two overlap
    per_point = ax.figure.dpi / 72.0
    ends = [_end(ax, line) or (0.0, 0.0) for line, _ in named]
    heights = [float(ax.transData.transform(end)[1]) / per_point for end in ends]
    places = _spread(heights, gap=1.3 * FONT_SIZE)
    for (line, label), end, height, place in zip(named, ends, heights, places, strict=True):
        ax.annotate(
            label,
            end,
            (6.0, place - height),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
            fontsize=FONT_SIZE,
            annotation_clip=False,
            gid=LINE_NAME,
        )


def _end(ax: Axes, line: Any) -> tuple[float, float] | None:
    """Return the last point of a line that the axes show; None of what is no line."""
    if not hasattr(line, "get_xydata"):
        return None
    low, high = sorted(ax.get_ylim())
    left, right = sorted(ax.get_xlim())
    shown = [(x, y) for x, y in line.get_xydata() if low <= y <= high and left <= x <= right]
    return max(shown) if shown else None


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights apart until neighbours have the gap, each group about its own middle."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[int]] = []
    for i in order:
        groups.append([i])
        while len(groups) > 1 and _bottom(groups[-1], heights, gap) < gap + _top(
            groups[-2], heights, gap
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    placed = list(heights)
    for group in groups:
        bottom = _bottom(group, heights, gap)
        for step, i in enumerate(group):
            placed[i] = bottom + step * gap
    return placed


def _bottom(group: Sequence[int], heights: Sequence[float], gap: float) -> float:
    middle = sum(heights[i] for i in group) / len(group)
    return middle - gap * (len(group) - 1) / 2.0


def _top(group: Sequence[int], heights: Sequence[float], gap: float) -> float:
    return _bottom(group, heights, gap) + gap * (len(group) - 1)


def _count(value: float) -> str:
    """Return a number as ticks show it: 500, 20k, 3M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:g}{letter}"
    return f"{value:,g}"
