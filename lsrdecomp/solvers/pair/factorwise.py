"""The paper's route for a LoRA pair: each side on its own by the SVD of its rearrangement."""

from __future__ import annotations

from lsrdecomp.arrays import Array
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape, ProductShape
from lsrdecomp.solvers.svd.dense import as_separated, rearranged_svd
from lsrdecomp.targets.base import Dense, LowRank


class FactorwiseSVD:
    """All truncations of ΔW = B A to (Σ B1 ⊗ B2)(Σ A1 ⊗ A2), one SVD of the rearrangement a side.

    B and A are taken in the balanced gauge U√Σ, √Σ Vᵀ, through QR factorizations, so that ΔW is never formed; the inner
    rank is cut or padded to that of ``shape``. Each side is then as good as it can be for its number of terms, but not
    the product: see `lsrdecomp.solvers.pair.joint_als` for the joint problem.

    Parameters
    ----------
    pair : LowRank, (m, n)
    shape : ProductShape
        Two factors a side.
    gauge : "balanced" or "given"
        "given" leaves B and A as they are, as the paper does; their columns must then be the inner rank of ``shape``.

    Cost O((m + n)·r²) for the gauge and O(m·r·min(m1·r1, m2·r2)) for the left side, likewise for the right.
    """

    def __init__(self, pair: LowRank, shape: ProductShape, gauge: str = "balanced") -> None:
        if shape.matrix_shape != pair.shape:
            raise ShapeError(
                f"{shape} is for a {shape.matrix_shape[0]}×{shape.matrix_shape[1]} matrix, "
                f"the pair is {pair.shape[0]}×{pair.shape[1]}"
            )
        if gauge == "given" and pair.rank != shape.inner_rank:
            raise ShapeError(f"the pair has rank {pair.rank}, but {shape} has inner rank {shape.inner_rank}")
        sides = pair.balanced(shape.inner_rank) if gauge == "balanced" else pair
        self.shape = shape
        self._left = _spectrum(sides.left, shape.left)
        self._right = _spectrum(sides.right, shape.right)

    @property
    def max_ranks(self) -> tuple[int, int]:
        """The most terms the two sides can need."""
        return self.shape.left.max_separation_rank, self.shape.right.max_separation_rank

    def truncate(self, left_rank: int, right_rank: int | None = None) -> SeparatedProduct:
        """The product of the first terms of each side; ranks above `max_ranks` are clipped."""
        right_rank = left_rank if right_rank is None else right_rank
        return SeparatedProduct(
            _terms(self._left, self.shape.left, left_rank), _terms(self._right, self.shape.right, right_rank)
        )


Spectrum = tuple[Array, Array, Array]


def _spectrum(side: Array, shape: KroneckerShape) -> Spectrum:
    return rearranged_svd(Dense(side).rearranged(shape))


def _terms(spectrum: Spectrum, shape: KroneckerShape, rank: int) -> SeparatedMatrix:
    u, sigma, vh = spectrum
    return as_separated(u, sigma, vh, shape, min(rank, shape.max_separation_rank))
