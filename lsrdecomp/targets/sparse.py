"""Sparse: a scipy sparse matrix or array, rearranged without being filled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import Array, as_double, as_floating, finite_norm, norm, require_matrix
from lsrdecomp.errors import PrecisionError
from lsrdecomp.kronecker.rearrange import khatri_rao
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.targets.contract import require_formable, require_two_factors
from lsrdecomp.targets.residual import (
    Approximation,
    cached_row_blocks,
    check_sizes,
    pair_core,
    residual_norm,
    separated_distance,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lsrdecomp.kronecker.shape import KroneckerShape


MAX_DENSE_RESIDUAL = 2**21
"""Entries of a residual from which inner products are tried first, as for arrays."""


@dataclass(frozen=True, eq=False)
class Sparse:
    """A scipy sparse matrix or array; its rearrangement is as sparse.

    Parameters
    ----------
    matrix : scipy sparse matrix or array, shape (m, n)
        Duplicate entries add up; integers are promoted to float64. Raises `PrecisionError` unless
        entries are finite.

    Examples
    --------
    >>> import scipy.sparse
    >>> from lsrdecomp import decompose
    >>> line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=(-1, 0, 1), shape=(30, 30))
    >>> identity = scipy.sparse.eye_array(30)
    >>> square = scipy.sparse.kron(line, identity) + scipy.sparse.kron(identity, line)
    >>> decompose(Sparse(square), "30x30, 30x30", rtol=1e-9).separation_rank  # a Laplacian
    2
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
        require_matrix(rows)
        object.__setattr__(self, "matrix", rows)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return int(self.matrix.shape[0]), int(self.matrix.shape[1])

    @cached_property
    def norm(self) -> float:
        """‖M‖_F in double precision."""
        return finite_norm(self.matrix.data)

    def rearranged(self, shape: KroneckerShape) -> RearrangedSparse:
        """Return R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        from scipy.sparse import csr_array

        (_, n), (p, q) = shape.factors
        entries = self.matrix.tocoo()
        i, k = np.divmod(entries.row.astype(np.int64), p)
        j, l = np.divmod(entries.col.astype(np.int64), q)  # noqa: E741 - M[i·p + k, j·q + l]
        places = i * n + j, k * q + l
        return RearrangedSparse(csr_array((entries.data, places), shape=shape.sizes))

    def core(self, shape: KroneckerShape) -> tuple[Array, tuple[Any, ...]]:
        """Return R(M) for any number of factors, where it is not zero.

        A sum of Kronecker products of sparse factors fills only the product of their patterns:
        places (i, j) of a factor where M has no entry at all are left out, so that a
        finite-difference operator on a grid of 100 × 100 × 100 points becomes a tensor of 298 × 298
        × 298.

        Returns
        -------
        core : Array, shape (u_1, …, u_d)
        bases : tuple of sparse arrays, shapes (m_i·n_i, u_i)
            Columns of the identity: R(M) = core ×_1 U_1 … ×_d U_d.

        Raises
        ------
        ShapeError
            If the core has too many entries (`require_formable`).
        """
        from scipy.sparse import csr_array

        core, places = self._core_and_places(shape)
        bases = []
        for covered, size in zip(places, shape.sizes, strict=True):
            ones = np.ones(covered.size)
            columns = np.arange(covered.size)
            bases.append(csr_array((ones, (covered, columns)), shape=(size, covered.size)))
        return core, tuple(bases)

    def _core_and_places(
        self, shape: KroneckerShape
    ) -> tuple[Array, tuple[NDArray[np.int64], ...]]:
        """Return the core, and for each factor the places i·n + j that it covers."""
        shape.check(self.shape)
        entries = self.matrix.tocoo()
        rows = np.unravel_index(entries.row, shape.rows)
        columns = np.unravel_index(entries.col, shape.columns)
        places = []
        indices = []
        for (_, n), i, j in zip(shape.factors, rows, columns, strict=True):
            covered, index = np.unique(i.astype(np.int64) * n + j, return_inverse=True)
            places.append(covered if covered.size else np.zeros(1, np.int64))
            indices.append(index)
        sizes = tuple(covered.size for covered in places)
        what = f"the {' × '.join(map(str, sizes))} places of a sparse matrix"
        require_formable(math.prod(sizes), what)
        core = np.zeros(sizes, dtype=self.matrix.dtype)
        core[tuple(indices)] = entries.data
        return core, tuple(places)

    def residual_norm(self, approximation: Approximation) -> float:
        """Return ‖M − M̂‖_F.

        Of a sum of Kronecker products from what it has in common with the core, so that the empty
        part of M costs nothing: of two factors always, of three and more where the sum vanishes
        wherever the core does.
        """
        check_sizes(self.shape, approximation.shape)
        if not isinstance(approximation, SeparatedMatrix):
            return residual_norm(self.shape, self._dense_rows, approximation)
        if approximation.separation_rank == 0:
            return self.norm
        if approximation.order == 2:
            return self._distance_of_two_factors(approximation)
        if approximation.order > 2:
            core, places = self._core_and_places(approximation.kronecker_shape)
            columns = _covered_columns(approximation.factors, places)
            if columns is not None:
                weights = np.asarray(approximation.weights, dtype=np.float64)
                return _core_distance(core, columns, weights)
        return residual_norm(self.shape, self._dense_rows, approximation)

    def _distance_of_two_factors(self, approximation: SeparatedMatrix) -> float:
        """Return ‖M − M̂‖_F from the rows and columns of R(M) that hold entries, and the others."""
        rearranged = self.rearranged(approximation.kronecker_shape)
        entries = rearranged.matrix.tocoo()
        rows, row = np.unique(entries.row, return_inverse=True)
        columns, column = np.unique(entries.col, return_inverse=True)
        if rows.size * columns.size > MAX_DENSE_RESIDUAL:
            distance = separated_distance(rearranged, self.norm, self.norm, approximation)
            if distance is not None:
                return distance
        weights = np.asarray(approximation.weights, dtype=np.float64)
        first, second = (
            np.reshape(as_double(factor), (factor.shape[0], -1)).T
            for factor in approximation.factors
        )
        first = first * weights
        # Distance 1: where R(M) has rows and columns with entries, block by block.
        from scipy.sparse import csr_array

        core = csr_array((entries.data, (row, column)), shape=(rows.size, columns.size))
        parts = []
        for block in cached_row_blocks(rows.size, columns.size):
            sums = first[rows[block]] @ second[columns].T
            parts.append(norm(as_double(core[block].toarray()) - sums))
        # Distance 2: M̂ where R(M) has none.
        hidden_second = np.delete(second, columns, axis=0)
        if np.any(hidden_second):
            parts.append(norm(pair_core([first[rows]], [hidden_second.conj()])))
        hidden_first = np.delete(first, rows, axis=0)
        if np.any(hidden_first):
            parts.append(norm(pair_core([hidden_first], [second.conj()])))
        return math.hypot(*parts)

    def _dense_rows(self, rows: slice) -> Array:
        return self.matrix[rows.start : rows.stop].toarray()


def _covered_columns(
    factors: Sequence[Array], places: Sequence[NDArray[np.int64]]
) -> list[Array] | None:
    """Return the entries of each factor at its places, one column a term; None if others remain."""
    columns = []
    for factor, covered in zip(factors, places, strict=True):
        entries = np.reshape(as_double(factor), (factor.shape[0], -1))
        if np.any(np.delete(entries, covered, axis=1)):
            return None
        columns.append(entries[:, covered].T)
    return columns


def _core_distance(core: Array, columns: Sequence[Array], weights: Array) -> float:
    """Return ‖core − Σ_k λ_k c_k⁽¹⁾ ∘ … ∘ c_k⁽ᵈ⁾‖ from entries, one slab of the core at a time."""
    first, *others = columns
    products = reduce(khatri_rao, others)
    norms = []
    for slab, row in zip(core, first, strict=True):
        residual = as_double(slab).reshape(-1) - products @ (row * weights)
        norms.append(np.linalg.norm(residual))
    return math.hypot(*norms)


@dataclass(frozen=True, slots=True)
class RearrangedSparse:
    """A sparse rearrangement."""

    matrix: Any

    @property
    def shape(self) -> tuple[int, int]:
        """(m_1·n_1, m_2·n_2)."""
        return int(self.matrix.shape[0]), int(self.matrix.shape[1])

    @property
    def prototype(self) -> Array:
        """One dense number of the type of the entries."""
        return np.zeros((1, 1), self.matrix.dtype)

    def matmat(self, x: Array) -> Array:
        """Return R(M) x."""
        return self.matrix @ x

    def rmatmat(self, y: Array) -> Array:
        """Return R(M)ᴴ y."""
        return self.matrix.conj().T @ y

    def formed(self) -> Array:
        """Return R(M), dense."""
        return self.matrix.toarray()
