"""Factors in few bits: integer codes of LSR products, and of what was stored before.

The factors of an LSR product have codes of one width, and each term one scale: a float16 or, with
few bits, a byte. They are rounded one factor after the other, while the others are solved again.
Truncated SVDs in codes are in `spectral_codes`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import singledispatch
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import Array, all_finite, to_numpy
from lsrdecomp.errors import PrecisionError, UnsupportedError
from lsrdecomp.formats.number_formats import (
    MAX_STEP_EXPONENT,
    STEPS_PER_OCTAVE,
    nearest_codes,
    nearest_steps,
    packed_digits_size,
    packed_size,
)
from lsrdecomp.formats.quantized import (
    LEVEL_BYTES,
    QuantizedMatrix,
    QuantizedProduct,
    SpectralCode,
    split_level,
)
from lsrdecomp.formats.stored import Factors, FloatProduct, Stored
from lsrdecomp.lora.search.layers import Layer
from lsrdecomp.lora.search.spectral_codes import (
    DEFAULT_GROUP,
    MAX_BITS,
    float16_scales,
    own_vectors,
    rounded_vectors,
    spectral_code,
    svd_code,
)
from lsrdecomp.precision import PRECISIONS, numpy_dtype, round_to, type_name
from lsrdecomp.solvers.batched_terms import safe_ratio
from lsrdecomp.solvers.pair.quantization_aware import quantize_sequentially
from lsrdecomp.targets.target import LowRank

if TYPE_CHECKING:
    from lsrdecomp.kronecker.product import SeparatedProduct
    from lsrdecomp.kronecker.separated import SeparatedMatrix
    from lsrdecomp.targets.weights import NormWeights

INTEGER_BITS = {f"int{bits}": bits for bits in (8, 6, 5, 4, 3, 2)}
"""Bits of an integer code by the name of its storage."""

MAX_BITS_OF_SHORT_SCALES = 5
"""Largest width of codes of an LSR product whose terms have scales of one byte."""

Doubles = NDArray[np.float64]

CodedProduct = QuantizedProduct | SpectralCode


# -- products --------------------------------------------------------------------------------------


def stored_product(product: SeparatedProduct, storage: str) -> FloatProduct | QuantizedProduct:
    """Round a product to factors in a floating type, or to codes as int8 or int4.

    A product of two factors is brought to canonical form first, which has condition γ = 1: rounding
    errors are not amplified. Raises `PrecisionError` for an unknown storage.
    """
    if storage in INTEGER_BITS:
        return quantized_product(product, INTEGER_BITS[storage])
    if storage not in PRECISIONS:
        known = ", ".join([*PRECISIONS, *INTEGER_BITS])
        raise PrecisionError(f"{storage}: unknown storage; known: {known}")
    if product.left.order == 2:
        product = product.canonical()
    return FloatProduct.of(product.round_to(storage), storage)


def stored_pair(left: Array, right: Array, storage: str) -> FloatProduct:
    """Round a plain pair (m, r) and (r, n) to a floating type, and hold it in that type.

    Raises `PrecisionError` if a number overflows the type.
    """
    dtype = numpy_dtype(type_name(storage))
    sides = []
    for side in (left, right):
        with np.errstate(over="ignore"):
            rounded = to_numpy(side).astype(dtype)
        if not all_finite(rounded):
            round_to(side, storage)  # which says what does not fit
        sides.append((rounded[None],))
    return FloatProduct(sides[0], sides[1], storage)


def quantized_product(product: SeparatedProduct, bits: int) -> QuantizedProduct:
    """Round both sides to codes; a product of two factors is brought to canonical form first."""
    if product.left.order == 2:
        product = product.canonical()
    return with_short_scales(quantize(product.left, bits), quantize(product.right, bits))


def with_short_scales(left: QuantizedMatrix, right: QuantizedMatrix) -> QuantizedProduct:
    """Return a product whose scales have a byte each, where codes are few bits and scales allow.

    It is joined (`QuantizedProduct`). A byte is a sixteenth of an octave: with codes of four bits
    that adds 1 % to the squared error of rounding, which as many bytes of codes would add too if a
    term had 1,700 numbers; with codes of six bits it would add 6 %.
    """
    product = QuantizedProduct(left, right)
    n_scales = min(left.scales.size, right.scales.size)
    if max(left.bits, right.bits) > MAX_BITS_OF_SHORT_SCALES or n_scales == 0:
        return product
    sides = [_positive_falling(side) for side in (left, right)]
    relative = [side.scales.astype(np.float64) for side in sides]
    largest = [float(scales[0]) for scales in relative]
    if min(largest) == 0.0:
        return product
    steps = [nearest_steps(scales / scales[0]) for scales in relative]
    octaves = left.exponent + right.exponent + math.log2(largest[0] * largest[1])
    left_exponent, first_step, right_exponent = split_level(round(STEPS_PER_OCTAVE * octaves))
    if steps[0] is None or steps[1] is None or int(steps[0].max()) + first_step > MAX_STEP_EXPONENT:
        return product
    left_steps = steps[0] + np.uint8(first_step)
    return QuantizedProduct(
        replace(sides[0], scales=left_steps, exponent=left_exponent),
        replace(sides[1], scales=steps[1], exponent=right_exponent),
    )


def _positive_falling(side: QuantizedMatrix) -> QuantizedMatrix:
    """Return the same matrix with terms from the largest scale on, and signs in the first codes."""
    order = np.argsort(-np.abs(side.scales.astype(np.float64)), kind="stable")
    signs = np.where(side.scales[order] < 0, -1, 1).astype(np.int8)
    codes = [code[order] for code in side.codes]
    codes[0] = codes[0] * signs[:, None, None]
    return replace(side, codes=tuple(codes), scales=np.abs(side.scales[order]))


def coded_size(parameters: int, ranks: tuple[int, int], bits: int) -> int:
    """Return the bytes that codes of a product take, by its numbers and terms, nearly always."""
    if bits <= MAX_BITS_OF_SHORT_SCALES:
        return packed_digits_size(parameters, bits) + sum(ranks) - 2 + LEVEL_BYTES
    return packed_size(parameters, bits) + 2 * sum(ranks) + 2


def refitted_product(layer: Layer, product: SeparatedProduct, bits: int) -> QuantizedProduct:
    """Find codes of a product that are near the layer in its norm, by `quantize_sequentially`.

    Each factor is rounded in turn, and the others are solved again. The result has as many bytes as
    that of `quantized_product`, and is seldom farther from the layer.
    """
    if 0 in product.separation_ranks:
        return quantized_product(product, bits)
    if product.left.order == 2:
        product = product.canonical()
    weights = None if layer.is_frobenius else layer.norms
    sides = quantize_sequentially(layer.pair, product, bits, weights=weights)
    left, right = (QuantizedMatrix(codes, *float16_scales(scales), bits) for codes, scales in sides)
    return with_short_scales(left, right)


def coded_product(
    product: SeparatedProduct, bits: int, norms: NormWeights | None = None
) -> CodedProduct:
    """Find codes near a product: solved in the norm, or rounded, whichever are nearer.

    Terms are rounded in canonical form, and as they are: a training that rounds as it goes
    (`round_factors_like`) ends at codes already. A product of one factor on each side is a matrix
    of low rank: its singular vectors are coded.
    """
    target = Layer.of("", LowRank(*product.to_lora()), norms)
    if product.left.order == 1:
        return svd_code(target, [bits] * len(target.sigma))
    as_it_is = with_short_scales(quantize(product.left, bits), quantize(product.right, bits))
    rounded = quantized_product(product, bits)
    solved = refitted_product(target, product, bits)
    return _nearest(target, as_it_is, rounded, solved)


def _nearest(target: Layer, *candidates: CodedProduct) -> CodedProduct:
    """Return the codes that are nearest to a layer in its norm."""
    return min(candidates, key=lambda coded: target.squared_error(coded.dequantized()))


@singledispatch
def stored_like(
    old: Stored, _product: SeparatedProduct, _norms: NormWeights | None = None
) -> Stored:
    """Return a product in the structure and storage of ``old``, as near as possible in the norm.

    Raises `UnsupportedError` for a structure for which no function is registered.
    """
    raise UnsupportedError(f"layers of {old.structure} cannot be stored with other numbers")


@stored_like.register(FloatProduct)
def _floats_like(
    old: FloatProduct, product: SeparatedProduct, _norms: NormWeights | None = None
) -> Stored:
    return stored_product(product, old.storage)


@stored_like.register(QuantizedProduct)
def _codes_like(
    old: QuantizedProduct, product: SeparatedProduct, norms: NormWeights | None = None
) -> Stored:
    return coded_product(product, max(old.left.bits, old.right.bits), norms)


@stored_like.register(SpectralCode)
def _components_like(
    old: SpectralCode, product: SeparatedProduct, norms: NormWeights | None = None
) -> Stored:
    # The k-th largest component of the new product gets the bits and groups that the k-th one had.
    target = Layer.of("", LowRank(*product.to_lora()), norms)
    rank = len(target.sigma)
    bits = (*old.bits, *[0] * rank)
    groups = (*old.groups, *[DEFAULT_GROUP] * rank)
    solved = svd_code(target, bits[:rank], groups[:rank])
    # Or the product's own columns and rows, which may be codes already.
    vectors = own_vectors(target)
    if len(vectors[1]) != len(old.bits):
        return solved
    as_it_is = spectral_code(target, vectors, old.bits, old.groups, rounds=0)
    return _nearest(target, as_it_is, solved)


@singledispatch
def round_factors_like(_old: Stored, left: Factors, right: Factors) -> tuple[Factors, Factors]:
    """Round the factors of a product one by one, as ``old`` stores them.

    Terms stay in their order and factors at their size, so that each number comes back near itself.
    Factors of floats are returned as they are.
    """
    return left, right


@round_factors_like.register(QuantizedProduct)
def _round_to_codes(
    old: QuantizedProduct, left: Factors, right: Factors
) -> tuple[Factors, Factors]:
    return _rounded_side(old.left, left), _rounded_side(old.right, right)


@round_factors_like.register(SpectralCode)
def _round_to_components(
    old: SpectralCode, left: Factors, right: Factors
) -> tuple[Factors, Factors]:
    if not old.bits:
        return left, right
    levels = list(zip(old.bits, old.groups, strict=True))
    ((columns,),), ((rows,),) = left, right
    left = (rounded_vectors(columns.T, levels).T[None],)
    right = (rounded_vectors(rows, levels)[None],)
    return left, right


def _rounded_side(old: QuantizedMatrix, factors: Factors) -> Factors:
    """Round the factors of a side to codes, and the scales of its terms with the first of them."""
    rounded = []
    scales = np.ones(len(factors[0]))
    for factor in factors:
        codes, steps = nearest_codes(factor.reshape(len(factor), -1), old.bits)
        rounded.append((codes * steps[:, None]).reshape(factor.shape))
        scales = scales * steps
    ratios = safe_ratio(_stored_scales(scales, old.has_byte_scales), scales)
    rounded[0] = rounded[0] * ratios[:, None, None]
    return tuple(rounded)


def _stored_scales(scales: Doubles, in_bytes: bool) -> Doubles:
    """Return the scales of terms as a reader gets them."""
    values: Doubles
    if in_bytes:
        sizes = np.abs(scales)
        steps = np.rint(STEPS_PER_OCTAVE * np.log2(np.where(sizes > 0.0, sizes, 1.0)))
        values = np.sign(scales) * np.exp2(steps / STEPS_PER_OCTAVE)
    else:
        halves, exponent = float16_scales(scales)
        values = np.ldexp(halves.astype(np.float64), exponent)
    return values


def quantize(matrix: SeparatedMatrix, bits: int) -> QuantizedMatrix:
    """Round each factor to integers, at the scale of each term with the least squared error.

    Raises `PrecisionError` unless 2 ≤ bits ≤ 8.
    """
    if not 2 <= bits <= MAX_BITS:
        raise PrecisionError(f"codes have 2 to {MAX_BITS} bits, got {bits}")
    scales = to_numpy(matrix.weights).astype(np.float64)
    codes = []
    for factor in matrix.factors:
        values = to_numpy(factor).astype(np.float64)
        code, steps = nearest_codes(values.reshape(len(values), math.prod(values.shape[1:])), bits)
        codes.append(code.reshape(values.shape))
        scales = scales * steps
    return QuantizedMatrix(tuple(codes), *float16_scales(scales), bits)
