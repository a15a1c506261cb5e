"""Factors in few bits: integer codes of LSR products, and of the components of a truncated SVD.

The factors of an LSR product have codes of one width, and each term one float16 scale. They are
rounded one factor after the other, while the others are solved again.

The components of a truncated SVD, each a column and a row, have codes of different widths and one
float16 scale each. Bits are spread by reverse water-filling [1]_: they go where they lower the
expected error most, and components below the water level get none. The columns and rows of the LoRA
pair can be coded in the same way.

References
----------
.. [1] T. M. Cover and J. A. Thomas, Elements of Information Theory, 2nd ed., section 10.3.3.
"""

from __future__ import annotations

import heapq
import math
from functools import singledispatch
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import Array, as_double, to_numpy
from lsrdecomp.compression.layers import Layer
from lsrdecomp.errors import PrecisionError, UnsupportedError
from lsrdecomp.formats.number_formats import FORMATS, Codes, nearest_codes
from lsrdecomp.formats.quantized import QuantizedMatrix, QuantizedProduct, SpectralCode
from lsrdecomp.formats.stored import FloatProduct, Stored
from lsrdecomp.precision import INTEGERS, PRECISIONS, numpy_dtype, round_to, type_name
from lsrdecomp.solvers.pair.quantization_aware import quantize_sequentially
from lsrdecomp.targets.base import LowRank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.kronecker.product import SeparatedProduct
    from lsrdecomp.kronecker.separated import SeparatedMatrix
    from lsrdecomp.targets.weights import NormWeights

INTEGER_BITS = {name: FORMATS[name].bits for name in INTEGERS}
"""Bits of an integer code by the name of its storage."""

MAX_BITS = 8
"""Largest width of an integer code, which is held in one byte."""

GAUSSIAN_ERROR = {
    2: 0.191, 3: 0.0467, 4: 0.01256, 5: 0.00341, 6: 0.000884, 7: 0.000225, 8: 0.0000558,
}  # fmt: skip
"""Relative squared error by bits, measured on a few hundred Gaussian numbers at the step of
`nearest_codes`."""

Doubles = NDArray[np.float64]


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
    factors = (np.asarray(round_to(side, storage)).astype(dtype) for side in (left, right))
    rounded_left, rounded_right = factors
    return FloatProduct((rounded_left[None],), (rounded_right[None],), storage)


def quantized_product(product: SeparatedProduct, bits: int) -> QuantizedProduct:
    """Round both sides to codes; a product of two factors is brought to canonical form first."""
    if product.left.order == 2:
        product = product.canonical()
    return QuantizedProduct(quantize(product.left, bits), quantize(product.right, bits))


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
    left, right = (QuantizedMatrix(codes, *_float16(scales), bits) for codes, scales in sides)
    return QuantizedProduct(left, right)


def coded_product(
    product: SeparatedProduct, bits: int, norms: NormWeights | None = None
) -> QuantizedProduct | SpectralCode:
    """Find codes near a product: solved in the norm, or rounded, whichever are nearer.

    Rounded ones may be nearer after training, whose numbers may be close to codes already. A
    product of one factor on each side is a matrix of low rank: its singular vectors are coded.
    """
    target = Layer.of("", LowRank(*product.to_lora()), norms)
    if product.left.order == 1:
        return svd_code(target, [bits] * len(target.gauge[1]))
    rounded = quantized_product(product, bits)
    solved = refitted_product(target, product, bits)
    return min((rounded, solved), key=lambda coded: target.squared_error(coded.dequantized()))


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
    # The k-th largest component of the new product gets the bits that the k-th one had.
    target = Layer.of("", LowRank(*product.to_lora()), norms)
    rank = len(target.gauge[1])
    bits = (*old.bits, *[0] * rank)
    return svd_code(target, bits[:rank])


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
    return QuantizedMatrix(tuple(codes), *_float16(scales), bits)


def _float16(scales: Doubles) -> tuple[NDArray[np.float16], int]:
    """Return scales as float16, and the exponent of a power of two to multiply them by.

    The power is such that the largest float16 lies between a half and one.
    """
    exponent = math.frexp(float(np.max(np.abs(scales), initial=0.0)))[1]
    return np.ldexp(scales, -exponent).astype(np.float16), exponent


# -- low rank --------------------------------------------------------------------------------------


def svd_code(layer: Layer, bits: Sequence[int]) -> SpectralCode:
    """Return the codes of a layer's SVD with these bits for each component; see `spectral_code`."""
    return spectral_code(layer, layer_svd(layer), bits)


def pair_code(layer: Layer) -> SpectralCode:
    """Return codes of eight bits of the pair's own columns and rows."""
    left = to_numpy(layer.pair.left).astype(np.float64)
    right = to_numpy(layer.pair.right).astype(np.float64)
    column_norms = np.linalg.norm(left, axis=0)
    row_norms = np.linalg.norm(right, axis=1)
    sizes = column_norms * row_norms
    nonzero = np.flatnonzero(sizes)
    columns = left[:, nonzero] / column_norms[nonzero]
    rows = right[nonzero, :] / row_norms[nonzero, None]
    return spectral_code(layer, (columns, sizes[nonzero], rows), (MAX_BITS,) * len(nonzero))


def layer_svd(layer: Layer) -> tuple[Doubles, Doubles, Doubles]:
    """Return U (m, r), σ, Vᵀ (r, n) of a layer in its norm."""
    pair = layer.pair
    columns, sigma, rows = layer.gauge
    u = to_numpy(as_double(pair.left) @ columns)
    vh = to_numpy(rows @ as_double(pair.right))
    return u, to_numpy(sigma), vh


