"""Layers as they are stored: one protocol for every structure, and the one in floats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import as_double, zero_padded
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.precision import numpy_dtype, precision, round_to

Factors = tuple[NDArray[Any], ...]


class Stored(Protocol):
    """A layer as it lies on disk, in one structure and one storage type.

    Whoever writes, counts, prices or names a layer asks it; nobody else knows which structures
    there are. How each is laid out in bytes stands in `lsrdecomp.lora.files.encodings`.
    """

    @property
    def structure(self) -> str:
        """The word for it in tables and records, such as ``"LSR"``."""

    @property
    def label(self) -> str:
        """The structure with its sizes, as the table of an opened adapter shows them."""

    @property
    def shape(self) -> ProductShape:
        """Split sizes of the product that a reader gets."""

    @property
    def terms(self) -> tuple[int, int]:
        """Terms of the out side and of the in side in `factors`, at least one each."""

    @property
    def storage(self) -> str:
        """Element type: a floating one, or ``"int4"`` and the like."""

    @property
    def parameters(self) -> int:
        """Numbers that are stored, scales of codes not counted."""

    @property
    def bytes(self) -> int:
        """Bytes that the numbers take, without the index and the file's header."""

    def dequantized(self) -> SeparatedProduct:
        """Return the product that a reader gets, in float64."""

    def factors(self) -> tuple[Factors, Factors]:
        """Return factors (s, m_i, r_i) and (t, r_i, n_i) of both sides, weights folded in.

        As many terms as `terms` says: one that rounded to zero stays, as zeros. `padded_factors`
        makes them of `dequantized`.
        """


@dataclass(frozen=True, eq=False)
class FloatProduct:
    """Both sides of a product in a floating type, weights folded into the factors.

    Attributes
    ----------
    left : tuple of Array, shapes (s, m_i, r_i)
        Factors of the out side.
    right : tuple of Array, shapes (t, r_i, n_i)
        Factors of the in side.
    storage : str
        The floating type they are rounded to when they are written; until then they may be wider.

    Raises
    ------
    ShapeError
        If the factors do not go together.

    Examples
    --------
    >>> left = np.ones((3, 4, 2)), np.ones((3, 2, 1))
    >>> right = np.ones((1, 2, 5)), np.ones((1, 1, 2))
    >>> stored = FloatProduct(left, right, "float16")
    >>> stored.label, stored.parameters, stored.bytes
    ('3+1 × (4×2 ⊗ 2×1)(2×5 ⊗ 1×2)', 42, 84)
    """

    left: Factors
    right: Factors
    storage: str

    def __post_init__(self) -> None:
        left, right = ([factor.shape for factor in side] for side in (self.left, self.right))
        text = f"factors {left} and {right}"
        if not left or len(left) != len(right) or any(len(sizes) != 3 for sizes in left + right):
            raise ShapeError(f"{text} are not equally many arrays of three sizes")
        for side in (left, right):
            if len({sizes[0] for sizes in side}) != 1:
                raise ShapeError(f"{text} have different numbers of terms on one side")
        if [sizes[2] for sizes in left] != [sizes[1] for sizes in right]:
            raise ShapeError(f"{text} do not share their inner sizes")

    @classmethod
    def of(cls, product: SeparatedProduct, storage: str) -> Self:
        """Fold the weights of a product into its factors.

        A side without terms gets one of zeros.
        """
        terms = tuple(max(1, count) for count in product.separation_ranks)
        return cls(*padded_factors(product, (terms[0], terms[1])), storage)

    @property
    def structure(self) -> str:
        """``"LSR"``, or ``"low rank"`` for one factor a side."""
        return "LSR" if len(self.left) > 1 else "low rank"

    @property
    def label(self) -> str:
        """The structure with its sizes, for tables."""
        return product_label(self.shape, self.terms)

    @property
    def shape(self) -> ProductShape:
        """Split sizes of the product that a reader gets."""
        return ProductShape(
            tuple(factor.shape[1] for factor in self.left),
            tuple(factor.shape[2] for factor in self.left),
            tuple(factor.shape[2] for factor in self.right),
        )

    @property
    def terms(self) -> tuple[int, int]:
        """Terms of the out side and of the in side, at least one each."""
        return self.left[0].shape[0], self.right[0].shape[0]

    @property
    def parameters(self) -> int:
        """Numbers that are stored, scales not counted."""
        return sum(factor.size for factor in self.left + self.right)

    @property
    def bytes(self) -> int:
        """Bytes of the factors in their type."""
        return math.ceil(self.parameters * precision(self.storage).bytes)

    def dequantized(self) -> SeparatedProduct:
        """Return the product that a reader gets, in float64."""
        left, right = (
            SeparatedMatrix.from_factors([_rounded(factor, self.storage) for factor in side])
            for side in (self.left, self.right)
        )
        return SeparatedProduct(left, right)

    def factors(self) -> tuple[Factors, Factors]:
        """Return the factors as they are, bit for bit."""
        return self.left, self.right


def _rounded(factor: NDArray[Any], storage: str) -> NDArray[np.float64]:
    """Return the numbers that a reader of a factor gets, in double precision."""
    double: NDArray[np.float64] = as_double(factor)
    # A factor that lies in its type already is not rounded twice.
    return double if factor.dtype == numpy_dtype(storage) else round_to(double, storage)


def padded_factors(product: SeparatedProduct, terms: tuple[int, int]) -> tuple[Factors, Factors]:
    """Return the folded factors of both sides, with terms of zeros up to a count a side."""
    left, right = (
        tuple(np.asarray(zero_padded(factor, 0, count)) for factor in side)
        for side, count in zip(product.folded(), terms, strict=True)
    )
    return left, right


def product_label(shape: ProductShape, terms: tuple[int, int]) -> str:
    """Return terms and split sizes of a product as tables show them.

    >>> product_label(ProductShape((24, 2), (2, 1), (16, 4)), (3, 1))
    '3+1 × (24×2 ⊗ 2×1)(2×16 ⊗ 1×4)'
    """
    return f"{terms[0]}+{terms[1]} × {shape}"
