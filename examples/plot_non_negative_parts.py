"""
Parts of an image: non-negative terms, and missing pixels
=========================================================

A facade repeats a few tiles, windows, doors and bricks, in different places. So it is a short sum
of Kronecker products, layout ⊗ tile. The SVD of the rearrangement gives the nearest sum, but its
tiles mix: they have negative pixels, which no paint has. With non-negative factors the tiles are
parts of the facade, at nearly the same error. And where pixels are missing, the same sum, fitted to
the known ones alone, fills them in.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import decompose

rng = np.random.default_rng(0)
shape = "8x10, 12x12"

window = np.zeros((12, 12))
window[2:10, 3:9] = 0.8
window[2:10, 5:7] = 0.3
brick = np.full((12, 12), 0.25)
brick[::4, :] = brick[2::4, ::6] = 0.05
door = np.zeros((12, 12))
door[3:12, 2:10] = 0.6

layouts = rng.random((3, 8, 10)) * 0.05
layouts[0, 1:6:2, 1::2] += 0.9  # windows on three floors
layouts[1] += 0.5 + rng.random((8, 10)) * 0.5  # bricks everywhere, lighter and darker
layouts[2, 7, 1::3] += 0.9  # three doors
tiles = (window, brick, door)
facade = sum(np.kron(layout, tile) for layout, tile in zip(layouts, tiles, strict=True))
facade += 0.02 * rng.random(facade.shape)

# %%
# Three terms of each kind. The error is measured the same way for both.

nearest = decompose(facade, shape, rank=3)
parts = decompose(facade, shape, rank=3, non_negative=True)
print(f"relative error: {nearest.relative_error:.4f}, non-negative {parts.relative_error:.4f}")

fig, rows = plt.subplots(2, 4, figsize=(8.6, 4.2), layout="constrained")
names = ("nearest", "non-negative")
for row, result, name in zip(rows, (nearest, parts), names, strict=True):
    row[0].imshow(result.to_matrix(), cmap="gray", vmin=0.0, vmax=1.1)
    row[0].set_title(name)
    for axes, tile in zip(row[1:], result.factors[1], strict=True):
        limit = np.abs(tile).max()
        axes.imshow(tile, cmap="RdBu", vmin=-limit, vmax=limit)
        axes.set_title(f"tile, least pixel {tile.min():+.2f}")
for axes in rows.flat:
    axes.set(xticks=[], yticks=[])
plt.show()

# %%
# Four pixels in ten are lost. The error that `decompose` reports is that of the known ones; here
# the others are at hand too, so that the prediction can be judged.

damaged = facade.copy()
lost = rng.random(facade.shape) < 0.4
damaged[lost] = np.nan
filled = decompose(damaged, shape, rank=3, known=~lost, non_negative=True)
prediction = filled.to_matrix()[lost]
error = np.linalg.norm(prediction - facade[lost]) / np.linalg.norm(facade[lost])
print(f"relative error: known pixels {filled.relative_error:.4f}, lost pixels {error:.4f}")

fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4), layout="constrained")
left.imshow(damaged, cmap="gray", vmin=0.0, vmax=1.1)
left.set_title(f"{lost.mean():.0%} of the pixels are missing")
right.imshow(filled.to_matrix(), cmap="gray", vmin=0.0, vmax=1.1)
right.set_title(f"filled in, error {error:.1%} on these")
for axes in (left, right):
    axes.set(xticks=[], yticks=[])
plt.show()
