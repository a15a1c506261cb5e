"""Where joint least squares starts: orthogonal Kronecker terms of each side, in the singular gauge of the norm.

The first singular triples of a batch of matrices come in little memory beside them where they are
large. These are starts, wanted by the thousand, and nobody is told how near the optimum they are.
`BatchedKrylov` answers for its errors, and that takes 2.5 to 6 times as long on batches of small
matrices (.8 to 3.5 at 384 × 256); at a loose tolerance it is 1.6 times faster from there on, and 3
to 21 times slower on small ones, by ``benchmarks/solvers/two_factors.py --only leading``. The two
share the last step, `rayleigh_ritz`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import Array, as_double, like, namespace, triangular_factor, zero_padded
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.pair.partial_traces import PartialTraces, along_rows, kron_apply
from lsrdecomp.solvers.svd.batch import rayleigh_ritz
from lsrdecomp.solvers.svd.golub_kahan import BlockGolubKahan
from lsrdecomp.targets.base import Dense
from lsrdecomp.targets.weighted import gauge_of

if TYPE_CHECKING:
    from lsrdecomp.solvers.batched_terms import Stacks

SMALL = 2**17
"""Entries of a matrix up to which its SVD is taken as it is."""

NARROW = 512
"""Columns up to which the SVD of R of a QR factorization is taken instead, above that a Krylov
space."""

EXCESS = 1e-3
"""Of the error of a Krylov space's triples over the optimum, relative; they are starts."""

OVERSAMPLING = 8
"""Columns of a subspace beyond the triples asked for."""

PASSES = 3
"""Passes of subspace iteration, each two products with the matrix."""


def leading_triples(matrices: Array, rank: int) -> tuple[Array, Array, Array]:
    """U (L, p, k), σ (L, k) and Vᵀ (L, k, q) of the k = min(rank, p, q) largest singular values of real matrices.

    A full SVD takes about six times the memory of a square matrix. A large narrow one is taken
    apart through R instead: X = Q R and R = W σ Vᵀ give U = X V σ⁻¹ without Q. A large one that is
    wide too goes to `BlockGolubKahan`, if few triples are asked for: by its certificate their error
    is at most `EXCESS` above the optimum, relative. Of any other one few triples come from a few
    passes of subspace iteration [1]_, whose error is up to about 1e-2 above the optimum for noise
    and 1e-3 or less where the spectrum falls, at a tenth of the time of an SVD of 256 × 256.

    .. [1] N. Halko, P. G. Martinsson and J. A. Tropp, Finding structure with randomness, SIAM
       Review 53 (2011), algorithm 4.4. doi:10.1137/090771806
    """
    xp = namespace(matrices)
    p, q = (int(size) for size in matrices.shape[1:])
    rank = min(rank, p, q)
    if p < q:
        v, sigma, uh = leading_triples(xp.matrix_transpose(matrices), rank)
        return xp.matrix_transpose(uh), sigma, xp.matrix_transpose(v)
    # Triples 1: few of a wide matrix by a Krylov space, each matrix alone.
    if q > NARROW and 8 * rank <= q:
        each = [_alone(matrices[i, :, :], rank) for i in range(int(matrices.shape[0]))]
        u, sigma, vh = (xp.stack(part, axis=0) for part in zip(*each, strict=True))
        return u, sigma, vh
    # Triples 2: few of any other by subspace iteration, all matrices together.
    if 4 * (rank + OVERSAMPLING) <= q:
        return _by_iteration(matrices, rank)
    # Triples 3: many of a small one by its SVD, of a large narrow one through R of a QR
    # factorization.
    if p * q <= SMALL:
        u, sigma, vh = xp.linalg.svd(matrices, full_matrices=False)
        return u[:, :, :rank], sigma[:, :rank], vh[:, :rank, :]
    _, sigma, vh = xp.linalg.svd(triangular_factor(matrices), full_matrices=False)
    sigma, vh = sigma[:, :rank], vh[:, :rank, :]
    above = sigma > q * unit_roundoff("float64") * xp.max(sigma, axis=1, keepdims=True)
    inverse = xp.where(
        above, 1.0 / xp.where(above, sigma, xp.ones_like(sigma)), xp.zeros_like(sigma)
    )
    return matrices @ (xp.matrix_transpose(vh) * inverse[:, None, :]), sigma, vh


def _by_iteration(matrices: Array, rank: int) -> tuple[Array, Array, Array]:
    """Subspace iteration from a random start that is always the same, ended by Rayleigh–Ritz."""
    xp, q = namespace(matrices), int(matrices.shape[2])
    start = like(np.random.default_rng(0).standard_normal((q, rank + OVERSAMPLING)), matrices)
    transposed = xp.matrix_transpose(matrices)
    basis = xp.linalg.qr(matrices @ start).Q
    for _ in range(PASSES):
        basis = xp.linalg.qr(matrices @ (transposed @ basis)).Q
    u, sigma, vh = rayleigh_ritz(matrices, basis)
    return u[:, :, :rank], sigma[:, :rank], vh[:, :rank, :]


def _alone(matrix: Array, rank: int) -> tuple[Array, Array, Array]:
    xp, (p, q), kind = namespace(matrix), matrix.shape, matrix.dtype
    matrix = as_double(matrix)  # whose certificate needs no residual
    shape = KroneckerShape(((int(p), 1), (1, int(q))))  # its rearrangement is the matrix itself
    approximation = (
        BlockGolubKahan(tolerance=EXCESS).solve(Dense(matrix), shape, rank=rank).approximation
    )
    u, vh = (zero_padded(xp.reshape(f, (f.shape[0], -1)), 0, rank) for f in approximation.factors)
    triples = xp.matrix_transpose(u), zero_padded(approximation.weights, 0, rank), vh
    return tuple(xp.astype(each, kind) for each in triples)


