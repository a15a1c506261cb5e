"""Separated: a sum of Kronecker products, to be approximated by fewer terms or in another shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, adjoint, as_double, conjugate, namespace
from lsrdecomp.kronecker.rearrange import sum_of_kroneckers
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.targets.base import RearrangedDense
from lsrdecomp.targets.contract import Rearranged, require_two_factors
from lsrdecomp.targets.residual import Approximation, residual_norm, row_blocks, rows_of
from lsrdecomp.targets.row_stream import RearrangedRows

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape


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
        return as_double(self.left) @ namespace(self.left).matrix_transpose(as_double(self.right))


@dataclass(frozen=True, eq=False)
class Separated:
    """A sum of Kronecker products of any number of factors, to be approximated by fewer terms or in another shape.

    In its own shape, and where consecutive factors are taken together, R(M) is a thin product and
    nothing is formed; in any other shape M is formed a block of rows at a time.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix, decompose
    >>> three = SeparatedMatrix.from_factors([np.eye(4)[None], np.ones((1, 3, 3)), np.eye(2)[None]])
    >>> decompose(Separated(three), "4x4, 6x6", rtol=1e-9).separation_rank        # the last two taken together
    1
    """

    matrix: SeparatedMatrix

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @cached_property
    def norm(self) -> float:
        return self.matrix.norm

    def rearranged(self, shape: KroneckerShape) -> Rearranged:
        """R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        factors = self.matrix.factors
        xp, s = namespace(*factors), self.matrix.separation_rank
        if s == 0:
            return RearrangedDense(xp.zeros(shape.sizes, dtype=self.matrix.dtype))
        weighted = (
            factors[0] * xp.astype(self.matrix.weights, factors[0].dtype)[:, None, None],
            *factors[1:],
        )
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
            return (self.matrix.in_double() - approximation.in_double()).norm
        return residual_norm(self.shape, rows_of(self.matrix), approximation)


def _merged(factors: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    return math.prod(m for m, _ in factors), math.prod(n for _, n in factors)


def _columns(factors: tuple[Array, ...]) -> Array:
    """Entries of the Kronecker product of each term, one column a term."""
    xp = namespace(*factors)
    terms = [
        sum_of_kroneckers([f[k : k + 1, :, :] for f in factors]) for k in range(factors[0].shape[0])
    ]
    return xp.stack([xp.reshape(term, (-1,)) for term in terms], axis=1)
