"""Factors in few bits: integer codes, one float16 scale a term; their bytes, and what a reader gets back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import PrecisionError
from lsrdecomp.formats.bit_packing import Codes
from lsrdecomp.formats.number_formats import FORMATS
from lsrdecomp.formats.number_formats import nearest_codes as nearest_codes
from lsrdecomp.formats.quantized import QuantizedMatrix, QuantizedProduct
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import INTEGERS, PRECISIONS
from lsrdecomp.solvers.pair.quantization_aware import quantize_sequentially
from lsrdecomp.targets.base import LowRank
from lsrdecomp.targets.weights import NormWeights

INTEGER_BITS = {name: FORMATS[name].bits for name in INTEGERS}
"""Bits of an integer code by the name of its storage."""


Doubles = NDArray[np.float64]


def quantize(matrix: SeparatedMatrix, bits: int) -> QuantizedMatrix:
    """Round each factor to the nearest integers at the scale of least squared error; terms in their given order.

    Raises `PrecisionError` unless 2 ≤ bits ≤ 8.
    """
    if not 2 <= bits <= 8:
        raise PrecisionError(f"codes have 2 to 8 bits, got {bits}")
    scale = to_numpy(matrix.weights).astype(np.float64)
    codes = []
    for factor in matrix.factors:
        values = to_numpy(factor).astype(np.float64)
        code, steps = nearest_codes(values.reshape(len(values), math.prod(values.shape[1:])), bits)
        codes.append(code.reshape(values.shape))
        scale = scale * steps
    return _with_scales(tuple(codes), scale, bits)


def _with_scales(codes: tuple[Codes, ...], scale: Doubles, bits: int) -> QuantizedMatrix:
    exponent = math.frexp(float(np.abs(scale).max(initial=0.0)))[1]
    return QuantizedMatrix(codes, np.ldexp(scale, -exponent).astype(np.float16), exponent, bits)


def refitted_product(pair: LowRank, product: SeparatedProduct, bits: int, norms: NormWeights) -> QuantizedProduct:
    """Codes near ``pair`` in the norm: each factor is rounded in turn and the others are solved again.

    By `quantize_sequentially`. Of as many bytes as `quantized_product`, and seldom farther.
    """
    if 0 in product.separation_ranks:
        return quantized_product(product, bits)
    if product.left.order == 2:
        product = product.canonical()
    weights = None if norms.is_frobenius else norms
    sides = quantize_sequentially(pair, product, lambda rows: nearest_codes(rows, bits), weights=weights)
    left, right = (_with_scales(side.codes, side.scales, bits) for side in sides)
    return QuantizedProduct(left, right)


def quantized_product(product: SeparatedProduct, bits: int) -> QuantizedProduct:
    """Both sides, in canonical form for two factors: orthogonal terms do not amplify rounding."""
    if product.left.order == 2:
        product = product.canonical()
    return QuantizedProduct(quantize(product.left, bits), quantize(product.right, bits))


@dataclass(frozen=True, slots=True)
class Stored:
    """A product in a storage type."""

    product: SeparatedProduct  # what a reader gets
    bytes: int
    codes: QuantizedProduct | None = None  # what is on disk, for integers


def stored_product(product: SeparatedProduct, storage: str) -> Stored:
    """The product in factors stored as float32, float16, bfloat16, int8 or int4.

    The form is canonical first where there is one (two factors), so that γ = 1 and rounding adds no more than its own
    size. Raises `PrecisionError` for an unknown storage.
    """
    if storage in INTEGER_BITS:
        codes = quantized_product(product, INTEGER_BITS[storage])
        return Stored(codes.dequantized(), codes.bytes, codes)
    if storage not in PRECISIONS:
        raise PrecisionError(f"{storage}: unknown storage; known: {', '.join([*PRECISIONS, *INTEGER_BITS])}")
    if product.left.order == 2:
        product = product.canonical()
    return Stored(product.round_to(storage), math.ceil(product.parameters * PRECISIONS[storage].bytes))
