"""Slow, obvious references that tests compare against."""

from __future__ import annotations

from functools import reduce

import numpy as np

from lsrdecomp.arrays import as_double, to_numpy
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weighted import weighted_gauge
from lsrdecomp.targets.weights import LowRankPlusIdentity


def kron_sum(weights, factors):
    """Σ λ_k ⊗_i M_k⁽ⁱ⁾ by numpy.kron, term by term."""
    weights, factors = to_numpy(weights), [to_numpy(f) for f in factors]
    return sum(
        (weights[k] * reduce(np.kron, [f[k] for f in factors]) for k in range(len(weights))),
        np.zeros((np.prod([f.shape[1] for f in factors]), np.prod([f.shape[2] for f in factors]))),
    )


def block_rearrange(matrix, first, second):
    """Rearrange for two factors by the definition: row (i, j) is the (i, j) block by rows."""
    (m, n), (p, q) = first, second
    return np.stack(
        [
            matrix[i * p : (i + 1) * p, j * q : (j + 1) * q].reshape(-1)
            for i in range(m)
            for j in range(n)
        ]
    )


def matrix_of(weight):
    """The matrix of a weight of a norm."""
    return weight.apply(np.eye(weight.size))


def weight_of(matrix, xp=np):
    """The weight of a norm that a positive semidefinite matrix is, by all of its eigenpairs."""
    values, vectors = np.linalg.eigh(matrix)
    return LowRankPlusIdentity(xp.asarray(vectors), xp.asarray(np.maximum(values, 0.0)), 0.0)


def assert_close(actual, expected, size=1, condition=1.0, dtype="float64"):
    """Equal in Frobenius norm up to size × condition × unit roundoff of the expected norm."""
    actual, expected = to_numpy(actual), to_numpy(expected)
    scale = np.max(np.abs(expected), initial=0.0) or 1.0
    gap = np.linalg.norm((actual - expected) / scale)
    allowed = (
        32 * size * condition * unit_roundoff(dtype) * max(np.linalg.norm(expected / scale), 1.0)
    )
    assert gap <= allowed, f"relative difference {gap:.3g}, allowed {allowed:.3g}"


def exact_error(matrix, approximation):
    """‖M − M̂‖_F of a sum of Kronecker products in extended precision, entry by entry."""
    weights, factors = to_numpy(approximation.weights), [to_numpy(f) for f in approximation.factors]
    kind = np.clongdouble if any(np.iscomplexobj(f) for f in (matrix, *factors)) else np.longdouble
    residual = matrix.astype(kind)
    for k in range(len(weights)):
        residual -= np.longdouble(weights[k]) * reduce(
            np.kron, [f[k].astype(kind) for f in factors]
        )
    entries = np.abs(residual)
    peak = entries.max() or np.longdouble(1)
    return peak * np.sqrt(np.sum((entries / peak) ** 2))


def weighted_svd(pair, weights):
    """Return (U, σ, Vᵀ) of a pair B A in the norm ‖G^½ · C^½‖.

    Columns of G^½ U and C^½ V are orthonormal.
    """
    left, right = as_double(pair.left), as_double(pair.right)
    columns, sigma, rows = weighted_gauge(left, right, weights)
    return left @ columns, sigma, rows @ right


def weighted_truncation(pair, weights, rank):
    """The best approximation of rank ``rank`` in the norm."""
    u, sigma, vh = weighted_svd(pair, weights)
    return LowRank(u[:, :rank] * sigma[:rank], vh[:rank, :])
