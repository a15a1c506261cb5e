"""Targets held in memory: a dense matrix, and the product of a low-rank pair, which is never formed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    as_floating,
    conjugate,
    finite_norm,
    namespace,
    norm,
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

CACHED = 2**18
"""Entries of a dense matrix that are rearranged at a time where it is not held: 2 MiB in double
precision."""

BETWEEN = 2**20
"""Entries between the two contractions of a pair's product, above which its columns go one after
the other."""

LARGE = 2**21
"""Entries of a dense matrix above which inner products measure an error sooner than entries do."""


@dataclass(frozen=True, slots=True)
class RearrangedDense:
    """The rearrangement of a dense matrix, held."""

    matrix: Array

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.matrix.shape[0]), int(self.matrix.shape[1])

    @property
    def prototype(self) -> Array:
        return self.matrix

    def matmat(self, x: Array) -> Array:
        return self.matrix @ x

    def rmatmat(self, y: Array) -> Array:
        return adjoint(
            adjoint(y) @ self.matrix
        )  # twice as fast as adjoint(matrix) @ y: BLAS reads rows as they lie

    def formed(self) -> Array:
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
    >>> target.rearranged(KroneckerShape(((4, 4), (3, 3)))).shape                 # of rank one, as one product is
    (16, 9)
    """

    matrix: Array

    def __post_init__(self) -> None:
        matrix = as_floating(self.matrix)
        require_matrix(matrix)
        object.__setattr__(self, "matrix", matrix)
        with one_blas_thread_for(math.prod(self.shape)):
            self.norm  # noqa: B018 - refuses entries that are not finite

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.matrix.shape[0]), int(self.matrix.shape[1])

    @cached_property
    def norm(self) -> float:
        return finite_norm(self.matrix)

    def tensor(self, shape: KroneckerShape) -> Array:
        """R(M) for any number of factors, as an array (m_1·n_1, …, m_d·n_d)."""
        return rearrange(self.matrix, shape)

    def rearranged(self, shape: KroneckerShape) -> RearrangedDense:
        """R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        return RearrangedDense(self.tensor(shape))

    def streamed(self, shape: KroneckerShape, kind: Any = None) -> RearrangedRows:
        """R(M) for two factors, double precision unless another type is given; read by blocks of rows, not held."""
        require_two_factors(shape, self.shape)
        (rows, columns), p = self.shape, shape.rows[1]
        xp, whole = namespace(self.matrix), max(1, CACHED // (columns * p)) * p
        height = (
            whole if whole * columns <= 8 * CACHED else max(1, CACHED // columns)
        )  # whole rows of R(M) if possible
        kind = as_double(self.matrix[:1, :1]).dtype if kind is None else kind

        def parts() -> Iterator[tuple[int, Array]]:
            for start in range(0, rows, height):
                part = self.matrix[start : min(start + height, rows), :]
                yield start, part if part.dtype == kind else xp.astype(part, kind)

        return RearrangedRows(parts, shape, xp.astype(self.matrix[:1, :1], kind))

    def residual_norm(self, approximation: Any) -> float:
        """‖M − M̂‖_F in double precision from entries; of large matrices by `separated_distance`, where exact."""
        check_sizes(self.shape, approximation.shape)
        if (
            len(getattr(approximation, "factors", ())) == 2
            and self.shape[0] * self.shape[1] >= LARGE
        ):
            operator = self.streamed(approximation.kronecker_shape)
            distance = separated_distance(operator, self.norm, self.norm, approximation)
            if distance is not None:
                return distance
        return residual_norm(self.shape, lambda rows: self.matrix[rows, :], approximation)


@dataclass(frozen=True, slots=True)
class RearrangedLowRank:
    """R(BA) = Σ_ρ mat(b_ρ) ⊗ mat(a_ρ), mat row by row, applied without being formed.

    ``left`` (m_1, m_2, r) holds the columns of B, ``right`` (n_1, n_2, r) the rows of A. The order
    of the two contractions is the one that needs less work.
    """

    left: Array
    right: Array

    @property
    def shape(self) -> tuple[int, int]:
        (m, p, _), (n, q, _) = self.left.shape, self.right.shape
        return m * n, p * q

    @property
    def prototype(self) -> Array:
        return self.left[:1, :1, :1] + self.right[:1, :1, :1]

    def matmat(self, x: Array) -> Array:
        return _apply_pair(self.left, self.right, x)

    def rmatmat(self, y: Array) -> Array:
        xp = namespace(self.left, self.right)
        left, right = (xp.permute_dims(f, (1, 0, 2)) for f in (self.left, self.right))
        return _apply_pair(conjugate(left), conjugate(right), y)

    def formed(self) -> Array:
        xp = namespace(self.left, self.right)
        (m, p, r), (n, q, _) = self.left.shape, self.right.shape
        left, right = (
            as_double(self.left),
            as_double(self.right),
        )  # a product in single precision would round entries
        entries = xp.reshape(left, (m * p, r)) @ xp.matrix_transpose(xp.reshape(right, (n * q, r)))
        return xp.reshape(
            xp.permute_dims(xp.reshape(entries, (m, p, n, q)), (0, 2, 1, 3)), (m * n, p * q)
        )


def _apply_pair(left: Array, right: Array, x: Array) -> Array:
    """Σ_ρ (L_ρ ⊗ R_ρ) x for L (m, p, r), R (n, q, r) and x (p·q, b), a few columns at a time if they are large."""
    xp = namespace(left, right, x)
    (m, p, r), (n, q, _), b = left.shape, right.shape, x.shape[1]
    columns = xp.reshape(
        xp.matrix_transpose(x), (b, p, q)
    )  # each column a matrix: no array of size r is ever permuted
    right_first = p * (q * n + n * m) <= q * (
        p * m + m * n
    )  # r·b·p·n·q + r·b·m·p·n against its mirror
    if right_first:
        outer = xp.reshape(left, (m, p * r))
        inner = xp.reshape(xp.permute_dims(right, (1, 2, 0)), (q, r * n))
    else:
        outer = xp.reshape(xp.permute_dims(left, (0, 2, 1)), (m * r, p))
        inner = xp.matrix_transpose(xp.reshape(xp.permute_dims(right, (0, 2, 1)), (n, r * q)))
    images, together = [], max(1, BETWEEN // (r * (p * n if right_first else m * q)))
    for start in range(0, b, together):
        some = columns[start : min(start + together, b), :, :]
        if right_first:
            images.append(outer @ xp.reshape(some @ inner, (-1, p * r, n)))  # from (b, p, r·n)
        else:
            images.append(xp.reshape(outer @ some, (-1, m, r * q)) @ inner)  # from (b, m·r, q)
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
    >>> B, A = np.kron(np.eye(4), np.ones((2, 1))), np.kron(np.eye(4), np.ones((1, 3)))
    >>> update = LowRank(B, A)                                                      # 8 × 12, never formed
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
        return triangular_factor(as_double(self.left)), triangular_factor(
            adjoint(as_double(self.right))
        )

    @cached_property
    def norm(self) -> float:
        return finite_norm(
            self.triangles[0] @ adjoint(self.triangles[1]), "low-rank matrix", computed=True
        )

    def balanced(self, rank: int | None = None) -> LowRank:
        """The pair U√Σ, √Σ Vᴴ, truncated or padded to ``rank``: the gauge in which both sides carry the spectrum."""
        u, sigma, vh = self.svd
        xp = namespace(u)
        root, rank = xp.sqrt(sigma), int(sigma.shape[0]) if rank is None else rank
        left, right = zero_padded(u * root, 1, rank), zero_padded(vh * root[:, None], 0, rank)
        return LowRank(left[:, :rank], right[:rank, :])

    def to_matrix(self) -> Array:
        """The product, formed; for small cases and tests."""
        return self.left @ self.right

    def rearranged(self, shape: KroneckerShape) -> RearrangedLowRank:
        """R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        xp = namespace(self.left, self.right)
        (m, n), (p, q) = shape.factors
        left = xp.reshape(self.left, (m, p, self.rank))
        right = xp.reshape(xp.matrix_transpose(self.right), (n, q, self.rank))
        return RearrangedLowRank(left, right)

    def residual_norm(self, approximation: Any) -> float:
        """‖BA − M̂‖_F in double precision; for a product M̂ = B̂Â by `pair_distance`, else block by block.

        The first costs O((m + n)(r + r̂)²) instead of O(m·n·(r + r̂)); its rounding error is of the
        order of 2⁻⁵³(‖B‖‖A‖ + ‖B̂‖‖Â‖), as for the entries of a residual. For two Kronecker factors
        inner products are taken, s products with the rearrangement, where they give twelve digits:
        while the distance is above 1/`WIDEST` of the sizes of what is subtracted.
        """
        check_sizes(self.shape, approximation.shape)
        left, right = as_double(self.left), as_double(self.right)
        if hasattr(approximation, "to_lora"):
            other_left, other_right = (as_double(f) for f in approximation.to_lora())
            return pair_distance(left, adjoint(right), other_left, adjoint(other_right))
        if len(getattr(approximation, "factors", ())) == 2:
            pair, size = (
                LowRank(left, right).rearranged(approximation.kronecker_shape),
                norm(left) * norm(right),
            )
            distance = separated_distance(pair, self.norm, size, approximation)
            if distance is not None:
                return distance
        return residual_norm(self.shape, lambda rows: left[rows, :] @ right, approximation)
