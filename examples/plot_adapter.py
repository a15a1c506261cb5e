"""
The adapter, drawn to scale
===========================

What the paper's missing figure should show. A frozen weight W gets ΔW = B̂ Â of low rank r = r1·r2,
as in LoRA; but each side is itself a sum of a few Kronecker products, and only their small factors
are stored and trained.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import ProductShape, SeparatedMatrix
from lsrdecomp.kronecker import SeparatedProduct
from lsrdecomp.plots import COLOURS

shape = ProductShape(out=(6, 8), inner=(2, 2), into=(6, 8))
terms = 3
rng = np.random.default_rng(7)


def side(split):
    return SeparatedMatrix.from_factors(
        [rng.standard_normal((terms, m, n)) for m, n in split.factors]
    )


adapter = SeparatedProduct(side(shape.left), side(shape.right))

# %%
# Every square is one number. Stored are the small tables on the left; all else follows from them.

fig = plt.figure(figsize=(9.6, 6.0))
scale = 0.0098  # height of one number, as a share of the figure
aspect = fig.get_figheight() / fig.get_figwidth()


def show(matrix, left, middle, title="", colour="0.4"):
    """A matrix with its squares, centred at a height; returns where it ends."""
    rows, columns = matrix.shape
    width, height = columns * scale * aspect, rows * scale
    ax = fig.add_axes((left, middle - height / 2, width, height))
    ax.imshow(matrix, cmap="PuOr", vmin=-2.5 * matrix.std(), vmax=2.5 * matrix.std(), aspect="auto")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_color(colour)
    ax.set_title(title, fontsize=9, pad=4)
    return left + width


def row(name, stacks, left, middle, colour):
    """Σ first ⊗ second, ending just before the matrix it makes."""
    first, second = stacks.folded()
    fig.text(left, middle, name, fontsize=14, va="center", color=colour)
    left += 0.045
    for k in range(terms):
        for stack, sign in ((first, "=" if k == 0 else "+"), (second, "⊗")):
            fig.text(left, middle, sign, ha="center", va="center", fontsize=12)
            left = (
                show(stack[k], left + 0.018, middle, "×".join(map(str, stack[k].shape)), colour)
                + 0.018
            )


up, down = adapter.to_lora()
row("Â", adapter.right, 0.03, 0.80, COLOURS[1])
row("B̂", adapter.left, 0.03, 0.36, COLOURS[0])
show(down, 0.66, 0.80, f"Â, {down.shape[0]}×{down.shape[1]}", COLOURS[1])
show(up, 0.615, 0.36, f"B̂, {up.shape[0]}×{up.shape[1]}", COLOURS[0])
show(adapter.to_matrix(), 0.66, 0.36, "ΔW = B̂ Â")
lora, full = up.size + down.size, up.shape[0] * down.shape[1]
fig.text(0.03, 0.94, f"stored and trained: {adapter.parameters} numbers", fontsize=11)
fig.text(0.615, 0.94, f"as a LoRA: {lora} numbers", fontsize=11)
fig.text(0.66, 0.06, f"ΔW: {full:,} numbers, never formed", fontsize=11)
plt.show()

# %%
# Sizes of the paper's own adapter: 768 × 768, r = 2·2, sixteen terms.

paper = ProductShape(out=(32, 24), inner=(2, 2), into=(32, 24))
print(f"{paper.parameters(16):,} numbers; LoRA of rank 8 has {8 * (768 + 768):,}")
