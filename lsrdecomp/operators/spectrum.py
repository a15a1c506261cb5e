"""log-determinants and eigenvalues of sums with common bases, from the factors alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from lsrdecomp.arrays import Array, is_complex, like, namespace
from lsrdecomp.errors import MatrixError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.operators.diagonal import diagonalize
from lsrdecomp.operators.host import check_separated, host
from lsrdecomp.operators.single import slogdet_of_term
from lsrdecomp.operators.threads import one_thread_for_small_factors
from lsrdecomp.operators.triangular import triangularize


@one_thread_for_small_factors
def slogdet(matrix: SeparatedMatrix) -> tuple[Any, Any]:
    """(sign, log|det A|) of any sum that `solve` solves exactly; the sign is a complex phase for complex factors.

    Of one term, det(A ⊗ B) = det(A)^p · det(B)^m; of the zero matrix (0, −∞).

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)

    Returns
    -------
    (sign, float)

    Raises
    ------
    ShapeError
        For factors that are not square.
    MatrixError
        For sums without common bases.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> matrix = SeparatedMatrix.from_factors([np.diag([10.0] * 100)[None], np.diag([10.0] * 100)[None]])
    >>> sign, log = slogdet(matrix)                                                 # the determinant is 10^20000
    >>> float(sign), round(float(log / np.log(10.0)), 6)
    (1.0, 20000.0)
    """
    if check_separated(matrix).separation_rank <= 1:
        return slogdet_of_term(matrix)
    terms = host(matrix)
    form = diagonalize(terms) or triangularize(terms)
    if form is None:
        raise _no_form(matrix, "log-determinant")
    sign, log = form.slogdet()
    return (sign if is_complex(matrix.factors[0]) else float(np.sign(np.real(sign)))), log


@one_thread_for_small_factors
def logdet(matrix: SeparatedMatrix) -> Any:
    """log det A of any sum that `solve` solves exactly, where the determinant is positive.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)

    Returns
    -------
    float

    Raises
    ------
    MatrixError
        If the determinant is not positive: `slogdet` gives its sign as well. For sums without
        common bases.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.operators import kronecker_sum
    >>> second = 2 * np.eye(3) - np.eye(3, k=1) - np.eye(3, k=-1)
    >>> laplacian = kronecker_sum(second, second)
    >>> bool(np.isclose(logdet(laplacian), np.linalg.slogdet(laplacian.to_matrix())[1]))
    True
    """
    sign, log = slogdet(matrix)
    if not abs(complex(sign) - 1.0) <= 1e-8:
        raise MatrixError(
            f"the determinant has the sign {sign:.3g}, and no real logarithm: see slogdet"
        )
    return log


@one_thread_for_small_factors
def eigenvalues(matrix: SeparatedMatrix, mass: SeparatedMatrix | None = None) -> Array:
    """All eigenvalues of a sum whose factors commute, or of the pencil A x = λ B x with ``mass`` B of one term.

    Kronecker sums of any number of factors, a covariance plus noise, finite elements with their
    mass matrix; A₁ ⊗ B₁ + A₂ ⊗ B₂ with ``mass`` A₂ ⊗ B₁. Real and ascending where the factors are
    Hermitian (and the mass positive definite), else complex in no order. Cost a few Σ m_i³ + s·n.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)
    mass : SeparatedMatrix, shape (n, n), optional
        B, one term of the same Kronecker shape.

    Returns
    -------
    Array, shape (n,)

    Raises
    ------
    MatrixError
        Where there is no closed form, or the mass is singular.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import decompose
    >>> matrix = decompose(np.kron(np.diag([1.0, 2.0]), np.diag([3.0, 5.0])), "2x2, 2x2", rank=1).approximation
    >>> np.round(eigenvalues(matrix), 6).tolist()
    [3.0, 5.0, 6.0, 10.0]
    """
    shape = check_separated(matrix).kronecker_shape
    if mass is not None and (mass.separation_rank != 1 or mass.kronecker_shape != shape):
        raise ShapeError(
            f"a mass is one term of {shape}; this has {mass.separation_rank} of {mass.kronecker_shape}"
        )
    if any(m != n for m, n in shape.factors):
        raise ShapeError(f"eigenvalues need square factors, these are {shape}")
    terms = host(matrix)
    unit = (
        SeparatedMatrix.from_factors([np.eye(m)[None] for m in shape.rows])
        if mass is None
        else host(mass)
    )
    both = _joined(terms, unit)
    flat = diagonalize(both, unitary=mass is None)
    if flat is not None and np.all(flat.terms[-1] > 0):
        return like(np.sort(flat.terms[:-1].sum(axis=0) / flat.terms[-1]), matrix.weights)
    bent = triangularize(both)
    if bent is None:
        raise _no_form(matrix, "eigenvalues")
    if np.min(np.abs(bent.terms[-1])) <= 2.0**-50 * np.max(np.abs(bent.terms[-1])):
        raise MatrixError("the mass is singular: the pencil has infinite eigenvalues")
    values = bent.terms[:-1].sum(axis=0) / bent.terms[-1]
    return (
        values
        if isinstance(matrix.weights, np.ndarray)
        else namespace(matrix.weights).asarray(values)
    )


def _joined(matrix: SeparatedMatrix, last: SeparatedMatrix) -> SeparatedMatrix:
    """The terms of both in this order, not sorted by size."""
    pairs = zip(matrix.factors, last.factors, strict=True)
    return SeparatedMatrix(
        np.concatenate([matrix.weights, last.weights]),
        tuple(np.concatenate([f, g]) for f, g in pairs),
    )


def _no_form(matrix: SeparatedMatrix, what: str) -> MatrixError:
    return MatrixError(
        f"{matrix.separation_rank} terms of {matrix.kronecker_shape} share no bases: no closed form of the {what} "
        "(one term, Kronecker sums, commuting factors and two terms with a mass have one); NumPy takes A.to_matrix(), "
        "SciPy's eigsh and eigs take A as it is"
    )
