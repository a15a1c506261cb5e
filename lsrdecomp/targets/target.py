"""Targets held in memory: a dense matrix, and a low-rank pair whose product is never formed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lsrdecomp.arrays import (
    MAX_DOT_ENTRIES,
    Array,
    adjoint,
    as_double,
    as_floating,
    conjugate,
    finite_norm,
    namespace,
    norm,
    refuse_traced,
    require_finite,
    require_matrix,
    triangular_factor,
    zero_padded,
)
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.targets.contract import Rearranged as Rearranged
from lsrdecomp.targets.contract import Target as Target
from lsrdecomp.targets.contract import require_two_factors
from lsrdecomp.targets.residual import Approximation as Approximation
from lsrdecomp.targets.residual import check_sizes, pair_distance, residual_norm, separated_distance
from lsrdecomp.targets.row_stream import RearrangedRows
from lsrdecomp.threads import one_blas_thread_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.kronecker.shape import KroneckerShape


@dataclass(frozen=True, slots=True)
class RearrangedDense:
    """The rearrangement of a dense matrix, held, or those of a batch (L, p, q)."""

    matrix: Array

    @property
    def shape(self) -> tuple[int, int]:
        """(m_1·n_1, m_2·n_2)."""
        return int(self.matrix.shape[-2]), int(self.matrix.shape[-1])

    @property
    def prototype(self) -> Array:
        """The matrix itself."""
        return self.matrix

    def matmat(self, x: Array) -> Array:
        """Return R(M) x."""
        return self.matrix @ x

    def rmatmat(self, y: Array) -> Array:
        """Return R(M)ᴴ y."""
        # Twice as fast as adjoint(matrix) @ y: BLAS reads rows as they lie.
        return adjoint(adjoint(y) @ self.matrix)

    def formed(self) -> Array:
        """Return R(M), which is held."""
        return self.matrix


@dataclass(frozen=True, eq=False)
class Dense:
    """A matrix held as an array.

    Parameters
    ----------
    matrix : array_like, shape (m, n)
        Real or complex, of any array library; integers are promoted to float64, half precisions to
        float32. Raises `PrecisionError` unless all entries are finite.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import KroneckerShape
    >>> target = Dense(np.kron(np.eye(4), np.ones((3, 3))))
    >>> target.shape, target.norm
    ((12, 12), 6.0)
    >>> target.rearranged(KroneckerShape(((4, 4), (3, 3)))).shape  # of rank one, as one product is
    (16, 9)
    """

    matrix: Array
    # (rows, columns) and ‖M‖_F in double precision: found once, for every solve asks for them
    shape: tuple[int, int] = field(init=False, repr=False)
    norm: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        matrix = as_floating(self.matrix)
        require_matrix(matrix)
        refuse_traced(matrix, "a decomposition")
        rows, columns = matrix.shape
        if columns <= MAX_DOT_ENTRIES:  # sums over short rows start no threads
            length = finite_norm(matrix)
        else:
            with one_blas_thread_for(rows * columns):
                length = finite_norm(matrix)
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "shape", (int(rows), int(columns)))
        object.__setattr__(self, "norm", length)

    def tensor(self, shape: KroneckerShape) -> Array:
        """Return R(M) for any number of factors, as an array (m_1·n_1, …, m_d·n_d)."""
        return rearrange(self.matrix, shape)

    def rearranged(self, shape: KroneckerShape) -> RearrangedDense:
        """Return R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        return RearrangedDense(self.tensor(shape))

    def streamed(self, shape: KroneckerShape, dtype: Any = None) -> RearrangedRows:
        """Return R(M) for two factors, read by blocks of rows and not held.

        Parameters
        ----------
        shape : KroneckerShape
        dtype : optional
            Element type of the products; double precision if absent.
        """
        require_two_factors(shape, self.shape)
        if dtype is None:
            dtype = as_double(self.matrix[:1, :1]).dtype
        xp = namespace(self.matrix)
        rows, columns = self.shape
        p = shape.rows[1]
        # Entries rearranged at a time; by hand, 2 MiB in double precision. Eight times as many are
        # taken where these are needed for one row of R(M).
        block_entries = 2**18
        height = max(1, block_entries // (columns * p)) * p  # whole rows of R(M)
        if height * columns > 8 * block_entries:
            height = max(1, block_entries // columns)

        def parts() -> Iterator[tuple[int, Array]]:
            for start in range(0, rows, height):
                part = self.matrix[start : min(start + height, rows), :]
                yield start, part if part.dtype == dtype else xp.astype(part, dtype)

        return RearrangedRows(parts, shape, xp.astype(self.matrix[:1, :1], dtype))

    def residual_norm(self, approximation: Any) -> float:
        """Return ‖M − M̂‖_F in double precision.

        Of 2²¹ entries on inner products (`separated_distance`) measure the distance to two factors
        sooner than entries do; where they are not exact, and in smaller matrices, the entries of
        the residual are formed.
        """
        check_sizes(self.shape, approximation.shape)
        has_two_factors = len(getattr(approximation, "factors", ())) == 2
        if has_two_factors and math.prod(self.shape) >= 2**21:
            operator = self.streamed(approximation.kronecker_shape)
            distance = separated_distance(operator, self.norm, self.norm, approximation)
            if distance is not None:
                return distance
        return residual_norm(self.shape, lambda rows: self.matrix[rows, :], approximation)


@dataclass(frozen=True, slots=True)
class RearrangedLowRank:
    """R(BA) = Σ_ρ mat(b_ρ) ⊗ mat(a_ρ), mat row by row, applied without being formed.

    ``left`` (m_1, m_2, r) holds the columns of B, ``right`` (n_1, n_2, r) the rows of A. The order
    of the two contractions is the one that needs less work; up to 2²⁰ entries, 8 MiB in double
    precision by hand, are held between them, and the columns of larger products go one after the
    other.
    """

    left: Array
    right: Array

    @property
    def shape(self) -> tuple[int, int]:
        """(m_1·n_1, m_2·n_2)."""
        m, p, _ = self.left.shape
        n, q, _ = self.right.shape
        return m * n, p * q

    @property
    def prototype(self) -> Array:
        """One number of the type of the products."""
        return self.left[:1, :1, :1] + self.right[:1, :1, :1]

    def matmat(self, x: Array) -> Array:
        """Return R(BA) x."""
        return _apply_pair(self.left, self.right, x)

    def rmatmat(self, y: Array) -> Array:
        """Return R(BA)ᴴ y."""
        xp = namespace(self.left, self.right)
        left = conjugate(xp.permute_dims(self.left, (1, 0, 2)))
        right = conjugate(xp.permute_dims(self.right, (1, 0, 2)))
        return _apply_pair(left, right, y)

    def formed(self) -> Array:
        """Return R(BA), in double precision: a product in single precision would round entries."""
        xp = namespace(self.left, self.right)
        m, p, r = self.left.shape
        n, q, _ = self.right.shape
        left = xp.reshape(as_double(self.left), (m * p, r))
        right = xp.reshape(as_double(self.right), (n * q, r))
        entries = xp.reshape(left @ xp.matrix_transpose(right), (m, p, n, q))
        return xp.reshape(xp.permute_dims(entries, (0, 2, 1, 3)), (m * n, p * q))


def _apply_pair(left: Array, right: Array, x: Array) -> Array:
    """Return Σ_ρ (L_ρ ⊗ R_ρ) x for L (m, p, r), R (n, q, r) and x (p·q, b).

    A few columns at a time, so that at most 2²⁰ entries stand between the products.
    """
    xp = namespace(left, right, x)
    m, p, r = left.shape
    n, q, _ = right.shape
    b = x.shape[1]
    # Each column is a matrix: no array of size r is ever permuted.
    columns = xp.reshape(xp.matrix_transpose(x), (b, p, q))
    # Multiplications over r·b: by R first, or by L first.
    right_first = p * (q * n + n * m) <= q * (p * m + m * n)
    if right_first:
        outer = xp.reshape(left, (m, p * r))
        inner = xp.reshape(xp.permute_dims(right, (1, 2, 0)), (q, r * n))
        between = r * p * n
    else:
        outer = xp.reshape(xp.permute_dims(left, (0, 2, 1)), (m * r, p))
        inner = xp.matrix_transpose(xp.reshape(xp.permute_dims(right, (0, 2, 1)), (n, r * q)))
        between = r * m * q
    batch = max(1, 2**20 // between)
    images = []
    for start in range(0, b, batch):
        block = columns[start : min(start + batch, b), :, :]
        if right_first:
            images.append(outer @ xp.reshape(block @ inner, (-1, p * r, n)))  # from (b, p, r·n)
        else:
            images.append(xp.reshape(outer @ block, (-1, m, r * q)) @ inner)  # from (b, m·r, q)
    image = images[0] if len(images) == 1 else xp.concat(images, axis=0)
    return xp.matrix_transpose(xp.reshape(image, (b, m * n)))


@dataclass(frozen=True, eq=False)
class LowRank:
    """A product B A of thin factors, never formed: the ΔW of a LoRA layer.

    Parameters
    ----------
    left : array_like, shape (m, r)
        B, with any scale folded in.
    right : array_like, shape (r, n)
        A.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import LowRank, decompose
    >>> B = np.kron(np.eye(4), np.ones((2, 1)))
    >>> A = np.kron(np.eye(4), np.ones((1, 3)))
    >>> update = LowRank(B, A)  # 8 × 12, never formed
    >>> update.shape, update.rank, decompose(update, "4x4, 2x3", rank=1).relative_error < 1e-12
    ((8, 12), 4, True)
    """

    left: Array
    right: Array

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            factor = as_floating(getattr(self, name), f"{name} factor")
            require_matrix(factor, f"{name} factor")
            require_finite(factor, f"{name} factor")
            object.__setattr__(self, name, factor)
        if self.left.shape[1] != self.right.shape[0]:
            raise ShapeError(
                f"low-rank pair: the left factor has {self.left.shape[1]} columns, "
                f"the right one {self.right.shape[0]} rows"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the product."""
        return int(self.left.shape[0]), int(self.right.shape[1])

    @property
    def rank(self) -> int:
        """Inner size r of the pair; the rank of the matrix may be lower."""
        return int(self.left.shape[1])

    @cached_property
    def svd(self) -> tuple[Array, Array, Array]:
        """(U, σ, Vᴴ) of the product through two thin QR factorizations, in double precision.

        Cost O((m + n)·r²); at most min(r, m, n) singular values. The gauge of a checkpoint is
        arbitrary, B A = (B G)(G⁻¹ A), and this is the way out of it.
        """
        xp = namespace(self.left, self.right)
        q_left, r_left = xp.linalg.qr(as_double(self.left))
        q_right, r_right = xp.linalg.qr(adjoint(as_double(self.right)))
        u, sigma, vh = xp.linalg.svd(r_left @ adjoint(r_right), full_matrices=False)
        return q_left @ u, sigma, vh @ adjoint(q_right)

    @cached_property
    def triangles(self) -> tuple[Array, Array]:
        """R of thin QR factorizations of B and of Aᴴ, in double precision."""
        left = triangular_factor(as_double(self.left))
        right = triangular_factor(adjoint(as_double(self.right)))
        return left, right

    @cached_property
    def norm(self) -> float:
        """‖B A‖_F in double precision."""
        left, right = self.triangles
        return finite_norm(left @ adjoint(right), "low-rank matrix", computed=True)

    def balanced(self, rank: int | None = None) -> LowRank:
        """Return the pair U√Σ, √Σ Vᴴ, in which both sides carry the spectrum.

        Truncated or padded to ``rank``.
        """
        u, sigma, vh = self.svd
        if rank is None:
            rank = int(sigma.shape[0])
        root = namespace(u).sqrt(sigma)
        left = zero_padded(u * root, 1, rank)
        right = zero_padded(vh * root[:, None], 0, rank)
        return LowRank(left[:, :rank], right[:rank, :])

    def to_matrix(self) -> Array:
        """Return the product, formed; for small cases and tests."""
        return self.left @ self.right

    def rearranged(self, shape: KroneckerShape) -> RearrangedLowRank:
        """Return R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        xp = namespace(self.left, self.right)
        (m, n), (p, q) = shape.factors
        left = xp.reshape(self.left, (m, p, self.rank))
        right = xp.reshape(xp.matrix_transpose(self.right), (n, q, self.rank))
        return RearrangedLowRank(left, right)

    def residual_norm(self, approximation: Any) -> float:
        """Return ‖BA − M̂‖_F in double precision.

        For a product M̂ = B̂Â by `pair_distance`, which costs O((m + n)(r + r̂)²) instead of
        O(m·n·(r + r̂)); its rounding error is of the order of 2⁻⁵³(‖B‖‖A‖ + ‖B̂‖‖Â‖), as for the
        entries of a residual. For two Kronecker factors from inner products, s products with the
        rearrangement, where these give twelve digits (`separated_distance`). Else block by block.
        """
        check_sizes(self.shape, approximation.shape)
        left = as_double(self.left)
        right = as_double(self.right)
        if hasattr(approximation, "to_lora"):
            other_left, other_right = (as_double(f) for f in approximation.to_lora())
            return pair_distance(left, adjoint(right), other_left, adjoint(other_right))
        if len(getattr(approximation, "factors", ())) == 2:
            operator = LowRank(left, right).rearranged(approximation.kronecker_shape)
            size = norm(left) * norm(right)
            distance = separated_distance(operator, self.norm, size, approximation)
            if distance is not None:
                return distance
        return residual_norm(self.shape, lambda rows: left[rows, :] @ right, approximation)
