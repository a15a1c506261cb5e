"""What all pictures share: their axes, and labels on the lines, where a legend would make the eye go back and forth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEXT = 8.5
"""Points, for labels within the axes."""


class End(NamedTuple):
    """Where a line ends, its label and its colour."""

    x: float
    y: float
    label: str
    colour: str


def label_ends(ax: Axes, ends: Sequence[End]) -> None:
    """Each label beside a point of its line, the last one if it can be, where it covers no line and no other label."""
    import numpy as np

    figure = ax.get_figure(root=True)
    if figure is None or not ends:
        return
    figure.draw_without_rendering()  # axes take their final place
    point = figure.dpi / 72.0
    height, box = 1.25 * TEXT * point, ax.bbox
    lines = {str(line.get_label()): _pixels(line) for line in ax.get_lines()}
    inked = np.concatenate([np.zeros((0, 2)), *map(_dense, lines.values()), *map(_inside, ax.texts)])
    for end in ends:
        if not (math.isfinite(end.x) and math.isfinite(end.y)):
            continue
        width = 0.66 * TEXT * point * len(end.label)
        own = lines.get(end.label, np.zeros((0, 2)))
        shown: Any = np.flatnonzero((own[:, 1] >= box.y0) & (own[:, 1] <= box.y1)) if len(own) else []
        own = _dense(own[: shown[-1] + 1] if len(shown) else own)[::-1]  # not where it dives out of the picture
        seen = own[(own[:, 1] >= box.y0 + 0.5 * height) & (own[:, 1] <= box.y1)][::8]
        u, v = ax.transData.transform((end.x, end.y))
        if not len(seen) and len(own):  # a line that lies below the axes has its label where it starts
            u, v = own[-1]
        if len(shown) and not box.y0 <= v <= box.y1:
            u, v = own[0]
        if box.y0 <= v <= box.y1 or not len(seen):
            seen = np.concatenate([[(u, min(max(v, box.y0 + 0.5 * height), box.y1))], seen])
        best = (math.inf, 0.0, 0.0, True)
        for penalty, (u, v) in enumerate(seen):
            for dx, dy in _OFFSETS:
                left = u + dx * point if dx > 0 else u + dx * point - width
                middle = v + dy * height
                # The gap to its point counts too: a label must not stand behind another line.
                start, stop = min(left, u + 3.0 * point), max(left + width, u - 3.0 * point)
                inside = (inked[:, 0] > start) & (inked[:, 0] < stop) & (np.abs(inked[:, 1] - middle) < 0.5 * height)
                outside = left < box.x0 or not box.y0 + 0.4 * height <= middle <= box.y1
                beyond = max(0.0, left + width - box.x1) / box.width
                cost = 8.0 * float(np.sum(inside)) + 1e4 * outside + 30.0 * beyond + penalty + abs(dy) + (dx < 0)
                best = min(best, (cost, left, middle, dx > 0))
        _, left, middle, rightwards = best
        x, y = ax.transData.inverted().transform((left if rightwards else left + width, middle))
        text = ax.annotate(
            end.label, (x, y), fontsize=TEXT, color=end.colour, va="center", ha="left" if rightwards else "right",
            annotation_clip=False, zorder=5,
        )  # fmt: skip
        inked = np.concatenate([inked, _inside(text)])


_OFFSETS = ((6.0, 0.0), (6.0, 0.7), (6.0, -0.7), (-6.0, 0.0), (-6.0, -0.7), (-6.0, 0.7), (6.0, 1.4), (-6.0, -1.4))
"""Places of a label around its point: to the right or left in points, up or down in lines of text."""


def _inside(text: Any) -> Any:
    """Points all over a text."""
    import numpy as np

    box = text.get_window_extent()
    across, up = np.meshgrid(np.linspace(box.x0, box.x1, 20), np.linspace(box.y0, box.y1, 3))
    return np.stack([across.reshape(-1), up.reshape(-1)], axis=1)


def _pixels(line: Any) -> Any:
    return line.get_transform().transform(line.get_xydata())


def _dense(pixels: Any) -> Any:
    """Points no more than a few pixels apart along a line."""
    import numpy as np

    if len(pixels) < 2:
        return pixels
    length = np.concatenate(([0.0], np.cumsum(np.hypot(*np.diff(pixels, axis=0).T))))
    along = np.linspace(0.0, length[-1], max(2, int(length[-1] / 4.0)))
    return np.stack([np.interp(along, length, pixels[:, k]) for k in (0, 1)], axis=1)


def new_axes(width: float = 6.4, height: float = 4.2) -> Axes:
    """Axes of a figure of their own, which no window shows."""
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
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.0 else (1.0, 3.0)))
            if axis is ax.xaxis or decades < 3.0:
                axis.set_major_formatter(FuncFormatter(lambda value, _: _count(value)))


def _count(value: float) -> str:
    """500, 20k, 3M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:g}{letter}"
    return f"{value:,g}"
