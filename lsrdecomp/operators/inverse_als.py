"""An inverse of few Kronecker terms by alternating least squares on ‖I − A X‖_F.

Every step is exact, so that the residual never rises.

Source: Y. Voet, Preconditioning techniques for generalized Sylvester matrix equations, 2023.
arXiv:2307.07884
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.decompose import decompose
from lsrdecomp.errors import LsrError, MatrixError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.operators.factor_threads import one_thread_for_small_factors
from lsrdecomp.operators.host import to_host
from lsrdecomp.operators.preconditioners import nearest_kronecker
from lsrdecomp.operators.single_term import inv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class ApproximateInverse:
    """X ≈ A⁻¹ as a sum of few Kronecker products; SciPy takes it as a preconditioner ``M``.

    Attributes
    ----------
    approximation : SeparatedMatrix
        X.
    residual : float
        ‖I − A X‖_F / ‖I‖_F, measured; below one it is better than nothing.
    residuals : tuple of float
        The same after each sweep, from the normal equations; never rising.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.operators import kronecker_sum
    >>> second = 2 * np.eye(3) - np.eye(3, k=1) - np.eye(3, k=-1)
    >>> laplacian = kronecker_sum(second, second)
    >>> inverse = approximate_inverse(laplacian, rank=3)
    >>> inverse.approximation.separation_rank, inverse.residual < 0.1, (inverse @ np.ones(9)).shape
    (3, True, (9,))
    """

    approximation: SeparatedMatrix
    residual: float
    residuals: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, n)."""
        return self.approximation.shape

    @property
    def dtype(self) -> Any:
        """Element type of X."""
        return self.approximation.dtype

    def matvec(self, x: Any) -> Any:
        """Return X x."""
        return self.approximation @ x

    def rmatvec(self, x: Any) -> Any:
        """Return Xᴴ x."""
        return self.approximation.rmatvec(x)

    __matmul__ = matvec

    def __str__(self) -> str:
        return (
            f"inverse of {self.shape[0]:,}² as {self.approximation.separation_rank} × "
            f"[{self.approximation.kronecker_shape}]: ‖I − AX‖ / ‖I‖ = {self.residual:.3g}, "
            f"{len(self.residuals)} sweeps"
        )


@one_thread_for_small_factors
def approximate_inverse(
    matrix: Any,
    shape: KroneckerShape | Sequence[Sequence[int]] | str | None = None,
    rank: int = 4,
    *,
    max_sweeps: int = 30,
    on_sweep: Callable[[int, float], Any] | None = None,
) -> ApproximateInverse:
    """Return X of ``rank`` Kronecker terms with small ‖I − A X‖_F [1]_.

    Parameters
    ----------
    matrix : SeparatedMatrix, or an array, sparse matrix or other target
        The latter are written as terms first, within a relative error of 1e-10.
    shape : KroneckerShape, sizes or text, optional
        Square factors; that of a separated matrix if absent.
    rank : int
        Terms of the inverse; each costs a product with d factors at every use.
    max_sweeps : int
        It ends before when a sweep lowers the residual by less than a thousandth of it.
    on_sweep : callable, optional
        Called with the number of the sweep and the relative residual.

    Returns
    -------
    ApproximateInverse

    Raises
    ------
    ShapeError
        If a factor is not square.
    MatrixError
        If the matrix is zero.

    Notes
    -----
    A sweep solves, for each factor, rank·m_i equations for m_i right-hand sides: (rank·m_i)³/3 +
    rank²·s²·m_i² operations. The inverse of a symmetric matrix comes out symmetric up to the
    residual only: use it with GMRES.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.operators import kronecker_sum
    >>> second = 2 * np.eye(3) - np.eye(3, k=1) - np.eye(3, k=-1)
    >>> laplacian = kronecker_sum(second, second)
    >>> coarse = approximate_inverse(laplacian, rank=1)
    >>> fine = approximate_inverse(laplacian, rank=3)
    >>> fine.residual < 0.5 * coarse.residual < 0.5
    True

    References
    ----------
    .. [1] Y. Voet, Preconditioning techniques for generalized Sylvester matrix equations, 2023.
           arXiv:2307.07884
    """
    a = _separated(matrix, shape)
    if any(m != n for m, n in a.kronecker_shape.factors):
        raise ShapeError(f"an inverse needs square factors, these are {a.kronecker_shape}")
    if a.separation_rank == 0:
        raise MatrixError("the matrix is zero: it has no inverse")
    if isinstance(rank, bool) or rank != int(rank) or rank < 1:
        raise ShapeError(f"a separation rank is a positive integer, got {rank}")
    # Step 1: terms of A with weights folded in, and the products A_tᴴ A_u of each factor, which
    # stay.
    factors = [np.asarray(f) for f in a.folded()]
    gram_factors = [np.einsum("tba,ubc->tuac", f.conj(), f, optimize=True) for f in factors]
    # Step 2: a start in the algebra that the factors of A span.
    inverse_factors = _initial_factors(a, factors, int(rank))
    # Step 3: the factors at each place in turn, for all terms together, until a sweep gains little.
    residuals: list[float] = []
    for sweep in range(1, max_sweeps + 1):
        squared = math.inf
        for i in range(a.order):
            inverse_factors[i], squared = _best_block(factors, gram_factors, inverse_factors, i)
            _balance(inverse_factors)
        residual = math.sqrt(max(squared, 0.0) / a.shape[0])
        if residuals and residual > residuals[-1]:  # rounding; `best` keeps what came before
            break
        residuals.append(residual)
        best = [f.copy() for f in inverse_factors]
        if on_sweep is not None:
            on_sweep(sweep, residual)
        if len(residuals) > 1 and residuals[-2] - residual <= 1e-3 * residuals[-2]:
            break
    # Step 4: ‖I − A X‖ from QR factors, for the normal equations lose half the digits of a small
    # one.
    inverse = SeparatedMatrix.from_factors(best)
    sizes = a.kronecker_shape.rows
    identity = SeparatedMatrix.from_factors([np.eye(m, dtype=a.dtype)[None] for m in sizes])
    measured = (identity - a @ inverse).norm / math.sqrt(a.shape[0])
    return ApproximateInverse(inverse, measured, tuple(residuals))


