"""The picture of the README: how many of one LoRA's whole answers are kept, against bytes.

python -m benchmarks.language.answer_curve_picture benchmarks/results/answer_curve.json
benchmarks/results/rivals.json docs/images/answers-by-bytes.png

The second record says what is left after a training that is the same for all methods.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import record as records
from benchmarks.headline import OPTIONS, Headline, headline
from benchmarks.language.answer_results import LSR, STORED, SVD, rows_of_task
from benchmarks.language.rival_results import ANSWERS_TASK, NAMES, RivalResults
from lsrdecomp import plots
from lsrdecomp.lora.measure.fidelity import wilson_interval
from lsrdecomp.plots.pictures import (
    COLOURS,
    FONT_SIZE,
    dress,
    line_style,
    name_lines,
    new_axes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    Row = dict[str, Any]

TRAINED = {method: f"{NAMES[method]}, trained" for method in ("LSR", "SVD")}
"""Methods of the rivals that are drawn, and the names of their lines."""
LINES = {
    TRAINED["LSR"]: TRAINED["LSR"],
    LSR: "LSR, as compressed",
    TRAINED["SVD"]: TRAINED["SVD"],
    SVD: "truncated SVD",
}
"""Methods that are drawn as lines, and their names."""
STORED_MARKERS = dict(zip(STORED, "*p", strict=True))
"""Of the whole LoRA, by its storage."""
SIZES = (8, 30, 60, 120, 240, 500, 1000)
"""Named sizes, in kB."""


def draw(rows: Sequence[Row]) -> Axes:
    """Draw a line a method, and a point for each storage of the whole LoRA, with intervals."""
    axes = new_axes()
    axes.set(xscale="log", ylim=(0.0, 105.0))
    for method, label in [*LINES.items(), *zip(STORED, STORED, strict=True)]:
        points = sorted((row for row in rows if row["method"] == method), key=lambda x: x["bytes"])
        if not points:
            continue
        kilobytes = [row["bytes"] / 1000 for row in points]
        shares = [100 * row["n_matching"] / row["answered"] for row in points]
        intervals = [wilson_interval(row["n_matching"], row["answered"]) for row in points]
        below = [share - 100 * low for share, (low, _) in zip(shares, intervals, strict=True)]
        above = [100 * high - share for share, (_, high) in zip(shares, intervals, strict=True)]
        style = line_style(label)
        if method not in LINES:
            style |= {"linestyle": "none", "marker": STORED_MARKERS[method]}
        axes.plot(kilobytes, shares, label=label, **style)
        axes.errorbar(
            kilobytes,
            shares,
            yerr=[[max(0.0, each) for each in side] for side in (below, above)],
            color=style["color"],
            linestyle="none",
            capsize=2,
            linewidth=0.8,
        )
    n_answers = max(row["answered"] for row in rows)
    dress(
        axes,
        "total size on disk, kB",
        f"answers word for word the LoRA's, % of {n_answers}",
    )
    low, high = axes.get_xlim()
    shown = [size for size in SIZES if low <= size <= high]
    axes.xaxis.set_ticks(shown, labels=[f"{size:g}" for size in shown])
    axes.minorticks_off()
    name_lines(axes)
    return axes


def trained_rows(results: RivalResults) -> list[Row]:
    """Return the rows of what was trained at the best rate, as those of the other record."""
    return [
        row | {"method": label}
        for method, label in TRAINED.items()
        for budget in results.budgets
        for row in results.trained(method, budget)
    ]


def mark_headline(axes: Axes, told: Headline) -> None:
    """Mark the figure that the front doors tell."""
    point = (told.bytes / 1000, 100 * told.n_matching / told.answered)
    axes.plot(*point, "*", color=COLOURS[0], markersize=15, markeredgecolor="white", zorder=5)
    size = told.sizes[1]
    axes.annotate(
        f"{OPTIONS}:\n{size}, {told.count}",
        point,
        (0.04, 0.9),
        textcoords="axes fraction",
        arrowprops={"arrowstyle": "-", "color": COLOURS[0], "shrinkB": 8},
        color=COLOURS[0],
        fontsize=FONT_SIZE,
        fontweight="bold",
    )


def main(source: Path, rivals: Path, out: Path) -> None:
    """Draw the picture of two records, with the figure of the front doors."""
    trained = trained_rows(RivalResults(records.load(rivals), ANSWERS_TASK))
    axes = draw([*rows_of_task(records.load(source)), *trained])
    mark_headline(axes, headline())
    plots.save_figure(axes, out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
