"""Fewer terms for a matrix that is already separated: what sums and products of representations are followed by."""

from __future__ import annotations

from lsrdecomp.decompose import decompose
from lsrdecomp.errors import BudgetError
from lsrdecomp.operator_targets import Separated
from lsrdecomp.separated import SeparatedMatrix
from lsrdecomp.solution import Solver


def recompress(
    matrix: SeparatedMatrix, *, rtol: float | None = None, rank: int | None = None, solver: Solver | None = None
) -> SeparatedMatrix:
    """The fewest terms within ``rtol``, or the best ``rank`` terms; the matrix is not formed.

    Two factors: the SVD of the rearrangement from QR factors of the terms, exact in O((p + q)·s²). More factors:
    `ALS` on the core that the terms span, whose error is measured from QR factors of the difference.

    Raises
    ------
    BudgetError
        If neither goal is given.
    ConvergenceError
        If ``rtol`` is not met.
    """
    if (rtol is None) == (rank is None):
        raise BudgetError(f"give one of rtol and rank, got rtol={rtol} and rank={rank}")
    if matrix.separation_rank == 0:
        return matrix
    if matrix.order != 2 or solver is not None:
        target = Separated(matrix)
        return decompose(
            target, matrix.kronecker_shape, rtol=rtol, rank=rank, solver=solver, throw=rtol is not None
        ).approximation
    orthogonal = matrix.canonical()
    if rank is not None:
        return orthogonal.truncate(rank)
    allowed, kept, dropped = (rtol or 0.0) * matrix.norm, orthogonal.separation_rank, 0.0
    while kept and (dropped + float(orthogonal.weights[kept - 1]) ** 2) ** 0.5 <= allowed:
        dropped += float(orthogonal.weights[kept - 1]) ** 2
        kept -= 1
    return orthogonal.truncate(kept)
