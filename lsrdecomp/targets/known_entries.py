"""KnownEntries: a matrix with missing or weighted entries, which its norm and errors count so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from lsrdecomp.arrays import as_floating, finite_norm, norm, require_matrix, to_numpy
from lsrdecomp.errors import BudgetError, LsrError, ShapeError
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.targets.residual import Approximation, cached_row_blocks, check_sizes, rows_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lsrdecomp.kronecker.shape import KroneckerShape


@dataclass(frozen=True, eq=False)
class KnownEntries:
    """A matrix with missing entries, or with a weight for each, in NumPy.

    `decompose` fits the known entries alone, by `solvers.WeightedALS`, and measures its error on
    them, (Σ w·abs(M − M̂)²)^½: what the sum of Kronecker products says of the others is a
    prediction.

    Parameters
    ----------
    matrix : array_like, shape (m, n)
        What stands in a missing entry is not read; it may be NaN.
    known : array_like of bool, shape (m, n), optional
        Which entries are known; absent, all that are not NaN.
    weights : array_like, shape (m, n), optional
        Weights w ≥ 0 of the squared errors of the entries, such as one over their variance; an
        entry of weight zero is missing. Absent, known entries count alike.

    Raises
    ------
    ShapeError
        If shapes differ, or no entry is known.
    BudgetError
        If a weight is negative or not finite.
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
    weights: Any = None

    def __post_init__(self) -> None:
        matrix = as_floating(to_numpy(self.matrix))
        require_matrix(matrix)
        known = ~np.isnan(matrix) if self.known is None else np.asarray(self.known, dtype=bool)
        if known.shape != matrix.shape:
            raise ShapeError(f"known has the shape {known.shape}, the matrix {matrix.shape}")
        weights = known.astype(np.float64)
        if self.weights is not None:
            weights = known * _checked_weights(self.weights, matrix.shape)
            known = weights > 0.0
        if not known.any():
            raise ShapeError(f"none of the {matrix.size:,} entries is known")
        object.__setattr__(self, "matrix", np.where(known, matrix, 0.0).astype(matrix.dtype))
        object.__setattr__(self, "known", known)
        object.__setattr__(self, "weights", weights)
        self.norm  # noqa: B018 - refuses entries that are not finite

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix."""
        rows, columns = self.matrix.shape
        return int(rows), int(columns)

    @cached_property
    def norm(self) -> float:
        """(Σ w·abs(M)²)^½ over the known entries."""
        finite_norm(self.matrix)  # names an entry that is not finite
        return finite_norm(np.sqrt(self.weights) * self.matrix)

    def tensors(self, shape: KroneckerShape) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Return R(M), zero where an entry is missing, and R of the weights."""
        shape.check(self.shape)
        return rearrange(self.matrix, shape), rearrange(self.weights, shape)

    def rearranged(self, shape: KroneckerShape) -> NoReturn:
        """Refuse the rearrangement, from which solvers would take missing entries for zeros."""
        raise LsrError(
            f"{shape}: a matrix with missing entries is fitted by solver=WeightedALS(); for others "
            "fill the entries in first"
        )

    def residual_norm(self, approximation: Approximation) -> float:
        """Return (Σ w·abs(M − M̂)²)^½ over the known entries, in double precision."""
        check_sizes(self.shape, approximation.shape)
        approximate_rows = rows_of(approximation)
        parts = []
        for rows in cached_row_blocks(*self.shape):
            difference = self.matrix[rows].astype(np.result_type(self.matrix, np.float64))
            difference -= to_numpy(approximate_rows(rows))
            parts.append(norm(difference * np.sqrt(self.weights[rows])))
        return math.hypot(*parts)


def _checked_weights(weights: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return weights of entries in double precision, or refuse them."""
    checked = np.asarray(to_numpy(weights), dtype=np.float64)
    if checked.shape != shape:
        raise ShapeError(f"weights have the shape {checked.shape}, the matrix {shape}")
    if not (np.all(np.isfinite(checked)) and np.all(checked >= 0.0)):
        raise BudgetError("weights of entries must be finite and not negative")
    return checked
