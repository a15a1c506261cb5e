"""
Solving with a Kronecker sum: heat flow and a steady state on a cube
====================================================================

The Laplacian of an n × n × n grid is A ⊗ I ⊗ I + I ⊗ A ⊗ I + I ⊗ I ⊗ A. Its inverse, determinant
and exponential follow from A alone, so a grid of 64,000 points takes a moment, and the matrix of
4·10⁹ entries is never there.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import operators

n = 40
nodes = np.arange(1, n + 1) / (n + 1)
second = (n + 1) ** 2 * (2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1))
laplacian = operators.kronecker_sum(second, second, second)
print(laplacian)

# %%
# A warm ball heats the cube from its middle. The steady state is a solve; on the way there the
# temperature at time t is (I − exp(−tA)) times that.

x, y, z = np.meshgrid(nodes, nodes, nodes, indexing="ij")
source = ((x - 0.4) ** 2 + (y - 0.5) ** 2 + (z - 0.5) ** 2 < 0.02).astype(float).reshape(-1)
steady = operators.solve(laplacian, source)
print(steady)
times = (0.002, 0.01, 0.05)
states = [steady.x - operators.expm_multiply(laplacian, steady.x, -t) for t in times]

figure, axes = plt.subplots(1, 4, figsize=(11, 3), layout="constrained")
for ax, state, title in zip(
    axes, [*states, steady.x], [*(f"t = {t}" for t in times), "steady"], strict=True
):
    ax.imshow(
        state.reshape(n, n, n)[:, :, n // 2],
        vmin=0.0,
        vmax=steady.x.max(),
        origin="lower",
        extent=(0, 1, 0, 1),
    )
    ax.set(title=title, xticks=[], yticks=[])
plt.show()
