"""The picture of the page on small adapters: share kept against bytes, each at its best rate.

python -m benchmarks.language.rivals_picture benchmarks/results/rivals.json
docs/images/small-adapters.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

from lsrdecomp import plots
from lsrdecomp.plots.pictures import COLOURS, MARKERS, dress, name_lines, new_axes

LINES = ("-", "--", ":", "-.")
NAMES = {
    "SVD": "truncated SVD",
    "XS": "LoRA-XS",
    "Fisher core": "Fisher cores",
    "Rank one": "rank one in int4",
}


def main(source: Path, out: Path, task: str = "E2E") -> None:
    rows = [
        row
        for row in json.loads(source.read_text(encoding="utf-8"))["rows"]
        if row["task"] == task and "held_out" not in row
    ]
    best = {
        (row["method"], row["budget"], row["seed"]): row
        for row in sorted(rows, key=lambda row: row["kept"])
    }
    axes = new_axes()
    methods = dict.fromkeys(["LSR", *(row["method"] for row in rows)])
    for i, method in enumerate(methods):
        label, colour = NAMES.get(method, method), COLOURS[i % len(COLOURS)]
        budgets = sorted({budget for name, budget, _ in best if name == method})
        seeds = [
            [row for (name, size, _), row in best.items() if (name, size) == (method, b)]
            for b in budgets
        ]
        x, y, error = (
            [fmean(row[key] for row in each) for each in seeds]
            for key in ("bytes", "kept", "error")
        )
        style = {
            "color": colour,
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": LINES[i % len(LINES)],
        }
        style["fillstyle"] = "full" if i < len(COLOURS) else "none"
        axes.errorbar(
            x,
            y,
            yerr=error,
            markersize=5,
            linewidth=1.8 if i == 0 else 1.2,
            capsize=2,
            label=label,
            **style,
        )
    axes.set(xscale="log", xlim=(700, 45_000))
    dress(axes, "bytes of the adapter", "share of the LoRA's answers that is kept")
    name_lines(axes)
    plots.save_figure(axes, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
