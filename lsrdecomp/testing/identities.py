"""The identities of Kronecker products, one function each: pass your ``kron`` and matrices of any array library.

Each raises `IdentityError` where the identity fails beyond rounding. ``kron(A, B)`` takes two matrices. Only your
function is called with your library's arrays; the other side is worked out in NumPy.

References
----------
C. F. Van Loan, The ubiquitous Kronecker product, J. Comput. Appl. Math. 123 (2000). doi:10.1016/S0377-0427(00)00393-9
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lsrdecomp.arrays import Array, adjoint, like, namespace, norm, to_numpy
from lsrdecomp.kronecker.rearrange import commutation_matrix
from lsrdecomp.testing.agreement import require_agreement

Kron = Callable[[Array, Array], Array]


def definition(kron: Kron, a: Array, b: Array) -> None:
    """(A ⊗ B)[i·p + k, j·q + l] = A[i, j]·B[k, l]: the first factor is outermost, as in ``numpy.kron``."""
    require_agreement(
        "definition, (A ⊗ B)[i·p + k, j·q + l] = A[i, j]·B[k, l]",
        kron(a, b),
        np.kron(to_numpy(a), to_numpy(b)),
        bound=norm(a) * norm(b),
        inputs=(a, b),
    )


def bilinearity(kron: Kron, a: Array, b: Array, c: Array) -> None:
    """(A + 2C) ⊗ B = A ⊗ B + 2 (C ⊗ B), for C of the shape of A."""
    require_agreement(
        "bilinearity, (A + 2C) ⊗ B = A ⊗ B + 2(C ⊗ B)",
        kron(a + 2.0 * c, b),
        to_numpy(kron(a, b)) + 2.0 * to_numpy(kron(c, b)),
        bound=(norm(a) + 2.0 * norm(c)) * norm(b),
        inputs=(a, b, c),
    )


def associativity(kron: Kron, a: Array, b: Array, c: Array) -> None:
    """A ⊗ (B ⊗ C) = (A ⊗ B) ⊗ C."""
    require_agreement(
        "associativity, A ⊗ (B ⊗ C) = (A ⊗ B) ⊗ C",
        kron(a, kron(b, c)),
        kron(kron(a, b), c),
        bound=norm(a) * norm(b) * norm(c),
        inputs=(a, b, c),
    )


def mixed_product(kron: Kron, a: Array, b: Array, c: Array, d: Array) -> None:
    """(A ⊗ B)(C ⊗ D) = AC ⊗ BD."""
    require_agreement(
        "mixed product, (A ⊗ B)(C ⊗ D) = AC ⊗ BD",
        to_numpy(kron(a, b)) @ to_numpy(kron(c, d)),
        kron(a @ c, b @ d),
        bound=norm(a) * norm(b) * norm(c) * norm(d),
        size=int(a.shape[1] * b.shape[1]),
        inputs=(a, b, c, d),
    )


def transpose(kron: Kron, a: Array, b: Array) -> None:
    """(A ⊗ B)ᵀ = Aᵀ ⊗ Bᵀ, without conjugation."""
    xp = namespace(a, b)
    require_agreement(
        "transpose, (A ⊗ B)ᵀ = Aᵀ ⊗ Bᵀ",
        to_numpy(kron(a, b)).T,
        kron(xp.matrix_transpose(a), xp.matrix_transpose(b)),
        bound=norm(a) * norm(b),
        inputs=(a, b),
    )


def conjugate_transpose(kron: Kron, a: Array, b: Array) -> None:
    """(A ⊗ B)ᴴ = Aᴴ ⊗ Bᴴ."""
    require_agreement(
        "conjugate transpose, (A ⊗ B)ᴴ = Aᴴ ⊗ Bᴴ",
        to_numpy(kron(a, b)).conj().T,
        kron(adjoint(a), adjoint(b)),
        bound=norm(a) * norm(b),
        inputs=(a, b),
    )


def inverse(kron: Kron, a: Array, b: Array) -> None:
    """(A ⊗ B)(A⁻¹ ⊗ B⁻¹) = I, for invertible A and B."""
    first, second = (like(np.linalg.inv(to_numpy(x)), x) for x in (a, b))
    size = int(a.shape[0] * b.shape[0])
    require_agreement(
        "inverse, (A ⊗ B)(A⁻¹ ⊗ B⁻¹) = I",
        to_numpy(kron(a, b)) @ to_numpy(kron(first, second)),
        np.eye(size),
        bound=(norm(a) * norm(first)) * (norm(b) * norm(second)),
        size=size,
        inputs=(a, b),
    )


def vec(kron: Kron, a: Array, b: Array, x: Array) -> None:
    """(A ⊗ B) vec(X) = vec(B X Aᵀ), for X of shape (columns of B, columns of A); vec stacks columns."""
    first, second, middle = to_numpy(a), to_numpy(b), to_numpy(x)
    require_agreement(
        "vec, (A ⊗ B) vec(C) = vec(B C Aᵀ)",
        to_numpy(kron(a, b)) @ middle.T.reshape(-1),
        (second @ middle @ first.T).T.reshape(-1),
        bound=norm(a) * norm(b) * norm(x),
        size=middle.size,
        inputs=(a, b, x),
    )


def trace(kron: Kron, a: Array, b: Array) -> None:
    """tr(A ⊗ B) = tr(A)·tr(B), for square A and B."""
    require_agreement(
        "trace, tr(A ⊗ B) = tr(A)·tr(B)",
        np.trace(to_numpy(kron(a, b))),
        np.trace(to_numpy(a)) * np.trace(to_numpy(b)),
        bound=norm(a) * norm(b),
        size=int(a.shape[0] * b.shape[0]),
        inputs=(a, b),
    )


def determinant(kron: Kron, a: Array, b: Array) -> None:
    """det(A ⊗ B) = det(A)^p · det(B)^m, for invertible A (m × m) and B (p × p); compared by logarithm and phase."""
    first, second = to_numpy(a), to_numpy(b)
    (m, _), (p, _) = first.shape, second.shape
    phase, size = np.linalg.slogdet(to_numpy(kron(a, b)))
    (phase_a, size_a), (phase_b, size_b) = np.linalg.slogdet(first), np.linalg.slogdet(second)
    require_agreement(
        "determinant, det(A ⊗ B) = det(A)^p · det(B)^m",
        np.stack([phase, size]),
        np.stack([phase_a**p * phase_b**m, p * size_a + m * size_b]),
        bound=float(np.linalg.cond(first) * np.linalg.cond(second)),
        size=(m * p) ** 2,
        inputs=(a, b),
    )


def rank(kron: Kron, a: Array, b: Array) -> None:
    """rank(A ⊗ B) = rank(A)·rank(B), for matrices whose singular values are one or zero."""
    first, second = (round(norm(x) ** 2) for x in (a, b))
    sigma = np.linalg.svd(to_numpy(kron(a, b)), compute_uv=False)
    require_agreement(
        "rank, rank(A ⊗ B) = rank(A)·rank(B)", np.sum(sigma > 0.5), first * second, bound=0.0, inputs=(a, b)
    )


def singular_values(kron: Kron, a: Array, b: Array) -> None:
    """The singular values of A ⊗ B are the products of those of A and of B."""
    ours = np.linalg.svd(to_numpy(kron(a, b)), compute_uv=False)
    products = np.outer(*(np.linalg.svd(to_numpy(x), compute_uv=False) for x in (a, b)))
    expected = np.zeros_like(ours)
    found = np.sort(products, axis=None)[::-1]
    expected[: found.size] = found
    require_agreement(
        "singular values, σ(A ⊗ B) = σ(A)·σ(B)", ours, expected, bound=norm(a) * norm(b), size=ours.size, inputs=(a, b)
    )


def eigenvectors(kron: Kron, a: Array, b: Array) -> None:
    """A u = α u and B v = β v give (A ⊗ B)(u ⊗ v) = αβ (u ⊗ v), for every pair; A and B square.

    The residual is compared, which rounding cannot spoil even where eigenvalues are ill conditioned.
    """
    (alpha, u), (beta, v) = (np.linalg.eig(to_numpy(x)) for x in (a, b))
    vectors = np.kron(u, v)
    require_agreement(
        "eigenvectors, (A ⊗ B)(u ⊗ v) = αβ (u ⊗ v)",
        to_numpy(kron(a, b)) @ vectors,
        vectors * np.kron(alpha, beta),
        bound=norm(a) * norm(b) * len(alpha) * len(beta),
        size=vectors.shape[0],
        inputs=(a, b),
    )


def norms(kron: Kron, a: Array, b: Array) -> None:
    """‖A ⊗ B‖ = ‖A‖·‖B‖ in the Frobenius, the spectral, the row-sum and the column-sum norm."""
    matrix, first, second = to_numpy(kron(a, b)), to_numpy(a), to_numpy(b)
    kinds: tuple[Any, ...] = ("fro", 2, 1, np.inf)
    require_agreement(
        "norms, ‖A ⊗ B‖ = ‖A‖·‖B‖ for the norms F, 2, 1, ∞",
        np.stack([np.linalg.norm(matrix, kind) for kind in kinds]),
        np.stack([np.linalg.norm(first, kind) * np.linalg.norm(second, kind) for kind in kinds]),
        bound=norm(a) * norm(b),
        size=matrix.size,
        inputs=(a, b),
    )


def commutation(kron: Kron, a: Array, b: Array) -> None:
    """K (A ⊗ B) K' = B ⊗ A with commutation matrices K_{p,m} and K'_{n,q}."""
    (m, n), (p, q) = a.shape, b.shape
    matrix = to_numpy(commutation_matrix(p, m)) @ to_numpy(kron(a, b)) @ to_numpy(commutation_matrix(n, q))
    require_agreement("commutation, K (A ⊗ B) K = B ⊗ A", matrix, kron(b, a), bound=norm(a) * norm(b), inputs=(a, b))
