"""Singular triples of a rearrangement as Kronecker terms, and what every solver needs of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from lsrdecomp.arrays import Array, device, namespace, norm, to_numpy
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.solver import Status
from lsrdecomp.targets.residual import cached_row_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.targets.target import Target

Triples: TypeAlias = tuple[Array, Array, Array]
"""U (…, p, s), σ (…, s) and Vᴴ (…, s, q)."""


def as_matrix(target: Target) -> Array:
    """Form any target: the rearrangement of (m×1) ⊗ (1×n) is the matrix itself."""
    m, n = target.shape
    return target.rearranged(KroneckerShape(((m, 1), (1, n)))).formed()


def required_rank(tails: list[float], rank: int | None, atol: float | None) -> tuple[int, Status]:
    """Return the terms to keep, given the error after 0, 1, 2, … of them, and the status."""
    max_terms = len(tails) - 1
    if rank is not None:
        max_terms = min(max_terms, rank)
    if atol is None:
        return max_terms, Status.rank_reached
    for terms in range(max_terms):
        if tails[terms] <= atol:
            return terms, Status.converged
    is_met = tails[max_terms] <= atol
    return max_terms, Status.converged if is_met else Status.rank_exhausted


def svd_of_tall(matrix: Array) -> tuple[Array, Array, Array]:
    """Return the thin SVD of a tall matrix; of a single column of NumPy's without LAPACK."""
    if type(matrix) is np.ndarray and matrix.shape[1] == 1:
        length = norm(matrix)
        if length > 0.0:
            unit = matrix / length
            return unit, np.full(1, length, unit.real.dtype), np.ones((1, 1), matrix.dtype)
    u, sigma, vh = namespace(matrix).linalg.svd(matrix, full_matrices=False)
    return u, sigma, vh


def as_separated(
    u: Array, sigma: Array, vh: Array, shape: KroneckerShape, rank: int
) -> SeparatedMatrix:
    """Return the first ``rank`` singular triples of a rearrangement as Kronecker terms.

    Zero terms are left out.
    """
    rank = int(np.count_nonzero(to_numpy(sigma[:rank])))
    return _terms(u, sigma, vh, shape, rank)


def traced_terms(matrix: Array, shape: KroneckerShape, rank: int) -> SeparatedMatrix:
    """Return the first terms of a matrix without looking at its numbers: `jax.jit` knows none.

    In the precision of the matrix; a matrix of fewer terms has weights of zero, or of rounding.
    """
    from lsrdecomp.solvers.svd.jax_truncation import first_triples

    u, sigma, vh = first_triples(rearrange(matrix, shape), rank)
    return _terms(u, sigma, vh, shape, rank)


def _terms(u: Array, sigma: Array, vh: Array, shape: KroneckerShape, rank: int) -> SeparatedMatrix:
    """Return the first ``rank`` singular triples, with the signs of `signed`, as terms."""
    (m, n), (p, q) = shape.factors
    if type(u) is np.ndarray:  # without the calls around each of NumPy's functions
        left, right = signed(u[:, :rank].T, vh[:rank, :])
        factors = left.reshape(rank, m, n), right.reshape(rank, p, q)
        return SeparatedMatrix(sigma[:rank], factors)
    xp = namespace(u)
    left, right = signed(xp.matrix_transpose(u[:, :rank]), vh[:rank, :])
    factors = xp.reshape(left, (rank, m, n)), xp.reshape(right, (rank, p, q))
    return SeparatedMatrix(sigma[:rank], factors)


def signed(left: Array, right: Array) -> tuple[Array, Array]:
    """Make the largest entry of each left singular vector positive; turn the right ones with it.

    Shapes (…, s, p) and (…, s, q). SVD libraries disagree on signs.
    """
    if 0 in left.shape:
        return left, right
    if type(left) is np.ndarray and left.ndim == 2:
        places = np.abs(left).argmax(axis=1)
        entries = left[np.arange(len(left)), places]
        phases = (entries / np.abs(entries))[:, None]
        return left / phases, right * phases
    xp = namespace(left)
    rows = left if left.ndim == 2 else xp.reshape(left, (-1, left.shape[-1]))
    peaks = xp.argmax(xp.abs(rows), axis=-1)
    entries = rows[xp.arange(rows.shape[0], device=device(left)), peaks]
    phases = (entries / xp.abs(entries))[:, None]
    if left.ndim > 2:
        phases = xp.reshape(phases, (*left.shape[:-1], 1))
    return left / phases, right * phases


def residual_blocks(rows: Array, left: Array, sigma: Array, vh: Array) -> Iterator[Array]:
    """Yield R − U Σ Vᴴ, a block of rows at a time that stays in the cache."""
    if sigma.dtype != left.dtype:
        sigma = namespace(left).astype(sigma, left.dtype)
    weighted = left * sigma
    for part in cached_row_blocks(*rows.shape):
        yield rows[part, :] - weighted[part, :] @ vh


def as_sums(u: Array, sigma: Array, vh: Array, shape: KroneckerShape) -> list[SeparatedMatrix]:
    """Return singular triples (L, p, s), (L, s), (L, s, q) as Kronecker terms, one sum a matrix."""
    xp = namespace(u)
    rank = int(sigma.shape[1])
    (m, n), (p, q) = shape.factors
    left, right = signed(xp.matrix_transpose(u), vh)
    left = xp.reshape(left, (-1, rank, m, n))
    right = xp.reshape(right, (-1, rank, p, q))
    batch = range(int(sigma.shape[0]))
    return [SeparatedMatrix(sigma[i, :], (left[i, :, :, :], right[i, :, :, :])) for i in batch]
