"""
An inverse of few Kronecker terms as a preconditioner
=====================================================

Three Kronecker terms have no closed inverse. A sum of a few terms comes near: alternating least
squares on ‖I − A X‖. More terms leave a smaller residual, and GMRES needs fewer iterations.
"""

import matplotlib.pyplot as plt
import numpy as np

from lsrdecomp import SeparatedMatrix, operators

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
for rank, inverse in zip(ranks, inverses, strict=True):
    left.semilogy(
        range(1, len(inverse.residuals) + 1), inverse.residuals, marker=".", label=f"{rank} terms"
    )
left.set(xlabel="sweep", ylabel="‖I − AX‖ / ‖I‖")
left.legend(fontsize="small")
right.plot(ranks, counts, marker="o", label="with X")
right.axhline(without, linestyle=":", color="gray", label="without")
right.set(xlabel="terms of X", ylabel="iterations of GMRES", ylim=(0, None))
right.legend()
plt.show()
