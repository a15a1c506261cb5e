"""The picture of docs/kernels.md: what adapters cost beside PEFT's LoRA, and what the cost model says they should.

python -m benchmarks.adapters.picture benchmarks/results/adapters-cpu.json docs/images/kernels-cpu.png
"""

from __future__ import annotations

import json
import sys
import textwrap
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
    """A panel a case: medians and quartiles of the time against PEFT's LoRA. Last: the cost model against the clock."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    cases = record["cases"]
    names = list(dict.fromkeys(arm["arm"] for case in cases for arm in case["arms"]))
    sums = {name: sum(arm["ratio"] for case in cases for arm in case["arms"] if arm["arm"] == name) for name in names}
    names.sort(key=lambda name: sums[name], reverse=True)
    columns = 4
    rows = -(-(len(cases) + 1) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(11, 3.6 * rows), layout="constrained", squeeze=False)
    panels = [panel for line in grid for panel in line]
    for number, (panel, case) in enumerate(zip(panels, cases, strict=False)):
        _times(panel, case, names)
        panel.set_yticks(range(len(names)), names if number % columns == 0 else [""] * len(names), fontsize=8)
        panel.set_title(textwrap.fill(case["name"], 28), fontsize=9)
        panel.set_xlabel("time, PEFT LoRA = 1", fontsize=8)
    span = [end for panel in panels[: len(cases)] for end in panel.get_xlim()]
    for panel in panels[: len(cases)]:
        panel.set_xlim(min(span), max(span))
    _against_model(panels[len(cases)], record)
    for panel in panels[len(cases) + 1 :]:
        panel.set_visible(False)
    scaled = [panel.xaxis for panel in panels[: len(cases) + 1]] + [panels[len(cases)].yaxis]
    for axis in scaled:
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_major_locator(FixedLocator((0.7, 1, 1.5, 2, 3, 4)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
        axis.set_tick_params(labelsize=8)
    device, dtype = record["environment"]["device"], record["dtype"].removeprefix("torch.")
    figure.suptitle(f"Forward and backward on {device} in {dtype}: median and quartiles over rounds", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _times(panel: Any, case: dict[str, Any], names: list[str]) -> None:
    """One case: a point and a bar for each arm; ours filled, others hollow."""
    for arm in case["arms"]:
        middle, low, high = arm["ratio"], arm["ratio_low"], arm["ratio_high"]
        ours = arm["arm"].startswith(("LSR", "our"))
        colour = COLOURS[0] if ours else "0.35"
        bars = [[middle - low], [high - middle]]
        height = names.index(arm["arm"])
        panel.errorbar(
            middle, height, xerr=bars, fmt="o" if ours else "s", ms=4, lw=1.2, color=colour, mfc=None if ours else "w"
        )
    panel.axvline(1, color="0.6", lw=1, zorder=0)
    panel.grid(axis="y", color="0.93")
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _against_model(panel: Any, record: dict[str, Any]) -> None:
    """All cases: what the cost model expects across, what was measured up; on the line they agree."""
    itemsize = 4 if "32" in record["dtype"] else 2
    points: dict[str, list[tuple[float, float]]] = {}
    for case in record["cases"]:
        if case["shapes"]:
            expected = model(case, record["ceilings"], itemsize)
            measured = {arm["arm"]: arm["ratio"] for arm in case["arms"]}
            for arm in expected:
                if arm != YARDSTICK and arm in measured:
                    points.setdefault(arm, []).append((expected[arm] / expected[YARDSTICK], measured[arm]))
    ends = [value for own in points.values() for point in own for value in point]
    if ends:
        panel.plot([min(ends), max(ends)], [min(ends), max(ends)], color="0.6", lw=1, zorder=0)
    for (arm, own), sign, colour in zip(points.items(), "os^vD", COLOURS, strict=False):
        panel.plot(*zip(*own, strict=True), sign, color=colour, ms=5, mfc="none", label=arm)
    panel.set_title("measured, against the cost model", fontsize=9)
    panel.set_xlabel("by the model, PEFT LoRA = 1", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    if points:
        panel.legend(fontsize=7, frameon=False, loc="upper left")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
