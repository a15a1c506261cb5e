"""The identities of Khatri–Rao products, one function each, and `check_khatri_rao`.

A ⊙ B takes A (m, n) and B (p, n) to (m·p, n): column j is A[:, j] ⊗ B[:, j], the first factor
outermost, as in ``scipy.linalg.khatri_rao``. Each function takes your ``khatri_rao(A, B)`` and
raises `IdentityError`.

References
----------
C. G. Khatri and C. R. Rao, Solutions to some functional equations and their applications to
characterization of probability distributions, Sankhyā A 30 (1968). S. Liu and G. Trenkler,
Hadamard, Khatri-Rao, Kronecker and other matrix products, Int. J. Inf. Syst. Sci. 4 (2008).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import numpy as np

from lsrdecomp.arrays import Array, norm
from lsrdecomp.kronecker.rearrange import commutation_matrix
from lsrdecomp.testing.agreement import Identities, Matrix, Sides
from lsrdecomp.testing.cases import Corners, Options
from lsrdecomp.testing.runner import check_identities

KhatriRao = Callable[[Array, Array], Array]
IDENTITIES = Identities()


def check_khatri_rao(khatri_rao: KhatriRao, **options: Unpack[Options]) -> None:
    """Try every identity of the Khatri–Rao product of two matrices on ``khatri_rao``.

    Parameters
    ----------
    khatri_rao : callable (A, B) -> A ⊙ B
        A (m, n) and B (p, n) to (m·p, n); column j is A[:, j] ⊗ B[:, j]. One that works row by row,
        the face-splitting product, is passed as ``lambda A, B: mine(A.T, B.T).T``.
    **options
        `Options`: array library, element type, tolerance, number of cases.

    Raises
    ------
    IdentityError
        Naming the identity that tells most, with the smallest case that breaks it; also where your
        code raises.

    Examples
    --------
    >>> from scipy.linalg import khatri_rao
    >>> check_khatri_rao(khatri_rao)
    >>> check_khatri_rao(lambda a, b: khatri_rao(b, a))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lsrdecomp.testing.agreement.IdentityError: definition, (A ⊙ B)[i·p + k, j] = A[i, j]·B[k, ...
    """
    __tracebackhide__ = True
    check_identities(IDENTITIES, khatri_rao, options, CORNERS)


CORNERS = Corners(
    shapes={
        "factors of equal shape": ((2, 3), (2, 3)),
        "large sides": ((6, 9), (8, 9)),
    },
    tiles={
        "first factor about 16": ((17, 3), (2, 3)),
        "second factor about 32": ((3, 2), (33, 2)),
        "64 columns and more": ((2, 65), (3, 65)),
        "both factors long": ((16, 31), (33, 31)),
    },
    empty={
        "empty first factor": ((0, 2), (3, 2)),
        "no columns": ((2, 0), (3, 0)),
    },
    answer="product",
)


@IDENTITIES.on("mn pn")
def definition(khatri_rao: KhatriRao, a: Matrix, b: Matrix) -> Sides:
    """Check that (A ⊙ B)[i·p + k, j] = A[i, j]·B[k, j]."""
    m, n = a.shape
    p = len(b)
    return khatri_rao(a, b), (a[:, None, :] * b[None, :, :]).reshape(m * p, n)


@IDENTITIES.on("mn pn mn", bound=lambda a, b, c: (norm(a) + 2 * norm(c)) * norm(b))
def bilinearity(khatri_rao: KhatriRao, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """Check that (A + 2C) ⊙ B = A ⊙ B + 2(C ⊙ B)."""
    return khatri_rao(a + 2 * c, b), khatri_rao(a, b) + 2 * khatri_rao(c, b)


@IDENTITIES.on("mn pn")
def commutation(khatri_rao: KhatriRao, a: Matrix, b: Matrix) -> Sides:
    """Check that K (A ⊙ B) = B ⊙ A with the commutation matrix K_{p,m}."""
    return commutation_matrix(len(b), len(a)) @ khatri_rao(a, b), khatri_rao(b, a)


@IDENTITIES.on("mn pn qn")
def associativity(khatri_rao: KhatriRao, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """Check that A ⊙ (B ⊙ C) = (A ⊙ B) ⊙ C."""
    return khatri_rao(a, khatri_rao(b, c)), khatri_rao(khatri_rao(a, b), c)


@IDENTITIES.on("rm sp mn pn", sums=True)
def mixed_product(khatri_rao: KhatriRao, a: Matrix, b: Matrix, c: Matrix, d: Matrix) -> Sides:
    """Check that (A ⊗ B)(C ⊙ D) = AC ⊙ BD."""
    return np.kron(a, b) @ khatri_rao(c, d), khatri_rao(a @ c, b @ d)


@IDENTITIES.on("mn pn", bound=lambda a, b: (norm(a) * norm(b)) ** 2, sums=True)
def gram(khatri_rao: KhatriRao, a: Matrix, b: Matrix) -> Sides:
    """Check that (A ⊙ B)ᴴ(A ⊙ B) = AᴴA ∘ BᴴB, where ∘ multiplies entry by entry."""
    product = khatri_rao(a, b)
    return product.conj().T @ product, (a.conj().T @ a) * (b.conj().T @ b)


@IDENTITIES.on("mn pn n1", sums=True)
def vec(khatri_rao: KhatriRao, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """Check that (A ⊙ B) c = vec(B diag(c) Aᵀ), where vec stacks columns."""
    return khatri_rao(a, b) @ c[:, 0], ((b * c[:, 0]) @ a.T).reshape(-1, order="F")
