"""One Kronecker term in closed form: inverse, determinant, eigenvalues, singular values, roots, in any array library.

Everything follows from the factors: cost Σ m_i³ where a formed matrix would cost Π m_i³. On torch
tensors the results are differentiable in the factors.

Source: C. F. Van Loan, The ubiquitous Kronecker product, J. Comput. Appl. Math. 123
(2000). doi:10.1016/S0377-0427(00)00393-9
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, NamedTuple

from lsrdecomp.arrays import Array, adjoint, as_double, namespace, to_numpy
from lsrdecomp.errors import MatrixError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.operators.host import check_separated
from lsrdecomp.operators.threads import one_thread_for_small_factors
from lsrdecomp.precision import tolerance


class Eigen(NamedTuple):
    """A = V diag(λ) Vᴴ; values in the order of the Kronecker product, not sorted.

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

    eigenvalues: Array  # (n,)
    eigenvectors: SeparatedMatrix  # one term, unitary


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
    """The inverse, (A ⊗ B)⁻¹ = A⁻¹ ⊗ B⁻¹.

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
    >>> from lsrdecomp import decompose
    >>> matrix = decompose(np.kron(np.diag([1.0, 2.0]), np.diag([3.0, 5.0])), "2x2, 2x2", rank=1).approximation
    >>> np.round(np.diag(inv(matrix).to_matrix()), 3).tolist()
    [0.333, 0.2, 0.167, 0.1]
    """
    factors = square_factors(matrix, "an inverse")
    for i, factor in enumerate(factors, 1):
        require_invertible(factor, f"factor {i}")
    xp = namespace(*factors)
    return _of([xp.linalg.inv(f) for f in factors], 1.0 / matrix.weights)


@one_thread_for_small_factors
def pinv(matrix: SeparatedMatrix, *, rtol: float | None = None) -> SeparatedMatrix:
    """The pseudo-inverse, (A ⊗ B)⁺ = A⁺ ⊗ B⁺; factors of any shape.

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
    allowed = [tolerance(f.dtype, max(f.shape)) / 4.0 if rtol is None else rtol for f in factors]
    return _of(
        [xp.linalg.pinv(f, rtol=r) for f, r in zip(factors, allowed, strict=True)],
        1.0 / matrix.weights,
    )


def slogdet_of_term(matrix: SeparatedMatrix) -> tuple[Any, Any]:
    """(sign, log|det|) of one term; see `lsrdecomp.operators.slogdet`."""
    if check_separated(matrix).separation_rank == 0 and matrix.shape[0] == matrix.shape[1]:
        return 0.0, -math.inf
    factors = square_factors(matrix, "a determinant")
    size = matrix.shape[0]
    xp = namespace(*factors)
    sign, total = 1.0, size * xp.log(as_double(matrix.weights)[0])
    for factor in factors:
        phase, log = xp.linalg.slogdet(as_double(factor))
        times = size // factor.shape[0]
        sign, total = sign * phase**times, total + times * log
    return sign, total


@one_thread_for_small_factors
def det(matrix: SeparatedMatrix) -> Any:
    """The determinant of one term; it over- and underflows early, `slogdet` does not.

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
    >>> from lsrdecomp import decompose
    >>> matrix = decompose(np.kron(np.diag([1.0, 2.0]), np.diag([3.0, 5.0])), "2x2, 2x2", rank=1).approximation
    >>> round(float(det(matrix)), 6)
    900.0
    """
    sign, log = slogdet_of_term(matrix)
    if isinstance(log, float) and log == -math.inf:
        return 0.0
    return sign * namespace(matrix.weights).exp(log)


@one_thread_for_small_factors
def eigh(matrix: SeparatedMatrix) -> Eigen:
    """Eigenvalues and orthonormal eigenvectors of one Hermitian term: products of those of the factors.

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
    pairs = [namespace(f).linalg.eigh(f) for f in factors]
    return Eigen(matrix.weights[0] * outer([q[0] for q in pairs]), _of([q[1] for q in pairs]))


@one_thread_for_small_factors
def svd(matrix: SeparatedMatrix) -> Svd:
    """The thin singular value decomposition of one term: products of those of the factors, of any shape.

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
    >>> matrix = SeparatedMatrix.from_factors([np.diag([2.0, 1.0])[None], np.diag([5.0, -3.0])[None]])
    >>> np.round(svd(matrix).S, 6).tolist()
    [10.0, 6.0, 5.0, 3.0]
    """
    factors = one_term(matrix, "a singular value decomposition")
    parts = [namespace(f).linalg.svd(f, full_matrices=False) for f in factors]
    values = matrix.weights[0] * outer([q[1] for q in parts])
    return Svd(_of([q[0] for q in parts]), values, _of([q[2] for q in parts]))


