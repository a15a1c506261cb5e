"""The identities of Kronecker products, one function each, and `check_kron`, which tries them.

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

import math
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np

from lsrdecomp.arrays import Array, norm, to_numpy
from lsrdecomp.kronecker.rearrange import commutation_matrix
from lsrdecomp.testing.agreement import Identities, Matrix, Sides
from lsrdecomp.testing.cases import SIDES, TILES, Cases, Corners, Options
from lsrdecomp.testing.runner import check_identities

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
    >>> check_kron(lambda a, b: np.kron(b, a))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lsrdecomp.testing.agreement.IdentityError: definition, (A ⊗ B)[i·p + k, j·q + l] = A[i, ...
    """
    __tracebackhide__ = True
    check_identities(IDENTITIES, kron, options, CORNERS, order=2)


CORNERS = Corners(
    shapes={
        "factors of equal shape": ((2, 3), (2, 3)),
        "large sides": ((6, 9), (7, 8)),
        "square factors": ((3, 3), (2, 2)),
        "equal squares": ((3, 3), (3, 3)),
        "single columns": ((5, 1), (4, 1)),
        "single rows": ((1, 5), (1, 4)),
        "a row and a column": ((1, 3), (4, 1)),
        "a column and a row": ((4, 1), (1, 3)),
        "one entry first": ((1, 1), (2, 3)),
        "one entry last": ((2, 3), (1, 1)),
        "one entry each": ((1, 1), (1, 1)),
        "a square product of oblong factors": ((2, 3), (3, 2)),
        "the same sides exchanged": ((3, 2), (2, 3)),
        "as many entries": ((2, 6), (4, 3)),
        "as many rows": ((3, 2), (3, 4)),
        "as many columns": ((2, 3), (4, 3)),
        "equal inner sides": ((2, 3), (3, 4)),
        "equal outer sides": ((2, 3), (4, 2)),
        "a square and as many columns": ((2, 3), (2, 2)),
    },
    tiles={
        **{f"long first factor {m}×{n}": ((m, n), (2, 3)) for m, n in TILES},
        **{f"long second factor {m}×{n}": ((2, 3), (m, n)) for m, n in TILES},
        **{f"sides {m}×{n} and {p}×{q}": ((m, n), (p, q)) for m, n, p, q in SIDES},
        "both factors long": ((16, 2), (4, 33)),
        "more than 65,536 entries": ((40, 41), (8, 6)),
    },
    empty={
        "empty first factor": ((0, 2), (2, 3)),
        "empty second factor": ((2, 3), (2, 0)),
        "two empty factors": ((0, 3), (0, 2)),
    },
    answer="product",
    has_free_sides=True,
)


def _condition(*matrices: Array) -> float:
    """Return the product of the conditions ‖A‖·‖A⁻¹‖."""
    conditions = [norm(q) * np.linalg.norm(np.linalg.inv(to_numpy(q))) for q in matrices]
    return float(np.prod(conditions))


def _log_size(*matrices: Array) -> float:
    """Return the size of what rounding changes in log|det A ⊗ B|: the condition, and its length."""
    size = math.prod(len(q) for q in matrices)
    logs = [size / len(q) * abs(np.linalg.slogdet(to_numpy(q))[1]) for q in matrices]
    return _condition(*matrices) + float(sum(logs))


