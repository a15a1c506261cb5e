"""
γ along the sweeps: why λ is penalised
======================================

Three factors have no best approximation in general: terms may grow and cancel without end. Plain
alternating least squares follows them; a penalty on λ, tied to the storage type, stops where
rounding would undo the gain. The matrix here is on the border: two terms approach it as closely as
one likes, and never reach it.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import KroneckerShape, decompose
from lsrdecomp.plots import plot_sweeps
from lsrdecomp.solvers.cp.als import ALS

up, eye = np.array([[0.0, 1.0], [0.0, 0.0]]), np.eye(2)
matrix = sum(
    np.kron(np.kron(*(up if k == i else eye for k in (0, 1))), up if i == 2 else eye)
    for i in range(3)
)
# Turned at random, so that no factor happens to be exact in half precision.
turn = np.ones((1, 1))
for seed in range(3):
    turn = np.kron(turn, np.linalg.qr(np.random.default_rng(seed).standard_normal((2, 2)))[0])
matrix = turn @ matrix
shape = KroneckerShape(((2, 2),) * 3)

# %%
# The same start with and without the penalty; the errors are as stored in float16.

results = {
    "no penalty": decompose(
        matrix, shape, rank=2, storage="float16", solver=ALS(ridge=0.0, initializations=1)
    ),
    "penalty of float16": decompose(
        matrix, shape, rank=2, storage="float16", solver=ALS(storage="float16", initializations=1)
    ),
}
for name, result in results.items():
    print(f"{name:20s} γ = {result.condition:8.1f}, error as stored {result.relative_error:.2e}")

fig, ax = plt.subplots(figsize=(6.8, 4.2), layout="constrained")
plot_sweeps({name: result.sweeps for name, result in results.items()}, quantity="condition", ax=ax)
plt.show()