@one_thread_for_small_factors
def cholesky(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """L lower triangular with L Lᴴ = A, for one positive definite term: ⊗ of the Cholesky factors.

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
    >>> from lsrdecomp import decompose
    >>> matrix = decompose(np.kron(np.diag([1.0, 2.0]), np.diag([3.0, 5.0])), "2x2, 2x2", rank=1).approximation
    >>> lower = cholesky(matrix).to_matrix()
    >>> bool(np.allclose(lower @ lower.T, matrix.to_matrix()))
    True
    """
    factors = positive_factors(matrix, "a Cholesky factor", strictly=True)
    return _of([namespace(f).linalg.cholesky(f) for f in factors], matrix.weights**0.5)


@one_thread_for_small_factors
def sqrtm(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """The positive semidefinite square root of one positive semidefinite term: ⊗ of those of the factors.

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
        roots.append(
            (vectors * xp.sqrt(xp.where(values > 0, values, xp.zeros_like(values))))
            @ adjoint(vectors)
        )
    return _of(roots, matrix.weights**0.5)


def solve_single(matrix: SeparatedMatrix, b: Array) -> Array:
    """A⁻¹ b of one term by a factorization of each factor; b of shape (n,) or (n, k)."""
    factors = square_factors(matrix, "a solution")
    xp = namespace(b, *factors)
    state = xp.reshape(
        b / matrix.weights[0], (1, b.shape[0], -1 if b.ndim == 1 else int(b.shape[1]))
    )
    before = 1
    for i, factor in enumerate(factors, 1):
        require_invertible(factor, f"factor {i}")
        m = int(factor.shape[0])
        state = xp.reshape(state, (before, m, math.prod(b.shape) // (before * m)))
        flat = xp.reshape(xp.permute_dims(state, (1, 0, 2)), (m, -1))
        state = xp.permute_dims(
            xp.reshape(xp.linalg.solve(factor, flat), (m, before, -1)), (1, 0, 2)
        )
        before *= m
    return xp.reshape(state, tuple(b.shape))


def outer(values: list[Array]) -> Array:
    """Products of one entry of each, the last one fast."""
    return reduce(lambda a, b: namespace(a, b).reshape(a[:, None] * b[None, :], (-1,)), values)


def one_term(matrix: SeparatedMatrix, what: str) -> list[Array]:
    """The factors of the only term, each a matrix."""
    if check_separated(matrix).separation_rank != 1:
        raise ShapeError(
            f"{what} is a Kronecker product for one term; this matrix has {matrix.separation_rank}. "
            "`solve`, `logdet` and `eigenvalues` take sums, `nearest_kronecker` and `approximate_inverse` approximate"
        )
    return [factor[0, :, :] for factor in matrix.factors]


def square_factors(matrix: SeparatedMatrix, what: str) -> list[Array]:
    """The factors of the only term, which must be square."""
    factors = one_term(matrix, what)
    for i, factor in enumerate(factors, 1):
        if factor.shape[0] != factor.shape[1]:
            raise ShapeError(
                f"factor {i} is {factor.shape[0]}×{factor.shape[1]}; {what} needs square factors"
            )
    return factors


def positive_factors(matrix: SeparatedMatrix, what: str, *, strictly: bool) -> list[Array]:
    """The factors of a positive (semi)definite term, each made positive: signs of a term may be anywhere in it."""
    factors = square_factors(matrix, what)
    signs = 1.0
    made: list[Array] = []
    for i, factor in enumerate(factors, 1):
        require_hermitian(factor, f"factor {i}")
        sign = 1.0 if float(to_numpy(namespace(factor).linalg.trace(factor)).real) >= 0.0 else -1.0
        smallest = float(to_numpy(namespace(factor).linalg.eigvalsh(sign * factor))[0])
        floor = tolerance(factor.dtype, factor.shape[0])
        if smallest < -floor or (strictly and smallest <= floor / 8.0):
            raise MatrixError(
                f"factor {i} is not {'positive definite' if strictly else 'positive semidefinite'}: its smallest "
                f"eigenvalue is {smallest:.3g} for a factor of norm one; {what} needs that"
            )
        signs, made = signs * sign, [*made, sign * factor]
    if signs < 0:
        raise MatrixError(f"the matrix is negative definite: {what} needs a positive one")
    return made


def require_hermitian(factor: Array, name: str) -> None:
    """Raise `MatrixError` unless a matrix equals its conjugate transpose up to rounding."""
    gap = deviation(factor)
    if gap > tolerance(factor.dtype, 8):
        raise MatrixError(f"{name} is not Hermitian: ‖M − Mᴴ‖ / ‖M‖ = {gap:.3g}")


def deviation(factor: Array) -> float:
    """‖M − Mᴴ‖ / ‖M‖."""
    values = to_numpy(factor)
    size = float((abs(values) ** 2).sum()) ** 0.5
    return float((abs(values - values.conj().T) ** 2).sum()) ** 0.5 / size if size else 0.0


def require_invertible(factor: Array, name: str) -> None:
    """Raise `MatrixError` where σ_min / σ_max is below the unit roundoff of the element type."""
    sigma = to_numpy(namespace(factor).linalg.svdvals(factor))
    rcond = float(sigma[-1] / sigma[0]) if sigma[0] > 0 else 0.0
    if rcond <= tolerance(factor.dtype, 1) / 8.0:
        raise MatrixError(
            f"{name} ({factor.shape[0]}×{factor.shape[0]}) is singular: σ_min / σ_max = {rcond:.3g}. "
            "`pinv` gives the least-squares solution"
        )


def _of(factors: list[Array], weights: Array | None = None) -> SeparatedMatrix:
    return SeparatedMatrix.from_factors([f[None, :, :] for f in factors], weights)
