"""SeparatedMatrix, Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾ with unit factors, and the product of two, (Σ B1 ⊗ B2)(Σ A1 ⊗ A2).

Each is used as a matrix, changed in form, rounded; of a product also its gauge, norm and expansion
to a plain LoRA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from lsrdecomp.arrays import Array, as_double, like, namespace, norm, to_numpy
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.algebra import Algebra
from lsrdecomp.kronecker.entries import Entries
from lsrdecomp.kronecker.files import Files
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.precision import precision, round_to


class SeparatedMatrix(Algebra, Entries, Files):
    """A matrix as a sum of s Kronecker products of d factors, on arrays of any library; it is never formed unasked.

    Parameters
    ----------
    weights : Array, shape (s,)
        λ, not negative, descending.
    factors : tuple of Array, shapes (s, m_i, n_i)
        Each factor of each term has Frobenius norm one.

    Use `from_factors` to build one from factors of any norm. With no terms (s = 0) it is the zero
    matrix.

    **Contents.** A chapter each, in this order below:

    - *Form*: ``canonical truncate folded round_to astype in_double``
    - *Algebra*: ``+ - * /`` with numbers, arrays and each other, ``kron``, ``inner``
    - *Action*: ``@ dot matvec matmat rmatvec rmatmat``, ``A @ B``, ``T mT H mH conj transpose
      adjoint``, ``ndim size to_numpy to_linear_operator``; NumPy and SciPy take it as it is
    - *Entries*: ``A[i, j]``, rows and columns, ``diagonal``, ``trace``
    - *Files*: ``save``, ``load``
    - *Terms*: ``from_factors weights factors separation_rank order kronecker_shape shape dtype
      parameters norm condition to_matrix``

    Solving, determinants, eigenvalues, functions and preconditioners are in `lsrdecomp.operators`.

    Examples
    --------
    >>> import numpy as np
    >>> import lsrdecomp as lsr
    >>> A = lsr.SeparatedMatrix.from_factors([np.eye(3)[None], np.ones((1, 2, 2))])
    >>> A
    SeparatedMatrix(6×6 as 1 × [3×3 ⊗ 2×2], 13 parameters, γ = 1)
    >>> A @ np.ones(6)
    array([2., 2., 2., 2., 2., 2.])
    """

    def truncate(self, rank: int) -> Self:
        """The first ``rank`` terms; the best ones where terms are orthogonal (`canonical`)."""
        if rank < 0:
            raise ShapeError(f"a separation rank cannot be negative, got {rank}")
        terms = min(rank, self.separation_rank)
        return self._of(self.weights[:terms], tuple(f[:terms, :, :] for f in self.factors))

    def canonical(self) -> Self:
        """The same matrix with orthogonal terms, γ = 1, for two factors: the SVD of the rearrangement from QR factors.

        Cost O((p + q)·s²) for factors of p and q entries. Raises `ShapeError` for another number of
        factors, where no such form exists.
        """
        if self.order != 2:
            raise ShapeError(
                f"orthogonal terms exist for two factors; this matrix has {self.order}"
            )
        xp = namespace(*self.factors)
        (left, r_left), (right, r_right) = (xp.linalg.qr(as_double(c)) for c in self._columns())
        core = (r_left * as_double(self.weights)) @ xp.matrix_transpose(r_right)
        u, sigma, vh = xp.linalg.svd(core, full_matrices=False)
        (m, n), (p, q) = self.kronecker_shape.factors
        s = sigma.shape[0]
        first = xp.reshape(xp.matrix_transpose(left @ u), (s, m, n))
        second = xp.reshape(vh @ xp.matrix_transpose(right), (s, p, q))
        return self.from_factors(
            (xp.astype(first, self.dtype), xp.astype(second, self.dtype)),
            xp.astype(sigma, self.weights.dtype),
        )

    def folded(self) -> tuple[Array, ...]:
        """Factors with λ_k^{1/d} folded into each: what is stored and trained."""
        root = self._weights() ** (1.0 / self.order)
        return tuple(f * root[:, None, None] for f in self.factors)

    def round_to(self, storage: str, *, scaled: bool = False) -> Self:
        """What a reader of factors stored as ``storage`` gets: of the folded factors, or of unit factors beside λ.

        Parameters
        ----------
        storage : str
            A floating type.
        scaled : bool
            Round unit factors instead, each multiplied by a power of two that brings its largest
            entry to the upper end of the range of ``storage``; the powers and λ are kept apart.
            Nothing overflows, and nothing small is lost.

        Raises
        ------
        PrecisionError
            If a folded factor overflows, or the type is not for storage.
        """
        if not scaled or self.separation_rank == 0:
            return self.from_factors([round_to(f, storage) for f in self.folded()])
        largest, weights, rounded = precision(storage).largest, self.weights, []
        for factor in self.factors:
            xp = namespace(factor)
            peak = to_numpy(xp.max(xp.abs(factor), axis=(1, 2))).astype(np.float64)
            power = (
                np.exp2(np.floor(np.log2(largest / peak))) if largest < 1e30 else np.ones_like(peak)
            )
            rounded.append(round_to(factor * like(power, self.weights)[:, None, None], storage))
            weights = weights / like(power, weights)
        return self.from_factors(rounded, weights)

    def astype(self, name: str) -> Self:
        """The same terms held in ``float32``, ``float64``, ``complex64`` or ``complex128`` for computing."""
        xp = namespace(*self.factors)
        kind = getattr(xp, name)
        real = getattr(xp, name.replace("complex64", "float32").replace("complex128", "float64"))
        return self._of(
            xp.astype(self.weights, real), tuple(xp.astype(f, kind) for f in self.factors)
        )

    def __repr__(self) -> str:
        rows, columns = self.shape
        return (
            f"SeparatedMatrix({rows}×{columns} as {self.separation_rank} × [{self.kronecker_shape}], "
            f"{self.parameters:,} parameters, γ = {self.condition:.3g})"
        )


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
