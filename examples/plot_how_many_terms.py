"""
How many terms does my matrix need?
===================================

Eight matrices of eight fields, each as a sum of Kronecker products of two: the fewest terms within
10 %, 1 % and a millionth of its norm. No solver runs; the curve of errors says it.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse as sp

import lsrdecomp as lsr
from lsrdecomp.plots import COLOURS

rng = np.random.default_rng(0)
n = 16
i = np.arange(float(n * n))
grid = np.stack(np.divmod(np.arange(n * n), n), axis=1).astype(float)
step = grid[:, None] - grid[None]
distance = np.linalg.norm(step, axis=-1)

# %%
# A thermal state of a chain of eight spins, cut in the middle.


def on_spin(matrix, k):
    return np.kron(np.kron(np.eye(2**k), matrix), np.eye(2 ** (7 - k)))


flip, spin = np.array([[0.0, 1.0], [1.0, 0.0]]), np.diag([1.0, -1.0])
energy = -sum(on_spin(spin, k) @ on_spin(spin, k + 1) for k in range(7))
energy = energy - sum(on_spin(flip, k) for k in range(8))
levels, states = np.linalg.eigh(energy)
thermal = (states * np.exp(levels[0] - levels)) @ states.T

# %%
# Heat in a plate whose conductivity is smooth; a camera that was moved at an angle; a city whose
# streets are a grid with diagonals.

second = sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(n, n))
laplacian = sp.kron(second, sp.eye(n)) + sp.kron(sp.eye(n), second)
heat = (sp.diags(1.0 + (grid**2).sum(1) / n**2) @ laplacian).toarray()
along, across = step[..., 0] + step[..., 1], step[..., 0] - step[..., 1]
blur = np.exp(-(along**2) / 18.0 - across**2 / 2.0)
streets = (np.abs(step).max(axis=-1) == 1.0).astype(float)

matrices = {
    "streets with diagonals (networks)": streets,
    "heat in a plate (engineering)": heat,
    "covariance in space and time (statistics)": np.exp(-distance / 5.0),
    "a thermal state of spins (physics)": thermal,
    "motion blur at an angle (imaging)": blur,
    "pull of masses on a grid (astronomy)": 1.0 / (1.0 + distance),
    "Hilbert matrix (numerics)": 1.0 / (1.0 + i[:, None] + i[None, :]),
    "random weights (machine learning)": rng.standard_normal((n * n, n * n)),
}
goals = (0.1, 0.01, 1e-6)
terms = {}
for name, matrix in matrices.items():
    curve = lsr.error_curve(matrix, f"{n}x{n}, {n}x{n}")
    terms[name] = [curve.rank_for(goal) for goal in goals]
    print(f"{name:42}", *(f"{count:4}" for count in terms[name]))

# %%
# What depends on distances, or on neighbours, needs few terms, and each digit a few more. What has
# no structure needs nearly all 256: there is nothing to gain.

fig, ax = plt.subplots(figsize=(8.4, 4.2), layout="constrained")
rows = np.arange(len(terms))
for place, goal in enumerate(goals):
    counts = [each[place] for each in terms.values()]
    label = f"error below {goal:g}"
    ax.barh(rows + 0.27 * (place - 1), counts, height=0.25, color=COLOURS[place], label=label)
ax.set(xscale="log", xlim=(0.9, 300), xlabel="Kronecker terms of at most 256, log scale")
ax.set_yticks(rows, list(terms))
ax.invert_yaxis()
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)
plt.show()
