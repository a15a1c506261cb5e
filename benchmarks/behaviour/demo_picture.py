"""The picture of the README: what survives of the demo's adapter, by structure and size.

python -m benchmarks.behaviour.demo_picture benchmarks/results/demo_function.json docs/images/demo-function.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

ARMS = {
    "lsr-kfac": ("LSR, fitted to what the layers do", "#0072B2", "o"),
    "svd-kfac": ("truncated SVD, in the same norm", "#D55E00", "s"),
    "svd-frobenius": ("truncated SVD of the numbers", "#009E73", "^"),
}


def main(source: Path, out: Path) -> None:
    results = json.loads(source.read_text(encoding="utf-8"))
    whole = next(row["parameters"] for row in results["rows"] if row["method"] == "lora")
    axes = Figure(figsize=(6.6, 3.7), layout="constrained").subplots()
    for method, (label, colour, marker) in ARMS.items():
        points = sorted((whole / row["ratio"], row["share"]) for row in results["rows"] if row["method"] == method)
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, linewidth=1.8, label=label)
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.text(800, 1.01, f"the LoRA itself, {whole:,} parameters", color="0.35", fontsize=8, va="bottom")
    axes.set_xscale("log")
    ratios = sorted({row["ratio"] for row in results["rows"] if "ratio" in row}, reverse=True)
    axes.set_xticks([whole / ratio for ratio in ratios], [f"1/{ratio:.0f}" for ratio in ratios])
    axes.minorticks_off()
    axes.set_ylim(0.0, 1.12)
    axes.set_xlabel("parameters of the adapter, as a share of the LoRA's")
    axes.set_ylabel("share of its gain that is kept\n(held-out loss, no retraining)")
    axes.grid(True, linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
