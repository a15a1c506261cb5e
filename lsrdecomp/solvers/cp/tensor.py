"""R(M) of a target with one axis a factor, for any number of them: formed, or exactly as a small core."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, as_double, device, is_differentiated, namespace
from lsrdecomp.errors import LsrError, ShapeError
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import tolerance
from lsrdecomp.solvers.cp.hosvd import Compressed
from lsrdecomp.solvers.cp.mttkrp import assemble
from lsrdecomp.solvers.matrix import without_unit_factors
from lsrdecomp.solvers.svd.dense import as_matrix

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.base import Target

LARGEST_CORE = 2**27
"""Most entries of a core spanned by given terms: 1 GiB in double precision."""


def rearranged_tensor(target: Target, shape: KroneckerShape) -> Compressed:
    """R(M) with one axis per factor; exactly, as a core, where M is separated in this very shape; else formed."""
    matrix = getattr(target, "matrix", None)
    if (
        isinstance(matrix, SeparatedMatrix)
        and matrix.kronecker_shape.essential == shape
        and matrix.separation_rank
    ):
        return _core_of(without_unit_factors(matrix))
    whole: tuple[Array | None, ...] = (None,) * shape.order
    if hasattr(target, "core"):
        return Compressed(*target.core(shape))
    tensor = (
        target.tensor(shape) if hasattr(target, "tensor") else rearrange(as_matrix(target), shape)
    )
    return Compressed(tensor, whole)


def _core_of(matrix: SeparatedMatrix) -> Compressed:
    """The tensor of a separated matrix in orthonormal bases of its factors, so that nothing large is formed."""
    xp = namespace(*matrix.factors)
    bases: list[Array | None] = []
    triangles = []
    for factor in matrix.factors:
        s, m, n = factor.shape
        u, sigma, vh = xp.linalg.svd(xp.reshape(as_double(factor), (s, m * n)), full_matrices=False)
        rank = sum(
            1 for value in sigma if float(value) > tolerance("float64", s) / 8.0 * float(sigma[0])
        )
        bases.append(xp.matrix_transpose(vh[:rank, :]))
        triangles.append(xp.matrix_transpose(u[:, :rank] * xp.astype(sigma[:rank], u.dtype)))
    entries = math.prod(int(r.shape[0]) for r in triangles)
    if entries > LARGEST_CORE:
        raise ShapeError(
            f"{matrix.separation_rank} terms of {matrix.kronecker_shape} span a core of {entries:,} entries, "
            f"more than {LARGEST_CORE:,}; recompress after fewer sums and products"
        )
    return Compressed(
        assemble(triangles, xp.astype(as_double(matrix.weights), triangles[0].dtype)), tuple(bases)
    )


def refuse_gradients(tensor: Array, shape: KroneckerShape) -> None:
    """Raise `LsrError` where torch would differentiate: the core is solved in NumPy, and gradients would be wrong."""
    if is_differentiated(tensor):
        raise LsrError(
            f"{shape}: terms of {shape.order} factors cannot be differentiated; pass matrix.detach(), "
            "or take two factors and SVD()"
        )


def no_terms(tensor: Array, shape: KroneckerShape) -> SeparatedMatrix:
    """The zero matrix, in the library and element type of ``tensor``."""
    xp = namespace(tensor)
    factors = tuple(
        xp.zeros((0, m, n), dtype=tensor.dtype, device=device(tensor)) for m, n in shape.factors
    )
    return SeparatedMatrix(xp.abs(factors[0][:, 0, 0]), factors)
