"""Sizes from which one way to the terms is faster than another, as measured."""

MIN_GRAM_SIDE = 32
"""Smaller side of R(M) up to which LAPACK's SVD is as fast as the eigenvectors of a Gram matrix."""

CROSSINGS: tuple[tuple[int, int, int], ...] = ((4, 128, 256), (16, 256, 529), (64, 600, 1100))
"""Terms at most; the smaller side of R(M) from which `Krylov` is faster than `SVD` with the same
tolerance where singular values fall, and where they hardly do."""


def krylov_side(rank: int, *, is_flat: bool = False) -> float:
    """Return the smaller side of R(M) from which `Krylov` is faster for so many terms."""
    for max_rank, falling, flat in CROSSINGS:
        if rank <= max_rank:
            return flat if is_flat else falling
    max_rank, falling, flat = CROSSINGS[-1]
    return rank / max_rank * (flat if is_flat else falling)
