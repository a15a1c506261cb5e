"""`solve`: A x = b in closed form where one exists, else by a Krylov method; always measured."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import numpy as np

from lsrdecomp.arrays import (
    Array,
    as_double,
    as_floating,
    is_complex,
    is_traced_by_jax,
    like,
    namespace,
    norm,
    to_numpy,
)
from lsrdecomp.errors import (
    BudgetError,
    ConvergenceError,
    ConvergenceWarning,
    LsrError,
    MatrixError,
)
from lsrdecomp.operators.diagonal import Diagonalized, diagonalize
from lsrdecomp.operators.factor_threads import one_thread_for_small_factors
from lsrdecomp.operators.host import as_solution, check_separated, check_sides, to_host
from lsrdecomp.operators.krylov import KrylovMethod, krylov
from lsrdecomp.operators.single_term import solve_single
from lsrdecomp.operators.term_gradients import (
    requires_gradient,
    solution_with_gradient,
    without_graph,
)
from lsrdecomp.operators.triangular import Triangularized, triangularize
from lsrdecomp.precision import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from lsrdecomp.kronecker.separated import SeparatedMatrix

ArrayT = TypeVar("ArrayT")
Method = Literal["auto", "exact", "cg", "minres", "gmres"]


@dataclass(frozen=True, slots=True)
class LinearSolution(Generic[ArrayT]):
    """x with A x ≈ b, and how near it is.

    Attributes
    ----------
    x : Array
        Of the library of b, with its shape.
    relative_residual : float
        ‖b − A x‖ / ‖b‖, measured afresh; of the worst column.
    backward_error : float
        ‖b − A x‖ / (‖A‖‖x‖ + ‖b‖), Frobenius: at rounding level no method can do better.
    method : str
        ``"factors"``, ``"diagonal"``, ``"triangular"``, ``"cg"``, ``"minres"`` or ``"gmres"``.
    iterations : int
        Products with A in the Krylov method; 0 for the exact ones.
    rtol : float
        The goal.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.operators import kronecker_sum
    >>> matrix = kronecker_sum(np.diag([1.0, 2.0]), np.diag([3.0, 4.0]))
    >>> solution = solve(matrix, np.array([4.0, 5.0, 5.0, 6.0]))
    >>> np.round(solution.x, 6).tolist(), solution.converged, solution.iterations
    ([1.0, 1.0, 1.0, 1.0], True, 0)
    """

    x: ArrayT
    relative_residual: float
    backward_error: float
    method: str
    iterations: int
    rtol: float

    @property
    def converged(self) -> bool:
        """Whether the residual met ``rtol``, or rounding where the method is exact.

        An array of JAX within ``jax.jit``.
        """
        solution: Array = self.x
        rounding = tolerance(solution.dtype, int(solution.shape[0]))
        if is_traced_by_jax(self.relative_residual):
            is_met: Any = self.relative_residual <= self.rtol
            return is_met | (self.backward_error <= rounding)  # type: ignore[no-any-return]
        if self.relative_residual <= self.rtol:
            return True
        if self.iterations:
            return False
        return self.backward_error <= rounding

    def __str__(self) -> str:
        return (
            f"{self.method}: ‖b − Ax‖ / ‖b‖ = {self.relative_residual:.3g} "
            f"(asked {self.rtol:.3g}), backward error {self.backward_error:.3g}, "
            f"{self.iterations} iterations"
        )


@overload
def solve(
    matrix: SeparatedMatrix,
    b: NDArray[Any] | Sequence[Any],
    *,
    rtol: float = ...,
    method: Method = ...,
    preconditioner: Any = ...,
    max_iterations: int = ...,
    throw: bool = ...,
    on_iteration: Callable[[int], Any] | None = ...,
) -> LinearSolution[NDArray[Any]]: ...
@overload
def solve(
    matrix: SeparatedMatrix,
    b: ArrayT,
    *,
    rtol: float = ...,
    method: Method = ...,
    preconditioner: Any = ...,
    max_iterations: int = ...,
    throw: bool = ...,
    on_iteration: Callable[[int], Any] | None = ...,
) -> LinearSolution[ArrayT]: ...
@one_thread_for_small_factors
def solve(
    matrix: SeparatedMatrix,
    b: Any,
    *,
    rtol: float = 1e-10,
    method: Method = "auto",
    preconditioner: Any = "auto",
    max_iterations: int = 2000,
    throw: bool = False,
    on_iteration: Callable[[int], Any] | None = None,
) -> LinearSolution[Any]:
    """Solve A x = b without forming A.

    One term is solved by its factors. Sums of Hermitian factors with common bases (Kronecker sums
    of any number of factors, finite elements on tensor grids, covariance plus noise) go by
    `diagonalize`, any other Kronecker sum and any two terms by `triangularize`, everything else by
    SciPy: CG (Hermitian and positive by its factors), MINRES (real symmetric) or GMRES.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)
    b : array, shape (n,) or (n, k)
        Of the library of the factors. On torch tensors the solution is differentiable in b and in
        the terms where it is exact, once in sums; iterations refuse tensors that require a
        gradient. Within ``jax.jit`` one term is solved, with its residual measured but not
        warned of, and a singular factor not refused: its solution is not finite.
    rtol : float
        Goal for ‖b − A x‖ / ‖b‖ of each column of an iterative method.
    method : str
        ``"exact"`` refuses to iterate.
    preconditioner : "auto", None, or anything SciPy takes as ``M``
        An approximation of the inverse, such as `approximate_inverse` gives. ``"auto"`` inverts
        `nearest_kronecker`.
    max_iterations : int
        For each column.
    throw : bool
        Raise where the goal is not met. Else that is a `RuntimeWarning`, and ``converged`` of the
        record is False.
    on_iteration : callable, optional
        Called with the number of products with A so far.

    Returns
    -------
    LinearSolution

    Raises
    ------
    MatrixError
        For a matrix that is singular to working precision, where an exact method finds it.
    ConvergenceError
        With ``throw`` where the goal is not met; ``record`` is the `LinearSolution` that was
        reached.
    ShapeError
        If the matrix is not square or ``b`` does not fit.

    Notes
    -----
    One term costs Σ m_i³ + n·Σ m_i, the diagonal form more m_i³, the triangular one s·n·Σ m_i in
    m_1⋯m_{d−1} steps.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.operators import kronecker_sum
    >>> second = 2 * np.eye(3) - np.eye(3, k=1) - np.eye(3, k=-1)
    >>> laplacian = kronecker_sum(second, second)
    >>> solution = solve(laplacian, np.ones(9))
    >>> solution.method, bool(np.allclose(laplacian @ solution.x, 1.0))
    ('diagonal', True)
    """
    b = as_floating(b, "b")
    is_traced = any(is_traced_by_jax(array) for array in (b, *check_separated(matrix).factors))
    check_sides(matrix, b, has_values=not is_traced)
    if method not in ("auto", "exact", "cg", "minres", "gmres"):
        raise BudgetError(f"method {method!r} is none of auto, exact, cg, minres, gmres")
    if not rtol > 0.0:
        raise BudgetError(f"rtol must be positive, got {rtol}")
    wants_exact = method in ("auto", "exact")
    if wants_exact and matrix.separation_rank == 0:
        raise MatrixError("the matrix is zero: no solution")
    if is_traced:
        return _traced_solution(matrix, b, rtol, is_exact=wants_exact)
    if wants_exact and matrix.separation_rank == 1:
        record = _measured(matrix, b, solve_single(matrix, b), "factors", 0, rtol)
        return _converged(record, throw)

    # Solve 1: on the host, by common bases of the terms, else by iterations.
    needs_gradient = requires_gradient(matrix, b)
    constant = without_graph(matrix) if needs_gradient else matrix
    terms = to_host(constant)
    right_hand = to_numpy(as_double(b))
    solved = _by_common_bases(terms, right_hand) if wants_exact else None
    if solved is not None:
        x, name = solved
        iterations = 0
    else:
        _check_may_iterate(matrix, method, needs_gradient=needs_gradient)
        krylov_method = KrylovMethod(method, rtol, preconditioner, max_iterations, on_iteration)
        x, name, iterations = krylov(terms, right_hand, krylov_method)
    # Solve 2: in the library of b, with its gradient, and with the residual measured there.
    solution = like(x, as_solution(b, constant))
    if needs_gradient:
        solution = solution_with_gradient(matrix, b, solution, partial(_solve_exactly, terms.mH))
    record = _measured(matrix, b, solution, name, iterations, rtol)
    return _converged(record, throw)


def _check_may_iterate(matrix: SeparatedMatrix, method: Method, *, needs_gradient: bool) -> None:
    """Raise `MatrixError` where an exact method was asked for, or gradients, which need one."""
    if needs_gradient:
        raise MatrixError(
            f"{matrix.separation_rank} terms of {matrix.kronecker_shape} have no exact method, and "
            "gradients are not followed through iterations; detach the tensors first"
        )
    if method == "exact":
        raise MatrixError(
            f"{matrix.separation_rank} terms of {matrix.kronecker_shape} are not triangular in "
            'common bases: no exact method; method="auto" iterates'
        )


def _traced_solution(
    matrix: SeparatedMatrix, b: Array, rtol: float, *, is_exact: bool
) -> LinearSolution[Any]:
    """Return the solution of one term within ``jax.jit``; its figures are arrays of JAX.

    Raises `LsrError` for more terms, whose method depends on their values.
    """
    if matrix.separation_rank != 1 or not is_exact:
        raise LsrError(
            "within jax.jit one term is solved by its factors; the method for "
            f"{matrix.separation_rank} terms of {matrix.kronecker_shape} depends on their values, "
            "which are not known yet: solve outside"
        )
    x = solve_single(matrix, b)
    xp = namespace(x)
    columns = xp.reshape(x, (x.shape[0], -1))
    right_hand = xp.reshape(b, (b.shape[0], -1))
    residual = right_hand - matrix @ columns
    residual_norms = xp.linalg.vector_norm(residual, axis=0)
    column_norms = xp.linalg.vector_norm(right_hand, axis=0)
    scale = xp.where(column_norms > 0, column_norms, xp.ones_like(column_norms))
    size = matrix.weights[0] * xp.linalg.vector_norm(x) + xp.linalg.vector_norm(b)
    backward_error = xp.linalg.vector_norm(residual) / xp.where(size > 0, size, xp.ones_like(size))
    relative = xp.max(residual_norms / scale)
    return LinearSolution(x, relative, backward_error, "factors", 0, rtol)


def _by_common_bases(matrix: SeparatedMatrix, b: np.ndarray) -> tuple[np.ndarray, str] | None:
    """Return (x, method) of NumPy arrays in double precision; None without common bases."""
    form: Diagonalized | Triangularized | None = diagonalize(matrix)
    name = "diagonal"
    if form is None:
        form = triangularize(matrix)
        name = "triangular"
    if form is None:
        return None
    x = form.solve(b)
    x = x + form.solve(b - matrix @ x)  # one step of refinement
    is_real = not is_complex(matrix.factors[0]) and not np.iscomplexobj(b)
    return (x.real if is_real else x), name


def _solve_exactly(matrix: SeparatedMatrix, b: np.ndarray) -> np.ndarray:
    """Return A⁻¹ b of a sum that has common bases."""
    solved = _by_common_bases(matrix, b)
    if solved is None:
        raise MatrixError("the adjoint of a sum with common bases was found to have none")
    x, _ = solved
    return x


def _measured(
    matrix: SeparatedMatrix, b: Array, x: Array, method: str, iterations: int, rtol: float
) -> LinearSolution[Any]:
    """Return the record of a solution, its residual formed afresh."""
    n = b.shape[0]
    residual = to_numpy(b - matrix @ x).reshape(n, -1)
    right_hand = to_numpy(b).reshape(n, -1)
    solution = to_numpy(x).reshape(n, -1)

    residual_norms = np.linalg.norm(residual.astype(complex), axis=0)
    column_norms = np.linalg.norm(right_hand.astype(complex), axis=0)
    scale = np.where(column_norms > 0, column_norms, 1.0)
    relative = float(np.max(residual_norms / scale, initial=0.0))
    if not math.isfinite(relative):
        relative = math.inf

    size = matrix.to_numpy().norm * norm(solution) + norm(right_hand)
    backward_error = norm(residual) / size if size else 0.0
    return LinearSolution(x, relative, backward_error, method, iterations, rtol)


def _converged(record: LinearSolution[Any], throw: bool) -> LinearSolution[Any]:
    """Return the record; warn, or raise with ``throw``, where it missed its goal."""
    if record.converged:
        return record
    message = (
        f"{record}; allow more iterations, pass a better preconditioner (approximate_inverse) "
        "or loosen rtol"
    )
    if throw:
        raise ConvergenceError(message, record)
    # Tell the caller of `solve`, which is wrapped once.
    warnings.warn(message, ConvergenceWarning, stacklevel=4)
    return record
