"""Separated: a sum of Kronecker products, to be approximated by fewer terms or in another shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, adjoint, as_double, conjugate, namespace
from lsrdecomp.kronecker.rearrange import sum_of_kroneckers
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.targets.contract import Rearranged, require_two_factors
from lsrdecomp.targets.residual import Approximation, residual_norm, row_blocks, rows_of
from lsrdecomp.targets.row_stream import RearrangedRows
from lsrdecomp.targets.target import RearrangedDense

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class RearrangedPair:
    """R(M) = L Rᵀ of a sum in its own shape, for thin L (m_1·n_1, s) and R (m_2·n_2, s)."""

    left: Array
    right: Array

    @property
    def shape(self) -> tuple[int, int]:
        """(m_1·n_1, m_2·n_2)."""
        return int(self.left.shape[0]), int(self.right.shape[0])

    @property
    def prototype(self) -> Array:
        """L itself."""
        return self.left

    def matmat(self, x: Array) -> Array:
        """Return R(M) x."""
        return self.left @ (namespace(x).matrix_transpose(self.right) @ x)

    def rmatmat(self, y: Array) -> Array:
        """Return R(M)ᴴ y."""
        return conjugate(self.right) @ (adjoint(self.left) @ y)

    def formed(self) -> Array:
        """Return R(M) in double precision."""
        return as_double(self.left) @ namespace(self.left).matrix_transpose(as_double(self.right))


@dataclass(frozen=True, eq=False)
class Separated:
    """A sum of Kronecker products, to be approximated by fewer terms or in another shape.

    Of any number of factors. In its own shape, and where consecutive factors are taken together,
    R(M) is a thin product and nothing is formed; in any other shape M is formed a block of rows at
    a time.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix, decompose
    >>> three = SeparatedMatrix.from_factors([np.eye(4)[None], np.ones((1, 3, 3)), np.eye(2)[None]])
    >>> result = decompose(Separated(three), "4x4, 6x6", rtol=1e-9)  # the last two taken together
    >>> result.separation_rank
    1
    """

    matrix: SeparatedMatrix

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.matrix.shape

    @cached_property
    def norm(self) -> float:
        """‖M‖_F in double precision, from QR factors of the terms."""
        return self.matrix.norm

    def rearranged(self, shape: KroneckerShape) -> Rearranged:
        """Return R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        factors = self.matrix.factors
        xp = namespace(*factors)
        if self.matrix.separation_rank == 0:
            return RearrangedDense(xp.zeros(shape.sizes, dtype=self.matrix.dtype))
        cut = self._cut_of(shape)
        if cut is not None:
            weights = xp.astype(self.matrix.weights, factors[0].dtype)
            left = (factors[0] * weights[:, None, None], *factors[1:cut])
            right = factors[cut:]
            return RearrangedPair(_columns_of_terms(left), _columns_of_terms(right))
        return RearrangedRows(self._parts, shape, as_double(factors[0][:1, :1, 0]))

    def residual_norm(self, approximation: Approximation) -> float:
        """Return ‖M − M̂‖_F.

        Between sums of one shape from the QR factors of their terms, else block by block.
        """
        if (
            isinstance(approximation, SeparatedMatrix)
            and approximation.kronecker_shape == self.matrix.kronecker_shape
        ):
            return (self.matrix.in_double() - approximation.in_double()).norm
        return residual_norm(self.shape, rows_of(self.matrix), approximation)

    def _cut_of(self, shape: KroneckerShape) -> int | None:
        """Return how many factors make the first of a two-factor shape; None where none do."""
        pairs = self.matrix.kronecker_shape.factors
        for cut in range(1, len(pairs)):
            left = KroneckerShape(pairs[:cut]).matrix_shape
            right = KroneckerShape(pairs[cut:]).matrix_shape
            if (left, right) == shape.factors:
                return cut
        return None

    def _parts(self) -> Iterator[tuple[int, Array]]:
        """Yield blocks of rows with the number of their first row."""
        block = rows_of(self.matrix)
        for rows in row_blocks(*self.shape):
            yield rows.start, block(rows)


def _columns_of_terms(factors: tuple[Array, ...]) -> Array:
    """Return the entries of the Kronecker product of each term, one column a term."""
    xp = namespace(*factors)
    columns = []
    for k in range(factors[0].shape[0]):
        term = sum_of_kroneckers([factor[k : k + 1, :, :] for factor in factors])
        columns.append(xp.reshape(term, (-1,)))
    return xp.stack(columns, axis=1)
