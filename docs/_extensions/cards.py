"""The four pictures of the front page, drawn from records and matrices while the site is built.

They have no background and grey words, so that one file serves light and dark pages.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
BLUE, ORANGE, GREY = "#2f8fd0", "#D55E00", "#808890"
"""Readable on white and on black, and told apart with any colour vision."""
SIZE = (3.2, 1.9)
"""Inches: the card's shape."""


def record(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


MIDDLE = {"ha": "center", "va": "center"}


def clean(ax: Any, *, sides: tuple[str, ...] = ()) -> None:
    """Leave the named sides of the frame, in grey, and no ticks."""
    for side, spine in ax.spines.items():
        spine.set_visible(side in sides)
        spine.set_color(GREY)
    ax.tick_params(length=0, colors=GREY, labelsize=9)


def draw_lora(ax: Any) -> None:
    """Bytes of a LoRA of SmolLM2 and of what `--keep 0.95 --distill 60` made of it, as areas."""
    from matplotlib.patches import Rectangle

    tasks = record("rivals")["tasks"]
    lora = next(each["bytes_of_lora"] for each in tasks if each["task"] == "E2E")
    rows = [
        row
        for row in record("one_command")["rows"]
        if row["name"] == "smollm2 keep .95 distill 60" and row["seed"] == 0
    ]
    small, kept = rows[0]["bytes"], rows[0]["kept"]
    side = 3.4
    small_side = side * (small / lora) ** 0.5
    ax.add_patch(Rectangle((0.0, 0.0), side, side, color=GREY))
    ax.add_patch(Rectangle((4.0, 0.0), small_side, small_side, color=BLUE))
    before, after = (
        f"a LoRA\n{lora / 1e6:.1f} MB",
        f"{small / 1e3:.1f} kB\nkeep {kept:.0%}\nof its effect",
    )
    ax.text(0.5 * side, 0.5 * side, before, color="white", fontsize=10, **MIDDLE)
    ax.text(4.0, 0.4, after, color=BLUE, fontsize=10)
    ax.set(xlim=(-0.1, 7.3), ylim=(-0.2, 3.6), xticks=[], yticks=[], aspect="equal")
    clean(ax)


def draw_matrix(ax: Any) -> None:
    """Error against terms, of a covariance on a grid and of a Hilbert matrix."""
    import numpy as np

    import lsrdecomp as lsr

    i = np.arange(64.0)
    grid = np.stack(np.meshgrid(np.arange(8.0), np.arange(8.0), indexing="ij"), -1).reshape(-1, 2)
    distance = np.linalg.norm(grid[:, None] - grid[None], axis=-1)
    matrices = {
        "covariance": (np.exp(-distance / 3.0), ORANGE, (5.2, 4e-4)),
        "Hilbert": (1.0 / (1.0 + i[:, None] + i[None, :]), BLUE, (2.1, 6e-7)),
    }
    for name, (matrix, colour, place) in matrices.items():
        errors = lsr.error_curve(matrix, "8x8, 8x8").relative_errors[1:8]
        ax.semilogy(range(1, len(errors) + 1), errors, "o-", color=colour, ms=4)
        ax.text(*place, name, color=colour, fontsize=10)
    ax.set(ylim=(1e-9, 2), xticks=range(1, 8), yticks=[1, 1e-4, 1e-8])
    ax.minorticks_off()
    ax.set_xlabel("Kronecker terms", color=GREY, fontsize=9)
    ax.set_ylabel("error", color=GREY, fontsize=9)
    clean(ax, sides=("left", "bottom"))


def draw_test(ax: Any) -> None:
    """The smallest factors on which a product with swapped sizes fails."""
    from matplotlib.patches import Rectangle

    def boxes(x: float, y: float, rows: int, columns: int, colour: str) -> None:
        for row in range(rows):
            for column in range(columns):
                corner = (x + column, y - row - 1)
                ax.add_patch(Rectangle(corner, 0.9, 0.9, facecolor=colour, alpha=0.75))

    boxes(0.3, 3.0, 1, 2, BLUE)
    boxes(5.3, 3.5, 2, 1, ORANGE)
    ax.text(0.3, 0.9, "expected\n(1, 2)", color=BLUE, fontsize=10, va="top")
    ax.text(4.6, 0.9, "returned\n(2, 1)", color=ORANGE, fontsize=10, va="top")
    ax.text(3.15, 2.2, "≠", color=GREY, fontsize=18)
    ax.set(xlim=(0, 7.4), ylim=(-0.8, 3.8), xticks=[], yticks=[])
    clean(ax)


def draw_tuning(ax: Any) -> None:
    """Held-out loss of the same number of parameters, from the LoRA and from scratch (E2E)."""
    facts = record("from_lora")
    arms: dict[str, list[float]] = {}
    for row in facts["rows"]:
        if row["task"] == "e2e":
            arms.setdefault(row["arm"], []).append(row["loss"])
    shown = {"LSR from the LoRA": BLUE, "LSR from scratch": ORANGE}
    for place, (arm, colour) in enumerate(shown.items()):
        value = fmean(arms[arm])
        ax.barh([1 - place], [value], color=colour, height=0.5)
        ax.text(0.02, 1.35 - place, f"{arm}: loss {value:.2f}", color=colour, fontsize=10)
    ax.set(ylim=(-0.6, 1.9), xticks=[], yticks=[])
    clean(ax, sides=("left",))


DRAWINGS = {"lora": draw_lora, "matrix": draw_matrix, "test": draw_test, "tune": draw_tuning}


def draw_cards(app: Any) -> None:
    """Write images/card-*.svg beside the pages' other pictures."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder = Path(app.srcdir) / "images"
    with mpl.rc_context({"svg.hashsalt": "cards", "svg.fonttype": "path"}):
        for name, draw in DRAWINGS.items():
            figure = Figure(figsize=SIZE, layout="constrained")
            draw(figure.subplots())
            path = folder / f"card-{name}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", draw_cards)
    return {"version": "1", "parallel_read_safe": True}
