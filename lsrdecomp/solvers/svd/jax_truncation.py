"""The truncated SVD of a JAX array, with derivatives where these exist."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lsrdecomp.solvers.svd.derivatives import rounding_gap, tied_gap, truncation_change

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.arrays import Array

    Triples = tuple[Array, Array, Array]


def first_triples(matrix: Array, rank: int) -> Triples:
    """Return the first ``rank`` singular triples of a matrix.

    Where values that are kept are equal, the tangents of the vectors are such that those of the sum
    are right; single terms have none there. Where the last value that is kept equals the first that
    is left out, or is rounding, they are NaN: within `jax.jit` nothing can be refused.
    """
    return _with_derivative()(matrix, rank)


@cache
def _with_derivative() -> Callable[[Array, int], Triples]:
    """Return the function and its rule; JAX is loaded where it is used."""
    import jax

    @partial(jax.custom_jvp, nondiff_argnums=(1,))
    def truncated(matrix: Array, rank: int) -> Triples:
        u, sigma, vh = jax.numpy.linalg.svd(matrix, full_matrices=False)
        return u[:, :rank], sigma[:rank], vh[:rank, :]

    truncated.defjvp(_derivative)
    return truncated


def _derivative(rank: int, primals: Any, tangents: Any) -> tuple[Triples, Triples]:
    """Return the triples and their tangents."""
    import jax.numpy as jnp

    (matrix,), (change,) = primals, tangents
    triples: Any = jnp.linalg.svd(matrix, full_matrices=False)
    u, sigma, vh = triples[0][:, :rank], triples[1][:rank], triples[2][:rank, :]
    v = vh.conj().T
    lengths = jnp.where(sigma <= rounding_gap(triples[1]), jnp.nan, sigma)
    # 1. The tangent of the sum, in coordinates of its terms.
    moved = truncation_change(triples, rank, change)
    columns = moved @ v
    rows = moved.conj().T @ u
    core = u.conj().T @ columns
    crossed = core.conj().T
    # 2. How vectors turn into each other; the half of a tangent each where values are equal.
    by_row, by_column = lengths[:, None], lengths[None, :]
    gaps = by_column - by_row
    is_tied = jnp.abs(gaps) <= tied_gap(triples[1])
    squares = jnp.where(is_tied, 1.0, gaps * (by_column + by_row))
    u_turn = (core * by_column + by_row * crossed) / squares
    v_turn = (core * by_row + by_column * crossed) / squares
    u_turn = jnp.where(is_tied, 0.5 * core / by_column, u_turn)
    v_turn = jnp.where(is_tied, 0.5 * crossed / by_column, v_turn)
    diagonal = jnp.diagonal(core)
    phase = jnp.diag(0.5 * (diagonal - diagonal.conj()) / lengths)  # of complex vectors
    off_diagonal = 1.0 - jnp.eye(rank, dtype=sigma.dtype)
    u_turn = u_turn * off_diagonal + 0.5 * phase
    v_turn = v_turn * off_diagonal - 0.5 * phase
    # 3. And out of the span of the others.
    u_change = u @ u_turn + (columns - u @ core) / lengths
    v_change = v @ v_turn + (rows - v @ crossed) / lengths
    changes = u_change, diagonal.real, v_change.conj().T
    return (u, sigma, vh), changes
