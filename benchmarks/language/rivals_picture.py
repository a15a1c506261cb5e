"""The picture of the page on small adapters: share kept against bytes, each at its best rate.

python -m benchmarks.language.rivals_picture benchmarks/results/rivals.json
docs/images/small-adapters.png

A panel holds five lines at most: LSR, and the methods of one kind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from lsrdecomp import plots
from lsrdecomp.plots.pictures import COLOURS, MARKERS, dress, name_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LSR = "LSR"
PANELS = {
    "made from the LoRA's numbers": {
        "LoRAQuant": "LoRAQuant",
        "SVD": "truncated SVD",
        "Rank one": "rank one, int4",
    },
    "small cores between fixed bases": {
        "Fisher core": "Fisher cores",
        "XS": "LoRA-XS",
        "TinyLoRA": "TinyLoRA",
    },
    "trained from nothing": {
        "Uni-LoRA": "Uni-LoRA",
        "VB-LoRA": "VB-LoRA",
        "FourierFT": "FourierFT",
        "VeRA": "VeRA",
    },
}
"""Names of the methods that stand beside LSR, by the title of their panel."""


def draw(record: dict[str, Any], task: str = "E2E") -> list[Axes]:
    """Draw the panels of one task, on shared axes; bars are standard errors over the examples.

    Raises `KeyError` for a method that no panel names.
    """
    rows = [row for row in record["rows"] if row["task"] == task and "held_out" not in row]
    best = {
        (row["method"], row["budget"], row["seed"]): row
        for row in sorted(rows, key=lambda row: row["kept"])
    }
    named = {method for names in PANELS.values() for method in names} | {LSR}
    unnamed = {row["method"] for row in rows} - named
    if unnamed:
        raise KeyError(f"no panel names {', '.join(sorted(unnamed))}")
    figure = Figure(figsize=(11.4, 4.0), layout="constrained")
    panels = list(figure.subplots(1, len(PANELS), sharex=True, sharey=True))
    for panel, (title, names) in zip(panels, PANELS.items(), strict=True):
        panel.set(xscale="log", title=title)
        for i, (method, label) in enumerate({LSR: LSR, **names}.items()):
            _draw_line(panel, best, method, label, i)
        panel.set_xlim(800, 36_000)
        dress(panel, "bytes of the adapter", "")
    panels[0].set_ylabel("share of the LoRA's answers that is kept")
    for panel in panels:
        name_lines(panel)
    return panels


def _draw_line(
    panel: Axes, best: dict[tuple[str, int, int], dict[str, Any]], method: str, label: str, i: int
) -> None:
    """Draw one method through its budgets, each the mean over seeds."""
    by_budget: dict[int, list[dict[str, Any]]] = {}
    for (name, budget, _), row in sorted(best.items()):
        if name == method:
            by_budget.setdefault(budget, []).append(row)
    if not by_budget:
        return
    x, y, error = (
        [fmean(row[key] for row in rows) for rows in by_budget.values()]
        for key in ("bytes", "kept", "error")
    )
    colour = COLOURS[i]
    width = 1.8 if method == LSR else 1.2
    panel.plot(x, y, color=colour, marker=MARKERS[i], markersize=5, linewidth=width, label=label)
    panel.errorbar(x, y, yerr=error, color=colour, linestyle="none", capsize=2)


def main(source: Path, out: Path) -> None:
    """Draw the picture of a record."""
    panels = draw(json.loads(source.read_text(encoding="utf-8")))
    plots.save_figure(panels[0], out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
