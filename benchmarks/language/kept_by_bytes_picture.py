"""The picture of the README: share of one LoRA's effect that is kept, against bytes.

python -m benchmarks.language.kept_by_bytes_picture benchmarks/results/kept_by_bytes.json
docs/images/kept-by-bytes.png
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import record as records
from lsrdecomp import plots
from lsrdecomp.plots.pictures import COLOURS, FONT_SIZE, MARKERS, dress, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Line:
    """A method, and where its name stands beside its smallest adapter."""

    method: str
    is_trained: bool  # on the LoRA's own answers
    label: str
    offset: tuple[float, float] = (-8.0, 0.0)  # points from the marker
    alignment: str = "right"


LINES = (
    Line("LSR", True, "LSR, distilled"),
    Line("LSR", False, "LSR, calibrated"),
    Line("SVD", True, "truncated SVD,\ndistilled"),
    Line("Uni-LoRA", True, "Uni-LoRA"),
    Line("LoRAQuant", True, "LoRAQuant's split", (6.0, -9.0), "left"),
)
"""Five lines at most; more cannot be told apart."""


def points(record: dict[str, Any], method: str, *, is_trained: bool) -> list[dict[str, Any]]:
    """Return the rows of one line, the smallest first."""
    rows = [row for row in record["rows"] if row["method"] == method]
    return sorted(
        (row for row in rows if (row["steps"] > 0) == is_trained), key=lambda row: row["bytes"]
    )


def draw(record: dict[str, Any]) -> Axes:
    """Draw those of `LINES` that have rows, with the standard errors of their shares."""
    axes = new_axes()
    for i, line in enumerate(LINES):
        rows = points(record, line.method, is_trained=line.is_trained)
        if not rows:
            continue
        axes.errorbar(
            [row["bytes"] / 1000 for row in rows],
            [row["kept"] for row in rows],
            yerr=[row["error"] for row in rows],
            color=COLOURS[i],
            marker=MARKERS[i],
            linestyle="-" if line.is_trained else "--",
            linewidth=1.8 if line.method == "LSR" else 1.2,
            markersize=5,
            capsize=2,
            label=line.label,
        )
        axes.annotate(
            line.label,
            (rows[0]["bytes"] / 1000, rows[0]["kept"]),
            xytext=line.offset,
            textcoords="offset points",
            ha=line.alignment,
            va="center",
            color=COLOURS[i],
            fontsize=FONT_SIZE,
        )
    axes.set(xscale="log", xlim=(0.3, 45.0), ylim=(0.0, 1.05))
    axes.minorticks_off()
    dress(
        axes,
        f"kB that open the adapter, all told (the LoRA: {record['bytes_of_lora'] / 1000:,.0f})",
        "share of the LoRA's effect that is kept",
    )
    return axes


def main(source: Path, out: Path) -> None:
    """Draw the picture of a record."""
    plots.save_figure(draw(records.load(source)), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
