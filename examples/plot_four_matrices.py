"""
Four matrices, four error curves
================================

How many Kronecker terms does a matrix need? A kernel and a covariance need few, an image with
sharp edges more. A weight update of a neural network needs nearly all: low rank suits it better.
"""

from importlib.resources import files

import matplotlib.pyplot as plt
import numpy as np

import lsrdecomp as lsr
from lsrdecomp.lora.search.layers import layer_pair
from lsrdecomp.plots import COLOURS

n = 16
x = np.linspace(0, 1, n)
points = np.stack(np.meshgrid(x, x, indexing="ij"), axis=-1).reshape(-1, 2)
distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
i = np.arange(256.0)
waves = np.sin(i[:, None] / 9) * np.cos(i[None, :] / 13)
rings = np.hypot(i[:, None] - 90, i[None, :] - 140) % 40 < 20
lora = lsr.open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
pair = layer_pair(lora, lora.layers[0])
update = np.asarray(pair.left @ pair.right)[:256, :256]
matrices = {
    "a kernel": 1.0 / (1.0 + np.abs(i[:, None] - i[None, :])),
    "a covariance": np.exp(-distance / 0.3),
    "an image": waves + rings,
    "a weight update": update,
}

# %%
# Above each matrix, below its error against the number of 16 × 16 ⊗ 16 × 16 terms, on one scale.

fig, axes = plt.subplots(2, 4, figsize=(10, 4.6), layout="constrained")
for column, (name, matrix) in enumerate(matrices.items()):
    picture, curve_axes = axes[:, column]
    limit = np.abs(matrix).max()
    picture.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
    picture.set(title=name, xticks=[], yticks=[])
    curve = lsr.error_curve(matrix, "16x16, 16x16")
    curve_axes.semilogy(curve.ranks, np.maximum(curve.relative_errors, 1e-8), color=COLOURS[0])
    curve_axes.set(ylim=(1e-7, 2), xlim=(0, 64), xlabel="terms")
    curve_axes.spines[["top", "right"]].set_visible(False)
    curve_axes.label_outer()
axes[1, 0].set_ylabel("relative error, log scale")
plt.show()

# %%
# The fewest terms that leave an error of one per cent:

for name, matrix in matrices.items():
    print(f"{name:16}", lsr.error_curve(matrix, "16x16, 16x16").rank_for(1e-2), "of 256")
