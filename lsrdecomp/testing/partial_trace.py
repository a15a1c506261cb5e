"""The identities of partial traces, one function each, and `check_partial_trace`.

A matrix X (p·q, p·q) acts on a product of two spaces. tr₁(X) is (q, q), the sum of its p diagonal
blocks; tr₂(X) is (p, p), the trace of each block. tr₁(A ⊗ B) = tr(A)·B and tr₂(A ⊗ B) = A·tr(B).
Each function takes your ``partial_trace(X, (p, q), axis)``, where axis 0 asks for tr₁ and axis 1
for tr₂, and raises `IdentityError`. In a formula tr₂ stands for both.

References
----------
R. Bhatia, Partial traces and entropy inequalities, Linear Algebra Appl. 370 (2003).
doi:10.1016/S0024-3795(03)00387-X
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack

import numpy as np
from hypothesis import strategies as st

from lsrdecomp.arrays import Array, namespace, norm
from lsrdecomp.testing.agreement import Identities, Matrix, Sides
from lsrdecomp.testing.cases import Cases, Corners, Options
from lsrdecomp.testing.runner import check_identities

Dims = tuple[int, int]
PartialTrace = Callable[[Array, Dims, int], Array]
IDENTITIES = Identities()


def check_partial_trace(partial_trace: PartialTrace, **options: Unpack[Options]) -> None:
    """Try every identity of the two partial traces on ``partial_trace``.

    Parameters
    ----------
    partial_trace : callable (X, (p, q), axis) -> tr₁(X) or tr₂(X)
        X is (p·q, p·q). Axis 0 traces out the first factor and leaves (q, q), axis 1 the second and
        leaves (p, p). Two functions are passed as ``lambda X, dims, axis: (trace_1,
        trace_2)[axis](X, *dims)``.
    **options
        `Options`: array library, element type, tolerance, number of cases.

    Raises
    ------
    IdentityError
        Naming the identity that tells most, with the smallest case that breaks it; also where your
        code raises.

    Examples
    --------
    >>> def mine(X, dims, axis):
    ...     return np.trace(X.reshape(*dims, *dims), axis1=axis, axis2=axis + 2)
    >>> check_partial_trace(mine)
    >>> check_partial_trace(lambda X, dims, axis: mine(X, dims, 1 - axis))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lsrdecomp.testing.agreement.IdentityError: definition, tr₂(A)[i, j] = Σ_k A[i·q + k, j·q + ...
    """
    __tracebackhide__ = True
    check_identities(IDENTITIES, partial_trace, options, CORNERS, _along_both_axes)


CORNERS = Corners(
    shapes={
        "factors of equal size": ((3, 3, 3, 3),),
        "large sides": ((6, 7, 6, 7),),
    },
    tiles={
        "first factor about 16": ((17, 2, 17, 2),),
        "second factor about 32": ((2, 33, 2, 33),),
        "first factor about 64": ((65, 1, 65, 1),),
    },
    empty={
        "empty first factor": ((0, 2, 0, 2),),
        "empty second factor": ((2, 0, 2, 0),),
    },
    answer="sum",
)


def _along_both_axes(function: PartialTrace, tensor: Array) -> None:
    """Check the definition of both traces of a matrix given as an array (p, q, p, q)."""
    p, q = int(tensor.shape[0]), int(tensor.shape[1])
    matrix = namespace(tensor).reshape(tensor, (p * q, p * q))
    for axis in (0, 1):
        definition(function, matrix, (p, q), axis)


def _drawn(
    d: Cases, second: Literal["none", "full size", "traced", "left"] = "none"
) -> tuple[Any, ...]:
    """Draw X, (p, q) and the axis, and a second matrix of one of their sizes."""
    p, q = d.sides(2, (1, 2, 3, 5))
    axis = d.draw(st.integers(0, 1))
    x = d.matrix((p * q, p * q))
    if second == "none":
        return x, (p, q), axis
    traced, left = (p, q) if axis == 0 else (q, p)
    size = {"full size": p * q, "traced": traced, "left": left}[second]
    return x, (p, q), axis, d.matrix((size, size))


def _on_factor(matrix: Matrix, dims: Dims, axis: int) -> Matrix:
    """Return M ⊗ I for axis 0, I ⊗ M for axis 1."""
    identity = np.eye(dims[1 - axis])
    return np.kron(matrix, identity) if axis == 0 else np.kron(identity, matrix)


@IDENTITIES.on(_drawn, sums=True)
def definition(partial_trace: PartialTrace, a: Matrix, dims: Dims, axis: int) -> Sides:
    """Check that tr₂(A)[i, j] = Σ_k A[i·q + k, j·q + k], tr₁(A)[k, l] = Σ_i A[i·q + k, i·q + l]."""
    expected = np.trace(a.reshape(*dims, *dims), axis1=axis, axis2=axis + 2)
    return partial_trace(a, dims, axis), expected


@IDENTITIES.on(
    lambda d: _drawn(d, "full size"), bound=lambda a, b: norm(a) + 2 * norm(b), sums=True
)
def linearity(partial_trace: PartialTrace, a: Matrix, dims: Dims, axis: int, b: Matrix) -> Sides:
    """Check that tr₂(A + 2B) = tr₂(A) + 2 tr₂(B)."""
    total = partial_trace(a, dims, axis) + 2 * partial_trace(b, dims, axis)
    return partial_trace(a + 2 * b, dims, axis), total


@IDENTITIES.on(lambda d: (*d.matrices("pp", "qq"), d.draw(st.integers(0, 1))), sums=True)
def product(partial_trace: PartialTrace, a: Matrix, b: Matrix, axis: int) -> Sides:
    """Check that tr₂(A ⊗ B) = A·tr(B), tr₁(A ⊗ B) = tr(A)·B."""
    expected = np.trace(a) * b if axis == 0 else a * np.trace(b)
    return partial_trace(np.kron(a, b), (len(a), len(b)), axis), expected


@IDENTITIES.on(_drawn, sums=True)
def conjugate_transpose(partial_trace: PartialTrace, a: Matrix, dims: Dims, axis: int) -> Sides:
    """Check that tr₂(Aᴴ) = tr₂(A)ᴴ."""
    return partial_trace(a.conj().T, dims, axis), partial_trace(a, dims, axis).conj().T


@IDENTITIES.on(_drawn, sums=True)
def trace(partial_trace: PartialTrace, a: Matrix, dims: Dims, axis: int) -> Sides:
    """Check that tr(tr₂(A)) = tr(A)."""
    return np.trace(partial_trace(a, dims, axis)), np.trace(a)


@IDENTITIES.on(lambda d: _drawn(d, "left"), sums=True)
def module(partial_trace: PartialTrace, a: Matrix, dims: Dims, axis: int, b: Matrix) -> Sides:
    """Check that tr₂((B ⊗ I) A) = B tr₂(A), tr₁((I ⊗ B) A) = B tr₁(A)."""
    factor = _on_factor(b, dims, 1 - axis)
    return partial_trace(factor @ a, dims, axis), b @ partial_trace(a, dims, axis)


@IDENTITIES.on(lambda d: _drawn(d, "traced"), sums=True)
def cyclic(partial_trace: PartialTrace, a: Matrix, dims: Dims, axis: int, b: Matrix) -> Sides:
    """Check that tr₂((I ⊗ B) A) = tr₂(A (I ⊗ B)), tr₁((B ⊗ I) A) = tr₁(A (B ⊗ I))."""
    factor = _on_factor(b, dims, axis)
    return partial_trace(factor @ a, dims, axis), partial_trace(a @ factor, dims, axis)
