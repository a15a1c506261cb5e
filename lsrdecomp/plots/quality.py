"""Pictures of comparisons: quality against size, each point a method with its spread over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lsrdecomp.plots.labels import End, label_ends
from lsrdecomp.plots.pictures import COLOURS, GREY, MARKERS, _dress, _new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    references: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Quality against size on a logarithmic axis; bars are one standard deviation; ``references`` are level lines."""
    ax = ax if ax is not None else _new_axes()
    ends = []
    for i, point in enumerate(sorted(points, key=lambda point: point.size)):
        colour = COLOURS[i % len(COLOURS)]
        _spread(ax, [point], colour)
        ax.plot([point.size], [point.mean], marker=MARKERS[i % len(MARKERS)], color=colour, label=point.label)
        ends.append(End(point.size, point.mean, point.label, colour))
    ax.set_xscale("log")
    _levels(ax, references or {})
    _dress(ax, size, quality)
    label_ends(ax, ends)
    return ax


def plot_paths(
    paths: Mapping[str, Sequence[Point]],
    *,
    size: str = "parameters",
    quality: str = "score",
    references: Mapping[str, float] | None = None,
    dashed: Iterable[str] = (),
    ax: Axes | None = None,
) -> Axes:
    """Quality against size, one line a structure through its budgets; those in ``dashed`` are drawn so."""
    ax = ax if ax is not None else _new_axes()
    ends, broken = [], set(dashed)
    for i, (label, path) in enumerate(paths.items()):
        points = sorted(path, key=lambda point: point.size)
        x, y = [point.size for point in points], [point.mean for point in points]
        colour, line = COLOURS[i % len(COLOURS)], "--" if label in broken else "-"
        _spread(ax, points, colour)
        ax.plot(
            x, y, linestyle=line, marker=MARKERS[i % len(MARKERS)], markersize=4, linewidth=1.5, color=colour,
            label=label,
        )  # fmt: skip
        ends.append(End(x[-1], y[-1], label, colour))
    ax.set_xscale("log")
    _levels(ax, references or {})
    _dress(ax, size, quality)
    label_ends(ax, ends)
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
