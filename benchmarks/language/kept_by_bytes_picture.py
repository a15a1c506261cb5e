"""The picture of the README: share of one LoRA's effect that is kept, against bytes.

python -m benchmarks.language.kept_by_bytes_picture benchmarks/results/kept_by_bytes.json
docs/images/kept-by-bytes.png
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import record as records
from lsrdecomp import plots
from lsrdecomp.plots.pictures import COLOURS, MARKERS, dress, name_lines, new_axes

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
    Line("Uni-LoRA", True, "Uni-LoRA"),
    Line("LoRAQuant", True, "LoRAQuant's split"),
)
"""Five lines at most; more cannot be told apart."""
SIZES = (1, 3, 10, 30)
"""Named sizes, in kB."""
SHARES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
"""Named shares on an axis that is logarithmic in what is lost."""


def points(record: dict[str, Any], method: str, *, is_trained: bool) -> list[dict[str, Any]]:
    """Return the rows of one line, the smallest first."""
    rows = [row for row in record["rows"] if row["method"] == method]
    return sorted(
        (row for row in rows if (row["steps"] > 0) == is_trained), key=lambda row: row["bytes"]
    )


def draw(record: dict[str, Any]) -> Axes:
    """Draw those of `LINES` that have rows, with the standard errors of their shares."""
    axes = new_axes()
    axes.set_yscale("function", functions=(digits, share))
    sizes = [row["bytes"] / 1000 for row in record["rows"]]
    top = share(digits(max(row["kept"] for row in record["rows"])) + 0.3)
    axes.set(xscale="log", xlim=(0.8 * min(sizes), 1.25 * max(sizes)), ylim=(0.0, top))
    for i, line in enumerate(LINES):
        rows = points(record, line.method, is_trained=line.is_trained)
        if not rows:
            continue
        sizes = [row["bytes"] / 1000 for row in rows]
        kept = [row["kept"] for row in rows]
        axes.plot(
            sizes,
            kept,
            color=COLOURS[i],
            marker=MARKERS[i],
            linestyle="-" if line.is_trained else "--",
            linewidth=1.8 if line.method == "LSR" else 1.2,
            markersize=5,
            label=line.label,
        )
        axes.errorbar(
            sizes,
            kept,
            yerr=[row["error"] for row in rows],
            color=COLOURS[i],
            linestyle="none",
            capsize=2,
        )
    dress(
        axes,
        f"kB of all that opens the adapter (the LoRA: {record['bytes_of_lora'] / 1000:,.0f})",
        "share of the LoRA's effect that is kept",
    )
    for axis, ticks, (_, most) in (
        (axes.xaxis, SIZES, axes.get_xlim()),
        (axes.yaxis, SHARES, axes.get_ylim()),
    ):
        shown = [each for each in ticks if each <= most]
        axis.set_ticks(shown, labels=[f"{each:g}" for each in shown])
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
    plots.save_figure(draw(records.load(source)), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
