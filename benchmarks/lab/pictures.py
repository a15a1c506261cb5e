"""Pictures of comparisons: quality against size, each point a method with its spread over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lsrdecomp.plots.pictures import COLOURS, FONT_SIZE, GREY, MARKERS, dress, name_lines, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Point:
    """One method: its size, and its quality over seeds.

    Examples
    --------
    >>> Point("LSR", size=1536, mean=0.61, deviation=0.03)
    Point(label='LSR', size=1536, mean=0.61, deviation=0.03)
    """

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
    """Draw quality against size, logarithmic, a label a method; bars are one standard deviation.

    Examples
    --------
    >>> points = [Point("LSR", 1536, 0.61, 0.03), Point("SVD", 1536, 0.40, 0.02)]
    >>> axes = plot_quality(points, quality="share of the gain")
    >>> axes.get_ylabel(), axes.get_xscale()
    ('share of the gain', 'log')
    """
    ax = ax if ax is not None else new_axes()
    for i, point in enumerate(sorted(points, key=lambda point: point.size)):
        colour = COLOURS[i % len(COLOURS)]
        _spread(ax, [point], colour)
        ax.plot(
            [point.size],
            [point.mean],
            marker=MARKERS[i % len(MARKERS)],
            color=colour,
            label=point.label,
        )
    ax.set_xscale("log")
    dress(ax, size, quality)
    name_lines(ax)
    return ax


def plot_stages(
    paths: Mapping[str, Mapping[str, Sequence[Point]]],
    *,
    size: str = "parameters",
    quality: str = "score",
    references: Mapping[str, float] | None = None,
) -> tuple[Axes, ...]:
    """Draw quality against size: a panel a stage, in each a line a structure through its budgets.

    ``paths`` holds the points by structure and stage; ``references`` are level lines. Bars are one
    standard deviation; those of one size stand side by side. Returns the panels, from left to
    right, on shared axes.

    Examples
    --------
    >>> lsr = {"compressed": [Point("LSR", 1536, 0.61)], "distilled": [Point("LSR", 1536, 0.85)]}
    >>> svd = {"compressed": [Point("SVD", 1536, 0.40)], "distilled": [Point("SVD", 1536, 0.80)]}
    >>> panels = plot_stages({"LSR": lsr, "SVD": svd}, references={"LoRA": 1.0})
    >>> [panel.get_title() for panel in panels]
    ['compressed', 'distilled']
    """
    from matplotlib.figure import Figure

    stages = list(dict.fromkeys(stage for path in paths.values() for stage in path)) or [""]
    figure = Figure(figsize=(1.0 + 3.1 * len(stages), 3.9), layout="constrained")
    panels = figure.subplots(1, len(stages), sharex=True, sharey=True, squeeze=False)[0]
    for panel, stage in zip(panels, stages, strict=True):
        for i, (structure, path) in enumerate(paths.items()):
            # Bars of one size must not cover each other.
            aside = 1.0 + 0.05 * (i - (len(paths) - 1) / 2)
            points = [
                Point(structure, aside * point.size, point.mean, point.deviation)
                for point in sorted(path.get(stage, ()), key=lambda point: point.size)
            ]
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            _spread(panel, points, colour)
            x, y = [point.size for point in points], [point.mean for point in points]
            label = structure if points else None
            panel.plot(
                x, y, marker=marker, markersize=4.5, linewidth=1.6, color=colour, label=label
            )
        panel.set_xscale("log")
        panel.set_title(stage, fontsize=10)
        _levels(panel, references or {}, named=panel is panels[-1])
        dress(panel, size, quality if panel is panels[0] else "")
    if len(panels) == 1:
        _name_beside(panels[0])
        return tuple(panels)
    named = {
        label: line
        for panel in panels
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(named.values()),
        list(named),
        frameon=False,
        fontsize=FONT_SIZE,
        loc="outside lower center",
        ncols=3,
    )
    return tuple(panels)


def _name_beside(panel: Axes) -> None:
    """Write each line's name at its middle point: the lowest line's below it, the others' above."""
    lines, labels = panel.get_legend_handles_labels()
    middles = [line.get_xydata()[len(line.get_xydata()) // 2] for line in lines]
    bottom = min(y for _, y in middles)
    for line, label, (x, y) in zip(lines, labels, middles, strict=True):
        is_above = y > bottom
        panel.annotate(
            label,
            (x, y),
            (-6, 6) if is_above else (8, -6),
            textcoords="offset points",
            ha="right" if is_above else "left",
            va="bottom" if is_above else "top",
            fontsize=FONT_SIZE,
            color=line.get_color(),
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )


def _spread(ax: Axes, points: Sequence[Point], colour: str) -> None:
    known = [point for point in points if point.deviation is not None]
    if known:
        x, y, spread = zip(
            *((point.size, point.mean, point.deviation) for point in known), strict=True
        )
        ax.errorbar(x, y, yerr=spread, linestyle="none", color=colour, capsize=2, linewidth=0.8)


def _levels(ax: Axes, references: Mapping[str, float], named: bool) -> None:
    """Level lines; their names stand to the right of the last panel, where nothing is drawn."""
    for label, value in references.items():
        ax.axhline(value, color=GREY, linewidth=0.8, linestyle=":")
        if named:
            at = ("axes fraction", "data")
            ax.annotate(
                label,
                (1.01, value),
                xycoords=at,
                fontsize=FONT_SIZE,
                color=GREY,
                va="center",
                annotation_clip=False,
            )
