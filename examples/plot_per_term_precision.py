"""
A number format for each term
=============================

Terms differ in size by orders of magnitude, and so may their precision: rounding a term of weight λ
costs λρ. Choosing a format for each factor of each term, or dropping it, saves bytes at the same
certified error.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import KroneckerShape, decompose
from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.mixed_precision import smallest
from lsrdecomp.plots import COLOURS
from lsrdecomp.targets.target import Dense

n = 32
i = np.arange(n * n)
x, y = np.divmod(i, n)
distance = np.hypot(x[:, None] - x[None, :], y[:, None] - y[None, :])
target = Dense(1.0 / (1.0 + distance))
shape = KroneckerShape(((n, n), (n, n)))
terms = decompose(target, shape, rank=16).approximation

# %%
# Bytes for each tolerance, against one format for everything.

tolerances = np.logspace(-3, -0.7, 10)
sizes = {
    "chosen for each factor": {},
    "uniform float16": {"formats": ("float16",)},
    "uniform float32": {"formats": ("float32",)},
}
fig, ax = plt.subplots(figsize=(6.8, 4.2), layout="constrained")
for (name, options), colour in zip(sizes.items(), COLOURS, strict=False):
    points = []
    for rtol in tolerances:
        try:
            points.append((rtol, smallest(target, terms, atol=rtol * target.norm, **options).bytes))
        except BudgetError:
            continue
    reached = np.array(points)
    ax.loglog(*reached.T, marker="o", markersize=4, color=colour)
    ax.annotate(
        name,
        reached[-1],
        (6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=colour,
    )
ax.set(
    xlabel="tolerance ε, relative, log scale",
    ylabel="bytes, certified error ≤ ε, log scale",
    xlim=(8e-4, 0.9),
)
ax.spines[["top", "right"]].set_visible(False)
ax.grid(linewidth=0.4, alpha=0.5)
plt.show()

# %%
# What was chosen at one tolerance: strong terms keep many bits, weak ones few.

stored = smallest(target, terms, atol=0.01 * target.norm)
print(stored)
for k, kinds in enumerate(stored.formats):
    print(f"term {k + 1}: {' ⊗ '.join(kinds)}")
