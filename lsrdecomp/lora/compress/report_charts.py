"""Charts of the HTML report: matplotlib's SVG, whose colours the page sets for light and dark."""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from lsrdecomp.plots.pictures import COLOURS, MARKERS, dress, line_style, new_axes, places

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from lsrdecomp.analysis import ErrorCurve

INK = {
    "#010101": "var(--fg)",
    "#020202": "var(--dim)",
    "#030303": "var(--line)",
    **{colour.lower(): f"var(--c{i})" for i, colour in enumerate(COLOURS[:5])},
}
"""Colours that are drawn with, and the variables of the page that take their places."""
TEXT, DIM, GRID = list(INK)[:3]
CHARACTER_WIDTH = 0.56
"""Mean width of a character, in font sizes: browsers choose the font, so it cannot be measured."""


@dataclass(frozen=True, slots=True)
class ChartSize:
    """A width that charts are drawn for; all by hand.

    Attributes
    ----------
    name : str
        Class of the chart on the page, whose style shows one of the sizes.
    width, height : float
        Inches.
    font_size : float
        Points.
    max_ticks : int
        On the axis of sizes.
    """

    name: str
    width: float
    height: float
    font_size: float = 8.5
    max_ticks: int = 9


WIDE = ChartSize("wide-chart", 7.6, 3.6)
NARROW = ChartSize("narrow-chart", 4.1, 3.6, max_ticks=4)
SIZES = (WIDE, NARROW)


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one way of compressing; joined, or each on its own."""

    label: str
    points: Sequence[tuple[float, float]]  # size and share or error, by rising size
    is_joined: bool = False


def share_charts(
    series: Sequence[Series], chosen: tuple[float, float, float], requested: float | None
) -> str:
    """Return what compressed versions keep against their bytes, in each of `SIZES`.

    Parameters
    ----------
    series : sequence of Series
        Bytes and shares as fractions.
    chosen : (bytes, share, standard error)
        The version that was written.
    requested : float, optional
        The share that was asked for, drawn as a line.
    """

    def draw(ax: Axes, size: ChartSize) -> None:
        labels = [_points(ax, one, line_style(one.label)) for one in series]
        x, y, error = chosen
        ax.errorbar(
            [x], [y], [error], fmt="o", markersize=10, markerfacecolor="none",
            color=TEXT, capsize=4, label="chosen",
        )  # fmt: skip
        labels.append(("written", x, y, TEXT))
        values = [y - error, y + error, *(value for one in series for _, value in one.points)]
        if requested is not None:
            ax.axhline(requested, color=DIM, linestyle="--", linewidth=1.0)
            values.append(requested)
        room = 0.12 * max(max(values) - min(values), 0.05)
        ax.set_ylim(min(values) - room, max(values) + room)
        _size_axis(ax, [x, *(at for one in series for at, _ in one.points)])
        ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
        _dress(ax, "weight file and config", "kept of the LoRA's effect", size)
        if ax.get_xscale() == "linear":
            ax.locator_params(axis="x", nbins=size.max_ticks)
        ax.xaxis.set_major_formatter(lambda value, _: _bytes_text(value))
        if requested is not None:
            labels.append((f"asked for {100 * requested:g} %", ax.get_xlim()[0], requested, DIM))
        _place_labels(ax, labels, size)

    return _in_each_size(draw, "Kept of the LoRA's effect against bytes")


def error_charts(
    curves: Sequence[ErrorCurve],
    chosen: tuple[float, float] | None,
    lora: int,
    *,
    smallest_error: float = 1e-5,
) -> str:
    """Return weight errors of a whole adapter against its parameters, in each of `SIZES`.

    Parameters
    ----------
    curves : sequence of ErrorCurve
    chosen : (parameters, relative error), optional
        The version that was written.
    lora : int
        Parameters of the LoRA itself, drawn as a line.
    smallest_error : float
        Smaller errors lie below any half-precision storage and are not drawn.

    Returns
    -------
    str
        Nothing where no curve has a point.
    """
    series = []
    for curve in curves:
        pairs = zip(curve.parameters, curve.relative_errors, strict=True)
        points = [(float(n), error) for n, error in pairs if n > 0 and error > smallest_error]
        if points:
            series.append(Series(curve.label, points, is_joined=True))
    if not series:
        return ""

    def draw(ax: Axes, size: ChartSize) -> None:
        order = places([one.label for one in series])
        styles = [{"color": COLOURS[place], "marker": MARKERS[place]} for place in order]
        labels = [_points(ax, *drawn) for drawn in zip(series, styles, strict=True)]
        sizes = [float(lora), *(at for one in series for at, _ in one.points)]
        if chosen is not None and min(chosen) > 0.0:
            ax.plot([chosen[0]], [chosen[1]], "o", markersize=10, fillstyle="none", color=TEXT)
            labels.append(("written", *chosen, TEXT))
            sizes.append(chosen[0])
        ax.axvline(lora, color=DIM, linestyle="--", linewidth=1.0)
        ax.set_yscale("log")
        _size_axis(ax, sizes)
        _dress(ax, "parameters", "weight error (relative, Frobenius norm)", size)
        labels.append(("the LoRA", float(lora), ax.get_ylim()[1], DIM))
        _place_labels(ax, labels, size)

    return _in_each_size(draw, "Weight error against parameters")


Label = tuple[str, float, float, str]
"""A text, the point that it names, and its colour."""


def _bytes_text(value: float) -> str:
    """Return a tick of bytes: 640 B, 5.4 kB, 1.2 MB."""
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:.4g} {name}"
    return f"{value:.4g} B"


def _points(ax: Axes, series: Series, style: dict[str, Any]) -> Label:
    """Draw a series; return its label, at its largest size."""
    x, y = zip(*series.points, strict=True)
    line = "-" if series.is_joined else "none"
    ax.plot(x, y, **{"markersize": 5, "linewidth": 1.5, **style, "linestyle": line})
    return series.label, x[-1], y[-1], style["color"]


def _size_axis(ax: Axes, sizes: Sequence[float]) -> None:
    """Let the axis of sizes hold all of them; logarithmic if they differ by more than a factor."""
    low, high = min(sizes), max(sizes)
    if high > 4.0 * low:
        ax.set_xscale("log")
        ax.set_xlim(low / 1.3, high * 1.3)
    else:
        room = max(0.15 * (high - low), 0.05 * high)
        ax.set_xlim(max(0.0, low - room), high + room)


def _dress(ax: Axes, xlabel: str, ylabel: str, size: ChartSize) -> None:
    """Give axes labels, a grid, and the colours that the page replaces."""
    dress(ax, xlabel, ylabel)
    ax.grid(True, color=GRID, linewidth=0.6)
    ax.tick_params(colors=DIM, labelcolor=TEXT, labelsize=size.font_size)
    ax.tick_params(which="minor", colors=DIM)
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set_color(TEXT)
        axis.label.set_fontsize(size.font_size)
    ax.spines[:].set_color(DIM)
    ax.set_facecolor("none")


def _place_labels(ax: Axes, labels: Sequence[Label], size: ChartSize) -> None:
    """Write each label beside its point, inside the axes and none over another."""
    figure: Any = ax.get_figure(root=True)
    figure.draw_without_rendering()  # the layout, which places depend on
    points_per_pixel = 72.0 / figure.dpi
    box = ax.get_window_extent()
    line_height = 1.35 * size.font_size / points_per_pixel
    gap = 0.9 * size.font_size / points_per_pixel
    places = []
    for text, x, y, colour in labels:
        at_x, at_y = ax.transData.transform((x, y))
        width = CHARACTER_WIDTH * len(text) * size.font_size / points_per_pixel
        is_left = at_x + gap + width > box.x1
        is_left = is_left and at_x - gap - width >= box.x0
        start = at_x - gap - width if is_left else min(at_x + gap, box.x1 - width)
        # Half a line above its point, so that no line or marker runs through it.
        places.append([at_y + 0.8 * line_height, start, width, text, colour])
    # Labels that overlap move down, from the top.
    places.sort(key=lambda place: -place[0])
    highest = box.y1 - 0.6 * line_height
    for index, place in enumerate(places):
        place[0] = min(place[0], highest)
        for other in places[:index]:
            is_beside = place[1] < other[1] + other[2] and other[1] < place[1] + place[2]
            if is_beside and other[0] - place[0] < line_height:
                place[0] = other[0] - line_height
    for at_y, start, _, text, colour in places:
        across, up = ax.transAxes.inverted().transform((start, at_y))
        ax.text(
            across, up, text, transform=ax.transAxes, color=colour, va="center",
            fontsize=size.font_size,
        )  # fmt: skip


def _in_each_size(draw: Callable[[Axes, ChartSize], None], title: str) -> str:
    return "".join(_svg(draw, title, size) for size in SIZES)


def _svg(draw: Callable[[Axes, ChartSize], None], title: str, size: ChartSize) -> str:
    """Return one chart as an inline SVG in the page's font and colours."""
    from matplotlib import rc_context

    text = StringIO()
    # Text stays text, and identifiers are the same in every run.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": size.name}):
        ax = new_axes(size.width, size.height)
        draw(ax, size)
        figure: Any = ax.get_figure(root=True)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # 1. What only a file needs: addresses, metadata, and sizes in points.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    head = f'<svg class="{size.name}" {box[0]} role="img" aria-label="{title}">'
    svg = re.sub(r"<svg[^>]*>", f"{head}<title>{title}</title>", svg, count=1)
    # 2. Identifiers are those of one page, on which several charts stand.
    svg = re.sub(r'\bid="', f'id="{size.name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{size.name}-", svg)
    # 3. Font and colours are the page's.
    svg = re.sub(r"font: ([^;\"]*?px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg)
    for colour, variable in INK.items():
        svg = svg.replace(colour, variable)
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip())
