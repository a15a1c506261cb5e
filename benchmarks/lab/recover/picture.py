"""The pictures of docs/evidence/fine-tuning-measured.md: shares of a LoRA's gain, one file a task.

``python -m benchmarks.lab.recover.picture benchmarks/results/recover-minilm.json docs/images``
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from benchmarks.lab.pictures import Point, plot_stages
from lsrdecomp import plots


def main(source: Path, folder: Path) -> None:
    results = json.loads(source.read_text(encoding="utf-8"))
    titles = {
        "compressed": "as compressed",
        "recovered": f"after {results['recover']['steps']} steps",
        "scratch": "from scratch",
    }
    for task in dict.fromkeys(line["task"] for line in results["lines"]):
        paths: dict[str, dict[str, list[Point]]] = {}
        for line in results["lines"]:
            label = line["label"].replace("K-FAC", "Fisher")  # its name in the oldest records
            for stage, title in titles.items():
                shares = line[stage]["share"]
                if line["task"] == task and line["structure"] != "lora" and shares:
                    spread = statistics.stdev(shares) if len(shares) > 1 else None
                    point = Point(label, line["parameters"], statistics.fmean(shares), spread)
                    paths.setdefault(label, {}).setdefault(title, []).append(point)
        panels = plot_stages(
            paths,
            size="parameters of the adapter",
            quality="share of the LoRA's gain (loss on dev)",
            references={"the LoRA": 1.0, "no adapter": 0.0},
        )
        plots.save_figure(panels[0], folder / f"recover-{task.lower().replace('-', '')}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
