"""Targets that are not arrays: operators, sparse matrices, sums of Kronecker products; and what becomes which."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lsrdecomp.arrays import Array, adjoint, as_double, as_floating, conjugate, finite_norm, is_complex, namespace
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.rearrange import sum_of_kroneckers
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.targets.base import Dense, Rearranged, RearrangedDense, Target, require_two_factors
from lsrdecomp.targets.residual import Approximation, check_sizes, residual_norm, row_blocks, rows_of
from lsrdecomp.targets.row_stream import RearrangedRows, RowStream, block_norm


def as_target(matrix: Any) -> Target:
    """What a solver can work on, from what a caller has.

    A target stays as it is. A `SeparatedMatrix` becomes `Separated`, a scipy sparse matrix or array `Sparse`, a
    ``numpy.memmap`` a `RowStream`, anything that offers ``matmat`` or ``matvec`` (a scipy ``LinearOperator``) an
    `Operator`, and anything else `Dense`.
    """
    if hasattr(matrix, "residual_norm"):
        return matrix  # type: ignore[no-any-return]
    if isinstance(matrix, SeparatedMatrix):
        return Separated(matrix)
    if hasattr(matrix, "tocoo") and hasattr(matrix, "nnz"):
        return Sparse(matrix)
    if isinstance(matrix, np.memmap):
        return RowStream.of(matrix)
    if hasattr(matrix, "matvec") and not hasattr(matrix, "__array__"):
        return Operator(matrix)
    return Dense(matrix)


@dataclass(frozen=True, slots=True)
class RearrangedTranspose:
    """R(M) from the rearrangement of Mᵀ: entry ((i, j), (k, l)) of the one is ((j, i), (l, k)) of the other."""

    transposed: Rearranged
    kronecker_shape: KroneckerShape

    @property
    def shape(self) -> tuple[int, int]:
        return self.transposed.shape

    @property
    def prototype(self) -> Array:
        return self.transposed.prototype

    def matmat(self, x: Array) -> Array:
        left, right = self.kronecker_shape.factors
        return _swap(self.transposed.matmat(_swap(x, *right)), *reversed(left))

    def rmatmat(self, y: Array) -> Array:
        left, right = self.kronecker_shape.factors
        return _swap(self.transposed.rmatmat(_swap(y, *left)), *reversed(right))

    def formed(self) -> Array:
        left, right = self.kronecker_shape.factors
        xp = namespace(self.prototype)
        rows = _swap(self.transposed.formed(), *reversed(left))
        return xp.matrix_transpose(_swap(xp.matrix_transpose(rows), *reversed(right)))


def _swap(x: Array, m: int, n: int) -> Array:
    """Rows (i, j) of x to rows (j, i)."""
    xp, b = namespace(x), x.shape[1]
    return xp.reshape(xp.permute_dims(xp.reshape(x, (m, n, b)), (1, 0, 2)), (m * n, b))


@dataclass(frozen=True, eq=False)
class Operator:
    """A matrix known by its action on vectors, such as a scipy ``LinearOperator``.

    The rearrangement mixes rows with columns, so that every product with R(M) needs all n columns of M: n products
    with the operator, in blocks. Where the matrix fits into memory, ``Dense(operator @ numpy.eye(n))`` pays them once.

    Parameters
    ----------
    operator : object
        With ``shape`` and ``matmat`` (n, b) → (m, b), or ``matvec`` alone.
    """

    operator: Any

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.operator.shape[0]), int(self.operator.shape[1])

    @cached_property
    def norm(self) -> float:
        return self._transpose.norm

    def rearranged(self, shape: KroneckerShape) -> RearrangedTranspose:
        require_two_factors(shape)
        shape.check(self.shape)
        return RearrangedTranspose(self._transpose.rearranged(shape.transposed), shape)

    def residual_norm(self, approximation: Approximation) -> float:
        check_sizes(self.shape, approximation.shape)
        return self._transpose.residual_norm(_Transposed(approximation))

    @cached_property
    def _transpose(self) -> RowStream:
        """The columns of the matrix as a stream of rows of its transpose."""
        m, n = self.shape
        return RowStream(self._columns, (n, m))

    def _columns(self) -> Iterator[Array]:
        m, n = self.shape
        for part in row_blocks(n, m):
            unit = np.zeros((n, part.stop - part.start))
            unit[np.arange(part.start, part.stop), np.arange(part.stop - part.start)] = 1.0
            if hasattr(self.operator, "matmat"):
                columns = np.asarray(self.operator.matmat(unit)).T
            else:
                columns = np.stack([np.asarray(self.operator.matvec(column)).reshape(m) for column in unit.T])
            block_norm(part.start, columns, "columns")
            yield columns


@dataclass(frozen=True, slots=True)
class _Transposed:
    """Mᵀ for measuring; sums of Kronecker products are transposed term by term."""

    approximation: Any

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.approximation.shape
        return columns, rows

    def to_matrix(self) -> Array:
        return namespace(self.approximation.to_matrix()).matrix_transpose(self.approximation.to_matrix())

    def __getattr__(self, name: str) -> Any:
        if name not in ("factors", "weights") or not hasattr(self.approximation, name):
            raise AttributeError(name)
        return getattr(self.approximation.mT, name)


@dataclass(frozen=True, eq=False)
class Sparse:
    """A scipy sparse matrix or array; its rearrangement is as sparse.

    Parameters
    ----------
    matrix : scipy sparse matrix or array, shape (m, n)
        Duplicate entries add up; integers are promoted to float64. Raises `PrecisionError` unless entries are finite.
    """

    matrix: Any

    def __post_init__(self) -> None:
        rows = self.matrix.tocsr(copy=True)
        rows.sum_duplicates()
        rows.data = as_floating(rows.data)
        if not np.all(np.isfinite(rows.data)):
            count = int(np.sum(~np.isfinite(rows.data)))
            raise PrecisionError(
                f"matrix: {count} of {rows.nnz} stored entries are not finite; "
                "remove or replace them before decomposing"
            )
        if 0 in rows.shape:
            raise ShapeError(f"matrix: a matrix of shape {tuple(rows.shape)} has no entries to approximate")
        object.__setattr__(self, "matrix", rows)

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.matrix.shape[0]), int(self.matrix.shape[1])

    @cached_property
    def norm(self) -> float:
        return finite_norm(self.matrix.data)

    def rearranged(self, shape: KroneckerShape) -> RearrangedSparse:
        require_two_factors(shape)
        shape.check(self.shape)
        from scipy.sparse import csr_array

        (_, n), (p, q) = shape.factors
        entries = self.matrix.tocoo()
        (i, k), (j, column) = np.divmod(entries.row.astype(np.int64), p), np.divmod(entries.col.astype(np.int64), q)
        return RearrangedSparse(csr_array((entries.data, (i * n + j, k * q + column)), shape=shape.sizes))

    def residual_norm(self, approximation: Approximation) -> float:
        return residual_norm(self.shape, lambda rows: self.matrix[rows.start : rows.stop].toarray(), approximation)


@dataclass(frozen=True, slots=True)
class RearrangedSparse:
    """A sparse rearrangement."""

    matrix: Any

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.matrix.shape[0]), int(self.matrix.shape[1])

    @property
    def prototype(self) -> Array:
        return np.zeros((1, 1), self.matrix.dtype)

    def matmat(self, x: Array) -> Array:
        return self.matrix @ x

    def rmatmat(self, y: Array) -> Array:
        return self.matrix.conj().T @ y

    def formed(self) -> Array:
        return self.matrix.toarray()


@dataclass(frozen=True, slots=True)
class RearrangedPair:
    """R(M) = L Rᵀ for thin matrices L (m_1·n_1, s) and R (m_2·n_2, s): a sum of s terms in its own shape."""

    left: Array
    right: Array

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.left.shape[0]), int(self.right.shape[0])

    @property
    def prototype(self) -> Array:
        return self.left

    def matmat(self, x: Array) -> Array:
        return self.left @ (namespace(x).matrix_transpose(self.right) @ x)

    def rmatmat(self, y: Array) -> Array:
        return conjugate(self.right) @ (adjoint(self.left) @ y)

    def formed(self) -> Array:
        return self.left @ namespace(self.left).matrix_transpose(self.right)


@dataclass(frozen=True, eq=False)
class Separated:
    """A sum of Kronecker products of any number of factors, to be approximated by fewer terms or in another shape.

    In its own shape, and where consecutive factors are taken together, R(M) is a thin product and nothing is formed;
    in any other shape M is formed a block of rows at a time.
    """

    matrix: SeparatedMatrix

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @cached_property
    def norm(self) -> float:
        return self.matrix.norm

    def rearranged(self, shape: KroneckerShape) -> Rearranged:
        require_two_factors(shape)
        shape.check(self.shape)
        factors = self.matrix.factors
        xp, s = namespace(*factors), self.matrix.separation_rank
        if s == 0:
            return RearrangedDense(xp.zeros(shape.sizes, dtype=self.matrix.dtype))
        weighted = (factors[0] * xp.astype(self.matrix.weights, factors[0].dtype)[:, None, None], *factors[1:])
        own = self.matrix.kronecker_shape.factors
        for cut in range(1, len(own)):
            if _merged(own[:cut]) == shape.factors[0] and _merged(own[cut:]) == shape.factors[1]:
                return RearrangedPair(_columns(weighted[:cut]), _columns(weighted[cut:]))
        block = rows_of(self.matrix)
        parts = lambda: ((rows.start, block(rows)) for rows in row_blocks(*self.shape))  # noqa: E731
        return RearrangedRows(parts, shape, as_double(factors[0][:1, :1, 0]))

    def residual_norm(self, approximation: Approximation) -> float:
        """‖M − M̂‖_F; between sums of one shape from the QR factors of their terms, else block by block."""
        own = self.matrix.kronecker_shape
        if isinstance(approximation, SeparatedMatrix) and approximation.kronecker_shape == own:
            return (_in_double(self.matrix) - _in_double(approximation)).norm
        return residual_norm(self.shape, rows_of(self.matrix), approximation)


def _in_double(matrix: SeparatedMatrix) -> SeparatedMatrix:
    return matrix.astype("complex128" if is_complex(matrix.factors[0]) else "float64")


def _merged(factors: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    return math.prod(m for m, _ in factors), math.prod(n for _, n in factors)


def _columns(factors: tuple[Array, ...]) -> Array:
    """Entries of the Kronecker product of each term, one column a term."""
    xp = namespace(*factors)
    terms = [sum_of_kroneckers([f[k : k + 1, :, :] for f in factors]) for k in range(factors[0].shape[0])]
    return xp.stack([xp.reshape(term, (-1,)) for term in terms], axis=1)
