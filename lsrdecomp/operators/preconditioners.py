"""The single Kronecker product nearest to a matrix; positive if the matrix is.

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
    is_complex,
    namespace,
    norm,
    to_numpy,
)
from lsrdecomp.decompose import decompose
from lsrdecomp.errors import MatrixError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.operators.factor_threads import one_thread_for_small_factors
from lsrdecomp.operators.host import to_host
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.targets.convert import as_target

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_CHANGE = 1e-13
"""Change of factors of norm one at which an iteration ends: some 500 unit roundoffs."""


@one_thread_for_small_factors
def nearest_kronecker(
    matrix: Any, shape: KroneckerShape | Sequence[Sequence[int]] | str = "balanced"
) -> SeparatedMatrix:
    """Return the one Kronecker product nearest to a matrix in the Frobenius norm.

    `inv` of it is a preconditioner.

    Parameters
    ----------
    matrix : array, scipy sparse matrix, SeparatedMatrix, LinearOperator or other target
    shape : KroneckerShape, sizes or text
        Factors of the product, also as ``"2x2, 2x2"``; two, or any number for arrays and separated
        matrices. "balanced" splits both sides into two factors as evenly as their divisors allow,
        and a separated matrix as it is.

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
    if isinstance(shape, str) and shape == "balanced":
        is_separated = isinstance(matrix, SeparatedMatrix)
        shape = matrix.kronecker_shape if is_separated else KroneckerShape.balanced(matrix.shape)
    shape = KroneckerShape.parse(shape, whole=matrix.shape)
    if isinstance(matrix, SeparatedMatrix) and matrix.kronecker_shape == shape:
        nearest = matrix.canonical().truncate(1) if matrix.order == 2 else _nearest_term(matrix)
    elif shape.order == 2:
        target = as_target(matrix)
        found = decompose(target, shape, rank=1).approximation
        nearest = _polished(target.rearranged(shape), found, shape)
    else:
        nearest = decompose(matrix, shape, rank=1).approximation
    if nearest.separation_rank == 0:
        raise MatrixError("the matrix is zero: no Kronecker product is nearest")
    return with_positive_factors(nearest)


def _nearest_term(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """Return a term near a sum of any number of factors: the nearer of two ends of an iteration.

    It starts from identities, which suit positive definite sums, and from what ALS finds.
    """
    identities = [np.eye(m, n) / min(m, n) ** 0.5 for m, n in matrix.kronecker_shape.factors]
    starts = [identities]
    by_als = decompose(to_host(matrix), matrix.kronecker_shape, rank=1).approximation
    if by_als.separation_rank:
        starts.append([stack[0] for stack in by_als.factors])
    ends = [_alternate(matrix, start) for start in starts]
    # Of projections of one matrix the longer is the nearer.
    return max(ends, key=lambda nearest: norm(nearest.weights))


def _alternate(matrix: SeparatedMatrix, start: Sequence[np.ndarray]) -> SeparatedMatrix:
    """Return one term near a sum, improving each factor in turn.

    Parameters
    ----------
    matrix : SeparatedMatrix
    start : sequence of arrays
        A factor of norm one for each place.
    """
    stacks = [to_numpy(as_double(f)) for f in matrix.factors]
    weights = to_numpy(as_double(matrix.weights))
    factors = [first.astype(stack.dtype) for first, stack in zip(start, stacks, strict=True)]
    for _ in range(500):  # by hand
        largest_change = 0.0
        for i, stack in enumerate(stacks):
            # The sum contracted with all other factors, which is the best one beside them.
            coefficients = weights.astype(stack.dtype)
            for j, other in enumerate(stacks):
                if j != i:
                    products = np.einsum("mn,kmn->k", factors[j].conj(), other)
                    coefficients = coefficients * products
            image = np.tensordot(coefficients, stack, axes=1)
            size = float(np.linalg.norm(image))
            if size == 0.0:  # orthogonal to this start: the heaviest term is one to go on from
                heaviest = tuple(f[:1, :, :] for f in matrix.factors)
                return SeparatedMatrix(matrix.weights[:1], heaviest)
            change = float(np.linalg.norm(image / size - factors[i]))
            largest_change = max(largest_change, change)
            factors[i] = image / size
        if largest_change <= MIN_CHANGE:
            break
    xp = namespace(*matrix.factors)
    place = device(matrix.factors[0])
    result = [xp.asarray(f[None], dtype=matrix.dtype, device=place) for f in factors]
    weight = xp.asarray([size], dtype=matrix.weights.dtype, device=place)
    return SeparatedMatrix.from_factors(result, weight)


def _polished(rearranged: Any, nearest: SeparatedMatrix, shape: KroneckerShape) -> SeparatedMatrix:
    """Return a term improved by products with R(A) and its adjoint in turn.

    A solver judged it by its error; its factors are sensitive to what is left of that.
    """
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
        change = norm(image / size - column)
        column = image / size
        if change <= MIN_CHANGE:
            break
    (m, n), (p, q) = shape.factors
    first = xp.reshape(left, (1, m, n))
    second = xp.reshape(conjugate(column), (1, p, q))
    weight = xp.asarray([size], dtype=xp.float64, device=device(first))
    return SeparatedMatrix.from_factors([first, second], weight)


def with_positive_factors(term: SeparatedMatrix) -> SeparatedMatrix:
    """Return the same term with Hermitian positive factors.

    The term itself where more than phases and rounding stand in the way.
    """
    factors: list[Array] = []
    phase_of_term: complex = 1.0
    for stack in term.factors:
        found = _positive_factor(stack[0, :, :])
        if found is None:
            return term
        factor, phase = found
        factors.append(factor[None, :, :])
        phase_of_term *= phase
    # Phases may stand in any factor; they cancel, or the term is not positive.
    if abs(phase_of_term - 1.0) > unit_roundoff(term.dtype) ** 0.5:
        return term
    return SeparatedMatrix.from_factors(factors, term.weights)


def _positive_factor(factor: Array) -> tuple[Array, complex] | None:
    """Return a Hermitian positive factor and the phase that was taken off it: a sign if real.

    Eigenvalues that are rounding are raised to it, so that the factor has an inverse. None for a
    factor, of norm one, that is farther from positive than half of its digits.
    """
    if factor.shape[0] != factor.shape[1]:
        return None
    xp = namespace(factor)
    roundoff = unit_roundoff(factor.dtype)
    phase: complex = 1.0
    trace = to_numpy(xp.linalg.trace(factor)).item()
    if is_complex(factor) and trace != 0.0:
        phase = trace / abs(trace)
        factor = factor * phase.conjugate()
    elif trace.real < 0.0:
        phase = -1.0
        factor = -factor
    skew = norm(factor - adjoint(factor))
    if skew > roundoff**0.5:
        return None
    factor = 0.5 * (factor + adjoint(factor))
    values, vectors = xp.linalg.eigh(factor)
    smallest = float(to_numpy(values)[0])
    largest = float(to_numpy(values)[-1])
    if smallest < -(roundoff**0.5):
        return None
    floor = 4.0 * roundoff * int(factor.shape[0]) * largest
    if smallest < floor:
        raised = xp.where(values < floor, floor * xp.ones_like(values), values)
        factor = (vectors * raised) @ adjoint(vectors)
        factor = 0.5 * (factor + adjoint(factor))
    return factor, phase
