"""Pictures of comparisons: quality against size, each point a method with its spread over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lsrdecomp.plots.labels import TEXT, End, label_ends
from lsrdecomp.plots.pictures import COLOURS, GREY, MARKERS, _dress, _new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LINES: tuple[Literal["-"], Literal["--"], Literal[":"]] = ("-", "--", ":")
"""Lines of the stages, in their order."""


@dataclass(frozen=True, slots=True)
class Point:
    """One method: its size, and its quality over seeds."""

    label: str
    size: float
    mean: float
    deviation: float | None = None


def plot_quality(
    points: Iterable[Point],
    *,
    size: str = "parameters",
    quality: str = "score",
    ax: Axes | None = None,
) -> Axes:
    """Quality against size on a logarithmic axis, each method with its label; bars are one standard deviation."""
    ax = ax if ax is not None else _new_axes()
    ends = []
    for i, point in enumerate(sorted(points, key=lambda point: point.size)):
        colour = COLOURS[i % len(COLOURS)]
        _spread(ax, [point], colour)
        ax.plot([point.size], [point.mean], marker=MARKERS[i % len(MARKERS)], color=colour, label=point.label)
        ends.append(End(point.size, point.mean, point.label, colour))
    ax.set_xscale("log")
    _dress(ax, size, quality)
    label_ends(ax, ends)
    return ax


def plot_stages(
    paths: Mapping[str, Mapping[str, Sequence[Point]]],
    *,
    size: str = "parameters",
    quality: str = "score",
    references: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Quality against size: a colour for each structure, a line for each of its stages through the budgets.

    ``paths`` holds the points by structure and stage; ``references`` are level lines. Bars are one standard deviation.
    """
    from matplotlib.lines import Line2D

    ax = ax if ax is not None else _new_axes()
    stages = list(dict.fromkeys(stage for path in paths.values() for stage in path))
    for i, path in enumerate(paths.values()):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        for stage, found in path.items():
            points = sorted(found, key=lambda point: point.size)
            style = LINES[stages.index(stage) % len(LINES)]
            _spread(ax, points, colour)
            x, y = [point.size for point in points], [point.mean for point in points]
            ax.plot(x, y, linestyle=style, marker=marker, markersize=4, linewidth=1.5, color=colour)
    ax.set_xscale("log")
    _levels(ax, references or {})
    _dress(ax, size, quality)
    signs = [
        Line2D([], [], color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], markersize=4, label=label)
        for i, label in enumerate(paths)
    ]
    signs += [Line2D([], [], color=GREY, linestyle=LINES[i % len(LINES)], label=s) for i, s in enumerate(stages)]
    ax.legend(handles=signs, frameon=False, fontsize=TEXT, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _spread(ax: Axes, points: Sequence[Point], colour: str) -> None:
    known = [point for point in points if point.deviation is not None]
    if known:
        x, y, spread = zip(*((point.size, point.mean, point.deviation) for point in known), strict=True)
        ax.errorbar(x, y, yerr=spread, linestyle="none", color=colour, capsize=2, linewidth=0.8)


def _levels(ax: Axes, references: Mapping[str, float]) -> None:
    for label, value in references.items():
        ax.axhline(value, color=GREY, linewidth=0.8, linestyle=":")
        ax.annotate(label, (0.01, value), xycoords=("axes fraction", "data"), fontsize=8, color=GREY, va="bottom")
