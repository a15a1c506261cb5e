"""The identities of Kronecker products, one function each, and `check_kron`, which tries them all on drawn cases.

Each takes your ``kron(A, B)`` and matrices of any array library, and raises `IdentityError` where
the identity fails beyond rounding. Only your function is called with your library's arrays; the
other side is worked out in NumPy.

References
----------
R. A. Horn and C. R. Johnson, Topics in Matrix Analysis, chapter 4, Cambridge University Press
(1991). C. F. Van Loan, The ubiquitous Kronecker product, J. Comput. Appl. Math. 123 (2000).
doi:10.1016/S0377-0427(00)00393-9
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import numpy as np

from lsrdecomp.arrays import Array, norm, to_numpy
from lsrdecomp.kronecker.rearrange import commutation_matrix
from lsrdecomp.testing.agreement import Identities, Matrix, Sides
from lsrdecomp.testing.cases import Cases, Options, trials
from lsrdecomp.testing.runner import guarded, try_identities

Kron = Callable[[Array, Array], Array]
IDENTITIES = Identities()


def check_kron(kron: Kron, **options: Unpack[Options]) -> None:
    """Try every identity of the Kronecker product of two matrices on ``kron``.

    Parameters
    ----------
    kron : callable (A, B) -> A ⊗ B
        Takes and returns arrays of the library ``xp``.
    **options
        `Options`: array library, element type, tolerance, number of cases.

    Raises
    ------
    IdentityError
        With the name of the identity that tells most, the smallest case found that breaks it, and
        the names of the others that fail; also where ``kron`` itself raises, with what it raised.

    Examples
    --------
    >>> check_kron(np.kron)
    >>> check_kron(lambda a, b: np.kron(b, a))                                  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lsrdecomp.testing.agreement.IdentityError: definition, (A ⊗ B)[i·p + k, j·q + l] = A[i, ...
    """
    __tracebackhide__ = True
    corners = {
        "factors of equal shape": ((2, 3), (2, 3)),
        "all sides above five": ((6, 9), (7, 8)),
        "empty first factor": ((0, 2), (2, 3)),
        "empty second factor": ((2, 3), (2, 0)),
    }
    try_identities(trials(IDENTITIES, guarded(kron), options, corners), **options)


def _condition(*matrices: Array) -> float:
    return float(np.prod([norm(q) * np.linalg.norm(np.linalg.inv(to_numpy(q))) for q in matrices]))


@IDENTITIES.on("mn pq")
def definition(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """(A ⊗ B)[i·p + k, j·q + l] = A[i, j]·B[k, l].

    The first factor is outermost, as in ``numpy.kron``.
    """
    return kron(a, b), np.kron(a, b)


@IDENTITIES.on("mn pq mn", bound=lambda a, b, c: (norm(a) + 2.0 * norm(c)) * norm(b))
def bilinearity(kron: Kron, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """(A + 2C) ⊗ B = A ⊗ B + 2(C ⊗ B)."""
    return kron(a + 2.0 * c, b), kron(a, b) + 2.0 * kron(c, b)


@IDENTITIES.on("mn pq")
def transpose(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """(A ⊗ B)ᵀ = Aᵀ ⊗ Bᵀ, without conjugation."""
    return kron(a, b).T, kron(a.T, b.T)


@IDENTITIES.on("mn pq")
def conjugate_transpose(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """(A ⊗ B)ᴴ = Aᴴ ⊗ Bᴴ."""
    return kron(a, b).conj().T, kron(a.conj().T, b.conj().T)


@IDENTITIES.on("mn pq")
def commutation(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """K (A ⊗ B) K' = B ⊗ A with commutation matrices K_{p,m} and K'_{n,q}."""
    (m, n), (p, q) = a.shape, b.shape
    return commutation_matrix(p, m) @ kron(a, b) @ commutation_matrix(n, q), kron(b, a)


@IDENTITIES.on(lambda d: d.matrices("mn", "pq", "rs", among=(1, 2, 3)))
def associativity(kron: Kron, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """A ⊗ (B ⊗ C) = (A ⊗ B) ⊗ C."""
    return kron(a, kron(b, c)), kron(kron(a, b), c)


@IDENTITIES.on(lambda d: d.matrices("mn", "pq", "nr", "qs", among=(1, 2, 3, 5)), sums=True)
def mixed_product(kron: Kron, a: Matrix, b: Matrix, c: Matrix, d: Matrix) -> Sides:
    """(A ⊗ B)(C ⊗ D) = AC ⊗ BD."""
    return kron(a, b) @ kron(c, d), kron(a @ c, b @ d)


@IDENTITIES.on("mn pq qn", sums=True)
def vec(kron: Kron, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """(A ⊗ B) vec(C) = vec(B C Aᵀ), where vec stacks columns."""
    return kron(a, b) @ c.reshape(-1, order="F"), (b @ c @ a.T).reshape(-1, order="F")


@IDENTITIES.on("mm pp", sums=True)
def trace(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """tr(A ⊗ B) = tr(A)·tr(B), for square A and B."""
    return np.trace(kron(a, b)), np.trace(a) * np.trace(b)


@IDENTITIES.on(Cases.invertible, bound=_condition, sums=True)
def inverse(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """(A ⊗ B)(A⁻¹ ⊗ B⁻¹) = I, for invertible A and B."""
    return kron(a, b) @ kron(np.linalg.inv(a), np.linalg.inv(b)), np.eye(len(a) * len(b))


@IDENTITIES.on(Cases.invertible, bound=_condition, sums=True)
def determinant(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """det(A ⊗ B) = det(A)^p · det(B)^m, for invertible A (m × m) and B (p × p).

    Compared by logarithm and phase.
    """
    (phase_a, size_a), (phase_b, size_b) = np.linalg.slogdet(a), np.linalg.slogdet(b)
    m, p = len(a), len(b)
    return np.stack(np.linalg.slogdet(kron(a, b))), np.stack(
        [phase_a**p * phase_b**m, p * size_a + m * size_b]
    )


@IDENTITIES.on("mm pp", sums=True)
def eigenvectors(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """(A ⊗ B)(u ⊗ v) = αβ (u ⊗ v) for A u = α u, B v = β v.

    For every pair; A and B square. The residual is compared, which rounding cannot spoil even where
    eigenvalues are ill conditioned.
    """
    (alpha, u), (beta, v) = np.linalg.eig(a), np.linalg.eig(b)
    return kron(a, b) @ np.kron(u, v), np.kron(u, v) * np.kron(alpha, beta)


@IDENTITIES.on(Cases.partial_isometries, bound=lambda a, b: 1.0)
def rank(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """rank(A ⊗ B) = rank(A)·rank(B), for matrices whose singular values are one or zero."""
    product = np.linalg.svd(kron(a, b), compute_uv=False)
    return np.sum(product > 0.5), round(norm(a) ** 2) * round(norm(b) ** 2)


@IDENTITIES.on("mn pq", sums=True)
def singular_values(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """σ(A ⊗ B) = σ(A)·σ(B): the singular values are all products, and zeros."""
    sigma, *factors = (np.linalg.svd(matrix, compute_uv=False) for matrix in (kron(a, b), a, b))
    products = np.sort(np.outer(*factors), axis=None)[::-1]
    return sigma, np.pad(products, (0, max(0, len(sigma) - len(products))))


@IDENTITIES.on("mn pq", sums=True)
def norms(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """‖A ⊗ B‖ = ‖A‖·‖B‖ for the Frobenius, the spectral, the column-sum and the row-sum norm."""
    kinds: tuple[Any, ...] = ("fro", 2, 1, np.inf)
    product, first, second = (
        [np.linalg.norm(q, kind) for kind in kinds] for q in (kron(a, b), a, b)
    )
    return np.stack(product), np.multiply(first, second)
