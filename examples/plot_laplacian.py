"""
A Laplacian in two terms: γ against ε
=====================================

The operator :math:`\\sum_i I \\otimes \\cdots \\otimes A \\otimes \\cdots \\otimes I` has d terms.
Beylkin and Mohlenkamp write it with two, as a difference quotient,

.. math:: \\frac{1}{h}\\Bigl(\\bigotimes_i (I + hA) - \\bigotimes_i I\\Bigr) = \\sum_i A_i + O(h),

at a price: the terms cancel, γ grows like 1/h, and rounding with it. The error as stored is
smallest where truncation and rounding meet, near :math:`\\sqrt{\\mu}`. The d-term form has γ near
one, and no such floor.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import SeparatedMatrix, unit_roundoff
from lsrdecomp.plots import COLOURS

d, n = 3, 4
# A in a basis that is not special: numbers that happen to be exact in half precision would flatter
# the picture.
turn = np.linalg.qr(np.random.default_rng(0).standard_normal((n, n)))[0]
a = turn @ (2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1))
eye = turn
exact = sum(
    np.kron(np.kron(*(a if k == i else eye for k in (0, 1))), a if i == 2 else eye)
    for i in range(d)
)


def two_terms(h):
    factors = [np.stack([eye + h * a, eye]) for _ in range(d)]
    return SeparatedMatrix.from_factors(factors, np.array([1.0, -1.0]) / h)


# %%
# For each step h: γ of the representation, and its error before and after its factors are rounded
# to a storage type.

steps = np.logspace(-4, -0.5, 60)
size = np.linalg.norm(exact)
forms = [two_terms(h) for h in steps]
gamma = np.array([form.condition for form in forms])
exactly = [np.linalg.norm(form.to_matrix() - exact) / size for form in forms]

fig, ax = plt.subplots(figsize=(6.8, 4.4), layout="constrained")
ax.loglog(steps, exactly, color="0.3", linewidth=1.2)
ax.annotate(
    "not rounded",
    (steps[24], exactly[24]),
    (6, -10),
    textcoords="offset points",
    fontsize=8.5,
    color="0.3",
)
for storage, colour in zip(("float16", "bfloat16"), COLOURS, strict=False):
    stored = [np.linalg.norm(form.round_to(storage).to_matrix() - exact) / size for form in forms]
    ax.loglog(steps, stored, ".", color=colour, markersize=5)
    ax.loglog(steps, gamma * unit_roundoff(storage), ":", color=colour, linewidth=1.2)
    ax.annotate(
        f"γ·μ of {storage}",
        (steps[-8], gamma[-8] * unit_roundoff(storage)),
        (0, -12),
        textcoords="offset points",
        fontsize=8.5,
        color=colour,
        ha="right",
    )
ax.set(
    xlabel="step h, log scale",
    ylabel="relative Frobenius error, log scale",
    title="Two terms of opposite sign: dots are as stored",
)
ax.spines[["top", "right"]].set_visible(False)
ax.grid(linewidth=0.4, alpha=0.5)
plt.show()
