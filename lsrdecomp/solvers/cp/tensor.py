"""R(M) of a target with one axis a factor: formed, or exactly as a small core."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lsrdecomp.arrays import (
    MAX_FORMED_ENTRIES,
    Array,
    as_double,
    device,
    is_differentiated,
    namespace,
)
from lsrdecomp.errors import LsrError, ShapeError
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import tolerance
from lsrdecomp.solvers.cp.hosvd import CompressedTensor
from lsrdecomp.solvers.cp.mttkrp import assemble
from lsrdecomp.solvers.matrix import without_unit_factors
from lsrdecomp.solvers.svd.singular_terms import as_matrix

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.target import Target


def rearranged_tensor(target: Target, shape: KroneckerShape) -> CompressedTensor:
    """Return R(M) with one axis a factor.

    Where M is separated in this very shape it is an exact small core, else it is formed. Raises
    `ShapeError` for a core of more than 2²⁷ entries (1 GiB in double precision).
    """
    matrix = getattr(target, "matrix", None)
    if isinstance(matrix, SeparatedMatrix) and _is_nonzero_sum(matrix, shape):
        return _core_of(without_unit_factors(matrix))
    if hasattr(target, "core"):
        return CompressedTensor(*target.core(shape))
    if hasattr(target, "tensor"):
        tensor = target.tensor(shape)
    else:
        tensor = rearrange(as_matrix(target), shape)
    return CompressedTensor(tensor, (None,) * shape.order)


def _is_nonzero_sum(matrix: SeparatedMatrix, shape: KroneckerShape) -> bool:
    """Return whether a matrix is given by terms in an essential shape, one at least."""
    return matrix.kronecker_shape.essential == shape and matrix.separation_rank > 0


def _core_of(matrix: SeparatedMatrix) -> CompressedTensor:
    """Return the tensor of a separated matrix in orthonormal bases of its factors.

    So nothing large is formed.
    """
    xp = namespace(*matrix.factors)
    bases: list[Array | None] = []
    triangles = []
    for factor in matrix.factors:
        s, m, n = factor.shape
        rows = xp.reshape(as_double(factor), (s, m * n))
        u, sigma, vh = xp.linalg.svd(rows, full_matrices=False)
        floor = tolerance("float64", s) / 8.0 * float(sigma[0])
        rank = sum(1 for value in sigma if float(value) > floor)
        bases.append(xp.matrix_transpose(vh[:rank, :]))
        triangles.append(xp.matrix_transpose(u[:, :rank] * xp.astype(sigma[:rank], u.dtype)))
    entries = math.prod(int(triangle.shape[0]) for triangle in triangles)
    if entries > MAX_FORMED_ENTRIES:
        raise ShapeError(
            f"{matrix.separation_rank} terms of {matrix.kronecker_shape} span a core of "
            f"{entries:,} entries, more than {MAX_FORMED_ENTRIES:,}; recompress after fewer sums "
            "and products"
        )
    weights = xp.astype(as_double(matrix.weights), triangles[0].dtype)
    return CompressedTensor(assemble(triangles, weights), tuple(bases))


def refuse_gradients(tensor: Array, shape: KroneckerShape) -> None:
    """Raise `LsrError` where torch would differentiate.

    The core is solved in NumPy, so that gradients would be wrong.
    """
    if is_differentiated(tensor):
        raise LsrError(
            f"{shape}: terms of {shape.order} factors cannot be differentiated; pass "
            "matrix.detach(), or take two factors and SVD()"
        )


def no_terms(tensor: Array, shape: KroneckerShape) -> SeparatedMatrix:
    """Return the zero matrix, in the library and element type of ``tensor``."""
    xp = namespace(tensor)
    factors = []
    for m, n in shape.factors:
        factors.append(xp.zeros((0, m, n), dtype=tensor.dtype, device=device(tensor)))
    return SeparatedMatrix(xp.abs(factors[0][:, 0, 0]), tuple(factors))
