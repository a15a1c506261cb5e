"""
The sine of a sum: d terms, not 2ᵈ⁻¹
====================================

:math:`\\sin(x_1 + \\cdots + x_d)` by the addition theorem is a sum of :math:`2^{d-1}` products.
Beylkin and Mohlenkamp found one of d products,

.. math:: \\sin\\Bigl(\\sum_j x_j\\Bigr) = \\sum_{j=1}^d \\sin(x_j) \\prod_{k \\ne j}
          \\frac{\\sin(x_k + \\alpha_k - \\alpha_j)}{\\sin(\\alpha_k - \\alpha_j)} ,

exact for all angles α whose differences are not multiples of π. The angles decide γ, and γ decides
what survives rounding.
"""

import math

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import SeparatedMatrix
from lsrdecomp.plots import COLOURS

n = 8
x = 2 * np.pi * np.arange(n) / n


def sine_of_a_sum(d, angles):
    """Return the sampled function as a separated matrix of shape (nᵈ, 1)."""
    factors = np.empty((d, d, n, 1))  # position k, term j
    for j in range(d):
        for k in range(d):
            turn = angles[k] - angles[j]
            factors[k, j, :, 0] = np.sin(x) if k == j else np.sin(x + turn) / math.sin(turn)
    return SeparatedMatrix.from_factors(list(factors))


def sampled(d):
    total = sum(np.meshgrid(*(x,) * d, indexing="ij"))
    return np.sin(total).reshape(-1, 1)


# %%
# With angles spread evenly over π the error is rounding, and γ grows only slowly with d.

orders = range(2, 6)
even = {d: sine_of_a_sum(d, np.pi * np.arange(d) / d) for d in orders}
for d, form in even.items():
    error = np.linalg.norm(form.to_matrix() - sampled(d)) / np.linalg.norm(sampled(d))
    print(f"d = {d}: {form.separation_rank} terms, error {error:.1e}, γ = {form.condition:.2f}")

# %%
# Angles that lie close together make the terms cancel.

spread = np.logspace(-2, 0, 40)
fig, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
for d, colour in zip(orders, COLOURS, strict=False):
    gammas = [sine_of_a_sum(d, share * np.pi * np.arange(d) / d).condition for share in spread]
    ax.loglog(spread, gammas, color=colour)
    ax.annotate(
        f"d = {d}",
        (spread[0], gammas[0]),
        (-4, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=8.5,
        color=colour,
    )
ax.set(
    xlabel="spread of the angles, as a share of π, log scale",
    ylabel="condition γ, log scale",
    xlim=(6e-3, 1.05),
)
ax.spines[["top", "right"]].set_visible(False)
ax.grid(linewidth=0.4, alpha=0.5)
plt.show()
