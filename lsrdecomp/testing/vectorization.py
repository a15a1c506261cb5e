"""The identities of vec and of the commutation matrix, one function each, and `check_vec`.

vec(X) of X (m, n) stacks the columns in a vector of m·n entries; K_{m,n} is the permutation with K
vec(X) = vec(Xᵀ). Each function takes your vec, its inverse or K, and raises `IdentityError`.

References
----------
R. A. Horn and C. R. Johnson, Topics in Matrix Analysis, chapter 4, Cambridge University Press
(1991). J. R. Magnus and H. Neudecker, The commutation matrix: some properties and applications,
Ann. Statist. 7 (1979). doi:10.1214/aos/1176344621
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import numpy as np

from lsrdecomp.arrays import Array, norm
from lsrdecomp.testing.agreement import Identities, Matrix, Sides, exact
from lsrdecomp.testing.cases import Options, trials
from lsrdecomp.testing.runner import guarded, try_identities
from lsrdecomp.testing.strategies import SIZES

Vec = Callable[[Array], Array]
Unvec = Callable[[Array, tuple[int, int]], Array]
Commutation = Callable[[int, int], Array]
VEC, UNVEC, COMMUTATION = Identities(), Identities(), Identities()


def check_vec(
    vec: Vec,
    unvec: Unvec | None = None,
    commutation: Commutation | None = None,
    **options: Unpack[Options],
) -> None:
    """Try every identity of vec, of its inverse and of commutation matrices on yours.

    Parameters
    ----------
    vec : callable (X) -> vec(X)
        X (m, n) to (m·n,) or to a single column (m·n, 1). One that stacks rows is passed as
        ``lambda X: mine(X.T)``.
    unvec : callable (v, (m, n)) -> X, optional
        The inverse of vec, for v of shape (m·n,).
    commutation : callable (m, n) -> K, optional
        The matrix (m·n, m·n) with K vec(X) = vec(Xᵀ) for every X (m, n).
    **options
        `Options`: array library, element type, tolerance, number of cases.

    Raises
    ------
    IdentityError
        Naming the identity that tells most, with the smallest case that breaks it; also where your
        code raises.

    Examples
    --------
    >>> from lsrdecomp.kronecker import commutation_matrix
    >>> check_vec(lambda X: X.T.reshape(-1), lambda v, shape: v.reshape(shape, order="F"), commutation_matrix)
    >>> check_vec(np.ravel)                                                     # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lsrdecomp.testing.agreement.IdentityError: definition, vec(A)[j·m + i] = A[i, j]: ...
    """
    __tracebackhide__ = True
    called = guarded(vec)

    def vector(x: Array) -> Array:
        entries = called(x)
        return entries[:, 0] if tuple(entries.shape) == (x.shape[0] * x.shape[1], 1) else entries

    corners = {
        "three columns": ((2, 3),),
        "all sides above five": ((6, 7),),
        "no rows": ((0, 2),),
        "no columns": ((2, 0),),
    }
    tried = trials(VEC, vector, options, corners)
    if unvec is not None:
        tried += trials(UNVEC, guarded(unvec), options, corners)
    if commutation is not None:
        tried += trials(COMMUTATION, guarded(commutation), options)
    try_identities(tried, **options)


@VEC.on("mn", bound=exact)
def definition(vec: Vec, a: Matrix) -> Sides:
    """vec(A)[j·m + i] = A[i, j]."""
    return vec(a), a.reshape(-1, order="F")


@VEC.on("mn mn", bound=lambda a, b: norm(a) + 2.0 * norm(b))
def linearity(vec: Vec, a: Matrix, b: Matrix) -> Sides:
    """vec(A + 2B) = vec(A) + 2 vec(B)."""
    return vec(a + 2.0 * b), vec(a) + 2.0 * vec(b)


@VEC.on("km mn np", sums=True)
def product(vec: Vec, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """vec(A B C) = (Cᵀ ⊗ A) vec(B)."""
    return vec(a @ b @ c), np.kron(c.T, a) @ vec(b)


@VEC.on("mn mn", sums=True)
def inner_product(vec: Vec, a: Matrix, b: Matrix) -> Sides:
    """vec(A)ᴴ vec(B) = tr(Aᴴ B)."""
    return np.vdot(vec(a), vec(b)), np.trace(a.conj().T @ b)


@UNVEC.on("mn", bound=exact)
def inverse(unvec: Unvec, a: Matrix) -> Sides:
    """unvec(vec(A), (m, n)) = A, with a vec of NumPy's."""
    return unvec(a.reshape(-1, order="F"), a.shape), a


@COMMUTATION.on(lambda d: d.sides(2, (*SIZES, 6, 0)), bound=exact)
def transposition(commutation: Commutation, m: int, n: int) -> Sides:
    """K_{m,n} vec(A) = vec(Aᵀ) for every A (m, n)."""
    sources = np.arange(m * n).reshape((n, m)).reshape(-1, order="F")
    return commutation(m, n), np.eye(m * n)[sources]


@COMMUTATION.on("mn pq")
def exchange(commutation: Commutation, a: Matrix, b: Matrix) -> Sides:
    """K_{p,m} (A ⊗ B) K_{n,q} = B ⊗ A for A (m, n) and B (p, q)."""
    (m, n), (p, q) = a.shape, b.shape
    return commutation(p, m) @ np.kron(a, b) @ commutation(n, q), np.kron(b, a)
