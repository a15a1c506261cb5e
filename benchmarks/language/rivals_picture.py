"""The picture of the page on small adapters: share kept against bytes, a panel a task.

python -m benchmarks.language.rivals_picture benchmarks/results/rivals.json
docs/images/small-adapters.png

Tasks of one size have a table on the page, and no panel.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from benchmarks import record as records
from benchmarks.language.kept_by_bytes_picture import SHARES, SIZES, digits, share
from benchmarks.language.rival_results import NAMES, RivalResults
from lsrdecomp import plots
from lsrdecomp.plots.pictures import dress, line_style, name_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TASKS = ("E2E", "extraction", "sums")
SHOWN = ("LSR", "SVD", "Uni-LoRA", "Fisher core", "LoRAQuant")
"""Five lines a panel; more cannot be told apart."""
LOWEST = 0.5
"""Smallest share that is shown."""


def draw(all_results: list[RivalResults]) -> list[Axes]:
    """Draw a panel for each task, on shared axes; bars are standard errors over the texts."""
    figure = Figure(figsize=(3.8 * len(all_results), 4.0), layout="constrained")
    panels = list(figure.subplots(1, len(all_results), sharex=True, sharey=True, squeeze=False)[0])
    highest = 0.0
    largest = max(results.budgets[-1] for results in all_results) / 1000
    for panel, results in zip(panels, all_results, strict=True):
        panel.set(xscale="log", title=results.about["task"])
        panel.set_yscale("function", functions=(digits, share))
        for method in SHOWN:
            highest = max(highest, _draw_line(panel, results, method))
        dress(panel, "kB of the adapter", "")
    figure.suptitle("All trained on the LoRA's own answers", fontsize=10)
    panels[0].set_ylabel("share of the LoRA's effect that is kept,\nlog scale of what is lost")
    top = float(share(digits(highest) + 0.3))
    for panel in panels:
        panel.set_ylim(LOWEST, top)
        panel.set_xlim(0.8, 1.3 * largest)
        sizes = [size for size in SIZES if size <= 1.3 * largest]
        panel.set_xticks(sizes, labels=[f"{size:g}" for size in sizes])
        ticks = [tick for tick in SHARES if LOWEST <= tick <= top]
        panel.set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        name_lines(panel)
    return panels


def _draw_line(panel: Axes, results: RivalResults, method: str) -> float:
    """Draw one method through its sizes; return the largest share."""
    budgets = [budget for budget in results.budgets if results.trained(method, budget)]
    if not budgets:
        return 0.0
    shares = [results.share(method, budget) for budget in budgets]
    sizes = [fmean(row["bytes"] for row in results.trained(method, b)) / 1000 for b in budgets]
    kept = [each.value for each in shares]
    errors = [each.error for each in shares]
    style = line_style(f"{NAMES[method]}, trained")
    panel.plot(sizes, kept, label=NAMES[method], **style)
    panel.errorbar(sizes, kept, yerr=errors, color=style["color"], linestyle="none", capsize=2)
    return max(kept)


def main(source: Path, out: Path) -> None:
    """Draw the picture of a record."""
    record = records.load(source)
    all_results = [RivalResults(record, task) for task in TASKS]
    panels = draw([results for results in all_results if len(results.budgets) > 1])
    plots.save_figure(panels[0], out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
