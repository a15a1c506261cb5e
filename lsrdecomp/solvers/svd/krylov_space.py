"""Block Krylov spaces of one matrix, or of a batch of matrices of one size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg

from lsrdecomp.arrays import (
    NUMPY,
    Array,
    adjoint,
    is_complex,
    like,
    namespace,
    to_numpy,
    triangular_factor,
)
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.svd.certificate import Certificate

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.targets.target import Rearranged


@dataclass(frozen=True, slots=True)
class AdjointOperator:
    """Rᴴ of an operator R."""

    operator: Rearranged

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of Rᴴ."""
        rows, columns = self.operator.shape
        return columns, rows

    @property
    def prototype(self) -> Array:
        """An array of the library and type of the products."""
        return self.operator.prototype

    def matmat(self, x: Array) -> Array:
        """Return Rᴴ x."""
        return self.operator.rmatmat(x)

    def rmatmat(self, y: Array) -> Array:
        """Return R y."""
        return self.operator.matmat(y)

    def formed(self) -> Array:
        """Form Rᴴ."""
        return adjoint(self.operator.formed())


MAX_KEPT_ENTRIES = 2**18
"""Random numbers of a start that are kept for the next solve of the same sizes: 1 MiB, by hand."""


class KrylovSpace:
    """A space of R Rᴴ that grows by blocks, fully reorthogonalised [1]_; R is divided by its norm.

    ``basis`` is Q (p, k) with orthonormal columns, ``images`` is Rᴴ Q (q, k), and ``projected`` is
    Qᴴ R Rᴴ Q (k, k), a NumPy array in double precision. Of a batch all have another axis in front:
    its spaces grow together.

    Parameters
    ----------
    operator : Rearranged
        R, with products of a matrix or of a stack of matrices.
    norm : float or Array
        ‖R‖_F; of a batch shape (L, 1, 1).
    block : int
        Columns of a block.
    seed : int
        Of the random start, drawn by NumPy whatever the library of R.

    References
    ----------
    .. [1] G. H. Golub and R. Underwood, The block Lanczos method for computing eigenvalues, in
       Mathematical Software III, 1977. doi:10.1016/B978-0-12-587260-7.50018-2
    """

    def __init__(self, operator: Rearranged, norm: Any, block: int, seed: int) -> None:
        self.operator = operator
        self.norm = norm
        prototype = operator.prototype
        self.unit = unit_roundoff(prototype.dtype)  # μ of the products
        rows, columns = operator.shape
        self.block = min(block, rows)
        self._seed = seed
        random = random_block(seed, columns, self.block, is_complex(prototype))
        start = like(random.copy(), prototype)  # torch warns of what cannot be written to
        self._first, self._triangle = orthonormal(operator.matmat(start) / norm)
        # The size of R from one random column to the next.
        self.sizes = _diagonal(self._triangle)
        self.n_blocks = 0
        self.basis: Array = self._first[..., :0]
        self.images: Array = None
        dtype = np.complex128 if is_complex(prototype) else np.float64
        self.projected: np.ndarray = np.zeros((*self._first.shape[:-2], 0, 0), dtype)

    @property
    def size(self) -> int:
        """k, the dimension of the space."""
        return int(self.projected.shape[-1])

    def falls_fast(self, rank: int) -> bool:
        """Return whether sizes fall so fast from column to column that one block may suffice."""
        return bool((self.sizes[..., -1] <= 0.06 * self.sizes[..., rank - 1]).all())

    @property
    def decays(self) -> np.ndarray:
        """How singular values of R times random columns fall, of each matrix; about one for noise.

        The root mean square of the smaller half over that of the larger half, but for what β random
        columns a row make of noise.
        """
        sigma = np.atleast_2d(np.linalg.svd(np.triu(self._triangle), compute_uv=False))
        half = sigma.shape[1] // 2
        larger, smaller = sigma[:, :half], sigma[:, half:]
        ratios = np.linalg.norm(smaller, axis=1) / np.linalg.norm(larger, axis=1)
        beta = self.block / self.operator.shape[0]
        decays: np.ndarray = ratios * (1.0 + beta**0.5) * (1.0 + beta)
        return decays

    @property
    def sinks(self) -> bool:
        """Whether sizes sink into the rounding of the products."""
        invisible = 4.0 * self.unit * self.operator.shape[1] ** 0.5
        return bool(np.any(self.sizes[..., -1] <= invisible * self.sizes.max(axis=-1)))

    def grow(self) -> None:
        """Take the next block into the space: what R Rᴴ of the newest one has outside of it."""
        self._append(self._outside(self._remainder) if self.n_blocks else self._first)

    def certificates(self, *, fine: bool = False) -> list[Certificate]:
        """Return the certificate of each matrix, of one matrix a list of one.

        ``fine``: singular values come from the images instead of their squares, to all digits.
        """
        if fine:
            triangle = to_numpy(triangular_factor(self.images))
            _, sigma, right = np.linalg.svd(triangle, full_matrices=False)
            values = sigma.astype(np.float64) ** 2
            vectors = right.conj().swapaxes(-1, -2)
        else:
            ascending, reverse = np.linalg.eigh(self.projected)
            values = ascending[..., ::-1]
            vectors = reverse[..., ::-1]
        gram = to_numpy(adjoint(self._remainder) @ self._remainder)
        if values.ndim == 1:
            return [Certificate.of(values, vectors, gram, self.unit, self.n_blocks)]
        parts = zip(values, vectors, gram, strict=True)
        return [Certificate.of(*part, self.unit, self.n_blocks) for part in parts]

    def _append(self, block: Array) -> None:
        """Take an orthonormal block into the space, and multiply it by R Rᴴ."""
        xp = namespace(block)
        n_old = self.size
        images = self.operator.rmatmat(block) / self.norm
        self.basis = xp.concat((self.basis, block), axis=-1) if n_old else block
        self.images = xp.concat((self.images, images), axis=-1) if n_old else images
        product = self.operator.matmat(images) / self.norm
        overlap = adjoint(self.basis) @ product
        self._remainder = product - self.basis @ overlap
        # The new columns of Qᴴ R Rᴴ Q; `eigh` reads the lower triangle.
        columns = to_numpy(overlap)
        n_new = n_old + self.block
        projected = np.zeros((*columns.shape[:-2], n_new, n_new), self.projected.dtype)
        projected[..., :n_old, :n_old] = self.projected
        projected[..., n_old:, :] = columns.conj().swapaxes(-1, -2)
        self.projected = projected
        self.n_blocks += 1

    def _outside(self, remainder: Array) -> Array:
        """Return an orthonormal basis of a block that was projected out of the space.

        A column that nearly depends on others is mostly rounding after they are taken out, in the
        space and outside: noise takes its place, so that a space which has become invariant goes on
        with fresh directions and finds repeated singular values. The overlap with the space that
        rounding leaves is taken out where its square would be seen in the energies.
        """
        block, triangle = orthonormal(remainder)
        smallest = float(np.min(_diagonal(triangle)))
        if smallest <= 4.0 * self.unit:
            rows = int(remainder.shape[-2])
            noise = random_block(self._seed + 1, rows, self.block, is_complex(remainder))
            noise = like(noise * (4.0 * self.unit / rows**0.5), remainder)
            block, _ = orthonormal(remainder + noise)
        max_overlap = self.unit**0.5
        if smallest * max_overlap > self.unit:
            return block
        xp = namespace(block)
        for _ in range(2):
            overlap = adjoint(self.basis) @ block
            if float(xp.max(xp.abs(overlap))) <= max_overlap * max_overlap * 4.0:
                break
            block, _ = orthonormal(block - self.basis @ overlap)
        return block


