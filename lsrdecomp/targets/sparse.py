"""Sparse: a scipy sparse matrix or array, rearranged without being filled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import Array, as_double, as_floating, finite_norm, require_matrix
from lsrdecomp.errors import PrecisionError
from lsrdecomp.kronecker.rearrange import khatri_rao
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.targets.contract import require_formable, require_two_factors
from lsrdecomp.targets.residual import Approximation, check_sizes, residual_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lsrdecomp.kronecker.shape import KroneckerShape


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
    >>> decompose(Sparse(square), "30x30, 30x30", rtol=1e-9).separation_rank       # a Laplacian of 900 points
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
        return int(self.matrix.shape[0]), int(self.matrix.shape[1])

    @cached_property
    def norm(self) -> float:
        return finite_norm(self.matrix.data)

    def rearranged(self, shape: KroneckerShape) -> RearrangedSparse:
        """R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        from scipy.sparse import csr_array

        (_, n), (p, q) = shape.factors
        entries = self.matrix.tocoo()
        (i, k), (j, column) = (
            np.divmod(entries.row.astype(np.int64), p),
            np.divmod(entries.col.astype(np.int64), q),
        )
        return RearrangedSparse(
            csr_array((entries.data, (i * n + j, k * q + column)), shape=shape.sizes)
        )

    def core(self, shape: KroneckerShape) -> tuple[Array, tuple[Any, ...]]:
        """R(M) for any number of factors, where it is not zero.

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
            If the core has more than `LARGEST_FORMED` entries.
        """
        from scipy.sparse import csr_array

        core, places = self._restricted(shape)
        sizes = zip(places, shape.sizes, strict=True)
        return core, tuple(
            csr_array((np.ones(used.size), (used, np.arange(used.size))), shape=(size, used.size))
            for used, size in sizes
        )

    def _restricted(self, shape: KroneckerShape) -> tuple[Array, tuple[NDArray[np.int64], ...]]:
        """The core, and for each factor the places i·n + j that it covers."""
        shape.check(self.shape)
        entries = self.matrix.tocoo()
        rows, columns = (
            np.unravel_index(entries.row, shape.rows),
            np.unravel_index(entries.col, shape.columns),
        )
        used_places = [
            np.unique(i.astype(np.int64) * n + j, return_inverse=True)
            for (_, n), i, j in zip(shape.factors, rows, columns, strict=True)
        ]
        sizes = tuple(max(1, used.size) for used, _ in used_places)
        require_formable(
            math.prod(sizes), f"the {' × '.join(map(str, sizes))} places of a sparse matrix"
        )
        core = np.zeros(sizes, dtype=self.matrix.dtype)
        core[tuple(index for _, index in used_places)] = entries.data
        return core, tuple(used if used.size else np.zeros(1, np.int64) for used, _ in used_places)

    def residual_norm(self, approximation: Approximation) -> float:
        """‖M − M̂‖_F; from the core alone where M̂ has three and more factors that vanish wherever the core does."""
        check_sizes(self.shape, approximation.shape)
        factors = getattr(approximation, "factors", ())
        if (
            isinstance(approximation, SeparatedMatrix)
            and len(factors) > 2
            and approximation.separation_rank
        ):
            core, places = self._restricted(approximation.kronecker_shape)
            flat = [np.reshape(as_double(f), (f.shape[0], -1)) for f in factors]
            outside = [np.delete(f, used, axis=1) for f, used in zip(flat, places, strict=True)]
            if not any(np.any(f) for f in outside):
                columns = [f[:, used].T for f, used in zip(flat, places, strict=True)]
                return _core_distance(
                    core, columns, np.asarray(approximation.weights, dtype=np.float64)
                )
        return residual_norm(
            self.shape, lambda rows: self.matrix[rows.start : rows.stop].toarray(), approximation
        )


def _core_distance(core: Array, columns: Sequence[Array], weights: Array) -> float:
    """‖core − Σ_k λ_k c_k⁽¹⁾ ∘ … ∘ c_k⁽ᵈ⁾‖ from its entries, one index of the first axis after the other."""
    first, *others = columns
    rest = reduce(khatri_rao, others)
    return math.hypot(
        *(
            np.linalg.norm(as_double(slab).reshape(-1) - rest @ (row * weights))
            for slab, row in zip(core, first, strict=True)
        )
    )


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
