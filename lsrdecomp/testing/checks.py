"""Checks of whole functions: draw many cases, shrink the one that fails, name the identity it breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from lsrdecomp.arrays import Array, Namespace, norm, to_numpy
from lsrdecomp.testing import identities, representations
from lsrdecomp.testing.agreement import require_agreement
from lsrdecomp.testing.cases import Cases
from lsrdecomp.testing.corners import corner_cases, small_terms
from lsrdecomp.testing.runner import Identity, guarded, try_identities

EXAMPLES = 25
"""Cases drawn for each identity."""


def check_kron(
    kron: identities.Kron,
    *,
    xp: Namespace = np,
    complex_values: bool = True,
    dtype: str = "float64",
    tolerance: float | None = None,
    max_examples: int = EXAMPLES,
) -> None:
    """Try every identity of the Kronecker product of two matrices on ``kron``.

    Parameters
    ----------
    kron : callable (A, B) -> A ⊗ B
        Takes and returns arrays of ``xp``.
    xp : namespace
        Array library in which the cases are handed over: ``numpy``, ``torch``, any of the array API standard.
    complex_values : bool
        Also draw complex matrices, of the precision of ``dtype``.
    dtype : str
        Element type of the cases: ``"float64"``, ``"float32"``, ``"complex128"``, ``"complex64"``.
    tolerance : float, optional
        Relative difference to let pass where rounding explains less: for code that computes in a coarser type.
    max_examples : int
        Cases drawn for each identity; they are the same in each run.

    Raises
    ------
    IdentityError
        With the name of the identity that tells most, the smallest case found that breaks it, and the names of the
        others that fail; also where ``kron`` itself raises, with what it raised.

    Examples
    --------
    >>> check_kron(np.kron)
    >>> check_kron(lambda a, b: np.kron(b, a))                                  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lsrdecomp.testing.agreement.IdentityError: definition, (A ⊗ B)[i·p + k, j·q + l] = A[i, j]·B[k, l]: ...
    """
    __tracebackhide__ = True
    names, yours = identities, guarded(kron)
    tried: list[Identity] = [
        ("definition", lambda d: names.definition(yours, *d.pair())),
        ("bilinearity", lambda d: names.bilinearity(yours, *d.with_sum())),
        ("transpose", lambda d: names.transpose(yours, *d.pair())),
        ("conjugate transpose", lambda d: names.conjugate_transpose(yours, *d.pair())),
        ("commutation", lambda d: names.commutation(yours, *d.pair())),
        ("associativity", lambda d: names.associativity(yours, *d.of_shape(d.shape(3)))),
        ("mixed product", lambda d: names.mixed_product(yours, *d.chain())),
        ("vec", lambda d: names.vec(yours, *d.with_middle())),
        ("trace", lambda d: names.trace(yours, *d.of_shape(d.shape(2, square=True)))),
        ("inverse", lambda d: names.inverse(yours, *d.invertible())),
        ("determinant", lambda d: names.determinant(yours, *d.invertible())),
        ("eigenvectors", lambda d: names.eigenvectors(yours, *d.of_shape(d.shape(2, square=True)))),
        ("rank", lambda d: names.rank(yours, *d.partial_isometries())),
        ("singular values", lambda d: names.singular_values(yours, *d.pair())),
        ("norms", lambda d: names.norms(yours, *d.pair())),
        *corner_cases(yours, complex_values and dtype == "float64", tiny=tolerance is None),
    ]
    try_identities(
        tried, xp=xp, complex_values=complex_values, max_examples=max_examples, dtype=dtype, tolerance=tolerance
    )


def check_apply(
    apply: Callable[[Sequence[Array], Array], Array],
    *,
    xp: Namespace = np,
    complex_values: bool = True,
    dtype: str = "float64",
    tolerance: float | None = None,
    max_examples: int = EXAMPLES,
) -> None:
    """Try a product that is never formed: ``apply([A, B, …], x)`` must be (A ⊗ B ⊗ …) x for x of shape (n, columns).

    Raises `IdentityError`. One to four factors are drawn, one-row and one-column ones among them.

    Examples
    --------
    >>> from functools import reduce
    >>> check_apply(lambda factors, x: reduce(np.kron, factors) @ x)              # prints nothing: no bug was found
    """

    __tracebackhide__ = True
    yours = guarded(apply)

    def case(d: Cases) -> None:
        shape = d.shape(None)
        factors = d.of_shape(shape)
        x = d.matrix((shape.matrix_shape[1], d.draw(st.integers(1, 3))))
        formed = np.ones((1, 1))
        for factor in factors:
            formed = np.kron(formed, to_numpy(factor))
        require_agreement(
            f"apply, (A ⊗ B ⊗ …) x, {shape}",
            yours(factors, x),
            formed @ to_numpy(x),
            bound=norm(formed) * norm(x),
            size=formed.shape[1],
            inputs=(*factors, x),
        )

    try_identities(
        [("apply, (A ⊗ B ⊗ …) x", case)],
        xp=xp,
        complex_values=complex_values,
        max_examples=max_examples,
        dtype=dtype,
        tolerance=tolerance,
    )


def check_rearrange(
    rearrange: representations.Rearrange,
    inverse: representations.Rearrange | None = None,
    *,
    order: int | None = 2,
    columns: bool = False,
    xp: Namespace = np,
    dtype: str = "float64",
    tolerance: float | None = None,
    max_examples: int = EXAMPLES,
) -> None:
    """Try a Van Loan–Pitsianis rearrangement ``rearrange(matrix, shape)``, and its ``inverse(tensor, shape)`` if given.

    Parameters
    ----------
    order : int or None
        Number of factors it can do; ``None`` for any.
    columns : bool
        Blocks are counted and read column by column, as Van Loan and Pitsianis do; absent, row by row, as this library.

    Raises `IdentityError`.

    Examples
    --------
    >>> from lsrdecomp.kronecker import rearrange
    >>> check_rearrange(rearrange)
    >>> check_rearrange(lambda matrix, shape: matrix.reshape(shape.sizes))        # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lsrdecomp.testing.agreement.IdentityError: ...
    """
    __tracebackhide__ = True
    yours = guarded(rearrange)
    tried: list[Identity] = [
        ("isometry", lambda d: representations.isometry(yours, *d.numbered(order))),
        ("outer product", lambda d: representations.outer_product(yours, d.of_shape(d.shape(order)), columns)),
    ]
    if order == 2:
        tried.append(("blocks", lambda d: representations.rearranged_blocks(yours, *d.numbered(2), columns)))
    if inverse is not None:
        back = guarded(inverse)
        tried.append(("inverse", lambda d: representations.inverse_of_rearrange(yours, back, *d.numbered(order))))
    try_identities(tried, xp=xp, complex_values=False, max_examples=max_examples, dtype=dtype, tolerance=tolerance)


def check_sum(
    form: Callable[[Array, Sequence[Array]], Array],
    *,
    order: int | None = None,
    xp: Namespace = np,
    complex_values: bool = True,
    dtype: str = "float64",
    tolerance: float | None = None,
    max_examples: int = EXAMPLES,
) -> None:
    """Try ``form(weights, factors)``, which must be Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾ for stacks of factors (s, m_i, n_i).

    Raises `IdentityError`.

    Examples
    --------
    >>> from functools import reduce
    >>> check_sum(lambda weights, factors: sum(w * reduce(np.kron, term) for w, *term in zip(weights, *factors)))
    """

    __tracebackhide__ = True
    yours = guarded(form)
    try_identities(
        [
            ("sum of terms", lambda d: representations.sum_of_terms(yours, *d.terms(d.shape(order)))),
            ("a small term", lambda d: representations.sum_of_terms(yours, *small_terms(d, order))),
        ],
        xp=xp,
        complex_values=complex_values,
        max_examples=max_examples,
        dtype=dtype,
        tolerance=tolerance,
    )


def check_decomposition(
    decompose: representations.Decompose,
    *,
    xp: Namespace = np,
    complex_values: bool = True,
    dtype: str = "float64",
    tolerance: float | None = None,
    max_examples: int = EXAMPLES,
) -> None:
    """Try ``decompose(matrix, shape, rank) -> (weights, (left, right))``, which must give the best terms there are.

    Shapes have two factors. Some matrices have singular values down to rounding, which an SVD through the Gram matrix
    loses. Weights must descend, factors have norm one, and the residual the norm that Eckart and
    Young's theorem says. Raises `IdentityError`.

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
    yours = guarded(decompose)

    def case(d: Cases, graded: bool = False) -> None:
        shape = d.shape(2)
        rank = d.draw(st.integers(1, shape.max_separation_rank))
        matrix = d.graded(shape) if graded else d.matrix(shape.matrix_shape)
        representations.best_terms(yours, matrix, shape, rank)

    try_identities(
        [("best terms", case), ("best terms of a graded spectrum", lambda d: case(d, graded=True))],
        xp=xp,
        complex_values=complex_values,
        max_examples=max_examples,
        dtype=dtype,
        tolerance=tolerance,
    )
