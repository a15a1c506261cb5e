"""A picture: share of one LoRA's effect that is kept, against bytes.

python -m benchmarks.language.kept_by_bytes_picture benchmarks/results/rivals.json
docs/images/kept-by-bytes.png
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import record as records
from benchmarks.language.rival_results import RivalResults
from lsrdecomp import plots
from lsrdecomp.plots.pictures import dress, line_style, name_lines, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Line:
    """A method, as trained or as compressed, and its name."""

    method: str
    is_trained: bool  # on the LoRA's own answers
    label: str


LINES = (
    Line("LSR", True, "LSR, distilled"),
    Line("LSR", False, "LSR, as compressed"),
    Line("SVD", True, "truncated SVD, distilled"),
    Line("Uni-LoRA", True, "Uni-LoRA, trained"),
    Line("LoRAQuant", True, "LoRAQuant's split, trained"),
)
"""Five lines at most; more cannot be told apart."""
SIZES = (1, 3, 10, 30)
"""Named sizes, in kB."""
SHARES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
"""Named shares on an axis that is logarithmic in what is lost."""


@dataclass(frozen=True)
class Point:
    """A size of a method: the mean over its seeds."""

    kilobytes: float
    kept: float
    error: float


def points(results: RivalResults, line: Line) -> list[Point]:
    """Return the sizes of one line, the smallest first."""
    found: list[Point] = []
    for budget in results.budgets:
        rows = results.untrained(line.method, budget)
        if line.is_trained:
            rows = results.trained(line.method, budget)
        if rows:
            kilobytes = fmean(row["bytes"] for row in rows) / 1000
            kept = fmean(row["kept"] for row in rows)
            found.append(Point(kilobytes, kept, fmean(row["error"] for row in rows)))
    return found


def draw(results: RivalResults) -> Axes:
    """Draw those of `LINES` that have rows, with the standard errors of their shares."""
    lines = {line: points(results, line) for line in LINES}
    drawn = [point for each in lines.values() for point in each]
    axes = new_axes()
    axes.set_yscale("function", functions=(digits, share))
    top = share(digits(max(point.kept for point in drawn)) + 0.3)
    smallest = min(point.kilobytes for point in drawn)
    largest = max(point.kilobytes for point in drawn)
    axes.set(xscale="log", xlim=(0.8 * smallest, 1.25 * largest), ylim=(0.0, top))
    for line, each in lines.items():
        if not each:
            continue
        sizes = [point.kilobytes for point in each]
        kept = [point.kept for point in each]
        style = line_style(line.label)
        axes.plot(sizes, kept, label=line.label, **style)
        errors = [point.error for point in each]
        axes.errorbar(sizes, kept, yerr=errors, color=style["color"], linestyle="none", capsize=2)
    size_of_lora = f"{results.about['bytes_of_lora'] / 1000:,.0f}"
    dress(
        axes,
        f"total size on disk in kB (the LoRA: {size_of_lora})",
        "share of the LoRA's effect that is kept,\nlog scale of what is lost",
    )
    for axis, ticks, (_, largest_shown) in (
        (axes.xaxis, SIZES, axes.get_xlim()),
        (axes.yaxis, SHARES, axes.get_ylim()),
    ):
        shown = [tick for tick in ticks if tick <= largest_shown]
        axis.set_ticks(shown, labels=[f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    name_lines(axes)
    return axes


def digits(kept: ArrayLike) -> NDArray[np.float64]:
    """Return how many decimal digits of what is lost are zero: 1 for 0.9, 2 for 0.99."""
    return np.asarray(-np.log10(np.maximum(1.0 - np.asarray(kept), 1e-6)))


def share(digits: ArrayLike) -> NDArray[np.float64]:
    """Return the share kept of a number of `digits`."""
    return np.asarray(1.0 - 10.0 ** -np.asarray(digits))


def main(source: Path, out: Path) -> None:
    """Draw the picture of a record."""
    plots.save_figure(draw(RivalResults(records.load(source), "E2E")), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
