"""The pictures of the front page, drawn from records and matrices while the site is built.

Three cards have no background and grey words, so that one file serves light and dark pages, where
its colours are brightened; and one picture is shown where people send a link to the site.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.headline import OF_WHAT, OPTIONS, headline
from lsrdecomp.plots.pictures import COLOURS

BLUE, ORANGE = COLOURS[:2]
GREY = "#808890"
"""Readable on white and on black."""
SIZE = (3.2, 1.9)
"""Inches: the card's shape."""
SOCIAL_SIZE = (12.0, 6.3)
"""Inches, at a hundred dots each: the shape that links are shown in."""
MIDDLE = {"ha": "center", "va": "center"}


def clean(ax: Any, *, sides: tuple[str, ...] = ()) -> None:
    """Leave the named sides of the frame, in grey, and no ticks."""
    for side, spine in ax.spines.items():
        spine.set_visible(side in sides)
        spine.set_color(GREY)
    ax.tick_params(length=0, colors=GREY, labelsize=9)


def draw_lora(ax: Any) -> None:
    """Bytes of a LoRA and of what the command of the front doors made of it, as areas."""
    from matplotlib.patches import Rectangle

    told = headline()
    before, after = told.sizes
    side = 3.4
    small_side = side * (told.bytes / told.lora_bytes) ** 0.5
    outline = {"facecolor": "none", "edgecolor": GREY, "linewidth": 2.0}
    ax.add_patch(Rectangle((0.0, 0.0), side, side, **outline))
    ax.add_patch(Rectangle((4.0, 0.0), small_side, small_side, color=BLUE))
    ax.text(0.5 * side, 0.5 * side, f"a LoRA\n{before}", color=GREY, fontsize=10, **MIDDLE)
    words = f"{after}\nkeeps {told.count}\nanswers"
    ax.text(4.0, small_side + 0.25, words, color=BLUE, fontsize=10)
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
    ax.set_ylabel("error, log scale", color=GREY, fontsize=9)
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


DRAWINGS = {"lora": draw_lora, "matrix": draw_matrix, "test": draw_test}


def draw_cards(app: Any) -> None:
    """Write images/card-*.svg and _static/social.png beside the pages' other pictures."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder = Path(app.srcdir) / "images"
    with mpl.rc_context({"svg.hashsalt": "cards", "svg.fonttype": "path"}):
        for name, draw in DRAWINGS.items():
            figure = Figure(figsize=SIZE, layout="constrained")
            draw(figure.subplots())
            path = folder / f"card-{name}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})
        figure = Figure(figsize=SOCIAL_SIZE)
        draw_social(figure)
        figure.savefig(Path(app.srcdir) / "_static" / "social.png", dpi=100)


def draw_social(figure: Any) -> None:
    """The mark, the name, and the figure of the front doors with its command."""
    import numpy as np
    from matplotlib.patches import Rectangle

    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set(xlim=(0.0, 12.0), ylim=(0.0, 6.3))
    ax.axis("off")
    small = np.array([[1.0, 0.45], [0.45, 1.0]])
    beside = np.array([[1.0, 0.6], [0.3, 1.0]])
    blocks = (
        (small, 0.8, 2.6, 0.4),
        (beside, 2.4, 4.2, 0.4),
        (np.kron(small, beside), 1.8, 1.8, 0.45),
    )
    for block, left, bottom, side in blocks:
        for (i, j), shade in np.ndenumerate(block):
            corner = (left + j * 1.1 * side, bottom + (len(block) - 1 - i) * 1.1 * side)
            ax.add_patch(Rectangle(corner, side, side, color=BLUE, alpha=shade))
    told = headline()
    before, after = told.sizes
    ax.text(4.9, 4.3, "lsrdecomp", fontsize=46, fontweight="bold", color="#1c2024")
    ax.text(4.9, 3.35, f"A LoRA of {before} became {after}", fontsize=24, color="#1c2024")
    ax.text(4.9, 2.75, f"and keeps {told.count} {OF_WHAT}.", fontsize=21, color="#1c2024")
    command = f"lsrdecomp compress my-lora/ {OPTIONS}"
    ax.text(4.9, 1.95, command, fontsize=13, color=GREY, family="monospace")


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", draw_cards)
    return {"version": "1", "parallel_read_safe": True}
