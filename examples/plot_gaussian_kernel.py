"""
Gaussian kernels on a grid
==========================

The kernel :math:`\\exp(-|x - y|^2 / 2\\ell^2)` between the points of a grid is one Kronecker
product, since the square of a distance is a sum over coordinates. Tilted, or with a heavier tail,
it needs more terms: how many, the curve says.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import KroneckerShape
from lsrdecomp.analysis import ErrorCurve, error_curve, low_rank_curve
from lsrdecomp.plots import plot_error_curves

n = 20
points = np.stack(np.meshgrid(*(np.linspace(0, 1, n),) * 2, indexing="ij"), axis=-1).reshape(-1, 2)
apart = points[:, None, :] - points[None, :, :]
u, v = apart[..., 0], apart[..., 1]
kernels = {
    "Gaussian": np.exp(-(u**2 + v**2) / (2 * 0.2**2)),
    "Gaussian, tilted": np.exp(
        -((0.8 * u + 0.6 * v) ** 2 / (2 * 0.4**2)) - (0.8 * v - 0.6 * u) ** 2 / (2 * 0.1**2)
    ),
    "Matérn 3/2": (1 + np.sqrt(3 * (u**2 + v**2)) / 0.2)
    * np.exp(-np.sqrt(3 * (u**2 + v**2)) / 0.2),
    "exponential": np.exp(-np.sqrt(u**2 + v**2) / 0.2),
}

# %%
# The plain Gaussian is exact with one term.

shape = KroneckerShape(((n, n), (n, n)))
print(
    "Gaussian, one term: error "
    f"{error_curve(kernels.pop('Gaussian'), shape).relative_errors[1]:.0e}"
)

# %%
# Error of the others against parameters; dashed in grey what plain low rank needs for the
# exponential kernel.

fig, ax = plt.subplots(figsize=(6.8, 4.4), layout="constrained")
ax.set_xlim(600, 4e5)
svd = low_rank_curve(kernels["exponential"])
ax.plot(svd.parameters[1:], svd.relative_errors[1:], "--", color="0.5", linewidth=1.0)
place = svd.parameters[6], svd.relative_errors[6]
ax.annotate(
    "exponential, truncated SVD", place, (4, 4), textcoords="offset points", fontsize=8, color="0.4"
)
curves = []
for name, kernel in kernels.items():
    curve = error_curve(kernel, shape)
    shown = (values[:24] for values in (curve.ranks, curve.parameters, curve.relative_errors))
    curves.append(ErrorCurve(name, *shown, curve.norm))
plot_error_curves(curves, storages=("float32",), ax=ax)
plt.show()
