"""KnownEntries: a matrix with missing entries; its norm and errors are those of the known ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from lsrdecomp.arrays import as_floating, finite_norm, norm, require_matrix, to_numpy
from lsrdecomp.errors import LsrError, ShapeError
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.targets.residual import Approximation, cached_row_blocks, check_sizes, rows_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lsrdecomp.kronecker.shape import KroneckerShape


@dataclass(frozen=True, eq=False)
class KnownEntries:
    """A matrix with missing entries, in NumPy.

    `decompose` fits the known entries alone, by `solvers.TensorLyCP`, and measures its error on
    them: what the sum of Kronecker products says of the others is a prediction.

    Parameters
    ----------
    matrix : array_like, shape (m, n)
        What stands in a missing entry is not read; it may be NaN.
    known : array_like of bool, shape (m, n), optional
        Which entries are known; absent, all that are not NaN.

    Raises
    ------
    ShapeError
        If the two differ in shape, or no entry is known.
    PrecisionError
        If a known entry is not finite.

    Examples
    --------
    Three of the 144 entries of a Kronecker product are lost, and found again:

    >>> import numpy as np
    >>> from lsrdecomp import decompose
    >>> whole = np.kron(np.arange(1.0, 10.0).reshape(3, 3), np.arange(1.0, 17.0).reshape(4, 4))
    >>> damaged = whole.copy()
    >>> damaged[[1, 5, 9], [2, 7, 3]] = np.nan
    >>> result = decompose(KnownEntries(damaged), "3x3, 4x4", rank=1)
    >>> bool(np.allclose(result.to_matrix(), whole))
    True
    """

    matrix: Any
    known: Any = None

    def __post_init__(self) -> None:
        matrix = as_floating(to_numpy(self.matrix))
        require_matrix(matrix)
        known = ~np.isnan(matrix) if self.known is None else np.asarray(self.known, dtype=bool)
        if known.shape != matrix.shape:
            raise ShapeError(f"known has the shape {known.shape}, the matrix {matrix.shape}")
        if not known.any():
            raise ShapeError(f"none of the {matrix.size:,} entries is known")
        object.__setattr__(self, "matrix", np.where(known, matrix, 0.0).astype(matrix.dtype))
        object.__setattr__(self, "known", known)
        self.norm  # noqa: B018 - refuses entries that are not finite

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix."""
        rows, columns = self.matrix.shape
        return int(rows), int(columns)

    @cached_property
    def norm(self) -> float:
        """‖M‖_F over the known entries."""
        return finite_norm(self.matrix)

    def tensors(self, shape: KroneckerShape) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Return R(M), zero where an entry is missing, and R of the mask, one where it is known."""
        shape.check(self.shape)
        return rearrange(self.matrix, shape), rearrange(self.known.astype(np.float64), shape)

    def rearranged(self, shape: KroneckerShape) -> NoReturn:
        """Refuse the rearrangement, from which solvers would take missing entries for zeros."""
        raise LsrError(
            f"{shape}: a matrix with missing entries is fitted by solver=TensorLyCP(); for others "
            "fill the entries in first"
        )

    def residual_norm(self, approximation: Approximation) -> float:
        """Return ‖M − M̂‖_F over the known entries, in double precision."""
        check_sizes(self.shape, approximation.shape)
        approximate_rows = rows_of(approximation)
        parts = []
        for rows in cached_row_blocks(*self.shape):
            difference = self.matrix[rows].astype(np.result_type(self.matrix, np.float64))
            difference -= to_numpy(approximate_rows(rows))
            parts.append(norm(difference * self.known[rows]))
        return math.hypot(*parts)
