"""Leading subspaces of many small Gram matrices by powers of them, and a bound on what they miss.

LAPACK reduces one matrix after the other, by products with vectors; powers of all of them are
products of matrices.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lsrdecomp.arrays import NUMPY, OVERSAMPLING, adjoint
from lsrdecomp.precision import unit_roundoff

MAX_SIDE = 100
"""Rows of R(M), the shorter side, up to which powers are faster than LAPACK's few eigenvectors: by
timing of 64 matrices of 36 × 36 to 144 × 144 with flat spectra and steep ones, as are all numbers
of this file."""


class Workspace:
    """Arrays that one part of a batch leaves to the next: fresh memory costs as much as a product.

    Examples
    --------
    >>> workspace = Workspace()
    >>> first = workspace.array("powers", (2, 3, 3), np.dtype("float64"))
    >>> workspace.array("powers", (2, 3, 3), np.dtype("float64")) is first
    True
    """

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the array of this name, with whatever it holds; a new one if it does not fit."""
        array = self._arrays.get(name)
        if array is None or array.shape != shape or array.dtype != dtype:
            array = np.empty(shape, dtype)
            self._arrays[name] = array
        return array


def leading_subspaces(
    rows: np.ndarray, count: int, seed: int, workspace: Workspace
) -> tuple[np.ndarray, np.ndarray]:
    """Return orthonormal vectors near the ``count`` leading ones of G = R Rᴴ, and a bound on them.

    Two squarings give G⁴, and two products with it, after one with G, turn random vectors into the
    leading ones of G⁹ within its gaps. Let X be the Ritz vectors of G in that space, Θ their
    values, B = GX − XΘ, and τ a bound on G outside of it. Where τ is below the last θ that counts,
    the inertia of G − λI says that the eigenvalues of G are at most those of Θ + BᴴB/(θ − τ).
    Powers give τ: t ↦ t²ᵖ is convex, so that τ²ᵖ ≤ ‖Gᵖ‖² − ‖GᵖX‖².

    Parameters
    ----------
    rows : ndarray, shape (L, n, q)
        Matrices R of norm one.
    count : int
        Vectors wanted of each.
    seed : int
        Of the random vectors.
    workspace : Workspace

    Returns
    -------
    basis : ndarray, shape (L, n, count)
        Ritz vectors, the largest value first.
    max_sums : ndarray, shape (L,)
        At least the sum of the ``count`` largest eigenvalues, but for rounding; infinite where τ is
        too large to tell.
    """
    n_matrices, side = rows.shape[:2]
    width = min(count + OVERSAMPLING, side)
    n_squarings = 2
    # Subspace 1: powers G, G², G⁴, ….
    sizes = (n_squarings + 1, n_matrices, side, side)
    powers = workspace.array("powers", sizes, rows.dtype)
    np.matmul(rows, adjoint(rows), out=powers[0])
    for i in range(n_squarings):
        np.matmul(powers[i], powers[i], out=powers[i + 1])
    # Subspace 2: random vectors, turned by powers.
    space = powers[0] @ random_vectors(seed, side, width)
    for _ in range(2):
        space = np.linalg.qr(powers[-1] @ space)[0]
    # Subspace 3: Ritz vectors, and what is left of their images.
    images = powers[0] @ space
    values, vectors = np.linalg.eigh(adjoint(space) @ images)
    values = np.flip(values, axis=1)
    vectors = np.ascontiguousarray(np.flip(vectors, axis=2))
    basis = space @ vectors
    remainders = images @ vectors - basis * values[:, None, :]
    # Subspace 4: the bound on the sum of eigenvalues.
    gaps = values[:, count - 1] - _norms_outside(powers, basis)
    is_apart = gaps > 0.0
    changed = adjoint(remainders) @ remainders / np.where(is_apart, gaps, 1.0)[:, None, None]
    diagonal = np.arange(width)
    changed[:, diagonal, diagonal] += values
    max_sums = np.sum(np.linalg.eigvalsh(changed)[:, width - count :], axis=1)
    return basis[:, :, :count], np.where(is_apart, max_sums, np.inf)


def _norms_outside(powers: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Return bounds τ on the eigenvalues of matrices G outside of a space, by their powers."""
    # A difference below this share is rounding, and may have been as large.
    rounding = 4.0 * basis.shape[1] * unit_roundoff("float64")
    bounds = np.full(len(basis), np.inf)
    for exponent, power in enumerate(powers[1:], 2):
        whole = squared_norms(power)
        within = squared_norms(power @ basis)
        outside = np.maximum(whole - within, rounding * whole)
        bounds = np.minimum(bounds, outside ** (0.5**exponent))
    return bounds


def squared_norms(matrices: np.ndarray) -> np.ndarray:
    """Return the squared Frobenius norms of matrices (L, m, n), infinite where squares overflow."""
    rows = matrices.reshape(len(matrices), -1)
    with np.errstate(over="ignore", invalid="ignore"):
        squares: np.ndarray = NUMPY.vecdot(rows, rows).real
    return squares


@lru_cache(maxsize=16)
def random_vectors(seed: int, size: int, count: int) -> np.ndarray:
    """Return random vectors (size, count), which every part of a batch starts from."""
    vectors = np.random.default_rng(seed).standard_normal((size, count))
    vectors.setflags(write=False)
    return vectors
