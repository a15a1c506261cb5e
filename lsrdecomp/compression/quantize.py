"""Factors in few bits: integer codes, one float16 scale a term; their bytes, and what a reader gets back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import PrecisionError
from lsrdecomp.precision import PRECISIONS
from lsrdecomp.product import SeparatedProduct
from lsrdecomp.separated import SeparatedMatrix

INTEGER_BITS = {"int8": 8, "int4": 4}
"""Bits of an integer code by the name of its storage."""

CLIPS = 24
"""Clipping levels tried between the largest entry and a quarter of it."""

Doubles = NDArray[np.float64]
Codes = NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A separated matrix as stored: Σ_k 2^e · scale_k · Q_k⁽¹⁾ ⊗ … ⊗ Q_k⁽ᵈ⁾ with small integers Q.

    A term needs one scale only, however many factors it has, since (aX) ⊗ (bY) = ab (X ⊗ Y).
    """

    codes: tuple[Codes, ...]  # (s, m_i, n_i), from −(2^(bits−1) − 1) to 2^(bits−1) − 1
    scales: NDArray[np.float16]  # (s,)
    exponent: int  # puts the largest scale near one, away from float16's limits
    bits: int

    @property
    def bytes(self) -> int:
        """Packed codes, scales and the exponent."""
        packed = sum(math.ceil(code.size * self.bits / 8) for code in self.codes)
        return packed + 2 * self.scales.size + 1

    def dequantized(self) -> SeparatedMatrix:
        """What a reader gets, in float64."""
        weights = np.ldexp(self.scales.astype(np.float64), self.exponent)
        return SeparatedMatrix.from_factors([code.astype(np.float64) for code in self.codes], weights)


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
    exponent = math.frexp(float(scale.max(initial=0.0)))[1]
    return QuantizedMatrix(tuple(codes), np.ldexp(scale, -exponent).astype(np.float16), exponent, bits)


def quantized_product(product: SeparatedProduct, bits: int) -> tuple[QuantizedMatrix, QuantizedMatrix]:
    """Both sides, in canonical form for two factors: orthogonal terms do not amplify rounding."""
    if product.left.order == 2:
        product = product.canonical()
    return quantize(product.left, bits), quantize(product.right, bits)


def nearest_codes(rows: Doubles, bits: int) -> tuple[Codes, Doubles]:
    """Integer codes and a scale for each row x: step·code with ‖x − step·code‖ least over the clipping levels tried.

    Parameters
    ----------
    rows : (s, p)
    bits : int

    Returns
    -------
    codes (s, p), steps (s,)
        The step is the least-squares one for its codes; a zero row has codes and step zero.
    """
    top = 2 ** (bits - 1) - 1
    largest = np.max(np.abs(rows), axis=1, initial=0.0)
    best_codes, best_steps = np.zeros_like(rows), np.zeros(len(rows))
    best_error = np.sum(rows * rows, axis=1)
    for clip in np.linspace(1.0, 0.25, CLIPS):
        step = np.where(largest > 0, clip * largest / top, 1.0)
        codes = np.clip(np.rint(rows / step[:, None]), -top, top)
        energy = np.sum(codes * codes, axis=1)
        fitted = np.sum(rows * codes, axis=1) / np.where(energy > 0, energy, 1.0)
        error = np.sum((rows - fitted[:, None] * codes) ** 2, axis=1)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_steps = np.where(better, fitted, best_steps)
        best_codes = np.where(better[:, None], codes, best_codes)
    return best_codes.astype(np.int8), best_steps


def pack(codes: Codes, bits: int) -> NDArray[np.uint8]:
    """Codes as a dense run of ``bits``-bit numbers, offset to be unsigned, most significant bit first."""
    unsigned = (codes.reshape(-1).astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    return np.packbits(np.unpackbits(unsigned[:, None], axis=1)[:, 8 - bits :])


def unpack(packed: NDArray[np.uint8], bits: int, shape: tuple[int, ...]) -> Codes:
    """The codes of `pack`. Raises `PrecisionError` if the bytes are not as many as the shape needs."""
    count = math.prod(shape)
    if packed.size != math.ceil(count * bits / 8):
        raise PrecisionError(
            f"{packed.size} bytes of {bits}-bit codes, but shape {shape} needs {math.ceil(count * bits / 8)}"
        )
    digits = np.unpackbits(packed)[: count * bits].reshape(count, bits)
    padded = np.concatenate([np.zeros((count, 8 - bits), dtype=np.uint8), digits], axis=1)
    unsigned = np.packbits(padded, axis=1)[:, 0].astype(np.int16)
    codes: Codes = (unsigned - 2 ** (bits - 1)).astype(np.int8).reshape(shape)
    return codes


def stored_product(product: SeparatedProduct, storage: str) -> tuple[SeparatedProduct, int]:
    """What a reader of factors stored as float32, float16, bfloat16, int8 or int4 gets, and their bytes.

    The form is canonical first where there is one (two factors), so that γ = 1 and rounding adds no more than its own
    size. Raises `PrecisionError` for an unknown storage.
    """
    if storage in INTEGER_BITS:
        sides = quantized_product(product, INTEGER_BITS[storage])
        return SeparatedProduct(*(side.dequantized() for side in sides)), sum(side.bytes for side in sides)
    if storage not in PRECISIONS:
        raise PrecisionError(f"{storage}: unknown storage; known: {', '.join([*PRECISIONS, *INTEGER_BITS])}")
    if product.left.order == 2:
        product = product.canonical()
    stored = product.round_to(storage)
    return stored, math.ceil(product.parameters * PRECISIONS[storage].bytes)
