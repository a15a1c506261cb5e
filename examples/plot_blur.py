"""
A blur: the separation rank of an operator is that of its point spread
======================================================================

Blurring an n × n image is an n² × n² matrix. With Kronecker factors of n × n its separation rank is
the rank of the point spread function, a small table: one for a Gaussian along the axes, three for
this disk. A tilted Gaussian has full rank, but its singular values fall fast.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import KroneckerShape, SeparatedMatrix, decompose
from lsrdecomp.analysis import Spectrum, rearranged_spectrum
from lsrdecomp.plots import plot_spectra

n, radius = 24, 6
offsets = np.arange(-radius, radius + 1)
y, x = np.meshgrid(offsets, offsets, indexing="ij")
along, across = 0.8 * x + 0.6 * y, -0.6 * x + 0.8 * y
spreads = {
    "along the axes": np.exp(-0.5 * (x / 3.0) ** 2 - 0.5 * (y / 1.2) ** 2),
    "tilted": np.exp(-0.5 * (along / 3.0) ** 2 - 0.5 * (across / 1.2) ** 2),
    "disk": (x**2 + y**2 <= 4.5**2).astype(float),
}


def blur(spread):
    """Return a blur with zeros outside the image: a sum of Kronecker products of shifts."""
    shift = {k: np.eye(n, k=k) for k in offsets}
    rows = np.stack([shift[k] for k in offsets])
    return np.einsum("ij,iab,jcd->acbd", spread / spread.sum(), rows, rows).reshape(n * n, n * n)


# %%
# The spectrum of the rearrangement ends where the rank of the point spread does.

shape = KroneckerShape(((n, n), (n, n)))
spectra = []
for name, spread in spreads.items():
    spectrum = rearranged_spectrum(blur(spread), shape)
    kept = tuple(value for value in spectrum.values if value > 1e-12 * spectrum.values[0])
    spectra.append(Spectrum(f"{name}: rank {np.linalg.matrix_rank(spread)}", kept))

fig, (left, right) = plt.subplots(
    1, 2, figsize=(8.6, 3.6), layout="constrained", width_ratios=(1, 1.7)
)
left.imshow(spreads["tilted"], cmap="cividis")
left.set(title="tilted point spread", xticks=[], yticks=[])
plot_spectra(spectra, ax=right)
right.set_title("singular values of the rearranged blur")
plt.show()

# %%
# A few terms blur an image as the full matrix does, to one per cent.

operator = blur(spreads["tilted"])
result = decompose(operator, shape, rtol=1e-2)
print(f"{result.parameters:,} numbers instead of {operator.size:,}")
image = np.zeros((n, n))
image[6:18, 6:18] = 1.0
image[10:14, 10:14] = 0.0
fig, axes = plt.subplots(1, 3, figsize=(8.6, 3.0), layout="constrained")
approximation: SeparatedMatrix = result.approximation
for ax, picture, title in zip(
    axes,
    (
        image,
        (operator @ image.ravel()).reshape(n, n),
        (approximation @ image.ravel()).reshape(n, n),
    ),
    ("image", "blurred", f"by {result.separation_rank} terms, error {result.relative_error:.1e}"),
    strict=True,
):
    ax.imshow(picture, cmap="cividis", vmin=0, vmax=1)
    ax.set(title=title, xticks=[], yticks=[])
plt.show()
