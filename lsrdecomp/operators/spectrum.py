"""Log-determinants and eigenvalues of sums with common bases, from the factors alone."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from lsrdecomp.arrays import Array, is_complex, like, namespace
from lsrdecomp.errors import MatrixError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.operators.diagonal import diagonalize
from lsrdecomp.operators.factor_threads import one_thread_for_small_factors
from lsrdecomp.operators.host import check_separated, to_host
from lsrdecomp.operators.single_term import is_singular_by_its_sizes, slogdet_of_term
from lsrdecomp.operators.term_gradients import (
    log_det_with_gradient,
    requires_gradient,
    without_graph,
)
from lsrdecomp.operators.triangular import triangularize


@one_thread_for_small_factors
def slogdet(matrix: SeparatedMatrix) -> tuple[Any, Any]:
    """Return (sign, log|det A|) of any sum that `solve` solves exactly.

    The sign is a complex phase for complex factors; the logarithm is differentiable in torch's
    tensors, once in sums. Of one term, det(A ⊗ B) = det(A)^p · det(B)^m; of the zero matrix
    (0, −∞).

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)

    Returns
    -------
    (sign, float)

    Raises
    ------
    ShapeError
        For a matrix that is not square, and for sums of factors that are not, unless their terms
        have so small a rank together that the determinant is zero.
    MatrixError
        For sums without common bases.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> ten_fold = 10.0 * np.eye(100)[None]
    >>> sign, log = slogdet(SeparatedMatrix.from_factors([ten_fold, ten_fold]))  # of 10^20000
    >>> float(sign), round(float(log / np.log(10.0)), 6)
    (1.0, 20000.0)
    """
    if check_separated(matrix).separation_rank <= 1 or is_singular_by_its_sizes(matrix):
        return slogdet_of_term(matrix)
    needs_gradient = requires_gradient(matrix)
    terms = to_host(without_graph(matrix) if needs_gradient else matrix)
    form = diagonalize(terms) or triangularize(terms)
    if form is None:
        raise _no_closed_form(matrix, "log-determinant")
    sign, log_det = form.slogdet()
    if needs_gradient:
        log_det = log_det_with_gradient(matrix, log_det, form)
    if not is_complex(matrix.factors[0]):
        sign = float(np.sign(np.real(sign)))
    return sign, log_det


@one_thread_for_small_factors
def logdet(matrix: SeparatedMatrix) -> Any:
    """Return log det A of any sum that `solve` solves exactly, where the determinant is positive.

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
    >>> _, exact = np.linalg.slogdet(laplacian.to_matrix())
    >>> bool(np.isclose(logdet(laplacian), exact))
    True
    """
    sign, log_det = slogdet(matrix)
    if not abs(complex(sign) - 1.0) <= 1e-8:
        raise MatrixError(
            f"the determinant has the sign {sign:.3g}, and no real logarithm: see slogdet"
        )
    return log_det


@one_thread_for_small_factors
def eigenvalues(matrix: SeparatedMatrix, mass: SeparatedMatrix | None = None) -> Array:
    """Return all eigenvalues of a sum whose factors commute, or of a pencil A x = λ B x.

    Kronecker sums of any number of factors, a covariance plus noise, finite elements with their
    mass matrix; A₁ ⊗ B₁ + A₂ ⊗ B₂ with ``mass`` A₂ ⊗ B₁. Real and ascending where the factors are
    Hermitian (and the mass positive definite), else complex in no order. Cost a few Σ m_i³ + s·n.
    Of a square product of factors that are not square, such as 2×3 ⊗ 3×2, they are those of a
    matrix as large as its rank, and zeros.

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
    ShapeError
        For a matrix that is not square, and for sums of factors that are not, unless their terms
        have so small a rank together that zero is an eigenvalue.
    MatrixError
        Where there is no closed form, or the mass is singular.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> A, B = np.diag([1.0, 2.0]), np.diag([3.0, 5.0])
    >>> matrix = SeparatedMatrix.from_factors([A[None], B[None]])
    >>> np.round(eigenvalues(matrix), 6).tolist()
    [3.0, 5.0, 6.0, 10.0]
    """
    shape = check_separated(matrix).kronecker_shape
    if mass is not None and (mass.separation_rank != 1 or mass.kronecker_shape != shape):
        found = f"{mass.separation_rank} of {mass.kronecker_shape}"
        raise ShapeError(f"a mass is one term of {shape}; this has {found}")
    terms = to_host(matrix)
    if any(m != n for m, n in shape.factors):
        if mass is not None or not is_singular_by_its_sizes(matrix):
            rows, columns = matrix.shape
            raise ShapeError(
                f"eigenvalues of this {rows}×{columns} matrix, {matrix.separation_rank} × "
                f"[{shape}], need square factors, or a square matrix of terms of so small a rank "
                "together that zero is among them; NumPy takes A.to_matrix()"
            )
        return namespace(matrix.weights).asarray(_eigenvalues_through_rank(terms))
    if mass is None:
        mass_term = SeparatedMatrix.from_factors([np.eye(m)[None] for m in shape.rows])
    else:
        mass_term = to_host(mass)
    pencil = _with_last_term(terms, mass_term)

    diagonal = diagonalize(pencil, unitary=mass is None)
    if diagonal is not None and np.all(diagonal.terms[-1] > 0):
        values = diagonal.terms[:-1].sum(axis=0) / diagonal.terms[-1]
        return like(np.sort(values), matrix.weights)

    triangular = triangularize(pencil)
    if triangular is None:
        raise _no_closed_form(matrix, "eigenvalues")
    mass_values = triangular.terms[-1]
    sizes = np.abs(mass_values)
    if np.min(sizes) <= 2.0**-50 * np.max(sizes):
        raise MatrixError("the mass is singular: the pencil has infinite eigenvalues")
    values = triangular.terms[:-1].sum(axis=0) / mass_values
    if isinstance(matrix.weights, np.ndarray):
        return values
    return namespace(matrix.weights).asarray(values)


def _eigenvalues_through_rank(matrix: SeparatedMatrix) -> np.ndarray:
    """Return the eigenvalues of A = L R, with as many columns of L as A has rank: of R L, and zero.

    L R and R L have the same eigenvalues but for zeros. A tall factor stands in L, with the
    identity in R, and a wide one in R.
    """
    dtype = np.result_type(*matrix.factors)
    left: list[np.ndarray] = []
    right: list[np.ndarray] = []
    for factor in matrix.factors:
        terms, m, n = factor.shape
        identity = np.broadcast_to(np.eye(min(m, n), dtype=dtype), (terms, min(m, n), min(m, n)))
        left.append(factor if m > n else identity)
        right.append(identity if m > n else factor)
    lefts = []
    rights = []
    for k, weight in enumerate(matrix.weights):
        lefts.append(weight * reduce(np.kron, [stack[k] for stack in left]))
        rights.append(reduce(np.kron, [stack[k] for stack in right]))
    size = matrix.shape[0]
    values = np.zeros(size, dtype=np.complex128)
    if lefts:
        core = np.concatenate(rights) @ np.concatenate(lefts, axis=1)
        values[size - len(core) :] = np.linalg.eigvals(core)
    return values


def _with_last_term(matrix: SeparatedMatrix, last: SeparatedMatrix) -> SeparatedMatrix:
    """Return the terms of both in this order, not sorted by size."""
    weights = np.concatenate([matrix.weights, last.weights])
    pairs = zip(matrix.factors, last.factors, strict=True)
    return SeparatedMatrix(weights, tuple(np.concatenate([f, g]) for f, g in pairs))


def _no_closed_form(matrix: SeparatedMatrix, what: str) -> MatrixError:
    """Return the error for a sum without common bases."""
    return MatrixError(
        f"{matrix.separation_rank} terms of {matrix.kronecker_shape} share no bases: no closed "
        f"form of the {what} (one term, Kronecker sums, commuting factors and two terms with a "
        "mass have one); NumPy takes A.to_matrix(), SciPy's eigsh and eigs take A as it is"
    )
