"""Layers stored as small integers: their codes, their bytes, and what a reader gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.formats.number_formats import (
    STEPS_PER_OCTAVE,
    Codes,
    expand_steps,
    packed_digits_size,
    packed_size,
    step_count,
    step_values,
)
from lsrdecomp.formats.stored import Factors, padded_factors, product_label
from lsrdecomp.kronecker.product import SeparatedProduct, low_rank_product
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import ProductShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

COMPONENT_BYTES = 3
"""Bytes of the float16 scale and of the number of bits of a component of a `SpectralCode`."""
WHOLE = 2**20
"""A group so large that all numbers of a vector share a step."""
LEVEL_BYTES = 2
"""Bytes of the level of a joined product and of its place in the index, about."""


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A separated matrix as stored: Σ_k 2^e · scale_k · Q_k⁽¹⁾ ⊗ … ⊗ Q_k⁽ᵈ⁾ with small integers Q.

    A term needs one scale only, however many factors it has, since (aX) ⊗ (bY) = ab (X ⊗ Y). It is
    a float16, or one byte as `lsrdecomp.formats.number_formats.step_values` reads it.

    Examples
    --------
    >>> codes = (np.array([[[1, 0], [0, 1]]], dtype=np.int8), np.array([[[7, -7]]], dtype=np.int8))
    >>> stored = QuantizedMatrix(codes, np.array([0.5], dtype=np.float16), exponent=-1, bits=4)
    >>> stored.bytes
    6
    >>> stored.dequantized().to_matrix()
    array([[ 1.75, -1.75,  0.  ,  0.  ],
           [ 0.  ,  0.  ,  1.75, -1.75]])
    """

    codes: tuple[Codes, ...]  # (s, m_i, n_i), from −(2^(bits−1) − 1) to 2^(bits−1) − 1
    scales: NDArray[np.float16] | NDArray[np.uint8]  # (s,)
    exponent: int  # puts the largest scale near one, away from float16's limits
    bits: int

    @property
    def has_byte_scales(self) -> bool:
        """True if each scale takes one byte."""
        return self.scales.dtype == np.uint8

    @property
    def bytes(self) -> int:
        """Bytes of the packed codes, the scales and the exponent."""
        packed = sum(packed_size(code.size, self.bits) for code in self.codes)
        return packed + self.scales.nbytes + 1

    def dequantized(self) -> SeparatedMatrix:
        """Return what a reader gets, in float64."""
        relative = self.scales.astype(np.float64)
        if self.has_byte_scales:
            relative = step_values(self.scales.astype(np.uint8))
        weights = np.ldexp(relative, self.exponent)
        factors = [code.astype(np.float64) for code in self.codes]
        return SeparatedMatrix.from_factors(factors, weights)


