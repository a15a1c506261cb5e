"""Block Golub–Kahan bidiagonalisation, fully reorthogonalised; its small matrices on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    is_complex,
    like,
    namespace,
    real_part,
    to_numpy,
)
from lsrdecomp.precision import unit_roundoff

if TYPE_CHECKING:
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


class Bidiagonal:
    """R V = U B and Rᴴ U = V Bᴴ + W N, with orthonormal U and [V W].

    Every step adds one block to U and V [1]_. ``small`` is B (k, k) and ``coupling`` is N (b, k),
    NumPy arrays in double precision; ``left`` is U, ``right`` is V and ``following`` is W. The
    operator is divided by ``norm``, so that B is at most one in Frobenius norm. The first block is
    spanned by ``start``, of at most ``block`` columns, and by random ones.

    References
    ----------
    .. [1] G. H. Golub, F. T. Luk and M. L. Overton, A block Lanczos method for computing the
       singular values and corresponding singular vectors of a matrix, ACM Trans. Math. Softw. 7
       (1981). doi:10.1145/355945.355946
    """

    def __init__(
        self, operator: Rearranged, norm: float, block: int, seed: int, start: Array | None = None
    ) -> None:
        self.operator = operator
        self.norm = norm
        self.block = block
        self.is_continued = start is not None  # the first block holds vectors of another space
        self.rng = np.random.default_rng(seed)
        first = self._random(operator.shape[1])
        if start is not None:
            random = first[:, : block - start.shape[1]] / start.shape[0] ** 0.5
            first = namespace(first).concat((start, random), axis=1)
        empty = first[:, :0]
        self.following, _, _ = extend(empty, first, self._random)
        self.left = like(np.zeros((operator.shape[0], 0)), first)
        self.right = empty
        dtype = np.complex128 if is_complex(first) else np.float64
        self.small: np.ndarray = np.zeros((0, 0), dtype)
        self.coupling: np.ndarray = np.zeros((block, 0), dtype)

    @property
    def size(self) -> int:
        """k, the dimension of the two spaces."""
        return int(self.small.shape[0])

    @property
    def roundoff(self) -> float:
        """μ of the arithmetic of the large products."""
        return unit_roundoff(self.left.dtype)

    def step(self) -> None:
        """Add a block by products with R and Rᴴ, reorthogonalised against all earlier ones."""
        xp = namespace(self.following)
        # Bidiagonal 1: R W = U C + (new block of U) T, C and T the new columns of B.
        image = self.operator.matmat(self.following) / self.norm
        new, along, triangle = extend(self.left, image, self._random)
        below = np.zeros((self.block, self.size), self.small.dtype)
        self.small = np.block([[self.small, along], [below, triangle]])
        self.left = xp.concat((self.left, new), axis=1)
        # Bidiagonal 2: W joins V; Rᴴ times the new block, orthogonal to V, is the next W with its
        # coupling N.
        self.right = xp.concat((self.right, self.following), axis=1)
        image = self.operator.rmatmat(new) / self.norm
        self.following, _, last = extend(self.right, image, self._random)
        self.coupling = np.concatenate((below.astype(last.dtype), last), axis=1)

    def triples(self, rank: int) -> tuple[Array, Array, Array]:
        """Return the first ``rank`` singular triples of the projection U Uᴴ R = U [B Nᴴ] [V W]ᴴ."""
        k = self.size
        u, sigma, vh = np.linalg.svd(self.projected(), full_matrices=False)
        left = self.left @ like(u[:, :rank], self.left)
        right = self.right @ like(vh[:rank, :k].conj().T, self.right)
        right = right + self.following @ like(vh[:rank, k:].conj().T, self.right)
        real_prototype = real_part(self.left[:1, :1])
        return left, like(sigma[:rank] * self.norm, real_prototype), adjoint(right)

    def leading(self, columns: int) -> Array:
        """Return at most so many leading right vectors of the space, or of its start.

        They are orthonormal in double precision.
        """
        if self.size == 0:
            return as_double(self.following)[:, :columns]
        _, _, vh = self.triples(min(columns, self.size))
        basis, _ = orthonormal(as_double(adjoint(vh)))
        return basis

    def projected(self) -> np.ndarray:
        """Return [B Nᴴ], shape (k, k + b)."""
        return np.concatenate((self.small, self.coupling.conj().T), axis=1)

    def _random(self, rows: int) -> Array:
        """Draw Gaussian numbers (rows, b), the same in every library."""
        prototype = self.operator.prototype
        values: Any = self.rng.standard_normal((rows, self.block))
        if is_complex(prototype):
            values = values + 1j * self.rng.standard_normal((rows, self.block))
        return like(values, prototype)


def extend(basis: Array, block: Array, random: Any) -> tuple[Array, np.ndarray, np.ndarray]:
    """Return Q, C, T with ``block`` = ``basis`` C + Q T and [basis Q] orthonormal.

    Directions that ``block`` lacks are filled at random at the size of its rounding error: a Krylov
    space that has become invariant goes on with fresh directions, so repeated singular values are
    found.
    """
    along = to_numpy(adjoint(basis) @ block)
    remainder = block - basis @ like(along, basis)
    q, triangle = orthonormal(remainder)
    floor = 4.0 * unit_roundoff(basis.dtype)
    if _smallest_diagonal(triangle) <= floor:
        noise = random(block.shape[0]) * (floor / block.shape[0] ** 0.5)
        q, triangle = orthonormal(remainder + noise)
    for _ in range(4):  # twice is enough, unless a direction was nearly all rounding
        correction = to_numpy(adjoint(basis) @ q)
        q, rotation = orthonormal(q - basis @ like(correction, basis))
        along = along + correction @ triangle
        triangle = rotation @ triangle
        if _smallest_diagonal(rotation) > 0.5:
            break
    return q, along, triangle


def orthonormal(block: Array) -> tuple[Array, np.ndarray]:
    """Return QR factors of a tall block: by Cholesky, a few matrix products, where that is safe.

    Elsewhere by Householder.
    """
    xp = namespace(block)
    dtype = np.complex128 if is_complex(block) else np.float64
    gram = to_numpy(adjoint(block) @ block).astype(dtype)
    try:
        lower = np.linalg.cholesky(gram)
        if _smallest_diagonal(lower) > 0.05 * np.max(np.abs(np.diagonal(lower))):
            return block @ like(np.linalg.inv(lower).conj().T, block), lower.conj().T
    except np.linalg.LinAlgError:
        pass
    q, triangle = xp.linalg.qr(block)
    return q, to_numpy(triangle).astype(dtype)


def _smallest_diagonal(triangle: np.ndarray) -> float:
    return float(np.min(np.abs(np.diagonal(triangle))))
