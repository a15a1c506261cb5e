"""Separated matrices brought to NumPy in double precision, and results back; no gradient is lost on the way."""

from __future__ import annotations

from lsrdecomp.arrays import Array, dtype_name, finite_norm, namespace
from lsrdecomp.errors import MatrixError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix


def check_separated(matrix: object) -> SeparatedMatrix:
    """The matrix; `MatrixError` for an array or sparse matrix, which is to be decomposed first."""
    if not isinstance(matrix, SeparatedMatrix):
        words = "make one of it by lsrdecomp.decompose(matrix, shape, rtol=1e-12)"
        raise MatrixError(
            f"expected a sum of Kronecker products, got a {type(matrix).__name__}: {words}"
        )
    return matrix


def check_sides(matrix: SeparatedMatrix, b: Array) -> None:
    """Raise `ShapeError` unless a square matrix and a right-hand side fit."""
    rows, columns = check_separated(matrix).shape
    if rows != columns:
        raise ShapeError(
            f"a {rows}×{columns} matrix: solving needs a square one; SciPy's lsmr takes it as it is"
        )
    if b.ndim not in (1, 2) or b.shape[0] != rows:
        raise ShapeError(f"b has shape {tuple(b.shape)}, the matrix {rows}×{columns}")
    finite_norm(b, "b")  # refuses entries that are not finite


def host(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """The same terms as NumPy arrays in double precision."""
    for factor in matrix.factors:
        detached(factor)
    return matrix.to_numpy().in_double()


def detached(array: Array) -> Array:
    """The array, unless it requires a gradient, which would be lost."""
    if getattr(array, "requires_grad", False):
        raise MatrixError(
            "gradients are followed through one term only; detach the tensors of this sum first"
        )
    return array


def wide(b: Array, matrix: SeparatedMatrix) -> Array:
    """A prototype of the solution: the type that holds b and the matrix."""
    xp = namespace(b, matrix.factors[0])
    if dtype_name(b) == dtype_name(matrix.factors[0]):
        return b
    return xp.astype(b, xp.result_type(b.dtype, matrix.dtype))
