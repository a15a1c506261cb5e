"""The identities of Kronecker sums, one function each, and `check_kron_sum`.

A ⊕ B = A ⊗ I + I ⊗ B takes square A (m, m) and B (p, p) to (m·p, m·p); the first factor is the
outermost, as in ``numpy.kron``. Each function takes your ``kron_sum(A, B)`` and raises
`IdentityError`.

References
----------
R. A. Horn and C. R. Johnson, Topics in Matrix Analysis, section 4.4, Cambridge University Press
(1991). They write the sum the other way round, as (I ⊗ A) + (B ⊗ I).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Unpack

import numpy as np

from lsrdecomp.arrays import Array, norm
from lsrdecomp.kronecker.rearrange import commutation_matrix
from lsrdecomp.testing.agreement import Identities, Matrix, Sides
from lsrdecomp.testing.cases import Corners, Options
from lsrdecomp.testing.runner import check_identities

KronSum = Callable[[Array, Array], Array]
IDENTITIES = Identities()


def check_kron_sum(kron_sum: KronSum, **options: Unpack[Options]) -> None:
    """Try every identity of the Kronecker sum of two square matrices on ``kron_sum``.

    Parameters
    ----------
    kron_sum : callable (A, B) -> A ⊗ I + I ⊗ B
        A (m, m) and B (p, p) to (m·p, m·p). One that returns B ⊗ I + I ⊗ A, as
        ``scipy.sparse.kronsum`` does, is passed as ``lambda A, B: mine(B, A)``.
    **options
        `Options`: array library, element type, tolerance, number of cases.

    Raises
    ------
    IdentityError
        Naming the identity that tells most, with the smallest case that breaks it; also where your
        code raises.

    Examples
    --------
    >>> def mine(A, B):
    ...     identity_a = np.eye(len(A), dtype=A.dtype)
    ...     identity_b = np.eye(len(B), dtype=B.dtype)
    ...     return np.kron(A, identity_b) + np.kron(identity_a, B)
    >>> check_kron_sum(mine)
    >>> check_kron_sum(lambda A, B: mine(B, A))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lsrdecomp.testing.agreement.IdentityError: definition, A ⊕ B = A ⊗ I + I ⊗ B: ...
    """
    __tracebackhide__ = True
    check_identities(IDENTITIES, kron_sum, options, CORNERS)


CORNERS = Corners(
    shapes={
        "factors of equal size": ((3, 3), (3, 3)),
        "large sides": ((6, 6), (7, 7)),
    },
    tiles={
        "first factor about 16": ((17, 17), (2, 2)),
        "second factor about 32": ((2, 2), (33, 33)),
        "first factor about 64": ((65, 65), (1, 1)),
    },
    empty={
        "empty first factor": ((0, 0), (2, 2)),
        "empty second factor": ((2, 2), (0, 0)),
    },
    answer="sum",
    spreads_nan=False,
)


def _size(*matrices: Array) -> float:
    """Return the size of the entries that are added up: each repeated along a diagonal."""
    a, b = (matrix[np.isfinite(matrix)] for matrix in matrices)
    return norm(a) * math.sqrt(len(matrices[1])) + norm(b) * math.sqrt(len(matrices[0]))


@IDENTITIES.on("mm pp", bound=_size)
def definition(kron_sum: KronSum, a: Matrix, b: Matrix) -> Sides:
    """Check that A ⊕ B = A ⊗ I + I ⊗ B."""
    m, p = len(a), len(b)
    expected = np.zeros((m, p, m, p), np.result_type(a, b))
    for k in range(p):
        expected[:, k, :, k] += a
    for i in range(m):
        expected[i, :, i, :] += b
    return kron_sum(a, b), expected.reshape(m * p, m * p)


@IDENTITIES.on("mm pp", bound=_size)
def transpose(kron_sum: KronSum, a: Matrix, b: Matrix) -> Sides:
    """Check that (A ⊕ B)ᵀ = Aᵀ ⊕ Bᵀ, without conjugation."""
    return kron_sum(a, b).T, kron_sum(a.T, b.T)


@IDENTITIES.on("mm pp", bound=_size)
def conjugate_transpose(kron_sum: KronSum, a: Matrix, b: Matrix) -> Sides:
    """Check that (A ⊕ B)ᴴ = Aᴴ ⊕ Bᴴ."""
    return kron_sum(a, b).conj().T, kron_sum(a.conj().T, b.conj().T)


@IDENTITIES.on("mm pp", bound=_size)
def commutation(kron_sum: KronSum, a: Matrix, b: Matrix) -> Sides:
    """Check that K (A ⊕ B) Kᵀ = B ⊕ A with the commutation matrix K_{p,m}."""
    commute = commutation_matrix(len(b), len(a))
    return commute @ kron_sum(a, b) @ commute.T, kron_sum(b, a)


@IDENTITIES.on("mm pp mm pp", bound=lambda a, b, c, d: _size(a, b) + _size(c, d))
def additivity(kron_sum: KronSum, a: Matrix, b: Matrix, c: Matrix, d: Matrix) -> Sides:
    """Check that (A + C) ⊕ (B + D) = (A ⊕ B) + (C ⊕ D)."""
    return kron_sum(a + c, b + d), kron_sum(a, b) + kron_sum(c, d)


@IDENTITIES.on("mm pp", bound=lambda a, b: _size(a, b) * len(a) * len(b), sums=True)
def trace(kron_sum: KronSum, a: Matrix, b: Matrix) -> Sides:
    """Check that tr(A ⊕ B) = p·tr(A) + m·tr(B) for A (m, m) and B (p, p)."""
    return np.trace(kron_sum(a, b)), len(b) * np.trace(a) + len(a) * np.trace(b)


@IDENTITIES.on("mm pp pm", bound=lambda a, b, c: (norm(a) + norm(b)) * norm(c), sums=True)
def vec(kron_sum: KronSum, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """Check that (A ⊕ B) vec(C) = vec(B C + C Aᵀ), where vec stacks columns."""
    return kron_sum(a, b) @ c.reshape(-1, order="F"), (b @ c + c @ a.T).reshape(-1, order="F")


@IDENTITIES.on(
    "mm pp",
    bound=lambda a, b: (norm(a) + norm(b)) * len(a) ** 0.5 * len(b) ** 0.5,
    sums=True,
    linalg=True,
)
def eigenvectors(kron_sum: KronSum, a: Matrix, b: Matrix) -> Sides:
    """Check that (A ⊕ B)(u ⊗ v) = (α + β)(u ⊗ v) for A u = α u, B v = β v.

    For every pair. The residual is compared, which rounding cannot spoil even where eigenvalues are
    ill conditioned.
    """
    alpha, u = np.linalg.eig(a)
    beta, v = np.linalg.eig(b)
    pairs = np.kron(u, v)
    sums = (alpha[:, None] + beta[None, :]).reshape(-1)
    return kron_sum(a, b) @ pairs, pairs * sums
