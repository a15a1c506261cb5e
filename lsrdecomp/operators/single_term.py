"""One Kronecker term in closed form: inverse, determinant, eigenvalues, singular values, roots.

Everything follows from the factors, in any array library: cost Σ m_i³ where a formed matrix would
cost Π m_i³. On torch tensors the results are differentiable in the factors.

Source: C. F. Van Loan, The ubiquitous Kronecker product, J. Comput. Appl. Math. 123
(2000). doi:10.1016/S0377-0427(00)00393-9
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from lsrdecomp.arrays import Array, adjoint, as_double, is_traced_by_jax, namespace, to_numpy
from lsrdecomp.errors import MatrixError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.operators.factor_threads import one_thread_for_small_factors
from lsrdecomp.operators.host import check_separated
from lsrdecomp.precision import tolerance

if TYPE_CHECKING:
    from collections.abc import Sequence


class Eigen(NamedTuple):
    """A = V diag(λ) Vᴴ; values in the order of the Kronecker product, not sorted.

    Attributes
    ----------
    eigenvalues : Array, shape (n,)
    eigenvectors : SeparatedMatrix, shape (n, n)
        One term, unitary.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> A, B = np.array([[2.0, 1.0], [1.0, 2.0]]), np.diag([1.0, 4.0])
    >>> matrix = SeparatedMatrix.from_factors([A[None], B[None]])
    >>> values, vectors = eigh(matrix)
    >>> bool(np.allclose(matrix @ vectors.to_matrix(), vectors.to_matrix() * values))
    True
    """

    eigenvalues: Array
    eigenvectors: SeparatedMatrix


class Svd(NamedTuple):
    """A = U diag(σ) Vᴴ; values in the order of the Kronecker product, not sorted.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> U, S, Vh = svd(SeparatedMatrix.from_factors([np.ones((1, 3, 1)), np.ones((1, 2, 5))]))
    >>> U.shape, S.shape, Vh.shape
    ((6, 2), (2,), (2, 5))
    """

    U: SeparatedMatrix
    S: Array
    Vh: SeparatedMatrix


@one_thread_for_small_factors
def inv(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """Return the inverse, (A ⊗ B)⁻¹ = A⁻¹ ⊗ B⁻¹.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)
        One term.

    Returns
    -------
    SeparatedMatrix, shape (n, n)
        One term, in the library and type of the factors.

    Raises
    ------
    ShapeError
        For more than one term, whose inverse is in general no short sum (`approximate_inverse`
        finds a near one); factors that are not square.
    MatrixError
        If a factor is singular to working precision; the message names it.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> A, B = np.diag([1.0, 2.0]), np.diag([3.0, 5.0])
    >>> matrix = SeparatedMatrix.from_factors([A[None], B[None]])
    >>> np.round(np.diag(inv(matrix).to_matrix()), 3).tolist()
    [0.333, 0.2, 0.167, 0.1]
    """
    factors = square_factors(matrix, "an inverse")
    for i, factor in enumerate(factors, 1):
        require_invertible(factor, f"factor {i}")
    xp = namespace(*factors)
    return _term([xp.linalg.inv(f) for f in factors], 1.0 / matrix.weights)


@one_thread_for_small_factors
def pinv(matrix: SeparatedMatrix, *, rtol: float | None = None) -> SeparatedMatrix:
    """Return the pseudo-inverse, (A ⊗ B)⁺ = A⁺ ⊗ B⁺; factors of any shape.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (m, n)
        One term.
    rtol : float, optional
        Relative to the largest singular value of each factor; absent, twice max(m, n) unit
        roundoffs.

    Returns
    -------
    SeparatedMatrix, shape (n, m)

    Raises
    ------
    ShapeError
        For more than one term.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> matrix = SeparatedMatrix.from_factors([np.ones((1, 3, 1)), np.diag([1.0, 4.0])[None]])
    >>> bool(np.allclose((pinv(matrix) @ matrix).to_matrix(), np.eye(2)))
    True
    """
    factors = one_term(matrix, "a pseudo-inverse")
    xp = namespace(*factors)
    inverses = []
    for factor in factors:
        cutoff = tolerance(factor.dtype, max(factor.shape)) / 4.0 if rtol is None else rtol
        inverses.append(xp.linalg.pinv(factor, rtol=cutoff))
    return _term(inverses, 1.0 / matrix.weights)


def slogdet_of_term(matrix: SeparatedMatrix) -> tuple[Any, Any]:
    """Return (sign, log|det|) of one term; see `lsrdecomp.operators.slogdet`."""
    if is_singular_by_its_sizes(matrix):
        return 0.0, -math.inf
    factors = square_factors(matrix, "a determinant")
    size = matrix.shape[0]
    xp = namespace(*factors)
    sign = 1.0
    log_det = size * xp.log(as_double(matrix.weights)[0])
    for factor in factors:
        factor_sign, factor_log = xp.linalg.slogdet(as_double(factor))
        power = size // factor.shape[0]
        sign = sign * factor_sign**power
        log_det = log_det + power * factor_log
    return sign, log_det


@one_thread_for_small_factors
def det(matrix: SeparatedMatrix) -> Any:
    """Return the determinant of one term; it over- and underflows early, `slogdet` does not.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)
        One term.

    Returns
    -------
    float or complex

    Raises
    ------
    ShapeError
        As `slogdet`, and for more than one term.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> A, B = np.diag([1.0, 2.0]), np.diag([3.0, 5.0])
    >>> matrix = SeparatedMatrix.from_factors([A[None], B[None]])
    >>> round(float(det(matrix)), 6)
    900.0
    """
    sign, log_det = slogdet_of_term(matrix)
    if isinstance(log_det, float) and log_det == -math.inf:
        return 0.0
    return sign * namespace(matrix.weights).exp(log_det)


@one_thread_for_small_factors
def eigh(matrix: SeparatedMatrix) -> Eigen:
    """Return eigenvalues and orthonormal eigenvectors of one Hermitian term, from the factors'.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)
        One term.

    Returns
    -------
    Eigen
        Values (n,) and one unitary term.

    Raises
    ------
    MatrixError
        Unless every factor is Hermitian; the message names it.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> A, B = np.array([[2.0, 1.0], [1.0, 2.0]]), np.diag([1.0, 4.0])
    >>> matrix = SeparatedMatrix.from_factors([A[None], B[None]])
    >>> np.round(eigh(matrix).eigenvalues, 6).tolist()
    [1.0, 4.0, 3.0, 12.0]
    """
    factors = square_factors(matrix, "an eigendecomposition")
    for i, factor in enumerate(factors, 1):
        require_hermitian(factor, f"factor {i}")
    values = []
    vectors = []
    for factor in factors:
        factor_values, factor_vectors = namespace(factor).linalg.eigh(factor)
        values.append(factor_values)
        vectors.append(factor_vectors)
    return Eigen(matrix.weights[0] * outer(values), _term(vectors))


@one_thread_for_small_factors
def svd(matrix: SeparatedMatrix) -> Svd:
    """Return the thin singular value decomposition of one term, with factors of any shape.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (m, n)
        One term.

    Returns
    -------
    Svd
        U, σ and Vᴴ, thin in every factor.

    Raises
    ------
    ShapeError
        For more than one term.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> A, B = np.diag([2.0, 1.0]), np.diag([5.0, -3.0])
    >>> matrix = SeparatedMatrix.from_factors([A[None], B[None]])
    >>> np.round(svd(matrix).S, 6).tolist()
    [10.0, 6.0, 5.0, 3.0]
    """
    factors = one_term(matrix, "a singular value decomposition")
    left, values, right = [], [], []
    for factor in factors:
        u, sigma, vh = namespace(factor).linalg.svd(factor, full_matrices=False)
        left.append(u)
        values.append(sigma)
        right.append(vh)
    return Svd(_term(left), matrix.weights[0] * outer(values), _term(right))


@one_thread_for_small_factors
def cholesky(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """Return lower triangular L with L Lᴴ = A, for one positive definite term.

    The Kronecker product of the Cholesky factors.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)
        One term.

    Returns
    -------
    SeparatedMatrix, shape (n, n)
        One term of triangular factors.

    Raises
    ------
    MatrixError
        Where the term is not Hermitian positive definite.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> A, B = np.diag([1.0, 2.0]), np.diag([3.0, 5.0])
    >>> matrix = SeparatedMatrix.from_factors([A[None], B[None]])
    >>> lower = cholesky(matrix).to_matrix()
    >>> bool(np.allclose(lower @ lower.T, matrix.to_matrix()))
    True
    """
    factors = positive_factors(matrix, "a Cholesky factor", strictly=True)
    return _term([namespace(f).linalg.cholesky(f) for f in factors], matrix.weights**0.5)


@one_thread_for_small_factors
def sqrtm(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """Return the positive semidefinite square root of one positive semidefinite term.

    The Kronecker product of those of the factors.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)
        One term.

    Returns
    -------
    SeparatedMatrix, shape (n, n)
        One term of semidefinite factors.

    Raises
    ------
    MatrixError
        Where the term is not Hermitian positive semidefinite.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> A, B = np.array([[2.0, 1.0], [1.0, 2.0]]), np.diag([1.0, 4.0])
    >>> matrix = SeparatedMatrix.from_factors([A[None], B[None]])
    >>> root = sqrtm(matrix)
    >>> bool(np.allclose((root @ root).to_matrix(), matrix.to_matrix()))
    True
    """
    roots = []
    for factor in positive_factors(matrix, "a square root", strictly=False):
        xp = namespace(factor)
        values, vectors = xp.linalg.eigh(factor)
        values = xp.where(values > 0, values, xp.zeros_like(values))
        roots.append((vectors * xp.sqrt(values)) @ adjoint(vectors))
    return _term(roots, matrix.weights**0.5)


def solve_single(matrix: SeparatedMatrix, b: Array) -> Array:
    """Return A⁻¹ b of one term by a factorization of each factor; b of shape (n,) or (n, k)."""
    factors = square_factors(matrix, "a solution")
    xp = namespace(b, *factors)
    entries = math.prod(b.shape)
    # The state has shape (solved for, of this factor, not yet solved for and columns of b).
    state = b / matrix.weights[0]
    solved = 1
    for i, factor in enumerate(factors, 1):
        if not is_traced_by_jax(factor):
            require_invertible(factor, f"factor {i}")
        m = int(factor.shape[0])
        state = xp.reshape(state, (solved, m, entries // (solved * m)))
        columns = xp.reshape(xp.permute_dims(state, (1, 0, 2)), (m, entries // m))
        solution = xp.reshape(xp.linalg.solve(factor, columns), (m, solved, -1))
        state = xp.permute_dims(solution, (1, 0, 2))
        solved *= m
    return xp.reshape(state, tuple(b.shape))


def outer(values: Sequence[Array]) -> Array:
    """Return the products of one entry of each array, the last one fast."""

    def pairs(a: Array, b: Array) -> Array:
        return namespace(a, b).reshape(a[:, None] * b[None, :], (-1,))

    return reduce(pairs, values)


def one_term(matrix: SeparatedMatrix, what: str) -> list[Array]:
    """Return the factors of the only term, each a matrix."""
    if check_separated(matrix).separation_rank != 1:
        raise ShapeError(
            f"{what} is a Kronecker product for one term; this matrix has "
            f"{matrix.separation_rank}. `solve`, `logdet` and `eigenvalues` take sums, "
            "`nearest_kronecker` and `approximate_inverse` approximate"
        )
    return [factor[0, :, :] for factor in matrix.factors]


def is_singular_by_its_sizes(matrix: SeparatedMatrix) -> bool:
    """Return whether a square matrix has terms of too small a rank, such as 2×3 ⊗ 3×2.

    A term of rank Π min(m_i, n_i) at most has determinant zero where its factors are not square.
    """
    rows, columns = check_separated(matrix).shape
    rank_of_term = math.prod(min(factor) for factor in matrix.kronecker_shape.factors)
    return rows == columns and matrix.separation_rank * rank_of_term < rows


def square_factors(matrix: SeparatedMatrix, what: str) -> list[Array]:
    """Return the factors of the only term, which must be square."""
    factors = one_term(matrix, what)
    for i, factor in enumerate(factors, 1):
        rows, columns = factor.shape
        if rows != columns:
            raise ShapeError(f"factor {i} is {rows}×{columns}; {what} needs square factors")
    return factors


def positive_factors(matrix: SeparatedMatrix, what: str, *, strictly: bool) -> list[Array]:
    """Return the factors of a positive (semi)definite term, each made positive.

    The signs of a term may stand anywhere in it.
    """
    factors = square_factors(matrix, what)
    sign_of_term = 1.0
    positive: list[Array] = []
    for i, factor in enumerate(factors, 1):
        require_hermitian(factor, f"factor {i}")
        xp = namespace(factor)
        trace = float(to_numpy(xp.linalg.trace(factor)).real)
        sign = 1.0 if trace >= 0.0 else -1.0
        smallest = float(to_numpy(xp.linalg.eigvalsh(sign * factor))[0])
        rounding = tolerance(factor.dtype, factor.shape[0])
        if smallest < -rounding or (strictly and smallest <= rounding / 8.0):
            needed = "positive definite" if strictly else "positive semidefinite"
            raise MatrixError(
                f"factor {i} is not {needed}: its smallest eigenvalue is {smallest:.3g} "
                f"for a factor of norm one; {what} needs that"
            )
        positive.append(sign * factor)
        sign_of_term *= sign
    if sign_of_term < 0:
        raise MatrixError(f"the matrix is negative definite: {what} needs a positive one")
    return positive


def require_hermitian(factor: Array, name: str) -> None:
    """Raise `MatrixError` unless a matrix equals its conjugate transpose up to rounding."""
    gap = deviation(factor)
    if gap > tolerance(factor.dtype, 8):
        raise MatrixError(f"{name} is not Hermitian: ‖M − Mᴴ‖ / ‖M‖ = {gap:.3g}")


def deviation(factor: Array) -> float:
    """Return ‖M − Mᴴ‖ / ‖M‖."""
    values = to_numpy(factor)
    size = float((abs(values) ** 2).sum()) ** 0.5
    skew = float((abs(values - values.conj().T) ** 2).sum()) ** 0.5
    return skew / size if size else 0.0


def require_invertible(factor: Array, name: str) -> None:
    """Raise `MatrixError` where σ_min / σ_max is below the unit roundoff of the element type."""
    sigma = to_numpy(namespace(factor).linalg.svdvals(factor))
    rcond = float(sigma[-1] / sigma[0]) if sigma[0] > 0 else 0.0
    if rcond <= tolerance(factor.dtype, 1) / 8.0:
        size = factor.shape[0]
        raise MatrixError(
            f"{name} ({size}×{size}) is singular: σ_min / σ_max = {rcond:.3g}. "
            "`pinv` gives the least-squares solution"
        )


def _term(factors: list[Array], weights: Array | None = None) -> SeparatedMatrix:
    """Return one term of these matrices."""
    return SeparatedMatrix.from_factors([f[None, :, :] for f in factors], weights)
