"""The picture of docs/kernels.md: what adapters cost beside PEFT's LoRA, and what the cost model says they should.

python benchmarks/adapters_picture.py benchmarks/results/adapters-cpu.json docs/images/kernels-cpu.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
YARDSTICK = "PEFT LoRA"


def model(case: dict[str, Any], ceilings: dict[str, float], itemsize: int) -> dict[str, float]:
    """Seconds of forward and backward by the cost model: operations and adapter bytes at the machine's ceilings.

    The base does 4 w1 w2 operations a token; a pair of rank r adds 6 r (w1 + w2), and LoKr, which forms ΔW and
    multiplies by it as by a trained weight, 6 w1 w2. Bytes a token, for 2-byte numbers, as in docs/kernels.md.
    """
    seconds = dict.fromkeys(
        ("frozen base", YARDSTICK, "our LoRA", "our LoRA, equal rank", "LSR blas", "PEFT LoKr"), 0.0
    )
    inner = case["rank"][0] * case["rank"][1]
    ranks = {
        YARDSTICK: case["lora_rank"],
        "our LoRA": case["lora_rank"],
        "our LoRA, equal rank": inner,
        "LSR blas": inner,
    }
    for out, into in case["shapes"]:
        n = case["tokens"]
        base = 4 * n * out * into / ceilings["flops"]
        for arm in seconds:
            if arm in ranks:
                # LSR's own work, expanding and contracting, does not grow with the tokens
                own = 6 * case["terms"] * inner * (out + into) if arm == "LSR blas" else 0
                flops = (6 * n * ranks[arm] * (out + into) + own) / ceilings["flops"]
                traffic = 20 * out + 12 * into if arm == YARDSTICK else 8 * out + 8 * into
                seconds[arm] += base + flops + n * traffic * itemsize / 2 / ceilings["bytes"]
            else:
                seconds[arm] += base + (6 * n * out * into / ceilings["flops"] if arm == "PEFT LoKr" else 0)
    return seconds


def draw(record: dict[str, Any], path: Path) -> None:
    """Left: medians and quartiles of the time against PEFT's LoRA. Right: the cost model against the measurement."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, (costs, models) = plt.subplots(1, 2, figsize=(11, 5.2), width_ratios=(1.5, 1), layout="constrained")
    cases = record["cases"]
    names = list(dict.fromkeys(arm["arm"] for case in cases for arm in case["arms"]))
    means = {name: sum(arm["ratio"] for case in cases for arm in case["arms"] if arm["arm"] == name) for name in names}
    names.sort(key=lambda name: means[name], reverse=True)
    for number, case in enumerate(cases):
        offset = (len(cases) / 2 - number) * 0.7 / len(cases)
        places = {arm["arm"]: arm for arm in case["arms"]}
        shown = [name for name in names if name in places]
        middle = [places[name]["ratio"] for name in shown]
        low = [places[name]["ratio"] - places[name]["ratio_low"] for name in shown]
        high = [places[name]["ratio_high"] - places[name]["ratio"] for name in shown]
        heights = [names.index(name) + offset for name in shown]
        colour = COLOURS[number % len(COLOURS)]
        costs.errorbar(middle, heights, xerr=(low, high), fmt="o", ms=4, lw=1, color=colour, label=case["name"])
    costs.axvline(1, color="0.6", lw=1, zorder=0)
    costs.set_yticks(range(len(names)), names)
    costs.set_xlabel("time of forward and backward, PEFT LoRA = 1 (median and quartiles over rounds)")
    costs.legend(fontsize=7, loc="upper right", frameon=False)
    costs.grid(axis="y", color="0.93")
    itemsize = 4 if "32" in record["dtype"] else 2
    ends = []
    for number, case in enumerate(case for case in cases if case["shapes"]):
        expected = model(case, record["ceilings"], itemsize)
        measured = {arm["arm"]: arm["ratio"] for arm in case["arms"]}
        for sign, arm in zip("os^vD", (name for name in expected if name != YARDSTICK), strict=True):
            if arm not in measured:
                continue
            point = expected[arm] / expected[YARDSTICK], measured[arm]
            ends += point
            colour = COLOURS[number % len(COLOURS)]
            models.plot(*point, sign, color=colour, ms=5, mfc="none", label=arm if number == 0 else None)
    if ends:
        models.plot([min(ends), max(ends)], [min(ends), max(ends)], color="0.6", lw=1, zorder=0)
    models.set(xlabel="ratio to PEFT LoRA by the cost model", ylabel="measured")
    for axis in (costs.xaxis, models.xaxis, models.yaxis):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_major_locator(FixedLocator((0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    legend = models.legend(fontsize=7, frameon=False)
    for handle in legend.legend_handles:
        handle.set_color("0.2")
    figure.suptitle(f"{record['environment']['device']}, {record['dtype'].removeprefix('torch.')}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