@IDENTITIES.on("mn pq")
def definition(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """Check that (A ⊗ B)[i·p + k, j·q + l] = A[i, j]·B[k, l].

    The first factor is outermost, as in ``numpy.kron``.
    """
    return kron(a, b), np.kron(a, b)


@IDENTITIES.on("mn pq mn", bound=lambda a, b, c: (norm(a) + 2 * norm(c)) * norm(b))
def bilinearity(kron: Kron, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """Check that (A + 2C) ⊗ B = A ⊗ B + 2(C ⊗ B)."""
    return kron(a + 2 * c, b), kron(a, b) + 2 * kron(c, b)


@IDENTITIES.on("mn pq")
def transpose(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """Check that (A ⊗ B)ᵀ = Aᵀ ⊗ Bᵀ, without conjugation."""
    return kron(a, b).T, kron(a.T, b.T)


@IDENTITIES.on("mn pq")
def conjugate_transpose(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """Check that (A ⊗ B)ᴴ = Aᴴ ⊗ Bᴴ."""
    return kron(a, b).conj().T, kron(a.conj().T, b.conj().T)


@IDENTITIES.on("mn pq")
def commutation(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """Check that K (A ⊗ B) K' = B ⊗ A with commutation matrices K_{p,m} and K'_{n,q}."""
    m, n = a.shape
    p, q = b.shape
    return commutation_matrix(p, m) @ kron(a, b) @ commutation_matrix(n, q), kron(b, a)


@IDENTITIES.on(lambda d: d.matrices("mn", "pq", "rs", among=(1, 2, 3)))
def associativity(kron: Kron, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """Check that A ⊗ (B ⊗ C) = (A ⊗ B) ⊗ C."""
    return kron(a, kron(b, c)), kron(kron(a, b), c)


@IDENTITIES.on(lambda d: d.matrices("mn", "pq", "nr", "qs", among=(1, 2, 3, 5)), sums=True)
def mixed_product(kron: Kron, a: Matrix, b: Matrix, c: Matrix, d: Matrix) -> Sides:
    """Check that (A ⊗ B)(C ⊗ D) = AC ⊗ BD."""
    return kron(a, b) @ kron(c, d), kron(a @ c, b @ d)


@IDENTITIES.on("mn pq qn", sums=True)
def vec(kron: Kron, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """Check that (A ⊗ B) vec(C) = vec(B C Aᵀ), where vec stacks columns."""
    return kron(a, b) @ c.reshape(-1, order="F"), (b @ c @ a.T).reshape(-1, order="F")


@IDENTITIES.on("mm pp", sums=True)
def trace(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """Check that tr(A ⊗ B) = tr(A)·tr(B), for square A and B."""
    return np.trace(kron(a, b)), np.trace(a) * np.trace(b)


@IDENTITIES.on(Cases.invertible, bound=_condition, sums=True, linalg=True)
def inverse(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """Check that (A ⊗ B)(A⁻¹ ⊗ B⁻¹) = I, for invertible A and B."""
    return kron(a, b) @ kron(np.linalg.inv(a), np.linalg.inv(b)), np.eye(len(a) * len(b))


@IDENTITIES.on(Cases.invertible, bound=_log_size, sums=True, linalg=True)
def determinant(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """Check that det(A ⊗ B) = det(A)^p · det(B)^m, for invertible A (m × m) and B (p × p).

    Compared by logarithm and phase.
    """
    phase_a, log_a = np.linalg.slogdet(a)
    phase_b, log_b = np.linalg.slogdet(b)
    m, p = len(a), len(b)
    expected = np.stack([phase_a**p * phase_b**m, p * log_a + m * log_b])
    return np.stack(np.linalg.slogdet(kron(a, b))), expected


@IDENTITIES.on("mm pp", sums=True, linalg=True)
def eigenvectors(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """Check that (A ⊗ B)(u ⊗ v) = αβ (u ⊗ v) for A u = α u, B v = β v.

    For every pair; A and B square. The residual is compared, which rounding cannot spoil even where
    eigenvalues are ill conditioned.
    """
    alpha, u = np.linalg.eig(a)
    beta, v = np.linalg.eig(b)
    return kron(a, b) @ np.kron(u, v), np.kron(u, v) * np.kron(alpha, beta)


@IDENTITIES.on(Cases.partial_isometries, bound=lambda *_: 1.0, linalg=True)
def rank(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """Check that rank(A ⊗ B) = rank(A)·rank(B), for singular values of one or zero."""
    sigma = np.linalg.svd(kron(a, b), compute_uv=False)
    return np.sum(sigma > 0.5), round(norm(a) ** 2) * round(norm(b) ** 2)


@IDENTITIES.on("mn pq", sums=True, linalg=True)
def singular_values(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """Check that σ(A ⊗ B) = σ(A)·σ(B): the singular values are all products, and zeros."""
    sigma = np.linalg.svd(kron(a, b), compute_uv=False)
    sigma_a = np.linalg.svd(a, compute_uv=False)
    sigma_b = np.linalg.svd(b, compute_uv=False)
    products = np.sort(np.outer(sigma_a, sigma_b), axis=None)[::-1]
    return sigma, np.pad(products, (0, max(0, len(sigma) - len(products))))


@IDENTITIES.on("mn pq", sums=True, linalg=True)
def norms(kron: Kron, a: Matrix, b: Matrix) -> Sides:
    """Check that ‖A ⊗ B‖ = ‖A‖·‖B‖ in the Frobenius, spectral, column-sum and row-sum norms."""
    product = kron(a, b)
    of_product = []
    expected = []
    orders: tuple[Any, ...] = ("fro", 2, 1, np.inf)
    for order in orders:
        of_product.append(np.linalg.norm(product, order))
        expected.append(np.linalg.norm(a, order) * np.linalg.norm(b, order))
    return np.stack(of_product), np.stack(expected)
