"""Block Golub–Kahan bidiagonalisation, fully reorthogonalised; small matrices on the host, in double precision."""

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
    from lsrdecomp.targets.base import Rearranged


@dataclass(frozen=True, slots=True)
class Adjoint:
    """Rᴴ as an operator."""

    operator: Rearranged

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.operator.shape
        return columns, rows

    @property
    def prototype(self) -> Array:
        return self.operator.prototype

    def matmat(self, x: Array) -> Array:
        return self.operator.rmatmat(x)

    def rmatmat(self, y: Array) -> Array:
        return self.operator.matmat(y)

    def formed(self) -> Array:
        return adjoint(self.operator.formed())


class Bidiagonal:
    """R V = U B and Rᴴ U = V Bᴴ + W N, with U, [V W] orthonormal; every step adds one block to U and V [1]_.

    ``small`` is B (k, k) and ``coupling`` is N (b, k), NumPy arrays in double precision; ``left``
    is U, ``right`` is V and ``following`` is W. The operator is divided by ``norm``, so that B is
    at most one in Frobenius norm. The first block is spanned by ``start``, of at most ``block``
    columns, and by random ones.

    References
    ----------
    .. [1] G. H. Golub, F. T. Luk and M. L. Overton, A block Lanczos method for computing the
       singular values and corresponding singular vectors of a matrix, ACM Trans. Math. Softw. 7
       (1981). doi:10.1145/355945.355946
    """

    def __init__(
        self, operator: Rearranged, norm: float, block: int, seed: int, start: Array | None = None
    ) -> None:
        self.operator, self.norm, self.block = operator, norm, block
        self.rng = np.random.default_rng(seed)
        fresh = self._random(operator.shape[1])
        if start is not None:
            fresh = fresh[:, : block - start.shape[1]] / start.shape[0] ** 0.5
            fresh = namespace(fresh).concat((start, fresh), axis=1)
        empty = fresh[:, :0]
        self.following, _, _ = extend(empty, fresh, self._random)
        self.left, self.right = like(np.zeros((operator.shape[0], 0)), fresh), empty
        kind = np.complex128 if is_complex(fresh) else np.float64
        self.small: np.ndarray = np.zeros((0, 0), kind)
        self.coupling: np.ndarray = np.zeros((block, 0), kind)

    @property
    def size(self) -> int:
        """k, the dimension of the two spaces."""
        return int(self.small.shape[0])

    @property
    def roundoff(self) -> float:
        """μ of the arithmetic of the large products."""
        return unit_roundoff(self.left.dtype)

    def step(self) -> None:
        """One product with R, one with Rᴴ, each reorthogonalised against all earlier blocks."""
        xp = namespace(self.following)
        # Bidiagonal 1: R W = U C + (new block of U) T, C and T the new columns of B.
        new, along, triangle = extend(
            self.left, self.operator.matmat(self.following) / self.norm, self._random
        )
        below = np.zeros((self.block, self.size), self.small.dtype)
        self.small = np.block([[self.small, along], [below, triangle]])
        self.left = xp.concat((self.left, new), axis=1)
        # Bidiagonal 2: W joins V; Rᴴ times the new block, orthogonal to V, is the next W with its
        # coupling N.
        self.right = xp.concat((self.right, self.following), axis=1)
        self.following, _, last = extend(
            self.right, self.operator.rmatmat(new) / self.norm, self._random
        )
        self.coupling = np.concatenate((below.astype(last.dtype), last), axis=1)

    def triples(self, rank: int) -> tuple[Array, Array, Array]:
        """(U, σ, Vᴴ) of the projection U Uᴴ R = U [B Nᴴ] [V W]ᴴ, its first ``rank`` singular triples."""
        u, sigma, vh = np.linalg.svd(self.projected(), full_matrices=False)
        k, weights = self.size, real_part(self.left[:1, :1])
        right = self.right @ like(vh[:rank, :k].conj().T, self.right)
        right = right + self.following @ like(vh[:rank, k:].conj().T, self.right)
        return (
            self.left @ like(u[:, :rank], self.left),
            like(sigma[:rank] * self.norm, weights),
            adjoint(right),
        )

    def leading(self, columns: int) -> Array:
        """At most so many leading right vectors of the space, or of its start, orthonormal in double precision."""
        if self.size == 0:
            return as_double(self.following)[:, :columns]
        _, _, vh = self.triples(min(columns, self.size))
        return orthonormal(as_double(adjoint(vh)))[0]

    def projected(self) -> np.ndarray:
        """[B Nᴴ], shape (k, k + b)."""
        return np.concatenate((self.small, self.coupling.conj().T), axis=1)

    def _random(self, rows: int) -> Array:
        """Gaussian numbers (rows, b), the same in every library."""
        prototype = self.operator.prototype
        values: Any = self.rng.standard_normal((rows, self.block))
        if is_complex(prototype):
            values = values + 1j * self.rng.standard_normal((rows, self.block))
        return like(values, prototype)


def extend(basis: Array, block: Array, random: Any) -> tuple[Array, np.ndarray, np.ndarray]:
    """Q, C, T with ``block`` = ``basis`` C + Q T and [basis Q] orthonormal.

    Directions that ``block`` lacks are filled at random at the size of its rounding error: a Krylov
    space that has become invariant goes on with fresh directions, so repeated singular values are
    found.
    """
    along = to_numpy(adjoint(basis) @ block)
    rest = block - basis @ like(along, basis)
    q, triangle = orthonormal(rest)
    floor = 4.0 * unit_roundoff(basis.dtype)
    if _smallest(triangle) <= floor:
        q, triangle = orthonormal(rest + random(block.shape[0]) * (floor / block.shape[0] ** 0.5))
    for _ in range(4):  # twice is enough, unless a direction was nearly all rounding
        again = to_numpy(adjoint(basis) @ q)
        q, turn = orthonormal(q - basis @ like(again, basis))
        along, triangle = along + again @ triangle, turn @ triangle
        if _smallest(turn) > 0.5:
            break
    return q, along, triangle


def orthonormal(block: Array) -> tuple[Array, np.ndarray]:
    """QR factors of a tall block: by Cholesky, a few matrix products, where that is safe, else by Householder."""
    xp = namespace(block)
    gram = to_numpy(adjoint(block) @ block).astype(
        np.complex128 if is_complex(block) else np.float64
    )
    try:
        lower = np.linalg.cholesky(gram)
        if _smallest(lower) > 0.05 * np.max(np.abs(np.diagonal(lower))):
            return block @ like(np.linalg.inv(lower).conj().T, block), lower.conj().T
    except np.linalg.LinAlgError:
        pass
    q, triangle = xp.linalg.qr(block)
    return q, to_numpy(triangle).astype(gram.dtype)


def _smallest(triangle: np.ndarray) -> float:
    return float(np.min(np.abs(np.diagonal(triangle))))
