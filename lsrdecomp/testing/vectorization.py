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
from lsrdecomp.testing.cases import CheckSettings, Corners, Options, trials
from lsrdecomp.testing.runner import GuardedFunction, try_identities
from lsrdecomp.testing.strategies import SIZES

Vec = Callable[[Array], Array]
Unvec = Callable[[Array, tuple[int, int]], Array]
Commutation = Callable[[int, int], Array]
VEC = Identities()
UNVEC = Identities()
COMMUTATION = Identities()


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
    >>> def vec(X):
    ...     return X.T.reshape(-1)
    >>> def unvec(v, shape):
    ...     return v.reshape(shape, order="F")
    >>> check_vec(vec, unvec, commutation_matrix)
    >>> check_vec(np.ravel)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lsrdecomp.testing.agreement.IdentityError: definition, vec(A)[j·m + i] = A[i, j]: ...
    """
    __tracebackhide__ = True
    settings = CheckSettings.of(options)
    called = GuardedFunction(vec)

    def vector(x: Array) -> Array:
        answer = called(x)
        is_column = tuple(answer.shape) == (x.shape[0] * x.shape[1], 1)
        return answer[:, 0] if is_column else answer

    tried = trials(VEC, vector, settings, CORNERS)
    if unvec is not None:
        tried += trials(UNVEC, GuardedFunction(unvec), settings, CORNERS)
    if commutation is not None:
        tried += trials(COMMUTATION, GuardedFunction(commutation), settings)
    try_identities(tried, settings)


CORNERS = Corners(
    shapes={
        "three columns": ((2, 3),),
        "large sides": ((6, 7),),
    },
    tiles={
        "sides about 16": ((17, 15),),
        "sides about 32": ((32, 33),),
        "sides about 64": ((65, 63),),
    },
    empty={
        "no rows": ((0, 2),),
        "no columns": ((2, 0),),
    },
    answer="entry",
)


@VEC.on("mn", bound=exact)
def definition(vec: Vec, a: Matrix) -> Sides:
    """Check that vec(A)[j·m + i] = A[i, j]."""
    return vec(a), a.reshape(-1, order="F")


@VEC.on("mn mn", bound=lambda a, b: norm(a) + 2 * norm(b))
def linearity(vec: Vec, a: Matrix, b: Matrix) -> Sides:
    """Check that vec(A + 2B) = vec(A) + 2 vec(B)."""
    return vec(a + 2 * b), vec(a) + 2 * vec(b)


@VEC.on("km mn np", sums=True)
def product(vec: Vec, a: Matrix, b: Matrix, c: Matrix) -> Sides:
    """Check that vec(A B C) = (Cᵀ ⊗ A) vec(B)."""
    return vec(a @ b @ c), np.kron(c.T, a) @ vec(b)


@VEC.on("mn mn", sums=True)
def inner_product(vec: Vec, a: Matrix, b: Matrix) -> Sides:
    """Check that vec(A)ᴴ vec(B) = tr(Aᴴ B)."""
    return np.vdot(vec(a), vec(b)), np.trace(a.conj().T @ b)


@UNVEC.on("mn", bound=exact)
def inverse(unvec: Unvec, a: Matrix) -> Sides:
    """Check that unvec(vec(A), (m, n)) = A, with a vec of NumPy's."""
    return unvec(a.reshape(-1, order="F"), a.shape), a


@COMMUTATION.on(lambda d: d.sides(2, (*SIZES, 6, 0)), bound=exact)
def transposition(commutation: Commutation, m: int, n: int) -> Sides:
    """Check that K_{m,n} vec(A) = vec(Aᵀ) for every A (m, n)."""
    sources = np.arange(m * n).reshape((n, m)).reshape(-1, order="F")
    return commutation(m, n), np.eye(m * n)[sources]


@COMMUTATION.on("mn pq")
def exchange(commutation: Commutation, a: Matrix, b: Matrix) -> Sides:
    """Check that K_{p,m} (A ⊗ B) K_{n,q} = B ⊗ A for A (m, n) and B (p, q)."""
    m, n = a.shape
    p, q = b.shape
    return commutation(p, m) @ np.kron(a, b) @ commutation(n, q), np.kron(b, a)
