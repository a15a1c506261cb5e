"""CG, MINRES or GMRES of SciPy on a separated matrix, a column at a time, restarted until the true residual is met."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import is_complex
from lsrdecomp.errors import LsrError
from lsrdecomp.operators.preconditioners import nearest_kronecker
from lsrdecomp.operators.single import deviation, inv

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.kronecker.separated import SeparatedMatrix

RESTART = 60
"""Vectors that GMRES keeps."""


def krylov(
    matrix: SeparatedMatrix,
    b: np.ndarray,
    rtol: float,
    method: str,
    preconditioner: Any,
    max_iterations: int,
    on_iteration: Callable[[int], Any] | None,
) -> tuple[np.ndarray, str, int]:
    """(x, method, products with A of the column that needed most); NumPy arrays in double precision."""
    import scipy.sparse.linalg as sparse

    chosen = choose(matrix) if method in ("auto", "exact") else method
    norm = matrix.norm or 1.0
    matrix = matrix * (
        1.0 / norm
    )  # SciPy's MINRES compares with absolute numbers: at 1e-14 it gives up
    if isinstance(preconditioner, str) and preconditioner == "auto":
        preconditioner = automatic(matrix, chosen)
    elif preconditioner is not None:
        preconditioner = sparse.aslinearoperator(preconditioner) * norm
    operator = matrix.to_linear_operator()
    count = 0

    def product(x: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        if on_iteration is not None:
            on_iteration(count)
        return np.asarray(operator @ x)

    counted = sparse.LinearOperator(
        matrix.shape, matvec=product, dtype=np.result_type(operator.dtype, b.dtype)
    )
    columns, worst = [], 0
    used = lambda: count  # noqa: E731
    for column in b.reshape(len(b), -1).T:
        count = 0
        columns.append(_column(counted, column, rtol, chosen, preconditioner, max_iterations, used))
        worst = max(worst, count)
    return np.stack(columns, axis=1).reshape(b.shape) / norm, chosen, max(worst, 1)


def choose(matrix: SeparatedMatrix) -> str:
    """The method for a matrix: CG where the factors prove it positive, MINRES where it is symmetric, else GMRES."""
    if (matrix - matrix.mH).norm > 1e-14 * max(matrix.norm, float(np.sum(matrix.weights))):
        return "gmres"
    if all(deviation(f) <= 1e-14 * len(f) for stack in matrix.factors for f in stack):
        lowest = [
            np.array([np.linalg.eigvalsh(f)[[0, -1]] for f in stack]) for stack in matrix.factors
        ]
        signs = np.ones(matrix.separation_rank)
        for ends in lowest:
            semidefinite = (ends[:, 0] >= -1e-14) | (ends[:, 1] <= 1e-14)
            signs *= np.where(semidefinite, np.where(ends[:, 0] >= -1e-14, 1.0, -1.0), np.nan)
        if np.all(signs == 1.0):
            return "cg"
    return "gmres" if is_complex(matrix.factors[0]) else "minres"


def automatic(matrix: SeparatedMatrix, method: str) -> Any:
    """The inverse of the nearest Kronecker product, where it is invertible and fits the method; else None."""
    try:
        nearest = nearest_kronecker(matrix, matrix.kronecker_shape)
        if method in ("cg", "minres"):
            for stack in nearest.factors:
                if deviation(stack[0]) > 1e-12 or np.linalg.eigvalsh(stack[0])[0] <= 1e-12:
                    return None
        return inv(nearest).to_linear_operator()
    except LsrError:
        return None


def _column(
    operator: Any,
    b: np.ndarray,
    rtol: float,
    method: str,
    preconditioner: Any,
    most: int,
    count: Callable[[], int],
) -> np.ndarray:
    """Solve for one right-hand side; what a method calls converged is checked, and continued from the residual."""
    import scipy.sparse.linalg as sparse

    x, size = np.zeros(len(b), dtype=operator.dtype), float(np.linalg.norm(b))
    rest, before = b.astype(operator.dtype), np.inf
    while size > 0.0 and np.linalg.norm(rest) > rtol * size and count() < most:
        now = float(np.linalg.norm(rest))
        if now > 0.9 * before:
            break  # rounding, or a matrix the method cannot serve
        before, left = now, most - count()
        # A method stops by its own estimate, of a preconditioned residual: the true one is formed,
        # and solved again.
        goal = 0.5 * rtol * size / now
        if method == "gmres":
            inner = min(RESTART, left, len(b))
            cycles = max(1, left // inner)
            step, _ = sparse.gmres(
                operator, rest, rtol=goal, restart=inner, maxiter=cycles, M=preconditioner
            )
        elif method == "minres":
            step, _ = sparse.minres(operator, rest, rtol=goal * 0.1, maxiter=left, M=preconditioner)
        else:
            step, _ = sparse.cg(operator, rest, rtol=goal, maxiter=left, M=preconditioner)
        fresh = b - operator @ (x + step)
        if not np.all(np.isfinite(fresh)) or np.linalg.norm(fresh) >= now:
            break
        x, rest = x + step, fresh
    return x
