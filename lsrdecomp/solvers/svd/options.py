"""Options of two-factor solvers that seldom need a change: their meaning, unit, and source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class SketchOptions:
    """A few terms from the range of R(M) times random columns, where its size falls fast.

    All values were set by hand; ``benchmarks/solvers/two_factors.py`` times the result.
    """

    # Random columns beyond the terms
    oversampling: int = 8
    # The smallest tolerance for which they are drawn: finer ones request the digits of LAPACK,
    # the same in every library
    min_tolerance: float = 1e-5
    # Rows of R(M) a column, at least
    min_rows_per_column: int = 3
    # The same for `Gram`, which can have the leading eigenvectors from LAPACK alone instead
    gram_rows_per_column: int = 8
    # The size after the last column over that after the last term: above this the spectrum does
    # not fall fast enough
    max_tail_ratio: float = 0.25
    # The size after the last column over that so many columns before: above this the remainder is
    # flat, or rounding, which one more product takes out
    flat_ratio: float = 0.05
    flat_columns: int = 5

    def falls_fast(self, sizes: np.ndarray, rank: int) -> bool:
        """Return whether the sizes of columns, in their order, fall so fast that these suffice."""
        return bool(sizes[-1] <= self.max_tail_ratio * sizes[rank - 1])

    def is_flat(self, sizes: np.ndarray) -> bool:
        """Return whether the last columns hold a flat remainder, or rounding."""
        return bool(sizes[-1] > self.flat_ratio * sizes[-1 - self.flat_columns])


@dataclass(frozen=True, slots=True)
class SubspaceOptions:
    """Leading subspaces of many small Gram matrices by powers of them.

    By timing of 64 matrices of 36 × 36 to 144 × 144 with flat spectra and steep ones.
    """

    # Rows of R(M), the shorter side, up to which powers are faster than LAPACK's few eigenvectors
    max_side: int = 100
    # So many of these rows for each term, at least; else the SVD is as fast
    sides_per_term: int = 4
    # Random vectors beyond the terms
    oversampling: int = 8
    # Squarings of G = R Rᴴ, and products with the highest power
    squarings: int = 2
    steps: int = 2


@dataclass(frozen=True, slots=True)
class SinglePrecisionOptions:
    """The solves that begin in single precision, at half the price, and are finished in double."""

    # Entries of a matrix from which on products are what a solve takes; smaller ones agree from
    # machine to machine. By hand.
    min_entries: int = 2**20
    # The smallest excess over the optimum that a certificate in single precision can show
    min_tolerance: float = 1e-7
    # Entries of a matrix up to which its rearrangement in double precision is held beside that in
    # single: 32 MiB. By hand.
    max_held_entries: int = 2**22
    # Norms up to which, and down to whose inverse, single precision holds entries and their squares
    max_norm: float = 1e15


@dataclass(frozen=True, slots=True)
class SpaceOptions:
    """The size of a Krylov space, and the intervals of its certificate; all values by hand."""

    # Columns of the smaller side of R(M) for each column of the space, at least: a larger space
    # would cost more than the Gram matrix
    columns_per_vector: int = 3
    # The same for the columns that a tolerance is predicted to need
    predicted_columns_per_vector: int = 2
    # The same for the terms of a request by their number
    columns_per_term: int = 4
    # A certificate is computed again when the space has grown by one in so many columns
    check_interval: int = 8
    # The same after a residual was measured that did not suffice
    measured_check_interval: int = 4
    # Columns of a block at least; at most where R(M) is stored, so that one reading of it serves
    # the whole block, and where it is not, so that products are paid for by the column
    min_block: int = 8
    max_block_stored: int = 16
    max_block_unformed: int = 8
    # Columns of a block beyond the terms where a narrower one may have missed copies of a value
    columns_beyond_terms: int = 4
    # Relative errors below which the rounding of single precision would cost terms: these are
    # sought in double precision
    fine_goal: float = 1e-4


@dataclass(frozen=True, slots=True)
class LanczosOptions:
    """The blocks of `BatchedKrylov`, and when its estimates can be trusted.

    Set on 1,000 matrices of 169 to 484 rows with fourteen kinds of spectra, clusters and spikes
    over slow remainders among them.
    """

    # Columns of a block beyond the terms, at least
    oversampling: int = 4
    # Entries of a matrix up to which its space is grown in double precision: single saves less
    # than it costs to convert the matrix, and takes a look more. By timing of 128² to 512².
    max_double_entries: int = 2**17
    # Blocks that a space needs before the excess is estimated; and where θ_s² is not 1/.8 of what
    # lies beyond, so that a cluster may be wider than the space
    min_blocks: int = 2
    min_blocks_of_clusters: int = 3
    max_tail_ratio: float = 0.8
