"""
The Hilbert matrix, and where rounding stops a curve
====================================================

Smooth matrices have rearrangements whose singular values fall geometrically. How fast depends on
the Kronecker sizes; how far it helps depends on the type the factors are stored in: below γ·μ there
is nothing left to gain.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import KroneckerShape
from lsrdecomp.analysis import error_curves, solver_curve
from lsrdecomp.plots import plot_error_curves

i = np.arange(64.0)
hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
shapes = [KroneckerShape(((m, m), (64 // m, 64 // m))) for m in (8, 4, 2)] + [
    KroneckerShape(((64, 1), (1, 64)))
]

fig, ax = plt.subplots(figsize=(6.8, 4.4), layout="constrained")
plot_error_curves(error_curves(hilbert, shapes), storages=("float16", "float32"), ax=ax)
ax.set_title("64 × 64 Hilbert matrix; (64×1) ⊗ (1×64) is plain low rank")
plt.show()

# %%
# The same curve as stored, for three types: each follows the optimum until its own floor.

fig, ax = plt.subplots(figsize=(6.8, 4.4), layout="constrained")
ranks = range(1, 9)
stored = [
    solver_curve(hilbert, shapes[0], ranks, storage=storage, label=storage)
    for storage in ("bfloat16", "float16", "float32")
]
plot_error_curves(stored, against="ranks", storages=("bfloat16", "float16", "float32"), ax=ax)
ax.set_title("measured after rounding, γ = 1")
plt.show()
