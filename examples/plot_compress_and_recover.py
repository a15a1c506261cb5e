"""
Compress and recover
====================

The paper's route treats the two sides of a LoRA one by one. But B A = (B G)(G⁻¹A) for any
invertible G, and how a side decomposes depends on that gauge, which training leaves arbitrary.
Going to the gauge of the singular values first helps; solving for all factors of both sides
together recovers most of the rest.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import LowRank, ProductShape
from lsrdecomp.plots import plot_sweeps
from lsrdecomp.solvers.pair.factorwise import FactorwiseSVD
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.solvers.solver import Sweep

# %%
# A layer that *has* the structure, hidden by a random gauge: two terms a side, 48 × 48, inner rank
# 4.

rng = np.random.default_rng(3)
shape = ProductShape(out=(8, 6), inner=(2, 2), into=(8, 6))


def side(split):
    (m, n), (p, q) = split.factors
    return sum(np.kron(rng.standard_normal((m, n)), rng.standard_normal((p, q))) for _ in range(2))


gauge = np.linalg.qr(rng.standard_normal((4, 4)))[0] * np.array([4.0, 2.0, 1.0, 0.25])
layer = LowRank(side(shape.left) @ gauge, np.linalg.solve(gauge, side(shape.right)))

as_found = FactorwiseSVD(gauge="given").truncations(layer, shape).truncate(2)
balanced = FactorwiseSVD().truncations(layer, shape).truncate(2)
together = JointALS(sweeps=60).solve(layer, shape, 2)
for name, product in (
    ("as found", as_found),
    ("singular gauge", balanced),
    ("jointly", together.product),
):
    print(
        f"{name:15s} {product.parameters} parameters, error "
        f"{layer.residual_norm(product) / layer.norm:.3f}"
    )

# %%
# How the joint solve gets there, beside the two that stay where they are.

flat = {
    "side by side, gauge as found": layer.residual_norm(as_found) / layer.norm,
    "side by side, singular gauge": layer.residual_norm(balanced) / layer.norm,
}
count = len(together.sweeps)
runs = {name: [Sweep(0, error), Sweep(count - 1, error)] for name, error in flat.items()}
runs["jointly"] = [Sweep(step.index - 1, step.relative_error) for step in together.sweeps]
fig, ax = plt.subplots(figsize=(6.8, 4.2), layout="constrained")
plot_sweeps(runs, quantity="relative_error", ax=ax)
plt.show()