def random_block(seed: int, rows: int, columns: int, is_complex: bool) -> np.ndarray:
    """Return random numbers (rows, columns), the same in every library and precision."""
    draw = _kept if rows * columns <= MAX_KEPT_ENTRIES else _drawn
    return draw(seed, rows, columns, is_complex)


def _drawn(seed: int, rows: int, columns: int, is_complex: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    block: Any = rng.standard_normal((rows, columns), np.float32)
    if is_complex:
        block = block + 1j * rng.standard_normal((rows, columns), np.float32)
    block.setflags(write=False)
    return np.asarray(block)


_kept = lru_cache(maxsize=16)(_drawn)


def orthonormal(block: Array) -> tuple[Array, np.ndarray]:
    """Return Q of thin QR factorizations of (…, p, b), and a NumPy array with R as upper triangle.

    NumPy factorizes single precision in double and copies R besides, at four times the price of
    LAPACK.
    """
    xp = namespace(block)
    if xp is not NUMPY:
        basis, triangle = xp.linalg.qr(block)
        return basis, to_numpy(triangle)
    if block.ndim == 2:
        factorize, form = _lapack_qr(block.dtype.char)
        reflectors, scales, _, _ = factorize(block)
        return form(reflectors[:, : len(block)], scales)[0], reflectors[: block.shape[1]]
    parts = [orthonormal(part) for part in block]
    bases, triangles = zip(*parts, strict=True)
    return np.stack(bases), np.stack(triangles)


def _diagonal(triangle: np.ndarray) -> np.ndarray:
    diagonal: np.ndarray = np.abs(np.diagonal(triangle, axis1=-2, axis2=-1))
    return diagonal


@cache
def _lapack_qr(type_code: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    names = ("geqrf", "ungqr" if type_code in "FD" else "orgqr")
    factorize, form = scipy.linalg.get_lapack_funcs(names, dtype=np.dtype(type_code))
    return factorize, form
