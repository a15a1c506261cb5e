"""The picture of `budgets`: error against parameters and bytes, by what makes an adapter smaller.

python -m benchmarks.compression.picture benchmarks/results/compression.json
docs/images/compression.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from lsrdecomp.plots.pictures import FONT_SIZE, name_lines

LEAST_RANK = 8
"""Adapters of lower rank leave other tools too few points."""

HEIGHTS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

ARMS = {
    "ours, float16": ("ours", "#0072B2", "o"),
    "PEFT convert_to_lora": ("SVD, one rank (PEFT, kohya)", "#D55E00", "s"),
    "SVD, same energy": ("SVD, one share of energy", "#009E73", "^"),
    "ours, Kronecker only, float16": ("ours, Kronecker shapes only", "#56B4E9", "v"),
    "LoKr": ("LoKr", "#CC79A7", "D"),
}
IN_BYTES = {
    "ours, bits chosen": ("ours", "#0072B2", "o"),
    "SVD, same rank, int8 or int4": ("SVD, one rank, int8 or int4", "#D55E00", "s"),
    "ours, Kronecker only, bits chosen": ("ours, Kronecker shapes only", "#56B4E9", "v"),
    "SVD, same rank": ("SVD, one rank, float16", "#E69F00", "P"),
    "LoKr": ("LoKr, float16", "#CC79A7", "D"),
    "LoRA int8": ("the LoRA\nin int8", "black", "*"),
    "LoRA int4": ("the LoRA in int4", "black", "X"),
    "LoRA NF4": ("the LoRA in NF4", "0.4", "P"),
}
POINT_NAMES = {"LoRA int8": (-9, 4), "LoRA int4": (-9, 7), "LoRA NF4": (-9, -7)}
"""Places of the names of single points beside them, in points."""


def draw(
    axes: Any, adapters: list[dict[str, Any]], arms: dict[str, tuple[str, str, str]], size: str
) -> None:
    """Medians over the adapters, where an arm has something of that size for all of them."""
    unit = 2 if size == "bytes" else 1  # of a number of the LoRA in float16
    for arm, (label, colour, marker) in arms.items():
        points: dict[str, list[tuple[float, float]]] = {}
        for adapter in adapters:
            for row in adapter["rows"]:
                at_own_size = row["budget"] == arm or not row["budget"].startswith("LoRA")
                if row["arm"] == arm and row.get(size) and at_own_size:
                    share = row[size] / (unit * adapter["parameters"])
                    points.setdefault(row["budget"], []).append((share, row["error"]))
        whole = [found for found in points.values() if len(found) == len(adapters)]
        medians = sorted(
            tuple(median(values) for values in zip(*found, strict=True)) for found in whole
        )
        if medians:
            line = ("-", 5) if len(medians) > 1 else ("none", 9)
            style = dict(zip(("linestyle", "markersize"), line, strict=True))
            axes.plot(
                *zip(*medians, strict=True),
                label=label if len(medians) > 1 else None,
                color=colour,
                marker=marker,
                linewidth=1.6,
                **style,
            )
        if len(medians) == 1:
            axes.annotate(
                label,
                medians[0],
                POINT_NAMES[arm],
                textcoords="offset points",
                color=colour,
                fontsize=FONT_SIZE,
                va="center",
                ha="right",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(
        [1 / t for t in (2, 4, 8, 16, 32, 48)], [f"1/{t}" for t in (2, 4, 8, 16, 32, 48)]
    )
    low, high = axes.get_ylim()
    axes.set_yticks(
        [t for t in HEIGHTS if low < t < high], [f"{t:g}" for t in HEIGHTS if low < t < high]
    )
    axes.minorticks_off()
    axes.grid(True, linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    name_lines(axes)


def main(source: Path, out: Path) -> None:
    results = json.loads(source.read_text(encoding="utf-8"))
    adapters = [one for one in results["adapters"].values() if min(one["ranks"]) >= LEAST_RANK]
    left, right = Figure(figsize=(11.0, 4.2), layout="constrained").subplots(1, 2)
    draw(left, adapters, ARMS, "parameters")
    draw(right, adapters, IN_BYTES, "bytes")
    left.set_xlabel("parameters, as a share of the LoRA's (all in float16)")
    right.set_xlabel("bytes, as a share of the LoRA's in float16")
    sample = f"median of {len(adapters)} adapters of rank {LEAST_RANK} or more"
    left.set_ylabel(f"relative Frobenius error, all layers\n({sample})")
    left.figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
