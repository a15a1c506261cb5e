"""
Operator Schmidt decomposition: gates of two qubits, states of many
===================================================================

An operator on two parts of a quantum system is a sum of products, :math:`\\sum_k \\lambda_k A_k
\\otimes B_k`. With orthogonal terms this is its operator Schmidt decomposition, the same as the
singular value decomposition of the rearranged matrix: `decompose` in the shape of the two parts.
The number of terms says how entangling the operator is, and how it can be simulated; the weights
say what is lost by fewer.
"""

import matplotlib.pyplot as plt
import numpy as np

import lsrdecomp as lsr

# %%
# Gates
# -----
# A product of two gates has one term, a controlled gate two, a swap four: no operator of two qubits
# has more.

x, y, z = (
    np.array(values, dtype=complex)
    for values in ([[0, 1], [1, 0]], [[0, -1j], [1j, 0]], [[1, 0], [0, -1]])
)
one = np.eye(2)
gates = {
    "X ⊗ Z": np.kron(x, z),
    "CNOT": np.kron((one + z) / 2, one) + np.kron((one - z) / 2, x),
    "SWAP": 0.5 * sum(np.kron(pauli, pauli) for pauli in (one, x, y, z)),
}
for name, gate in gates.items():
    schmidt = lsr.decompose(gate, (2, 2), rtol=1e-12)
    values = ", ".join(f"{value:.3f}" for value in schmidt.weights)
    print(f"{name}: Schmidt rank {schmidt.separation_rank}, values {values}")

# %%
# A controlled phase of a small angle is nearly a product: its second value is small.

angles = np.linspace(0.02, np.pi, 60)
values = np.array(
    [lsr.decompose(np.diag([1, 1, 1, np.exp(1j * a)]), (2, 2), rank=2).weights for a in angles]
)
fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4), layout="constrained")
left.plot(angles, values / 2.0)
left.set(xlabel="angle of a controlled phase", ylabel="Schmidt values / 2")

# %%
# Many qubits
# -----------
# The thermal state of an Ising chain in a transverse field, cut into two halves. The colder it is,
# the more terms it takes: with the curve of errors one chooses how many to keep.


def on_qubit(operator, place, count):
    return np.kron(np.kron(np.eye(2**place), operator), np.eye(2 ** (count - place - 1)))


def thermal_state(temperature, count=8):
    hamiltonian = -sum(
        on_qubit(z.real, k, count) @ on_qubit(z.real, k + 1, count) for k in range(count - 1)
    )
    hamiltonian = hamiltonian - sum(on_qubit(x.real, k, count) for k in range(count))
    energies, states = np.linalg.eigh(hamiltonian)
    weights = np.exp(-(energies - energies[0]) / temperature)
    return (states * (weights / weights.sum())) @ states.T


half = (16, 16)
for temperature in (8.0, 2.0, 0.5):
    curve = lsr.error_curve(thermal_state(temperature), half)
    errors = np.maximum(curve.relative_errors, 1e-16)
    right.semilogy(curve.ranks, errors, marker=".", label=f"temperature {temperature:g}")
    print(f"temperature {temperature:g}: {curve.rank_for(1e-6)} terms for an error of 1e-6")
right.set(xlabel="terms", ylabel="relative error, log scale", xlim=(0, 40), ylim=(1e-13, 2.0))
right.legend(frameon=False)
plt.show()
