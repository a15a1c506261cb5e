"""What every operator checks of a matrix and its right-hand side, and how these come to NumPy.

No gradient is lost on the way: a tensor that requires one is refused.
"""

from __future__ import annotations

from lsrdecomp.arrays import Array, dtype_name, finite_norm, namespace
from lsrdecomp.errors import MatrixError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix


def check_separated(matrix: object) -> SeparatedMatrix:
    """Return the matrix; raise `MatrixError` for an array or sparse matrix."""
    if not isinstance(matrix, SeparatedMatrix):
        advice = "make one of it by lsrdecomp.decompose(matrix, shape, rtol=1e-12)"
        raise MatrixError(
            f"expected a sum of Kronecker products, got a {type(matrix).__name__}: {advice}"
        )
    return matrix


def check_sides(matrix: SeparatedMatrix, b: Array, *, has_values: bool = True) -> None:
    """Raise `ShapeError` unless a square matrix and a right-hand side fit.

    Without values, within ``jax.jit``, entries cannot be looked at.
    """
    rows, columns = check_separated(matrix).shape
    if rows != columns:
        raise ShapeError(
            f"a {rows}×{columns} matrix: solving needs a square one; SciPy's lsmr takes it as it is"
        )
    if b.ndim not in (1, 2) or b.shape[0] != rows:
        raise ShapeError(f"b has shape {tuple(b.shape)}, the matrix {rows}×{columns}")
    if has_values:
        finite_norm(b, "b")  # refuses entries that are not finite


def to_host(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """Return the same terms as NumPy arrays in double precision."""
    for factor in matrix.factors:
        without_gradient(factor)
    return matrix.to_numpy().in_double()


def without_gradient(array: Array) -> Array:
    """Return the array; raise `MatrixError` if it requires a gradient, which would be lost."""
    if getattr(array, "requires_grad", False):
        raise MatrixError(
            "gradients are followed through one term, and through solve, logdet and slogdet of "
            "sums that have an exact method; detach the tensors of this sum first"
        )
    return array


def as_solution(b: Array, matrix: SeparatedMatrix) -> Array:
    """Return b in the element type of a solution, which holds b and the matrix."""
    xp = namespace(b, matrix.factors[0])
    if dtype_name(b) == dtype_name(matrix.factors[0]):
        return b
    return xp.astype(b, xp.result_type(b.dtype, matrix.dtype))
