"""The product of two separated matrices, (Σ B1 ⊗ B2 ⊗ …)(Σ A1 ⊗ A2 ⊗ …): an adapter's ΔW."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    conjugate,
    namespace,
    norm,
    real_part,
    triangular_factor,
)
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
        """γ of the product: rounding both sides with unit roundoff μ moves ΔW by about γμ‖ΔW‖_F.

        Rounding moves a side by about γ_B·μ·‖B̂‖_F, the rule of `SeparatedMatrix.condition`. In the
        product the errors E_B and E_A of the sides become E_B Â + B̂ E_A, up to terms in μ², and
        they are independent of each other. So

        γ² = ((γ_B ‖B̂‖_F ‖Â‖₂)² + (γ_A ‖Â‖_F ‖B̂‖₂)²) / ‖B̂ Â‖_F².

        It is large where terms cancel within a side, or the sides in their product. Infinite for
        sides that are not zero and have a product of zero. Cost O((m + n)·r²).
        """
        left, right = (_unit_in_double(side) for side in self.to_lora())
        left_gram = adjoint(left) @ left
        right_gram = right @ adjoint(right)
        left_rounding = self.left.condition * _root_of_largest(right_gram)
        right_rounding = self.right.condition * _root_of_largest(left_gram)
        rounding = math.hypot(left_rounding, right_rounding)
        product_norm = _norm_of_product(left, right, left_gram, right_gram)
        if product_norm > 0.0:
            return rounding / product_norm
        is_zero = min(norm(left), norm(right)) == 0.0
        return 1.0 if is_zero else math.inf

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
        """Return the same product with orthogonal terms in sides of equal norm, each of γ = 1."""
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


def _unit_in_double(matrix: Array) -> Array:
    """Return a matrix in double precision over its Frobenius norm; zero as it is."""
    matrix = as_double(matrix)
    size = norm(matrix)
    return matrix / size if size > 0.0 else matrix


def _root_of_largest(gram: Array) -> float:
    """Return the largest singular value of the matrix whose Gram matrix this is."""
    if 0 in gram.shape:
        return 0.0
    return math.sqrt(max(float(namespace(gram).linalg.eigvalsh(gram)[-1]), 0.0))


def _norm_of_product(left: Array, right: Array, left_gram: Array, right_gram: Array) -> float:
    """Return ‖B̂ Â‖_F of sides of norm one.

    It is read off their Gram matrices, tr(B̂ᴴB̂ ÂÂᴴ)^½. Where the sides cancel to below
    a millionth of their norms that has few digits, so triangular factors are taken.
    """
    xp = namespace(left)
    squared = float(xp.sum(real_part(left_gram * conjugate(right_gram))))
    if squared > 1e-6**2:
        return math.sqrt(squared)
    left_triangle = triangular_factor(left)
    right_triangle = triangular_factor(adjoint(right))
    return norm(left_triangle @ adjoint(right_triangle))


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
