"""Block Lanczos on R Rᴴ for matrices of one size together, and what its spaces have not found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg

from lsrdecomp.arrays import NUMPY, Array, adjoint, conjugate, is_complex, like, namespace, to_numpy
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.solver import ErrorKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIN_BLOCKS = 2
"""Blocks that a space needs before its excess is estimated. Set, as are the numbers of
`RitzPairs.excess`, on 1,000 matrices of 169 to 484 rows with fourteen kinds of spectra, clusters
and spikes over slow remainders among them."""

MAX_OVERLAP = 1e-4
"""Overlap of a new block with its space above which it is projected again: its square is an error
of the energies."""


class LanczosSpaces:
    """Krylov spaces of R Rᴴ, each of one matrix R (p, q), that grow together by blocks.

    ``basis`` is Q (L, p, k) with orthonormal columns, ``images`` is Rᴴ Q (L, q, k), and
    ``projected`` is Qᴴ R Rᴴ Q/‖R‖² (L, k, k), a NumPy array in double precision. After `multiply`
    ``following`` is the next block W (L, p, b), and ``coupling`` is N (L, b, b) in R Rᴴ Q_b = Q C +
    W N ‖R‖², where Q_b are the newest columns of Q.

    Parameters
    ----------
    operators : Array, shape (L, p, q)
    norms : ndarray, shape (L,)
        Their Frobenius norms.
    first : Array, shape (L, p, b)
        The first block, with orthonormal columns.
    noise : Array, shape (p, b)
        Directions to go on with where nothing is left of R Rᴴ Q_b outside of a space: a Krylov
        space that has become invariant then finds repeated singular values.
    """

    def __init__(self, operators: Array, norms: np.ndarray, first: Array, noise: Array) -> None:
        self.operators = operators
        self.roundoff = unit_roundoff(operators.dtype)  # μ of the products
        self.squared_norms = norms**2
        self._noise = noise
        self.basis = first
        self.images = self._multiplied_by_adjoint(first)
        self.projected = self._gram(self.images)
        self.following: Array = first[:, :, :0]
        self.coupling: np.ndarray = self.projected[:, :0, :]
        self._newest_images = self.images

    @property
    def size(self) -> int:
        """k, the dimension of each space."""
        return int(self.basis.shape[2])

    @property
    def block(self) -> int:
        """b, the columns that a step adds."""
        return int(self._noise.shape[1])

    def multiply(self) -> None:
        """Multiply the newest images by R: the next block, and its coupling to the space."""
        product = self.operators @ self._newest_images
        remainder = product - self.basis @ (adjoint(self.basis) @ product)
        self.following = self._outside(remainder)
        coupling = to_numpy(adjoint(self.following) @ product).astype(self.projected.dtype)
        self.coupling = coupling / self.squared_norms[:, None, None]

    def grow(self) -> None:
        """Take the next block into each space."""
        xp = namespace(self.basis)
        images = self._multiplied_by_adjoint(self.following)
        n_old = self.size
        n_new = n_old + self.block
        projected = np.zeros((len(self.projected), n_new, n_new), self.projected.dtype)
        projected[:, :n_old, :n_old] = self.projected
        projected[:, n_old:, n_old:] = self._gram(images)
        newest = slice(n_old - self.block, n_old)
        projected[:, n_old:, newest] = self.coupling
        projected[:, newest, n_old:] = self.coupling.conj().swapaxes(1, 2)
        self.projected = projected
        self.basis = xp.concat((self.basis, self.following), axis=2)
        self.images = xp.concat((self.images, images), axis=2)
        self._newest_images = images  # in one piece, as BLAS likes it

    def ritz_pairs(self) -> list[RitzPairs]:
        """Return the Ritz pairs of each space, and what couples them to the next block."""
        values, vectors = np.linalg.eigh(self.projected)
        residuals = self.coupling @ vectors[:, -self.block :, :]
        squares = np.einsum("lij,lij->lj", residuals, residuals.conj()).real
        parts = zip(values, squares, vectors, strict=True)
        return [RitzPairs.of(*each, self.roundoff) for each in parts]

    def leading_images(self, pairs: Sequence[RitzPairs], rank: int) -> Array:
        """Return Rᴴ q of the leading Ritz vectors q, shape (L, q, rank)."""
        vectors = np.stack([each.vectors[:, :rank] for each in pairs])
        return self.images @ like(vectors, self.images)

    def _outside(self, remainder: Array) -> Array:
        """Return orthonormal bases of blocks, which were projected out of each space.

        A column that nearly depends on others is mostly rounding after they are taken out, in the
        space and outside. Where the result may overlap the space by more than `MAX_OVERLAP`, it is
        projected again.
        """
        block, sizes = orthonormal_columns(remainder)
        smallest = float(np.min(sizes.min(axis=1) / self.squared_norms))
        if smallest <= 4.0 * self.roundoff:
            lengths = like(self.squared_norms * self.roundoff, block)[:, None, None]
            noise = self._noise[None, :, :] / self._noise.shape[0] ** 0.5
            block, _ = orthonormal_columns(remainder + lengths * noise)
        if smallest * MAX_OVERLAP > self.roundoff:
            return block
        xp = namespace(block)
        for _ in range(2):
            overlap = adjoint(self.basis) @ block
            if float(xp.max(xp.abs(overlap))) <= MAX_OVERLAP:
                break
            block, _ = orthonormal_columns(block - self.basis @ overlap)
        return block

    def _multiplied_by_adjoint(self, block: Array) -> Array:
        """Return Rᴴ times a block; of real matrices twice as fast as the adjoint of Qᴴ R."""
        transposed = namespace(block).matrix_transpose(self.operators)
        return conjugate(transposed @ conjugate(block))

    def _gram(self, images: Array) -> np.ndarray:
        dtype = np.complex128 if is_complex(images) else np.float64
        gram = to_numpy(adjoint(images) @ images).astype(dtype)
        projected: np.ndarray = gram / self.squared_norms[:, None, None]
        return projected


@dataclass(frozen=True, slots=True)
class RitzPairs:
    """Ritz pairs of R Rᴴ in one of `LanczosSpaces`, for ‖R‖ = 1, and what they may lack.

    Let q be Ritz vectors, θ q̃ᴴ = qᴴ R their images, and f the part of R q̃ outside of the space.
    Then R has the form of `Certificate`, transposed: the images of the first s capture Σ(θ² +
    ‖f‖²), and the optimum at most Σ‖f‖²τ²/(θ² − τ²) more, where τ < θ is the norm of what couples
    to none of them. Two figures are put for τ:

    - all of ‖R‖ that was not captured, which makes it a bound;
    - the largest value that the space has seen beyond s, coupling included. Then it is an
      estimate, as the bound by θ‖f‖ is, the distance from θ² to an eigenvalue of R Rᴴ [1]_, which
      needs no gap. The smaller of both is summed over the s terms.

    The estimate assumes that the first Ritz values are near the first eigenvalues, which takes two
    blocks, and three where θ_s does not stand apart: a cluster may be wider than the space, and the
    second block may go to what a start holds of small singular values.

    References
    ----------
    .. [1] B. N. Parlett, The Symmetric Eigenvalue Problem, SIAM 1998, theorems 4.5.1 and 11.7.1.
       doi:10.1137/1.9781611971163
    """

    values: list[float]  # θ², largest first
    couplings: list[float]  # ‖f‖²
    vectors: np.ndarray  # (k, k): in the basis of the space, as columns
    roundoff: float  # of the products

    @classmethod
    def of(
        cls, values: np.ndarray, squares: np.ndarray, vectors: np.ndarray, roundoff: float
    ) -> RitzPairs:
        """Take eigenpairs of a projection, in ascending order, and the squares of θ‖f‖."""
        largest_first = [max(value, 0.0) for value in values[::-1].tolist()]
        couplings = []
        for square, value in zip(squares[::-1].tolist(), largest_first, strict=True):
            couplings.append(square / max(value, roundoff))
        return cls(largest_first, couplings, vectors[:, ::-1], roundoff)

    def captured(self, rank: int) -> float:
        """Return what the images of the first Ritz vectors capture of ‖R‖² = 1."""
        return sum(self.values[:rank]) + sum(self.couplings[:rank])

    def hides_error(self, rank: int, tolerance: float) -> bool:
        """Return whether the error sinks so far in the rounding of squares that it is not known."""
        return 1.0 - self.captured(rank) <= 2.0 * self.roundoff / tolerance

    def excess(self, rank: int, tolerance: float, n_blocks: int) -> tuple[float, ErrorKind]:
        """Return error/optimum − 1 of the first terms, infinite where nothing is known.

        It is the bound where that is at most ``tolerance`` and certain to rounding.
        """
        squared_error = 1.0 - self.captured(rank)
        last = self.values[rank - 1]
        # Excess 1: the bound, with τ = all that is left.
        outside = max(squared_error, 0.0) + 64.0 * self.roundoff
        if last > outside and 64.0 * self.roundoff <= tolerance * squared_error:
            coupled = sum(self.couplings[:rank]) + self.roundoff
            bound = _excess(coupled * outside / (last - outside), squared_error)
            if bound <= tolerance:
                return bound, ErrorKind.bounded
        # Excess 2: the estimate, with τ as far as it was seen.
        beyond = zip(self.values[rank:], self.couplings[rank:], strict=True)
        seen = max((value + coupling for value, coupling in beyond), default=0.0)
        tail = min(seen, outside)
        # Where the last term does not stand apart, a cluster may be wider than the space.
        is_apart = tail <= 0.8 * last
        if n_blocks < (MIN_BLOCKS if is_apart else 3):
            return math.inf, ErrorKind.estimated
        gain = 4.0 * self.roundoff
        for value, coupling in zip(self.values[:rank], self.couplings[:rank], strict=True):
            by_distance = math.sqrt(value * coupling)
            by_gap = coupling * tail / (value - tail) if value > tail else math.inf
            gain += min(by_distance, by_gap)
        return _excess(gain, squared_error), ErrorKind.estimated


def _excess(gain: float, squared_error: float) -> float:
    """Return error/optimum − 1 where the optimum captures ``gain`` more."""
    if gain >= squared_error:
        return math.inf
    return 1.0 / math.sqrt(1.0 - gain / squared_error) - 1.0


def orthonormal_columns(blocks: Array) -> tuple[Array, np.ndarray]:
    """Return Q of thin QR factorizations of blocks (L, p, b), and the diagonals of R (L, b).

    These are positive. NumPy factorizes single precision in double and copies R besides, at four
    times the price of LAPACK.
    """
    xp = namespace(blocks)
    if xp is not NUMPY:
        bases, triangles = xp.linalg.qr(blocks)
        return bases, np.abs(np.diagonal(to_numpy(triangles), axis1=1, axis2=2))
    n_matrices, rows, columns = blocks.shape
    bases = np.empty((n_matrices, rows, min(rows, columns)), blocks.dtype)
    sizes = np.empty((n_matrices, min(rows, columns)))
    for i in range(n_matrices):
        bases[i], sizes[i] = orthonormal_matrix(blocks[i])
    return bases, sizes


def orthonormal_matrix(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Q of a thin QR factorization of one NumPy matrix, and the diagonal of R in size."""
    factorize, form = _lapack_qr(block.dtype.char)
    reflectors, scales, _, _ = factorize(block)
    return form(reflectors[:, : len(block)], scales)[0], np.abs(reflectors.diagonal())


@cache
def _lapack_qr(type_code: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    names = ("geqrf", "ungqr" if type_code in "FD" else "orgqr")
    factorize, form = scipy.linalg.get_lapack_funcs(names, dtype=np.dtype(type_code))
    return factorize, form