def _best_block(
    factors: list[np.ndarray],
    gram_factors: list[np.ndarray],
    inverse_factors: list[np.ndarray],
    i: int,
) -> tuple[np.ndarray, float]:
    """Return the best factors in place i, the others held, and ‖I − A X‖² with them."""
    import scipy.linalg

    terms = len(factors[i])
    r, m = inverse_factors[i].shape[:2]
    # What the other places contribute: Π ⟨A_t X_k, A_u X_l⟩ and Π tr(A_t X_k)*.
    gram = np.ones((terms, r, terms, r))
    traces = np.ones((terms, r))
    for j, (stack, other) in enumerate(zip(factors, inverse_factors, strict=True)):
        if j == i:
            continue
        images = np.einsum("tab,kbc->tkac", stack, other, optimize=True)  # A_t X_k
        flat = images.reshape(terms * r, -1)
        gram = gram * (flat.conj() @ flat.T).reshape(terms, r, terms, r)
        traces = traces * np.einsum("tkaa->tk", images).conj()
    normal = np.einsum("tkul,tuac->kalc", gram, gram_factors[i], optimize=True)
    normal = normal.reshape(r * m, r * m)
    right = np.einsum("tk,tba->kab", traces, factors[i].conj(), optimize=True).reshape(r * m, m)
    # Terms of the inverse may be nearly dependent: a ridge of 512 unit roundoffs.
    size = float(np.trace(normal).real) / (r * m)
    normal[np.diag_indices(r * m)] += 2.0**-44 * size
    try:
        solved = scipy.linalg.solve(normal, right, assume_a="pos")
    except np.linalg.LinAlgError:
        solved = scipy.linalg.lstsq(normal, right)[0]
    rows = math.prod(f.shape[1] for f in factors)
    return solved.reshape(r, m, m), rows - float(np.vdot(right, solved).real)


def _initial_factors(a: SeparatedMatrix, factors: list[np.ndarray], rank: int) -> list[np.ndarray]:
    """Return powers P^k X of the inverse X of the nearest product, with P = Σ_t c_t A_t X.

    An inverse is a polynomial in such matrices.
    """
    try:
        bases = [f[0] for f in inv(nearest_kronecker(a, a.kronecker_shape)).factors]
    except LsrError:
        bases = [np.eye(m, dtype=factors[0].dtype) for m in a.kronecker_shape.rows]
    initial = []
    rng = np.random.default_rng(0)
    for stack, base in zip(factors, bases, strict=True):
        combination = np.tensordot(rng.uniform(-1.0, 1.0, len(stack)), stack, axes=1) @ base
        combination = combination / np.linalg.norm(combination, 2)
        powers = [base]
        for _ in range(rank - 1):
            power = powers[-1] @ combination
            size = max(float(np.linalg.norm(power)), 1e-300)
            powers.append(power / size * np.linalg.norm(base))
        initial.append(np.stack(powers).astype(np.result_type(base, stack)))
    return initial


def _balance(stacks: list[np.ndarray]) -> None:
    """Give the factors of each term equal norms, in place."""
    sizes = np.stack([np.linalg.norm(f, axis=(1, 2)) for f in stacks])
    mean = np.exp(np.mean(np.log(np.maximum(sizes, 1e-300)), axis=0))
    for stack, size in zip(stacks, sizes, strict=True):
        stack *= (mean / np.maximum(size, 1e-300))[:, None, None]


def _separated(
    matrix: Any,
    shape: KroneckerShape | Sequence[Sequence[int]] | str | None,
) -> SeparatedMatrix:
    """Return a matrix as terms in double precision; one that is not separated is decomposed."""
    if shape is not None:
        shape = KroneckerShape.parse(shape)
    if isinstance(matrix, SeparatedMatrix) and shape in (None, matrix.kronecker_shape):
        separated = matrix
    elif shape is None:
        raise ShapeError("say in which KroneckerShape the inverse is sought")
    else:
        separated = decompose(matrix, shape, rtol=1e-10, throw=True).approximation
    return to_host(separated)