def water_fill(
    layer: Layer, u: Doubles, sigma: Doubles, vh: Doubles, max_bits: int = MAX_BITS
) -> list[tuple[int, ...]]:
    """Return the bits of every component after each step of greedy reverse water-filling.

    Parameters
    ----------
    layer : Layer
    u, sigma, vh : arrays of shapes (m, r), (r,) and (r, n)
        Its SVD in its norm.
    max_bits : int
        Largest width of a component.

    Returns
    -------
    list of tuple of int
        Widths of all components, 0 for those left out. Each entry has more bits than the one
        before.

    Notes
    -----
    O(r log r) steps of a heap. The noise of codes of b bits in u_k has the squared norm
    ‖u_k‖² · tr G / m · D(b), relative to u_kᵀ G u_k = 1, and likewise in v_k. In the Frobenius norm
    both factors before D(b) are one.
    """
    # 1. The squared norm of noise in each component, relative to the component.
    output = layer.norms.output
    input_ = layer.norms.input
    noise = np.sum(u * u, axis=0) * (float(output.trace) / output.size)
    noise = noise + np.sum(vh * vh, axis=1) * (float(input_.trace) / input_.size)
    # 2. The best next width of every component, by loss removed per bit.
    widths = [0] * len(sigma)
    heap = []
    for k in range(len(sigma)):
        step = _next_width(k, 0, sigma, noise, max_bits)
        if step is not None:
            heap.append(step)
    heapq.heapify(heap)
    # 3. The steepest step first, until none lowers the loss.
    filled: list[tuple[int, ...]] = []
    while heap:
        _, k, bits = heapq.heappop(heap)
        widths[k] = bits
        filled.append(tuple(widths))
        step = _next_width(k, bits, sigma, noise, max_bits)
        if step is not None:
            heapq.heappush(heap, step)
    return filled


def _next_width(
    k: int, width: int, sigma: Doubles, noise: Doubles, max_bits: int
) -> tuple[float, int, int] | None:
    """Return (−loss removed per bit, k, bits) for the best next width of component k.

    A step may add several bits, since a first bit alone codes nothing. None if no width lowers the
    loss.
    """
    energy = float(sigma[k] ** 2)

    def loss_in(bits: int) -> float:
        if bits == 0:
            return energy
        return energy * min(1.0, float(noise[k]) * GAUSSIAN_ERROR[bits])

    best_gain = 0.0
    best_bits = 0
    for bits in range(max(width + 1, 2), max_bits + 1):
        gain = (loss_in(width) - loss_in(bits)) / (bits - width)
        if (gain, bits) > (best_gain, best_bits):
            best_gain = gain
            best_bits = bits
    return (-best_gain, k, best_bits) if best_gain > 0.0 else None


def spectral_code(
    layer: Layer, svd: Sequence[Doubles], bits: Sequence[int], *, rounds: int = 2
) -> SpectralCode:
    """Find codes of columns and rows whose products are near the layer in its norm.

    Parameters
    ----------
    layer : Layer
    svd : (u, sigma, vh), shapes (m, r), (r,), (r, n)
        Columns, sizes and rows to start from.
    bits : sequence of int
        Width of each component; 0 leaves it out.
    rounds : int
        Times that each side is fitted to the codes of the other. By hand.

    Notes
    -----
    O((m + n) r²) a round, and two applications of the weights of the norm.
    """
    # 1. Round both sides, with half of σ on each.
    u, sigma, vh = svd
    coded = [k for k, width in enumerate(bits) if width]
    widths = tuple(bits[k] for k in coded)
    root = np.sqrt(sigma[coded])
    left_codes, left = _nearest_columns(u[:, coded] * root, widths)
    right_codes, _ = _nearest_columns(vh[coded, :].T * root, widths)
    # 2. With ΔW = b aᵀ and the left side L fixed, the right side of least error in the norm is
    #    ΔWᵀ G L (Lᵀ G L)⁺. Round it, fix it, and solve for the left side in the same way with C.
    norms = layer.norms
    b = to_numpy(layer.pair.left).astype(np.float64)
    a = to_numpy(layer.pair.right).astype(np.float64).T
    for _ in range(rounds):
        weighted_left = norms.output.apply(left)
        inverse_gram = np.linalg.pinv(left.T @ weighted_left, hermitian=True)
        right_codes, right = _nearest_columns(a @ (b.T @ weighted_left) @ inverse_gram, widths)
        weighted_right = norms.input.apply(right)
        inverse_gram = np.linalg.pinv(right.T @ weighted_right, hermitian=True)
        left_codes, left = _nearest_columns(b @ (a.T @ weighted_right) @ inverse_gram, widths)
    # 3. The scales of the rank-one codes by least squares: their Gram matrix, and their inner
    #    products with ΔW.
    left = left_codes.astype(np.float64)
    right = right_codes.astype(np.float64)
    weighted_left = norms.output.apply(left)
    weighted_right = norms.input.apply(right)
    gram = (left.T @ weighted_left) * (right.T @ weighted_right)
    cross = np.sum((b.T @ weighted_left) * (a.T @ weighted_right), axis=0)
    scales, exponent = _float16(np.linalg.lstsq(gram, cross, rcond=None)[0])
    return SpectralCode(
        tuple(left_codes.T), tuple(right_codes.T), scales, exponent, widths, layer.shape
    )


def _nearest_columns(columns: Doubles, widths: Sequence[int]) -> tuple[Codes, Doubles]:
    """Return the nearest codes of each column in its number of bits, and their values."""
    codes = np.zeros(columns.shape, dtype=np.int8)
    values = np.zeros(columns.shape)
    for width in set(widths):
        same = [k for k, other in enumerate(widths) if other == width]
        nearest, steps = nearest_codes(columns[:, same].T, width)
        codes[:, same] = nearest.T
        values[:, same] = (nearest * steps[:, None]).T
    return codes, values
