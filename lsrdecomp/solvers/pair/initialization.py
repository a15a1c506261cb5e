"""The start of joint least squares: orthogonal terms of each side, in a singular gauge.

The first singular triples of a batch of matrices come in little memory beside them where they are
large. These are starts, computed by the thousand, and carry no claim how near the optimum they are.
`Krylov` answers for its errors, and that takes 2.5 to 6 times as long on batches of small
matrices (0.8 to 3.5 at 384 × 256); at a loose tolerance it is 1.6 times faster from there on, and 3
to 21 times slower on small ones, by ``benchmarks/solvers/two_factors.py --only leading``. The two
share the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import (
    OVERSAMPLING,
    Array,
    as_double,
    like,
    namespace,
    triangular_factor,
    zero_padded,
)
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.pair.partial_traces import PartialTraces, apply_to_rows, kron_apply
from lsrdecomp.solvers.svd.block_krylov import Krylov
from lsrdecomp.targets.target import Dense
from lsrdecomp.targets.weighted import gauge_of

if TYPE_CHECKING:
    from lsrdecomp.solvers.batched_terms import Stacks

Triples = tuple[Array, Array, Array]
Way = Callable[[Array, int], Triples]


def leading_triples(matrices: Array, rank: int, way: Way | None = None) -> Triples:
    """Return the k = min(rank, p, q) largest singular triples of real matrices (L, p, q).

    A full SVD takes about six times the memory of a square matrix. A large narrow one is taken
    apart through R instead: X = Q R and R = W σ Vᵀ give U = X V σ⁻¹ without Q. A large one that is
    wide too goes to `Krylov`, if few triples are requested: by its certificate their error
    is at most a thousandth above the optimum. Of any other one few triples come from a few passes
    of subspace iteration [1]_, whose error is up to about 1e-2 above the optimum for noise and 1e-3
    or less where the spectrum falls, at a tenth of the time of an SVD of 256 × 256.

    Parameters
    ----------
    matrices : Array, shape (L, p, q)
    rank : int
    way : callable (matrices, rank) -> triples, optional
        One of `by_svd`, `through_triangles`, `by_iteration` and `by_krylov_spaces`, for p ≥ q;
        absent, the one that `choose_way` says.

    Returns
    -------
    Array, shape (L, p, k)
        U.
    Array, shape (L, k)
        σ, descending.
    Array, shape (L, k, q)
        Vᵀ.

    References
    ----------
    .. [1] N. Halko, P. G. Martinsson and J. A. Tropp, Finding structure with randomness, SIAM
       Review 53 (2011), algorithm 4.4. doi:10.1137/090771806
    """
    xp = namespace(matrices)
    p, q = (int(size) for size in matrices.shape[1:])
    rank = min(rank, p, q)
    if p < q:
        v, sigma, uh = leading_triples(xp.matrix_transpose(matrices), rank, way)
        return xp.matrix_transpose(uh), sigma, xp.matrix_transpose(v)
    way = way or choose_way(p, q, rank)
    return way(matrices, rank)


def choose_way(p: int, q: int, rank: int) -> Way:
    """Return the way to the triples of matrices (p, q) with p ≥ q.

    All limits are by hand; ``benchmarks/solvers/two_factors.py --only leading`` times the ways.
    """
    # Way 1: few triples of a wide matrix by a Krylov space, each matrix alone.
    if q > 512 and 8 * rank <= q:
        return by_krylov_spaces
    # Way 2: few of any other by subspace iteration, all matrices together.
    if 4 * (rank + OVERSAMPLING) <= q:
        return by_iteration
    # Way 3: many of a small one by its SVD, of a large narrow one, whose SVD would need too much
    # memory, through R of a QR factorization.
    return by_svd if p * q <= 2**17 else through_triangles


def by_svd(matrices: Array, rank: int) -> Triples:
    """Truncate the SVD."""
    u, sigma, vh = namespace(matrices).linalg.svd(matrices, full_matrices=False)
    return u[:, :, :rank], sigma[:, :rank], vh[:, :rank, :]


def through_triangles(matrices: Array, rank: int) -> Triples:
    """Take the SVD of R of a QR factorization; triples at rounding get zeros for left vectors."""
    xp = namespace(matrices)
    q = int(matrices.shape[2])
    _, sigma, vh = xp.linalg.svd(triangular_factor(matrices), full_matrices=False)
    sigma = sigma[:, :rank]
    vh = vh[:, :rank, :]
    largest = xp.max(sigma, axis=1, keepdims=True)
    is_above_rounding = sigma > q * unit_roundoff("float64") * largest
    divisor = xp.where(is_above_rounding, sigma, xp.ones_like(sigma))
    inverse = xp.where(is_above_rounding, 1.0 / divisor, xp.zeros_like(sigma))
    u = matrices @ (xp.matrix_transpose(vh) * inverse[:, None, :])
    return u, sigma, vh


def by_iteration(matrices: Array, rank: int) -> Triples:
    """Iterate a subspace from a random start that is always the same; end by Rayleigh–Ritz."""
    xp = namespace(matrices)
    q = int(matrices.shape[2])
    random = np.random.default_rng(0).standard_normal((q, rank + OVERSAMPLING))
    transposed = xp.matrix_transpose(matrices)
    basis = xp.linalg.qr(matrices @ like(random, matrices)).Q
    for _ in range(3):
        basis = xp.linalg.qr(matrices @ (transposed @ basis)).Q
    # Rayleigh–Ritz: the singular triples of Q Qᵀ R.
    v, sigma, uh = xp.linalg.svd(transposed @ basis, full_matrices=False)
    u = basis @ xp.matrix_transpose(uh)
    return u[:, :, :rank], sigma[:, :rank], xp.matrix_transpose(v)[:, :rank, :]


def by_krylov_spaces(matrices: Array, rank: int) -> Triples:
    """Solve each matrix alone by `Krylov`, to a thousandth: these are starts."""
    xp = namespace(matrices)
    solver = Krylov(tolerance=1e-3)
    batch = range(int(matrices.shape[0]))
    triples = [_by_krylov_space(matrices[i, :, :], rank, solver) for i in batch]
    u, sigma, vh = (xp.stack(part, axis=0) for part in zip(*triples, strict=True))
    return u, sigma, vh


def _by_krylov_space(matrix: Array, rank: int, solver: Krylov) -> Triples:
    xp = namespace(matrix)
    p, q = matrix.shape
    # In double precision the solver's certificate needs no residual; in this shape the
    # rearrangement is the matrix itself.
    target = Dense(as_double(matrix))
    shape = KroneckerShape(((int(p), 1), (1, int(q))))
    terms = solver.solve(target, shape, rank=rank).approximation
    left, right = (xp.reshape(f, (f.shape[0], -1)) for f in terms.factors)
    u = xp.matrix_transpose(zero_padded(left, 0, rank))
    sigma = zero_padded(terms.weights, 0, rank)
    vh = zero_padded(right, 0, rank)
    dtype = matrix.dtype
    return xp.astype(u, dtype), xp.astype(sigma, dtype), xp.astype(vh, dtype)


def gauge_transforms(triangles: tuple[Array, Array], rank: int) -> tuple[Array, Array]:
    """Return S and T (L, r, rank) that transform a pair into its singular gauge.

    Truncated or padded to ``rank`` components. U√σ = B S and V√σ = Aᵀ T. ``triangles`` are R of
    thin QR factorizations of B and Aᵀ, or of G^½ B and C^½ Aᵀ for the gauge of that norm.
    """
    xp = namespace(*triangles)
    columns, sigma, rows = gauge_of(*triangles)
    root = xp.sqrt(sigma)[:, None, :]
    left = zero_padded(columns * root, 2, rank)
    right = zero_padded(xp.matrix_transpose(rows) * root, 2, rank)
    return left[:, :, :rank], right[:, :, :rank]


def first_factor_fastest(transforms: Array, inner: tuple[int, ...]) -> Array:
    """Reorder components (L, R, r): along the first inner factor, then along the second, ….

    The other order is as good a gauge. On real adapters this one starts nearer, by up to a tenth,
    and joint least squares ends as near or nearer on average (ranks 4 to 16), single layers by a
    tenth; fewer linger on the way.
    """
    xp = namespace(transforms)
    d = len(inner)
    grid = xp.reshape(transforms, (*transforms.shape[:2], *reversed(inner)))
    return xp.reshape(xp.permute_dims(grid, (0, 1, *range(d + 1, 1, -1))), transforms.shape)


def side_terms(
    side: Array,
    transform: Array,
    shape: KroneckerShape,
    rank: int,
    traces: PartialTraces | None = None,
) -> Stacks:
    """Return orthogonal Kronecker terms of each ``side @ transform`` (L, m, r).

    With ``traces`` they are orthogonal in the norm of these.
    """
    if traces is None:
        return orthogonal_terms(rearrange(side @ transform, shape), rank)
    roots, inverse_roots = traces.roots
    whitened = rearrange(kron_apply(roots, side @ transform, shape.rows), shape)
    return apply_to_rows(orthogonal_terms(whitened, rank), inverse_roots)


def orthogonal_terms(tensor: Array, rank: int) -> Stacks:
    """Return the largest of mutually orthogonal rank-one terms of each tensor (L, p_1, …, p_d).

    The first axis is split off by its `leading_triples` and each right singular vector is split in
    turn, so for two axes this is close to the best approximation there is (Eckart–Young), and for
    more an orthogonal one: no cancellation, γ = 1.

    Returns
    -------
    list of Array, shapes (L, p_i, s)
        At most ``rank`` terms, padded with zero terms.
    """
    xp = namespace(tensor)
    batch, p, *other_sizes = tensor.shape
    # Terms 1: the first axis against all others.
    u, sigma, vh = leading_triples(xp.reshape(tensor, (batch, p, -1)), rank)
    leading = int(sigma.shape[1])
    if len(other_sizes) == 1:
        root = xp.sqrt(sigma)[:, None, :]
        left = u * root
        right = xp.matrix_transpose(vh) * root
        return [zero_padded(left, 2, rank), zero_padded(right, 2, rank)]
    # Terms 2: each right vector, with its weight, is a tensor of one axis fewer: its terms in turn.
    right_tensors = xp.reshape(sigma[:, :, None] * vh, (batch * leading, *other_sizes))
    inner = orthogonal_terms(right_tensors, rank)
    count = int(inner[0].shape[2])
    first = xp.broadcast_to(u[:, :, :, None], (batch, p, leading, count))
    stacks = [xp.reshape(first, (batch, p, leading * count))]
    for stack in inner:
        q = stack.shape[1]
        stack = xp.permute_dims(xp.reshape(stack, (batch, leading, q, count)), (0, 2, 1, 3))
        stacks.append(xp.reshape(stack, (batch, q, leading * count)))
    # Terms 3: of all products of a left vector and a term of its tensor the largest; they are
    # orthogonal.
    largest = _largest(stacks, min(rank, leading * count))
    return [zero_padded(stack, 2, rank) for stack in largest]


def _largest(stacks: Stacks, rank: int) -> Stacks:
    """Select the ``rank`` largest terms of each problem."""
    xp = namespace(*stacks)
    squares = math.prod(xp.sum(stack * stack, axis=1) for stack in stacks)
    order = xp.argsort(squares, axis=1, descending=True, stable=True)[:, :rank]
    batch = range(int(order.shape[0]))
    selected = []
    for stack in stacks:
        columns = [xp.take(stack[k, :, :], order[k, :], axis=1) for k in batch]
        selected.append(xp.stack(columns, axis=0))
    return selected


def as_factors(stacks: Stacks, shape: KroneckerShape) -> list[Array]:
    """Reshape stacks (L, m_i·n_i, s) to factors (L, s, m_i, n_i)."""
    xp = namespace(*stacks)
    factors = []
    for stack, (m, n) in zip(stacks, shape.factors, strict=True):
        rows = xp.matrix_transpose(stack)
        factors.append(xp.reshape(rows, (stack.shape[0], stack.shape[2], m, n)))
    return factors


def as_stacks(factors: list[Array]) -> Stacks:
    """Reshape factors (L, s, m_i, n_i) to stacks (L, m_i·n_i, s)."""
    xp = namespace(*factors)
    stacks = []
    for factor in factors:
        batch, s, m, n = factor.shape
        stacks.append(xp.matrix_transpose(xp.reshape(factor, (batch, s, m * n))))
    return stacks
