"""Operator: a matrix known by its action on vectors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import Array, namespace, to_numpy
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.targets.contract import Rearranged, require_formable, require_two_factors
from lsrdecomp.targets.residual import check_sizes, row_blocks
from lsrdecomp.targets.row_stream import RowStream, block_norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.kronecker.shape import KroneckerShape


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

    The rearrangement mixes rows with columns, so that every product with R(M) needs all n columns
    of M: n products with the operator, in blocks. Where the matrix fits into memory,
    ``Dense(operator @ numpy.eye(n))`` pays them once.

    Parameters
    ----------
    operator : object
        With ``shape`` and ``matmat`` (n, b) → (m, b), or ``matvec`` alone.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import decompose
    >>> from scipy.sparse.linalg import LinearOperator
    >>> reverse = LinearOperator((12, 12), matvec=lambda x: x[::-1], dtype=float)  # the identity upside down
    >>> result = decompose(Operator(reverse), "4x4, 3x3", rtol=1e-9)
    >>> result.separation_rank, round(result.relative_error, 9)
    (1, 0.0)
    """

    operator: Any

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.operator.shape[0]), int(self.operator.shape[1])

    @cached_property
    def norm(self) -> float:
        return self._transpose.norm

    def rearranged(self, shape: KroneckerShape) -> RearrangedTranspose:
        """R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        return RearrangedTranspose(self._transpose.rearranged(shape.transposed), shape)

    def tensor(self, shape: KroneckerShape) -> Array:
        """R(M) for any number of factors, formed from n products. Raises `ShapeError` where that is too large."""
        shape.check(self.shape)
        require_formable(self.shape[0] * self.shape[1], "an operator")
        return rearrange(np.concatenate(list(self._columns())).T, shape)

    def residual_norm(self, approximation: Any) -> float:
        """‖M − M̂‖_F, measured: `Target.residual_norm`."""
        check_sizes(self.shape, approximation.shape)
        if not hasattr(approximation, "factors"):
            approximation = SeparatedMatrix(
                np.ones(1), (to_numpy(approximation.to_matrix())[None, :, :],)
            )
        return self._transpose.residual_norm(approximation.mT)

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
                columns = np.stack(
                    [np.asarray(self.operator.matvec(column)).reshape(m) for column in unit.T]
                )
            block_norm(part.start, columns, "columns")
            yield columns
