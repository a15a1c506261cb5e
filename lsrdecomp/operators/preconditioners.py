"""The nearest single Kronecker product: of a matrix, or of a sum over samples that is never formed; positive if it is.

For a positive semidefinite A the nearest B ⊗ C has positive semidefinite factors (theorem 5.8): a
contraction of A with such a factor is one again, so the iterations here never leave them; rounding
is cut off at the end.

Source: C. F. Van Loan and N. Pitsianis, Approximation with Kronecker products, in Linear Algebra
for Large Scale and Real-Time Applications, 1993. doi:10.1007/978-94-015-8196-7_17
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    conjugate,
    device,
    namespace,
    norm,
    to_numpy,
)
from lsrdecomp.decompose import decompose
from lsrdecomp.errors import MatrixError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.operators.host import host
from lsrdecomp.operators.threads import one_thread_for_small_factors
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.targets.convert import as_target

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS = 500
"""Most rounds of an alternating iteration for one term."""

GAP = 1e-13
"""Change of the factors, of norm one, at which such an iteration on a matrix ends."""


@one_thread_for_small_factors
def nearest_kronecker(
    matrix: Any, shape: KroneckerShape | Sequence[Sequence[int]] | str
) -> SeparatedMatrix:
    """The one Kronecker product nearest to a matrix in the Frobenius norm; `inv` of it is a preconditioner.

    Parameters
    ----------
    matrix : array, scipy sparse matrix, SeparatedMatrix, LinearOperator or other target
    shape : KroneckerShape, sizes or text
        Factors of the product, also as ``"2x2, 2x2"``; two, or any number for arrays and separated
        matrices.

    Returns
    -------
    SeparatedMatrix
        One term; usable wherever SciPy takes a ``LinearOperator``. For a Hermitian positive
        semidefinite matrix every factor is one, with eigenvalues below rounding raised to it.

    Raises
    ------
    MatrixError
        For the zero matrix; for a sum of three and more factors that requires a gradient, which is
        not followed.

    Examples
    --------
    >>> import numpy as np
    >>> A, B = np.array([[2.0, 1.0], [1.0, 2.0]]), np.diag([1.0, 4.0])
    >>> nearest = nearest_kronecker(np.kron(A, B) + 1e-3 * np.eye(4), "2x2, 2x2")
    >>> bool(np.allclose(nearest.to_matrix(), np.kron(A, B), atol=2e-3))
    True
    """
    shape = KroneckerShape.parse(shape)
    if isinstance(matrix, SeparatedMatrix) and matrix.kronecker_shape == shape:
        nearest = matrix.canonical().truncate(1) if matrix.order == 2 else _nearest_term(matrix)
    elif shape.order == 2:
        target = as_target(matrix)
        nearest = _polished(
            target.rearranged(shape), decompose(target, shape, rank=1).approximation, shape
        )
    else:
        nearest = decompose(matrix, shape, rank=1).approximation
    if nearest.separation_rank == 0:
        raise MatrixError("the matrix is zero: no Kronecker product is nearest")
    return positive(nearest)


def _nearest_term(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """The nearer of two ends: from identities, which suit positive definite sums, and from what ALS finds."""
    starts = [[np.eye(m, n) / min(m, n) ** 0.5 for m, n in matrix.kronecker_shape.factors]]
    by_als = decompose(host(matrix), matrix.kronecker_shape, rank=1).approximation
    if by_als.separation_rank:
        starts.append([stack[0] for stack in by_als.factors])
    # Of projections of one matrix the longer is the nearer.
    return max(
        (_power(matrix, start) for start in starts), key=lambda nearest: norm(nearest.weights)
    )


def _power(matrix: SeparatedMatrix, start: Sequence[np.ndarray]) -> SeparatedMatrix:
    """One term near a sum of any number of factors: each factor in turn, from factors of norm one, until they rest."""
    factors = [to_numpy(as_double(f)) for f in matrix.factors]
    weights = to_numpy(as_double(matrix.weights))
    now = [first.astype(stack.dtype) for first, stack in zip(start, factors, strict=True)]
    for _ in range(ROUNDS):
        # Each factor in turn: the sum contracted with all others, which is the best one beside
        # them.
        change = 0.0
        for i, stack in enumerate(factors):
            shares = weights.astype(stack.dtype)
            for j, other in enumerate(factors):
                if j != i:
                    shares = shares * np.einsum("mn,kmn->k", now[j].conj(), other)
            image = np.tensordot(shares, stack, axes=1)
            size = float(np.linalg.norm(image))
            if size == 0.0:  # orthogonal to this start: the heaviest term is one to go on from
                return SeparatedMatrix(
                    matrix.weights[:1], tuple(f[:1, :, :] for f in matrix.factors)
                )
            change = max(change, float(np.linalg.norm(image / size - now[i])))
            now[i] = image / size
        if change <= GAP:
            break
    xp = namespace(*matrix.factors)
    where = device(matrix.factors[0])
    made = [xp.asarray(f[None], dtype=matrix.dtype, device=where) for f in now]
    return SeparatedMatrix.from_factors(
        made, xp.asarray([size], dtype=matrix.weights.dtype, device=where)
    )


def _polished(rearranged: Any, nearest: SeparatedMatrix, shape: KroneckerShape) -> SeparatedMatrix:
    """Alternate R(A) and its adjoint from what a solver found, which was judged by its error and not by its factors."""
    if nearest.separation_rank == 0:
        return nearest
    xp = namespace(*nearest.factors)
    column = as_double(xp.reshape(nearest.factors[1], (-1, 1)))
    column = xp.astype(column, xp.result_type(column.dtype, rearranged.prototype.dtype))
    column = conjugate(column)
    for _ in range(20):
        left = rearranged.matmat(column)
        left = left / norm(left)
        image = rearranged.rmatmat(left)
        size = norm(image)
        gap = norm(image / size - column)
        column = image / size
        if gap <= GAP:
            break
    (m, n), (p, q) = shape.factors
    made = [xp.reshape(left, (1, m, n)), xp.reshape(conjugate(column), (1, p, q))]
    return SeparatedMatrix.from_factors(
        made, xp.asarray([size], dtype=xp.float64, device=device(made[0]))
    )


def positive(term: SeparatedMatrix) -> SeparatedMatrix:
    """The same term with Hermitian positive factors, where only signs and rounding stand in the way; else as it is."""
    made: list[Array] = []
    xp, signs = namespace(*term.factors), 1.0
    for stack in term.factors:
        factor = stack[0, :, :]
        if factor.shape[0] != factor.shape[1]:
            return term
        skew = norm(factor - adjoint(factor))
        mu = unit_roundoff(factor.dtype)
        if skew > mu**0.5:
            return term
        # Signs may stand in any factor; they cancel, or the term is not positive.
        factor = 0.5 * (factor + adjoint(factor))
        sign = 1.0 if float(to_numpy(xp.linalg.trace(factor)).real) >= 0.0 else -1.0
        values, vectors = xp.linalg.eigh(sign * factor)
        smallest = float(to_numpy(values)[0])
        if smallest < -(mu**0.5):
            return term
        # Eigenvalues that are rounding are raised to it, so that the factor has an inverse.
        floor = 4.0 * mu * int(factor.shape[0]) * float(to_numpy(values)[-1])
        if smallest < floor:
            factor = sign * (
                (vectors * xp.where(values < floor, floor * xp.ones_like(values), values))
                @ adjoint(vectors)
            )
            factor = 0.5 * (factor + adjoint(factor))
        signs, made = signs * sign, [*made, (sign * factor)[None, :, :]]
    if signs < 0:
        return term
    return SeparatedMatrix.from_factors(made, term.weights)