def split_level(level: int) -> tuple[int, int, int]:
    """Split the level of a joined product over its sides, about evenly.

    Parameters
    ----------
    level : int
        The largest scale of the left side times that of the right, in sixteenths of an octave.

    Returns
    -------
    (int, int, int)
        Exponent and first scale of the left side, and exponent of the right, whose first is 0.

    Examples
    --------
    >>> split_level(-35)  # 2^-2 · 2^(-3/16)
    (0, 3, -2)
    """
    right_exponent = level // (2 * STEPS_PER_OCTAVE)
    left_level = level - STEPS_PER_OCTAVE * right_exponent
    left_exponent = -(-left_level // STEPS_PER_OCTAVE)
    return left_exponent, STEPS_PER_OCTAVE * left_exponent - left_level, right_exponent


@dataclass(frozen=True, eq=False)
class QuantizedProduct:
    """Both sides of an LSR product as stored.

    A *joined* product takes fewer bytes. Its sides have codes of one width and positive scales of
    one byte, each side's largest first. Then one number is stored for the largest scales of both,
    the level, none for each, and all codes lie in one run (`pack_digits`).

    Examples
    --------
    >>> ones = np.ones((1, 4, 2), dtype=np.int8), np.ones((1, 4, 2), dtype=np.int8)
    >>> left = QuantizedMatrix(ones, np.array([1.0], dtype=np.float16), exponent=0, bits=2)
    >>> transposed = tuple(code.transpose(0, 2, 1) for code in ones)
    >>> right = QuantizedMatrix(transposed, left.scales, exponent=0, bits=2)
    >>> product = QuantizedProduct(left, right)
    >>> product.storage, str(product.shape), product.bytes
    ('int2', '(4×2 ⊗ 4×2)(2×4 ⊗ 2×4)', 14)
    """

    left: QuantizedMatrix
    right: QuantizedMatrix

    @property
    def structure(self) -> str:
        """The word for it in tables and records."""
        return "LSR"

    @property
    def label(self) -> str:
        """The structure with its sizes, for tables."""
        return product_label(self.shape, self.terms)

    @property
    def terms(self) -> tuple[int, int]:
        """Terms that codes are stored of, those whose scale rounded to zero among them."""
        return max(1, self.left.scales.size), max(1, self.right.scales.size)

    @property
    def parameters(self) -> int:
        """Numbers that are stored, scales not counted."""
        return self.shape.parameters(*self.terms)

    @property
    def level(self) -> int:
        """Product of the first scales of both sides, in sixteenths of an octave, if joined."""
        octaves = self.left.exponent + self.right.exponent
        return STEPS_PER_OCTAVE * octaves - int(self.left.scales[0]) - int(self.right.scales[0])

    @property
    def is_joined(self) -> bool:
        """True if the product has the form that takes fewest bytes, see the class."""
        sides = self.left, self.right
        for side in sides:
            if not side.has_byte_scales or side.scales.size == 0:
                return False
            if side.scales[0] != side.scales.min() or side.scales.max() >= 128:
                return False
        if self.left.bits != self.right.bits or self.right.scales[0] != 0:
            return False
        split = self.left.exponent, int(self.left.scales[0]), self.right.exponent
        return split == split_level(self.level)

    @property
    def bytes(self) -> int:
        """Bytes of both sides."""
        if not self.is_joined:
            return self.left.bytes + self.right.bytes
        n_codes = sum(code.size for code in (*self.left.codes, *self.right.codes))
        n_scales = self.left.scales.size + self.right.scales.size - 2
        return packed_digits_size(n_codes, self.left.bits) + n_scales + LEVEL_BYTES

    @property
    def storage(self) -> str:
        """Element type of the codes, such as ``"int4"``."""
        return f"int{max(self.left.bits, self.right.bits)}"

    @property
    def shape(self) -> ProductShape:
        """Split sizes of the product that a reader gets."""
        return ProductShape(
            tuple(code.shape[1] for code in self.left.codes),
            tuple(code.shape[2] for code in self.left.codes),
            tuple(code.shape[2] for code in self.right.codes),
        )

    def dequantized(self) -> SeparatedProduct:
        """Return what a reader gets, in float64."""
        return SeparatedProduct(self.left.dequantized(), self.right.dequantized())

    def factors(self) -> tuple[Factors, Factors]:
        """Return the factors in float64, weights folded in."""
        return padded_factors(self.dequantized(), self.terms)


@dataclass(frozen=True, eq=False)
class SpectralCode:
    """Components of an SVD in integer codes, each in its own bits: Σ_k 2^e · scale_k · u_k v_kᵀ.

    A component has a step for each group of numbers of u and of v besides, of one byte
    (`lsrdecomp.formats.number_formats.step_values`).

    Examples
    --------
    >>> u, v = np.array([1, 0, -1], dtype=np.int8), np.array([1, 1], dtype=np.int8)
    >>> scales = np.array([2.0], dtype=np.float16)
    >>> steps = (np.zeros(2, dtype=np.uint8),)
    >>> code = SpectralCode((u,), (v,), scales, 0, (2,), (3, 2), groups=(4,), steps=steps)
    >>> code.storage, code.bytes
    ('int2', 9)
    >>> code.dequantized().to_matrix().round(6) + 0.0
    array([[ 2.,  2.],
           [ 0.,  0.],
           [-2., -2.]])
    """

    left: tuple[Codes, ...]  # u_k, (m,)
    right: tuple[Codes, ...]  # v_k, (n,)
    scales: NDArray[np.float16]
    exponent: int
    bits: tuple[int, ...]
    matrix_shape: tuple[int, int]
    groups: tuple[int, ...]  # numbers that share a step, of each component
    steps: tuple[NDArray[np.uint8], ...]  # of each component: of the groups of u, then of v

    @property
    def structure(self) -> str:
        """The word for it in tables and records."""
        return "low rank"

    @property
    def label(self) -> str:
        """The structure with its sizes, for tables."""
        return product_label(self.shape, self.terms)

    @property
    def terms(self) -> tuple[int, int]:
        """Terms of the out side and of the in side, at least one each."""
        return 1, 1

    @property
    def parameters(self) -> int:
        """Numbers that are stored, scales not counted."""
        return self.shape.parameters(*self.terms)

    @property
    def bytes(self) -> int:
        """Bytes of both sides."""
        entries = sum(self.matrix_shape)
        packed = sum(packed_size(entries, bits) for bits in self.bits)
        group_sizes = len(self.groups)  # a byte each in the index
        steps = sum(step.size for step in self.steps)
        return packed + COMPONENT_BYTES * len(self.bits) + group_sizes + steps + 1

    @property
    def storage(self) -> str:
        """One width, such as ``"int4"``, or the narrowest and the widest, such as ``"int2-6"``."""
        narrowest = min(self.bits, default=2)
        widest = max(self.bits, default=2)
        return f"int{widest}" if narrowest == widest else f"int{narrowest}-{widest}"

    @property
    def shape(self) -> ProductShape:
        """Split sizes of the product that a reader gets."""
        return ProductShape.low_rank(self.matrix_shape, max(1, len(self.bits)))

    def dequantized(self) -> SeparatedProduct:
        """Return what a reader gets, in float64; one zero component where none was kept."""
        m, n = self.matrix_shape
        if not self.bits:
            return low_rank_product(np.zeros((m, 1)), np.zeros((1, n)))
        # Each side takes the root of a scale; its sign goes to the left.
        scales = self.scales.astype(np.float64)
        roots = np.sqrt(np.abs(np.ldexp(scales, self.exponent)))
        columns = np.stack([self._values(k, 0) for k in range(len(self.bits))], axis=1)
        rows = np.stack([self._values(k, 1) for k in range(len(self.bits))])
        return low_rank_product(columns * (roots * np.sign(scales)), roots[:, None] * rows)

    def factors(self) -> tuple[Factors, Factors]:
        """Return the factors in float64, weights folded in."""
        return padded_factors(self.dequantized(), self.terms)

    def _values(self, k: int, side: int) -> NDArray[np.float64]:
        """Return u_k (side 0) or v_k (side 1): its codes, times the steps of their groups."""
        codes = (self.left, self.right)[side][k].astype(np.float64)
        group = self.groups[k]
        left_steps = step_count(self.matrix_shape[0], group)
        steps = (self.steps[k][:left_steps], self.steps[k][left_steps:])[side]
        return codes * expand_steps(steps, group, codes.size)
