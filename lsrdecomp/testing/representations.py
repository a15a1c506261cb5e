"""Checks of rearrangements and of sums of Kronecker products, and the identities they try.

A shape is a `KroneckerShape`; ``rearrange(matrix, shape)`` returns (m_1·n_1, …, m_d·n_d); a
representation is ``(weights, factors)`` with weights (s,) and one stack of factors (s, m_i, n_i)
for each position. The identities take your function and a case, and raise `IdentityError`.

References
----------
C. F. Van Loan and N. Pitsianis, Approximation with Kronecker products, in Linear Algebra for Large
Scale and Real-Time Applications, Kluwer (1993). doi:10.1007/978-94-015-8196-7_17
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Unpack

import numpy as np
from hypothesis import strategies as st

from lsrdecomp.arrays import Array, namespace, norm, to_numpy
from lsrdecomp.kronecker.rearrange import inverse_rearrange
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.testing.agreement import (
    Identities,
    IdentityError,
    Matrix,
    Sides,
    exact,
    require_agreement,
)
from lsrdecomp.testing.cases import Cases, CheckSettings, Corners, Options, trials
from lsrdecomp.testing.runner import GuardedFunction, check_identities, try_identities

Apply = Callable[[Sequence[Array], Array], Array]
Form = Callable[[Array, Sequence[Array]], Array]
Rearrange = Callable[[Array, KroneckerShape], Array]
Decompose = Callable[[Array, KroneckerShape, int], tuple[Array, Sequence[Array]]]
APPLY = Identities()
REARRANGE = Identities()
ROUND_TRIP = Identities()
SUM = Identities()
BEST = Identities()


def check_apply(apply: Apply, **options: Unpack[Options]) -> None:
    """Try a product with a vector for which the Kronecker product is never formed.

    Parameters
    ----------
    apply : callable ([A, B, …], x) -> (A ⊗ B ⊗ …) x
        Takes one to five factors, one-row and one-column ones among them, and x of shape (n,
        columns).
    **options
        `Options`: array library, element type, tolerance, number of cases.

    Raises
    ------
    IdentityError
        With the smallest case that breaks it; also where your code raises.

    Examples
    --------
    >>> from functools import reduce
    >>> check_apply(lambda factors, x: reduce(np.kron, factors) @ x)  # prints nothing: no bug
    """
    __tracebackhide__ = True
    check_identities(APPLY, apply, options, APPLY_CORNERS, _product_of_all, order=None)


APPLY_CORNERS = Corners(
    shapes={
        "three factors": ((2, 3), (3, 2), (6, 2)),
        "five factors": ((2, 1), (1, 2), (3, 2), (1, 1), (2, 3), (12, 2)),
        "large sides": ((6, 7), (8, 9), (63, 6)),
    },
    tiles={
        "first factor about 16": ((17, 16), (2, 3), (48, 2)),
        "last factor about 32": ((2, 3), (33, 31), (93, 1)),
        "sides about 64": ((1, 2), (65, 64), (128, 3)),
        "64 columns and more": ((2, 3), (3, 2), (6, 65)),
    },
    empty={
        "empty first factor": ((0, 2), (2, 3), (6, 2)),
        "a factor without columns": ((2, 0), (2, 3), (0, 2)),
        "no vectors": ((2, 3), (3, 2), (6, 0)),
    },
    answer="sum",
)


def _product_of_all(apply: Apply, *arrays: Array) -> None:
    """Check the product of all arrays but the last with the last."""
    product(apply, arrays[:-1], arrays[-1])


def check_rearrange(
    rearrange: Rearrange,
    inverse: Rearrange | None = None,
    *,
    order: int | None = 2,
    columns: bool = False,
    **options: Unpack[Options],
) -> None:
    """Try a Van Loan–Pitsianis rearrangement, and its inverse.

    Parameters
    ----------
    rearrange : callable (matrix, shape) -> (m_1·n_1, …, m_d·n_d)
    inverse : callable (tensor, shape) -> matrix, optional
    order : int or None
        Number of factors it can do; ``None`` for any.
    columns : bool
        Blocks are counted and read column by column, as Van Loan and Pitsianis do; absent, row by
        row, as this library. It is tried on transposes, and an error shows the transpose of what
        yours was called with.
    **options
        `Options`: array library, element type, tolerance, number of cases.

    Raises
    ------
    IdentityError
        Naming the identity that tells most, with the smallest case that breaks it; also where your
        code raises.

    Examples
    --------
    >>> from lsrdecomp.kronecker import rearrange
    >>> check_rearrange(rearrange)
    >>> check_rearrange(lambda matrix, shape: matrix.reshape(shape.sizes))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lsrdecomp.testing.agreement.IdentityError: ...
    """
    __tracebackhide__ = True
    settings = CheckSettings.of(options, order)
    called = GuardedFunction(rearrange)

    def by_columns(matrix: Array, shape: KroneckerShape) -> Array:
        return called(namespace(matrix).matrix_transpose(matrix), shape.transposed)

    tried = trials(REARRANGE, by_columns if columns else called, settings)
    if inverse is not None:
        back = GuardedFunction(inverse)
        tried += trials(ROUND_TRIP, lambda a, q: back(called(a, q), q), settings)
    try_identities(tried, settings)


def check_sum(form: Form, *, order: int | None = None, **options: Unpack[Options]) -> None:
    """Try a function that forms a sum of Kronecker products.

    Parameters
    ----------
    form : callable (weights, factors) -> Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾
        Takes weights (s,), also small and negative ones, and stacks of factors (s, m_i, n_i).
    order : int, optional
        Number of factors d; absent, one to five.
    **options
        `Options`: array library, element type, tolerance, number of cases.

    Raises
    ------
    IdentityError
        With the smallest case that breaks it; also where your code raises.

    Examples
    --------
    >>> from functools import reduce
    >>> def form(weights, factors):
    ...     terms = [w * reduce(np.kron, term) for w, *term in zip(weights, *factors)]
    ...     return sum(terms)
    >>> check_sum(form)
    """
    __tracebackhide__ = True
    check_identities(SUM, form, options, order=order)


def check_decomposition(decompose: Decompose, **options: Unpack[Options]) -> None:
    """Try a function that finds the best sum of Kronecker products of two factors.

    Some matrices have singular values down to rounding, which an SVD through the Gram matrix loses.
    Weights must descend, factors have norm one, and the residual the norm that Eckart and Young's
    theorem says.

    Parameters
    ----------
    decompose : callable (matrix, shape, rank) -> (weights, (left, right))
        At most ``rank`` terms: weights (rank,), stacks (rank, m, n) and (rank, p, q).
    **options
        `Options`: array library, element type, tolerance, number of cases.

    Raises
    ------
    IdentityError
        With the smallest case that breaks it; also where your code raises.

    Examples
    --------
    >>> def by_svd(matrix, shape, rank):
    ...     (m, n), (p, q) = shape.factors
    ...     rearranged = matrix.reshape(m, p, n, q).transpose(0, 2, 1, 3).reshape(m * n, p * q)
    ...     u, sigma, vh = np.linalg.svd(rearranged, full_matrices=False)
    ...     return sigma[:rank], (u.T[:rank].reshape(-1, m, n), vh[:rank].reshape(-1, p, q))
    >>> check_decomposition(by_svd)
    """
    __tracebackhide__ = True
    check_identities(BEST, decompose, options, order=2)


def _product_and_vectors(d: Cases) -> tuple[Any, ...]:
    """Draw factors, and columns that their product can be applied to."""
    shape = d.shape()
    vectors = d.draw(st.integers(1, 3))
    return d.factors(shape), d.matrix((shape.matrix_shape[1], vectors))


def _matrix_and_rank(d: Cases) -> tuple[Any, ...]:
    """Draw a matrix, its shape, and a number of terms."""
    shape = d.shape()
    rank = d.draw(st.integers(1, shape.max_separation_rank))
    return d.matrix(shape.matrix_shape), shape, rank


def _graded_matrix_and_rank(d: Cases) -> tuple[Any, ...]:
    """Draw a matrix with singular values down to rounding, its shape, and a number of terms."""
    shape = d.shape()
    rank = d.draw(st.integers(1, shape.max_separation_rank))
    return d.graded(shape), shape, rank


@APPLY.on(_product_and_vectors, sums=True)
def product(apply: Apply, factors: Sequence[Matrix], x: Matrix) -> Sides:
    """Check that (A ⊗ B ⊗ …) x."""
    return apply(factors, x), reduce(np.kron, factors) @ x


@REARRANGE.on(Cases.numbered, bound=exact)
def entries(rearrange: Rearrange, matrix: Matrix, shape: KroneckerShape) -> Sides:
    """Check that R(A)[i_1·n_1 + j_1, …] = A[i, j] for i = (i_1, …, i_d) and j = (j_1, …, j_d).

    For two factors: row (i, j) of R(A) is block (i, j) of A read as a vector.
    """
    axes: list[int] = []
    for k in range(shape.order):
        axes += [k, shape.order + k]
    tensor = matrix.reshape(*shape.rows, *shape.columns).transpose(axes)
    return rearrange(matrix, shape), tensor.reshape(shape.sizes)


@REARRANGE.on(lambda d: (d.factors(d.shape()),))
def outer_product(rearrange: Rearrange, factors: Sequence[Matrix]) -> Sides:
    """Check that R(A ⊗ B) = vec(A) vec(B)ᵀ, for any number of factors; vec reads row by row."""
    shape = KroneckerShape(tuple(factor.shape for factor in factors))
    vectors = [factor.reshape(-1) for factor in factors]
    return rearrange(reduce(np.kron, factors), shape), reduce(np.multiply.outer, vectors)


@SUM.on(Cases.terms, Cases.small_term, sums=True)
def sum_of_terms(form: Form, weights: Matrix, factors: Sequence[Matrix]) -> Sides:
    """Check that Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾ with every term once."""
    return form(weights, factors), formed_terms(weights, factors)


@ROUND_TRIP.on(Cases.numbered, bound=exact)
def there_and_back(round_trip: Rearrange, matrix: Matrix, shape: KroneckerShape) -> Sides:
    """Check that R⁻¹(R(A)) = A, in every bit."""
    return round_trip(matrix, shape), matrix


def formed_terms(weights: Array, factors: Sequence[Array]) -> np.ndarray:
    """Return Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾ by ``numpy.kron``, in double precision."""
    stacks = []
    for factor in factors:
        values = to_numpy(factor)
        stacks.append(values.astype(np.result_type(values.dtype, np.float64)))
    total: Any = 0.0
    for k, weight in enumerate(to_numpy(weights)):
        total = total + weight * reduce(np.kron, [stack[k] for stack in stacks])
    return np.asarray(total)


def unit_terms(weights: Matrix, factors: Sequence[Matrix]) -> None:
    """Raise `IdentityError` unless λ descends and factors have norm one, as γ supposes."""
    if np.iscomplexobj(weights) or np.any(weights < 0.0) or np.any(np.diff(weights) > 0.0):
        raise IdentityError(
            "weights", f"λ must be real, not negative and descending, got {weights}"
        )
    for i, terms in enumerate(factors, 1):
        require_agreement(
            f"unit factors, ‖M_k⁽{i}⁾‖_F = 1",
            np.asarray([norm(term) for term in terms]),
            np.ones(len(weights)),
            bound=math.sqrt(max(len(terms), 1)),
            size=math.prod(terms.shape[1:]),
            inputs=(terms,),
        )


@BEST.on(_matrix_and_rank, _graded_matrix_and_rank, sums=True, linalg=True)
def best_terms(decompose: Decompose, matrix: Matrix, shape: KroneckerShape, rank: int) -> Sides:
    """Check that ‖A − Â‖ is the tail of the spectrum of R(A).

    At most ``rank`` terms of two factors, and no other such terms are nearer. With all terms the
    matrix comes back; a wrong conjugate, a transposed factor, a lost term and a weight counted
    twice all show here.
    """
    (m, n), (p, q) = shape.factors
    rearranged = matrix.reshape(m, p, n, q).transpose(0, 2, 1, 3).reshape(m * n, p * q)
    sigma = np.linalg.svd(rearranged, compute_uv=False)
    weights, factors = decompose(matrix, shape, rank)
    unit_terms(weights, factors)
    if len(weights) > rank:
        raise IdentityError("rank", f"{len(weights)} terms for rank {rank}")
    left, right = factors
    left_columns = left.reshape(len(left), m * n).T
    right_rows = right.reshape(len(right), p * q)
    approximation = inverse_rearrange((left_columns * weights) @ right_rows, shape)
    return norm(matrix - approximation), math.hypot(*sigma[rank:])
