"""The product of two separated matrices, (Σ B1 ⊗ B2 ⊗ …)(Σ A1 ⊗ A2 ⊗ …): an adapter's ΔW with both sides separated."""

from __future__ import annotations

from dataclasses import dataclass

from lsrdecomp.arrays import Array, norm
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import ProductShape


@dataclass(frozen=True, eq=False, repr=False)
class SeparatedProduct:
    """ΔW = B̂ Â with both sides separated: the adapter of the paper, eq. for ΔW in section "Our Approach".

    Parameters
    ----------
    left : SeparatedMatrix, shape (m, r)
        B̂, the out side.
    right : SeparatedMatrix, shape (r, n)
        Â, the in side; its row splits equal the column splits of ``left``.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> from lsrdecomp.kronecker import SeparatedProduct
    >>> left = SeparatedMatrix.from_factors([np.ones((1, 4, 1)), np.eye(2)[None]])
    >>> product = SeparatedProduct(left, left.T)
    >>> product.shape, product.parameters, [factor.shape for factor in product.to_lora()]
    ((8, 8), 16, [(8, 2), (2, 8)])
    """

    left: SeparatedMatrix
    right: SeparatedMatrix

    def __post_init__(self) -> None:
        inner = self.left.kronecker_shape.columns, self.right.kronecker_shape.rows
        if inner[0] != inner[1]:
            raise ShapeError(
                f"inner splits differ: {self.left.kronecker_shape} against {self.right.kronecker_shape}"
            )

    @property
    def product_shape(self) -> ProductShape:
        left, right = self.left.kronecker_shape, self.right.kronecker_shape
        return ProductShape(left.rows, left.columns, right.columns)

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    @property
    def separation_ranks(self) -> tuple[int, int]:
        """Terms of the out side and of the in side."""
        return self.left.separation_rank, self.right.separation_rank

    @property
    def parameters(self) -> int:
        return self.left.parameters + self.right.parameters

    @property
    def condition(self) -> float:
        """The larger γ of the two sides."""
        return max(self.left.condition, self.right.condition)

    def to_lora(self) -> tuple[Array, Array]:
        """(B, A) of shapes (m, r) and (r, n) with B A = ΔW: exact, and every LoRA server loads it."""
        return self.left.to_matrix(), self.right.to_matrix()

    def to_matrix(self) -> Array:
        """ΔW, formed; shape (m, n)."""
        left, right = self.to_lora()
        return left @ right

    def __matmul__(self, x: Array) -> Array:
        return self.left @ (self.right @ x)

    def canonical(self) -> SeparatedProduct:
        """The same product with orthogonal terms on each side (γ = 1) and equal norms of the sides."""
        left, right = self.left.canonical(), self.right.canonical()
        sizes = (
            norm(left.weights),
            norm(right.weights),
        )  # of the sides, for their terms are orthogonal
        if not min(sizes) > 0.0:
            return SeparatedProduct(left, right)
        ratio = (sizes[1] / sizes[0]) ** 0.5
        return SeparatedProduct(
            SeparatedMatrix(left.weights * ratio, left.factors),
            SeparatedMatrix(right.weights / ratio, right.factors),
        )

    def round_to(self, storage: str) -> SeparatedProduct:
        """The product a reader of factors stored as ``storage`` gets."""
        return SeparatedProduct(self.left.round_to(storage), self.right.round_to(storage))

    def folded(self) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Factors of the out side and of the in side with the weights folded in."""
        return self.left.folded(), self.right.folded()

    def __repr__(self) -> str:
        m, n = self.shape
        return (
            f"SeparatedProduct({m}×{n} as {self.left.separation_rank} × [{self.left.kronecker_shape}] times "
            f"{self.right.separation_rank} × [{self.right.kronecker_shape}], {self.parameters:,} parameters)"
        )


def low_rank_product(left: Array, right: Array) -> SeparatedProduct:
    """Plain factors (m, r) and (r, n) as a separated product of one term of one factor a side: exact.

    Parameters
    ----------
    left, right : Array, shapes (m, r) and (r, n)

    Returns
    -------
    SeparatedProduct, shape (m, n)

    Examples
    --------
    >>> import numpy as np
    >>> product = low_rank_product(np.ones((6, 2)), np.ones((2, 4)))
    >>> product.shape, product.separation_ranks, bool(np.allclose(product.to_matrix(), 2.0))
    ((6, 4), (1, 1), True)
    """
    return SeparatedProduct(
        SeparatedMatrix.from_factors((left[None, :, :],)),
        SeparatedMatrix.from_factors((right[None, :, :],)),
    )
