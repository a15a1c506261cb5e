"""
Which Kronecker sizes? Search all of them
=========================================

A matrix has as many two-factor shapes as its sides have pairs of divisors. Plain low rank, (m×1) ⊗
(1×n), is one of them, so the best shape cannot lose to truncated SVD. For the inverse of a
Laplacian on a grid it wins by a wide margin.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp.analysis import error_curves, pareto_front
from lsrdecomp.kronecker.shape import divisors, kronecker_shapes
from lsrdecomp.plots import plot_pareto

n = 12
second = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
matrix = np.linalg.inv(np.kron(second, np.eye(n)) + np.kron(np.eye(n), second))
shapes = list(kronecker_shapes(matrix.shape))
curves = error_curves(matrix, shapes)

# %%
# Parameters that each shape needs for a relative error of 1 %; the map is by the size of the first
# factor.

rows = divisors(matrix.shape[0])
needed = np.full((len(rows), len(rows)), np.nan)
for shape, curve in zip(shapes, curves, strict=True):
    m, k = shape.factors[0]
    needed[rows.index(m), rows.index(k)] = curve.parameters_for(1e-2)

fig, ax = plt.subplots(figsize=(7.4, 5.6), layout="constrained")
image = ax.imshow(np.log10(needed), cmap="cividis_r", origin="lower")
ax.set_xticks(range(len(rows)), rows)
ax.set_yticks(range(len(rows)), rows)
ax.set(xlabel="columns of the first factor", ylabel="rows of the first factor")
best = np.unravel_index(np.nanargmin(needed), needed.shape)
ax.plot(
    best[1],
    best[0],
    "o",
    markerfacecolor="none",
    markeredgecolor="#D55E00",
    markersize=17,
    markeredgewidth=2,
)
ax.plot(
    0,
    len(rows) - 1,
    "s",
    markerfacecolor="none",
    markeredgecolor="w",
    markersize=17,
    markeredgewidth=2,
)
ax.set_title(
    f"circle: best, {rows[best[0]]}×{rows[best[1]]}, {int(np.nanmin(needed)):,} parameters; "
    f"square: low rank, {int(needed[-1, 0]):,}; dense: {matrix.size:,}",
    fontsize=10,
)
fig.colorbar(image, label="log₁₀ of parameters for 1 % error")
plt.show()

# %%
# The front over all shapes: what no other shape and rank beats in both parameters and error.

front = [point for point in pareto_front(curves) if point.relative_error > 1e-10]
fig, ax = plt.subplots(figsize=(7.4, 4.4), layout="constrained")
plot_pareto(front, ax=ax)
plt.show()
