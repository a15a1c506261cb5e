"""Derivatives of a truncated SVD, finite at equal singular values that are kept together.

With σ_i kept and σ_j left out, a change dR of R moves the truncation R̂ by

    dR̂ = dR − (I − U Uᴴ) dR (I − V Vᴴ)
         + Σ_ij u_i (σ_j² e_ij + σ_i σ_j f̄_ji) / (σ_i² − σ_j²) v_jᴴ
         + Σ_ij u_j (σ_j² f_ji + σ_i σ_j ē_ij) / (σ_i² − σ_j²) v_iᴴ,

where U and V are the singular vectors that are kept, e_ij = u_iᴴ dR v_j and f_ji = u_jᴴ dR v_i
[1]_. There is no difference between two values that are kept, nor between two that are left out.
The map from dR to dR̂ is its own adjoint, so that it takes gradients back too.

References
----------
.. [1] N. J. Higham, Functions of Matrices, 2008, theorem 3.11, for the function that keeps the
   eigenvalues ±σ_i of [[0, R], [Rᴴ, 0]] and makes the others zero. doi:10.1137/1.9780898717778
"""

from __future__ import annotations

from lsrdecomp.arrays import Array, adjoint, namespace


def truncation_change(triples: tuple[Array, Array, Array], rank: int, change: Array) -> Array:
    """Return by how much the first ``rank`` terms of a matrix move as it changes.

    NaN where the last value that is kept equals the first that is left out.

    Parameters
    ----------
    triples : tuple of arrays
        All singular triples of the matrix, thin: U (p, n), σ (n,) descending, Vᴴ (n, q).
    rank : int
        Terms that are kept.
    change : array, shape (p, q)
        Change of the matrix; or the gradient by the truncation, which becomes that by the matrix.
    """
    u, sigma, vh = triples
    xp = namespace(u)
    kept_u, other_u = u[:, :rank], u[:, rank:]
    kept_vh, other_vh = vh[:rank, :], vh[rank:, :]
    # 1. What keeps the row space or the column space.
    rows = adjoint(kept_u) @ change
    columns = change @ adjoint(kept_vh)
    core = rows @ adjoint(kept_vh)
    moved = kept_u @ rows + (columns - kept_u @ core) @ kept_vh
    if other_u.shape[1] == 0:
        return moved
    # 2. What turns kept directions into those left out.
    kept = xp.reshape(sigma[:rank], (-1, 1))
    other = xp.reshape(sigma[rank:], (1, -1))
    is_cut = kept - other <= rounding_gap(sigma)
    gaps = (kept - other) * (kept + other)
    gaps = xp.where(is_cut, xp.asarray(float("nan"), dtype=gaps.dtype), gaps)
    e = rows @ adjoint(other_vh)
    f = adjoint(adjoint(other_u) @ columns)
    into_rows = (other**2 / gaps) * e + (kept * other / gaps) * f
    into_columns = (other**2 / gaps) * f + (kept * other / gaps) * e
    return moved + kept_u @ into_rows @ other_vh + other_u @ adjoint(into_columns) @ kept_vh


def rounding_gap(sigma: Array) -> Array:
    """Return the distance below which rounding alone may part two singular values."""
    return 64.0 * sigma.shape[0] * _unit(sigma) * sigma[0]


def tied_gap(sigma: Array) -> Array:
    """Return the distance of two values below which their vectors turn by no known angle.

    Above it half of the digits of that angle are right.
    """
    return _unit(sigma) ** 0.5 * sigma[0]


def _unit(sigma: Array) -> float:
    return 0.5 * float(namespace(sigma).finfo(sigma.dtype).eps)
