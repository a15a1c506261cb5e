"""The product of two separated matrices, (Σ B1 ⊗ B2 ⊗ …)(Σ A1 ⊗ A2 ⊗ …): an adapter's ΔW."""

from __future__ import annotations

from dataclasses import dataclass

from lsrdecomp.arrays import Array, norm
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import ProductShape


@dataclass(frozen=True, eq=False, repr=False)
class SeparatedProduct:
    """ΔW = B̂ Â with both sides separated: the adapter of the paper, section "Our Approach".

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
        left = self.left.kronecker_shape
        right = self.right.kronecker_shape
        if left.columns != right.rows:
            raise ShapeError(f"inner splits differ: {left} against {right}")

    @property
    def product_shape(self) -> ProductShape:
        """Sizes of the factors of both sides."""
        left, right = self.left.kronecker_shape, self.right.kronecker_shape
        return ProductShape(left.rows, left.columns, right.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the formed product."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def separation_ranks(self) -> tuple[int, int]:
        """Terms of the out side and of the in side."""
        return self.left.separation_rank, self.right.separation_rank

    @property
    def parameters(self) -> int:
        """Numbers in the factors of both sides."""
        return self.left.parameters + self.right.parameters

    @property
    def condition(self) -> float:
        """The larger γ of the two sides."""
        return max(self.left.condition, self.right.condition)

    def to_lora(self) -> tuple[Array, Array]:
        """Return (B, A) of shapes (m, r), (r, n) with B A = ΔW; every LoRA server loads it."""
        return self.left.to_matrix(), self.right.to_matrix()

    def to_matrix(self) -> Array:
        """Return ΔW, formed; shape (m, n)."""
        left, right = self.to_lora()
        return left @ right

    def __matmul__(self, x: Array) -> Array:
        return self.left @ (self.right @ x)

    def canonical(self) -> SeparatedProduct:
        """Return the same product with orthogonal terms (γ = 1) and sides of equal norm."""
        left = self.left.canonical()
        right = self.right.canonical()
        # Terms are orthogonal now, so the norm of λ is that of the side.
        left_norm = norm(left.weights)
        right_norm = norm(right.weights)
        if not min(left_norm, right_norm) > 0.0:
            return SeparatedProduct(left, right)
        ratio = (right_norm / left_norm) ** 0.5
        return SeparatedProduct(
            SeparatedMatrix(left.weights * ratio, left.factors),
            SeparatedMatrix(right.weights / ratio, right.factors),
        )

    def round_to(self, storage: str) -> SeparatedProduct:
        """Return the product that a reader of factors stored as ``storage`` gets."""
        return SeparatedProduct(self.left.round_to(storage), self.right.round_to(storage))

    def folded(self) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Return the factors of the out side and of the in side with the weights folded in."""
        return self.left.folded(), self.right.folded()

    def __repr__(self) -> str:
        m, n = self.shape
        left = f"{self.left.separation_rank} × [{self.left.kronecker_shape}]"
        right = f"{self.right.separation_rank} × [{self.right.kronecker_shape}]"
        return f"SeparatedProduct({m}×{n} as {left} times {right}, {self.parameters:,} parameters)"


def low_rank_product(left: Array, right: Array) -> SeparatedProduct:
    """Return plain factors as a separated product, one term of one factor a side: exact.

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
