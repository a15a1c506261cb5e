"""The picture of LSR from a LoRA beside training from scratch: a panel a task, a dot a seed.

python -m benchmarks.language.from_lora_picture benchmarks/results/from_lora.json
docs/images/from-lora.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lsrdecomp import plots
from lsrdecomp.plots.pictures import COLOURS, FONT_SIZE, GREY, MARKERS, dress

TITLES = {"e2e": "E2E: a sentence from facts", "sst2": "SST-2: the mood of a sentence"}


def main(source: Path, out: Path) -> None:
    record: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    tasks = list(record["tasks"])
    figure = Figure(figsize=(6.4, 1.6 * len(tasks) + 1.0), layout="constrained")
    panels = figure.subplots(len(tasks), squeeze=False)[:, 0]
    for axes, task in zip(panels, tasks, strict=True):
        rows = [row for row in record["rows"] if row["task"] == task]
        arms = list(dict.fromkeys(row["arm"] for row in rows))
        for i, arm in enumerate(arms):
            losses = [row["loss"] for row in rows if row["arm"] == arm]
            starts = [
                row["start"] for row in rows if row["arm"] == arm and row["start"] is not None
            ]
            colour = COLOURS[0] if arm.startswith("LSR") else GREY
            axes.plot(losses, [i] * len(losses), MARKERS[i], color=colour, linestyle="none")
            axes.plot(
                starts,
                [i] * len(starts),
                MARKERS[i],
                color=colour,
                fillstyle="none",
                linestyle="none",
            )
        for name, side in (("lora", "left"), ("base", "right")):
            loss = record["tasks"][task][name]
            axes.axvline(loss, color=GREY, linewidth=1.0, linestyle="--")
            text = {"lora": " LoRA, r = 8", "base": "base "}[name]
            axes.text(
                loss, len(arms) - 0.2, text, color=GREY, fontsize=FONT_SIZE, ha=side, va="bottom"
            )
        axes.set_xscale("log")
        dress(axes, "", "")
        axes.set_yticks(range(len(arms)), arms)
        axes.set_ylim(len(arms) - 0.1, -0.5)
        axes.set_title(TITLES.get(task, task), fontsize=10, loc="left")
    panels[-1].set_xlabel(
        "loss on held-out answers, nats a token, log scale (open: before training)"
    )
    plots.save_figure(panels[-1], out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