def gauge_transforms(triangles: tuple[Array, Array], rank: int) -> tuple[Array, Array]:
    """S, T (L, r, rank) that transform a pair into U√σ = B S, V√σ = Aᵀ T of its singular gauge, truncated or padded.

    ``triangles`` are R of thin QR factorizations of B and Aᵀ, or of G^½ B and C^½ Aᵀ for the gauge
    of that norm.
    """
    xp = namespace(*triangles)
    columns, sigma, rows = gauge_of(*triangles)
    root = xp.sqrt(sigma)[:, None, :]
    transforms = [
        zero_padded(transform * root, 2, rank)[:, :, :rank]
        for transform in (columns, xp.matrix_transpose(rows))
    ]
    return transforms[0], transforms[1]


def first_factor_fastest(transforms: Array, inner: tuple[int, ...]) -> Array:
    """Components (L, R, r) in a new order: ascending along the first inner factor, then along the second, ….

    The other order is as good a gauge. On real adapters this one starts nearer, by up to a tenth,
    and joint least squares ends as near or nearer on average (ranks 4 to 16), single layers by a
    tenth; fewer linger on the way.
    """
    xp, d = namespace(transforms), len(inner)
    grid = xp.reshape(transforms, (*transforms.shape[:2], *reversed(inner)))
    return xp.reshape(xp.permute_dims(grid, (0, 1, *range(d + 1, 1, -1))), transforms.shape)


def side_terms(
    side: Array,
    transform: Array,
    shape: KroneckerShape,
    rank: int,
    traces: PartialTraces | None = None,
) -> Stacks:
    """Orthogonal Kronecker terms of each ``side @ transform`` (L, m, r); with ``traces`` orthogonal in their norm."""
    if traces is None:
        return orthogonal_terms(rearrange(side @ transform, shape), rank)
    roots, inverses = traces.roots
    white = rearrange(kron_apply(roots, side @ transform, shape.rows), shape)
    return along_rows(orthogonal_terms(white, rank), inverses)


def orthogonal_terms(tensor: Array, rank: int) -> Stacks:
    """The ``rank`` largest of mutually orthogonal rank-one terms of each tensor (L, p_1, …, p_d).

    The first axis is split off by its `leading_triples` and each right singular vector is split in
    turn, so for two axes this is close to the best approximation there is (Eckart–Young), and for
    more an orthogonal one: no cancellation, γ = 1.

    Returns
    -------
    list of Array, shapes (L, p_i, s)
        At most ``rank`` terms, padded with zero terms.
    """
    xp = namespace(tensor)
    batch, p = tensor.shape[0], tensor.shape[1]
    rest = tuple(tensor.shape[2:])
    # Terms 1: the first axis against all others.
    u, sigma, vh = leading_triples(xp.reshape(tensor, (batch, p, -1)), rank)
    leading = int(sigma.shape[1])
    if len(rest) == 1:
        root = xp.sqrt(sigma)[:, None, :]
        return [zero_padded(stack, 2, rank) for stack in (u * root, xp.matrix_transpose(vh) * root)]
    # Terms 2: each right vector, with its weight, is a tensor of one axis fewer: its terms in turn.
    inner = orthogonal_terms(xp.reshape(sigma[:, :, None] * vh, (batch * leading, *rest)), rank)
    count = int(inner[0].shape[2])
    first = xp.reshape(
        xp.broadcast_to(u[:, :, :, None], (batch, p, leading, count)), (batch, p, leading * count)
    )
    stacks = [first]
    for stack in inner:
        q = stack.shape[1]
        stack = xp.permute_dims(xp.reshape(stack, (batch, leading, q, count)), (0, 2, 1, 3))
        stacks.append(xp.reshape(stack, (batch, q, leading * count)))
    # Terms 3: of all products of a left vector and a term of its tensor the largest; they are
    # orthogonal.
    return [zero_padded(stack, 2, rank) for stack in _largest(stacks, min(rank, leading * count))]


def _largest(stacks: Stacks, rank: int) -> Stacks:
    xp = namespace(*stacks)
    size = math.prod(xp.sum(stack * stack, axis=1) for stack in stacks)
    order = xp.argsort(size, axis=1, descending=True, stable=True)[:, :rank]
    chosen = []
    for stack in stacks:
        picked = [xp.take(stack[k, :, :], order[k, :], axis=1) for k in range(int(stack.shape[0]))]
        chosen.append(xp.stack(picked, axis=0))
    return chosen


def as_factors(stacks: Stacks, shape: KroneckerShape) -> list[Array]:
    """Stacks (L, m_i·n_i, s) as factors (L, s, m_i, n_i)."""
    xp = namespace(*stacks)
    pairs = zip(stacks, shape.factors, strict=True)
    return [
        xp.reshape(xp.matrix_transpose(f), (f.shape[0], f.shape[2], m, n)) for f, (m, n) in pairs
    ]


def as_stacks(factors: list[Array]) -> Stacks:
    """Factors (L, s, m_i, n_i) as stacks (L, m_i·n_i, s)."""
    xp = namespace(*factors)
    return [
        xp.matrix_transpose(xp.reshape(f, (f.shape[0], f.shape[1], f.shape[2] * f.shape[3])))
        for f in factors
    ]
