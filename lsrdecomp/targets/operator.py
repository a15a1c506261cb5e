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
    """R(M) from the rearrangement of Mᵀ: its entry ((i, j), (k, l)) is ((j, i), (l, k)) of that."""

    transposed: Rearranged
    kronecker_shape: KroneckerShape

    @property
    def shape(self) -> tuple[int, int]:
        """(m_1·n_1, m_2·n_2)."""
        return self.transposed.shape

    @property
    def prototype(self) -> Array:
        """That of the transposed rearrangement."""
        return self.transposed.prototype

    def matmat(self, x: Array) -> Array:
        """Return R(M) x."""
        (m, n), (p, q) = self.kronecker_shape.factors
        image = self.transposed.matmat(_swap_pairs(x, p, q))
        return _swap_pairs(image, n, m)

    def rmatmat(self, y: Array) -> Array:
        """Return R(M)ᴴ y."""
        (m, n), (p, q) = self.kronecker_shape.factors
        image = self.transposed.rmatmat(_swap_pairs(y, m, n))
        return _swap_pairs(image, q, p)

    def formed(self) -> Array:
        """Return R(M)."""
        (m, n), (p, q) = self.kronecker_shape.factors
        xp = namespace(self.prototype)
        rows_swapped = _swap_pairs(self.transposed.formed(), n, m)
        return xp.matrix_transpose(_swap_pairs(xp.matrix_transpose(rows_swapped), q, p))


def _swap_pairs(x: Array, m: int, n: int) -> Array:
    """Move rows (i, j) of an m·n-row array to rows (j, i)."""
    xp = namespace(x)
    b = x.shape[1]
    swapped = xp.permute_dims(xp.reshape(x, (m, n, b)), (1, 0, 2))
    return xp.reshape(swapped, (m * n, b))


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
    >>> reverse = LinearOperator((12, 12), matvec=lambda x: x[::-1], dtype=float)
    >>> result = decompose(Operator(reverse), "4x4, 3x3", rtol=1e-9)
    >>> result.separation_rank, round(result.relative_error, 9)
    (1, 0.0)
    """

    operator: Any

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return int(self.operator.shape[0]), int(self.operator.shape[1])

    @cached_property
    def norm(self) -> float:
        """‖M‖_F from n products."""
        return self._transpose.norm

    def rearranged(self, shape: KroneckerShape) -> RearrangedTranspose:
        """Return R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        return RearrangedTranspose(self._transpose.rearranged(shape.transposed), shape)

    def tensor(self, shape: KroneckerShape) -> Array:
        """Return R(M) for any number of factors, formed from n products.

        Raises `ShapeError` where that is too large.
        """
        shape.check(self.shape)
        require_formable(self.shape[0] * self.shape[1], "an operator")
        return rearrange(np.concatenate(list(self._columns())).T, shape)

    def residual_norm(self, approximation: Any) -> float:
        """Return ‖M − M̂‖_F, measured: `Target.residual_norm`."""
        check_sizes(self.shape, approximation.shape)
        if not hasattr(approximation, "factors"):
            formed = to_numpy(approximation.to_matrix())
            approximation = SeparatedMatrix(np.ones(1), (formed[None, :, :],))
        return self._transpose.residual_norm(approximation.mT)

    @cached_property
    def _transpose(self) -> RowStream:
        """The columns of the matrix as a stream of rows of its transpose."""
        m, n = self.shape
        return RowStream(self._columns, (n, m))

    def _columns(self) -> Iterator[Array]:
        """Yield blocks of columns of the matrix, as rows."""
        m, n = self.shape
        for part in row_blocks(n, m):
            width = part.stop - part.start
            unit = np.zeros((n, width))
            unit[np.arange(part.start, part.stop), np.arange(width)] = 1.0
            if hasattr(self.operator, "matmat"):
                columns = np.asarray(self.operator.matmat(unit)).T
            else:
                images = [self.operator.matvec(column) for column in unit.T]
                columns = np.stack([np.asarray(image).reshape(m) for image in images])
            block_norm(part.start, columns, "columns")
            yield columns
