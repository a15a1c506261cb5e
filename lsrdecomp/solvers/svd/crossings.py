"""Sizes from which one way to the terms is faster than another, as measured."""

MIN_GRAM_SIDE = 32
"""Smaller side of R(M) up to which LAPACK's SVD is as fast as the eigenvectors of a Gram matrix."""

MIN_ALL_SIDE = 96
"""The same where more than a quarter of all vectors are needed, which LAPACK finds with all."""

FAST = 0.09
FLAT = 0.88
"""How singular values of R times random columns fall, see `KrylovSpace.decays`: below the one fast,
above the other hardly, as those of noise do."""

BATCH_GAIN = 1.25
"""How much smaller sides may be in a batch, whose matrices share what goes around the products."""

CROSSINGS: tuple[tuple[int, int, int, int], ...] = (
    (1, 95, 105, 180),
    (4, 100, 115, 230),
    (8, 120, 140, 350),
    (16, 140, 200, 470),
    (32, 190, 330, 740),
    (64, 400, 700, 1050),
)
"""Terms at most; the smaller side of R(M) from which `Krylov` is faster than `SVD` with the same
tolerance where singular values fall fast, where they fall, and where they hardly do: by
``benchmarks/results/crossings.json``. Looking takes less than a tenth of the dense way's time."""


def takes_range(side: int, rank: int, *, is_single: bool) -> bool:
    """Return whether LAPACK finds so few eigenvectors sooner than all in double precision."""
    return (4 if is_single else 8) * rank <= side


def takes_gram(side: int, rank: int) -> bool:
    """Return whether eigenvectors of a Gram matrix are found sooner than an SVD."""
    is_range = takes_range(side, rank, is_single=True)
    return side > (MIN_GRAM_SIDE if is_range else MIN_ALL_SIDE) and rank < side


def krylov_side(rank: int, decay: float = 0.0, *, is_batch: bool = False) -> float:
    """Return the smaller side of R(M) from which `Krylov` is faster for a number of terms."""
    column = 1 if decay < FAST else 2 if decay < FLAT else 3
    row = next((row for row in CROSSINGS if rank <= row[0]), CROSSINGS[-1])
    side = row[column] * max(1.0, rank / row[0])
    return side / BATCH_GAIN if is_batch and decay < FLAT else side
