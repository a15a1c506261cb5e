"""CG, MINRES or GMRES of SciPy on a separated matrix, restarted until the true residual is met."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import is_complex
from lsrdecomp.errors import LsrError, MatrixError
from lsrdecomp.operators.preconditioners import nearest_kronecker
from lsrdecomp.operators.single_term import deviation, inv

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.kronecker.separated import SeparatedMatrix


@dataclass(frozen=True, slots=True)
class KrylovMethod:
    """An iterative method and how far it goes.

    Attributes
    ----------
    name : str
        ``"cg"``, ``"minres"``, ``"gmres"``, or ``"auto"`` for the one that fits the matrix.
    rtol : float
        Goal for ‖b − A x‖ / ‖b‖ of each column.
    preconditioner : "auto", None, or anything SciPy takes as ``M``
    max_iterations : int
        Products with the matrix, for each column.
    on_iteration : callable, optional
        Called with the number of products so far.
    """

    name: str
    rtol: float
    preconditioner: Any
    max_iterations: int
    on_iteration: Callable[[int], Any] | None


class CountedProducts:
    """The products with a matrix in a form that SciPy takes, and their number so far."""

    def __init__(
        self, matrix: SeparatedMatrix, dtype: Any, on_iteration: Callable[[int], Any] | None
    ) -> None:
        import scipy.sparse.linalg as sparse

        self.count = 0
        self._on_iteration = on_iteration
        self._matrix = matrix.to_linear_operator()
        self.operator = sparse.LinearOperator(matrix.shape, matvec=self._product, dtype=dtype)

    def _product(self, x: np.ndarray) -> np.ndarray:
        self.count += 1
        if self._on_iteration is not None:
            self._on_iteration(self.count)
        return np.asarray(self._matrix @ x)


def krylov(
    matrix: SeparatedMatrix, b: np.ndarray, method: KrylovMethod
) -> tuple[np.ndarray, str, int]:
    """Solve A x = b, a column at a time, on NumPy arrays in double precision.

    Returns
    -------
    x : array, like b
    name : str
        The method that was used.
    iterations : int
        Products with A of the column that needed most.
    """
    import scipy.sparse.linalg as sparse

    name = choose(matrix) if method.name in ("auto", "exact") else method.name
    if name == "minres" and is_complex(matrix.factors[0]):
        raise MatrixError(
            "minres takes real symmetric matrices, and the factors are complex; "
            'method="gmres" takes any'
        )
    if name == "minres" and np.iscomplexobj(b):
        return _by_real_parts(matrix, b, replace(method, name=name))
    # SciPy's MINRES compares with absolute numbers: at 1e-14 it gives up.
    norm = matrix.norm or 1.0
    matrix = matrix * (1.0 / norm)
    preconditioner = method.preconditioner
    if isinstance(preconditioner, str) and preconditioner == "auto":
        preconditioner = automatic_preconditioner(matrix, name)
    elif preconditioner is not None:
        preconditioner = sparse.aslinearoperator(preconditioner) * norm

    dtype = np.result_type(matrix.dtype, b.dtype)
    products = CountedProducts(matrix, dtype, method.on_iteration)
    columns = []
    most_products = 1
    for column in b.reshape(len(b), -1).T:
        products.count = 0
        columns.append(_solve_column(products, column, name, preconditioner, method))
        most_products = max(most_products, products.count)
    x = np.stack(columns, axis=1).reshape(b.shape) / norm
    return x, name, most_products


def _by_real_parts(
    matrix: SeparatedMatrix, b: np.ndarray, method: KrylovMethod
) -> tuple[np.ndarray, str, int]:
    """Solve A x = b of a real A for the real and the imaginary part of b, one beside the other."""
    columns = b.reshape(len(b), -1)
    parts = np.concatenate([columns.real, columns.imag], axis=1)
    x, name, iterations = krylov(matrix, parts, method)
    real, imaginary = np.split(x, 2, axis=1)
    return (real + 1j * imaginary).reshape(b.shape), name, iterations


def choose(matrix: SeparatedMatrix) -> str:
    """Return the method for a matrix.

    CG where the factors prove it positive, MINRES where it is real and symmetric, else GMRES.
    """
    skew = (matrix - matrix.mH).norm
    if skew > 1e-14 * max(matrix.norm, float(np.sum(matrix.weights))):
        return "gmres"
    if _is_sum_of_positive_terms(matrix):
        return "cg"
    return "gmres" if is_complex(matrix.factors[0]) else "minres"


def _is_sum_of_positive_terms(matrix: SeparatedMatrix) -> bool:
    """Return whether every term is positive semidefinite, up to rounding, by its factors."""
    for stack in matrix.factors:
        if any(deviation(factor) > 1e-14 * len(factor) for factor in stack):
            return False
    signs = np.ones(matrix.separation_rank)
    for stack in matrix.factors:
        spectra = np.array([np.linalg.eigvalsh(factor) for factor in stack])
        is_positive = spectra[:, 0] >= -1e-14
        is_negative = spectra[:, -1] <= 1e-14
        signs *= np.where(is_positive, 1.0, np.where(is_negative, -1.0, np.nan))
    return bool(np.all(signs == 1.0))


def automatic_preconditioner(matrix: SeparatedMatrix, name: str) -> Any:
    """Return the inverse of the nearest Kronecker product; None where the method bars it."""
    try:
        nearest = nearest_kronecker(matrix, matrix.kronecker_shape)
        if name in ("cg", "minres") and not _has_positive_factors(nearest):
            return None
        return inv(nearest).to_linear_operator()
    except LsrError:
        return None


def _has_positive_factors(term: SeparatedMatrix) -> bool:
    """Return whether every factor of a term is positive definite, clear of rounding."""
    for stack in term.factors:
        factor = stack[0]
        if deviation(factor) > 1e-12 or np.linalg.eigvalsh(factor)[0] <= 1e-12:
            return False
    return True


def _solve_column(
    products: CountedProducts, b: np.ndarray, name: str, preconditioner: Any, method: KrylovMethod
) -> np.ndarray:
    """Solve for one right-hand side.

    A method stops by its own estimate, of a preconditioned residual: the true one is formed, and
    solved again.
    """
    operator = products.operator
    b_norm = float(np.linalg.norm(b))
    x = np.zeros(len(b), dtype=operator.dtype)
    residual = b.astype(operator.dtype)
    previous_norm = np.inf
    while b_norm > 0.0 and products.count < method.max_iterations:
        residual_norm = float(np.linalg.norm(residual))
        if residual_norm <= method.rtol * b_norm:
            break
        # Less progress is rounding, or a matrix that the method cannot serve.
        if residual_norm > 0.9 * previous_norm:
            break
        previous_norm = residual_norm
        goal = 0.5 * method.rtol * b_norm / residual_norm
        remaining = method.max_iterations - products.count
        step = _scipy_solve(name, operator, residual, goal, remaining, preconditioner)
        new_residual = b - operator @ (x + step)
        new_norm = np.linalg.norm(new_residual)
        if not np.isfinite(new_norm) or new_norm >= residual_norm:
            break
        x = x + step
        residual = new_residual
    return x


def _scipy_solve(
    name: str,
    operator: Any,
    b: np.ndarray,
    rtol: float,
    max_iterations: int,
    preconditioner: Any,
) -> np.ndarray:
    """Return SciPy's solution of one system by one of its methods."""
    import scipy.sparse.linalg as sparse

    if name == "gmres":
        inner = min(60, max_iterations, len(b))  # vectors that it keeps, by hand
        cycles = max(1, max_iterations // inner)
        x, _ = sparse.gmres(operator, b, rtol=rtol, restart=inner, maxiter=cycles, M=preconditioner)
    elif name == "minres":
        x, _ = sparse.minres(operator, b, rtol=rtol * 0.1, maxiter=max_iterations, M=preconditioner)
    else:
        x, _ = sparse.cg(operator, b, rtol=rtol, maxiter=max_iterations, M=preconditioner)
    return np.asarray(x)
