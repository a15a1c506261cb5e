"""
An inverse of few Kronecker terms as a preconditioner
=====================================================

Three Kronecker terms have no closed inverse. A sum of a few terms comes near: alternating least
squares on ‖I − A X‖. More terms leave a smaller residual, and GMRES needs fewer iterations.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import SeparatedMatrix, operators
from lsrdecomp.plots.pictures import COLOURS, MARKERS, name_lines

rng = np.random.default_rng(0)
sizes = (24, 30)
factors = [0.3 * rng.standard_normal((3, m, m)) / m**0.5 for m in sizes]
for factor in factors:
    factor[0] += np.eye(factor.shape[1])
matrix = SeparatedMatrix.from_factors(factors)
b = rng.standard_normal(matrix.shape[0])

# %%
# Ranks from one up, and the iterations each takes to ‖b − Ax‖ ≤ 1e-10 ‖b‖.

ranks = (1, 2, 3, 4, 6, 8)
inverses = [operators.approximate_inverse(matrix, rank=rank) for rank in ranks]
counts = [operators.solve(matrix, b, preconditioner=inverse).iterations for inverse in inverses]
without = operators.solve(matrix, b, preconditioner=None).iterations
print(inverses[-1])

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
shown = [(rank, each) for rank, each in zip(ranks, inverses, strict=True) if rank in (1, 2, 4, 8)]
for i, (rank, inverse) in enumerate(shown):
    label = f"{rank} terms" if rank > 1 else "1 term"
    sweeps = range(1, len(inverse.residuals) + 1)
    left.semilogy(
        sweeps, inverse.residuals, color=COLOURS[i], marker=MARKERS[i], markersize=4, label=label
    )
left.set(xlabel="sweep", ylabel="‖I − AX‖ / ‖I‖, log scale", xlim=(0, 14), ylim=(1e-3, 0.3))
name_lines(left)
right.plot(ranks, counts, color=COLOURS[0], marker="o")
right.axhline(without, linestyle=":", color="0.45")
right.set(xlabel="terms of X", ylabel="iterations of GMRES", ylim=(0, 1.15 * without))
right.annotate("with X", (ranks[-1], counts[-1]), (-4, 8), textcoords="offset points", ha="right")
right.annotate("without", (ranks[-1], without), (-4, 4), textcoords="offset points", ha="right")
plt.show()
