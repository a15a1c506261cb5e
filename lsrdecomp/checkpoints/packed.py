"""Quantised layers in one tensor: an entry for each of many small factors would outweigh the factors.

The tensor ``base_model.model.lsr_packed`` holds bytes: the length of an index as four little-endian bytes, the index as
zlib-compressed JSON, then the codes of each layer in its order. An entry of the index is

    [name, "terms", out, inner, into, [bits, exponent, terms] of the left side, the same of the right side]
    [name, "components", [m, n], [bits of each component], exponent]

A side's codes are its float16 scales, then each factor's codes, packed; a component's are its scale, then u and v. See
`lsrdecomp.codes` for what they stand for.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.checkpoints.peft_format import PREFIX
from lsrdecomp.codes import CodedProduct, Codes, QuantizedMatrix, QuantizedProduct, SpectralCode, pack, unpack
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.product import SeparatedProduct
from lsrdecomp.shape import ProductShape

Bytes = NDArray[np.uint8]
PACKED = f"{PREFIX}lsr_packed"
LONGEST_INDEX = 64 * 2**20
MOST_NUMBERS = 2**31
"""Of one layer: a few bytes must not ask for more memory than a machine has."""


def encode(layers: Mapping[str, CodedProduct]) -> Bytes:
    """All layers as one array of bytes."""
    index, body = [], []
    for name, layer in layers.items():
        entry, data = _encode_terms(layer) if isinstance(layer, QuantizedProduct) else _encode_components(layer)
        index.append([name, *entry])
        body.append(data)
    header = zlib.compress(json.dumps(index, separators=(",", ":")).encode(), 9)
    length = np.frombuffer(len(header).to_bytes(4, "little"), np.uint8)
    return np.concatenate([length, np.frombuffer(header, np.uint8), *body])


def decode(packed: Bytes) -> dict[str, CodedProduct]:
    """The layers of `encode`. Raises `CheckpointError` for bytes that `encode` did not write."""
    try:
        length = int.from_bytes(packed[:4].tobytes(), "little")
        unzip = zlib.decompressobj()
        index = json.loads(unzip.decompress(packed[4 : 4 + length].tobytes(), LONGEST_INDEX))
        reader = _Reader(packed, 4 + length)
        layers = {str(name): _decode(reader, *entry) for name, *entry in index}
        if len(layers) != len(index) or reader.place != packed.size:
            raise CheckpointError(f"{reader.place} of {packed.size} bytes belong to {len(index)} layers")
    except (LsrError, ValueError, TypeError, KeyError, zlib.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"packed layers are damaged: {error}", tensor=PACKED) from None
    return layers


def named_factors(name: str, layer: CodedProduct) -> dict[str, NDArray[np.float64]]:
    """The factors by the keys they would have in a file of their own."""
    sides = zip("BA", factors_of(layer), strict=True)
    return {
        f"{PREFIX}{name}.lsr_{side}.factor_{i}": np.asarray(factor)
        for side, factors in sides
        for i, factor in enumerate(factors, 1)
    }


def factors_of(layer: CodedProduct) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Factors (s, m_i, r_i) of the out side and (t, r_i, n_i) of the in side, in float64, weights folded in."""
    sides = []
    product: SeparatedProduct = layer.dequantized()
    for side in (product.left, product.right):
        folded = side.folded()
        if side.separation_rank == 0:
            folded = tuple(np.zeros((1, *factor.shape[1:])) for factor in folded)
        sides.append(folded)
    return sides[0], sides[1]


def _encode_terms(layer: QuantizedProduct) -> tuple[list[Any], Bytes]:
    shape = layer.shape
    entry: list[Any] = ["terms", shape.out, shape.inner, shape.into]
    data = []
    for side in (layer.left, layer.right):
        entry.append([side.bits, side.exponent, int(side.scales.size)])
        data += [side.scales.astype("<f2").view(np.uint8), *(pack(code, side.bits) for code in side.codes)]
    return entry, np.concatenate(data)


def _encode_components(layer: SpectralCode) -> tuple[list[Any], Bytes]:
    entry: list[Any] = ["components", layer.matrix_shape, layer.bits, layer.exponent]
    data = [np.zeros(0, np.uint8)]
    for u, v, scale, bits in zip(layer.left, layer.right, layer.scales, layer.bits, strict=True):
        data += [np.array([scale], "<f2").view(np.uint8), pack(np.concatenate([u, v]), bits)]
    return entry, np.concatenate(data)


class _Reader:
    """Walks through the bytes; a read beyond the end is an error, not an empty array."""

    def __init__(self, packed: Bytes, place: int) -> None:
        self.packed, self.place = packed, place

    def take(self, count: int) -> Bytes:
        if count < 0 or self.place + count > self.packed.size:
            raise ValueError(f"{count} bytes are needed at byte {self.place} of {self.packed.size}")
        piece = self.packed[self.place : self.place + count]
        self.place += count
        return piece

    def scales(self, count: int) -> NDArray[np.float16]:
        values = np.frombuffer(self.take(2 * count).tobytes(), "<f2").astype(np.float16)
        if not np.isfinite(values).all():
            raise ValueError("a scale is NaN or infinite")
        return values

    def codes(self, bits: int, shape: tuple[int, ...]) -> Codes:
        count = int(np.prod(shape, dtype=object))
        if not 2 <= bits <= 8 or count > MOST_NUMBERS:
            raise ValueError(f"codes of {bits} bits for shape {shape}")
        return unpack(self.take(-(-count * bits // 8)), bits, shape)


def _decode(reader: _Reader, kind: str, *entry: Any) -> CodedProduct:
    if kind == "terms":
        out, inner, into, left, right = entry
        shape = ProductShape(tuple(out), tuple(inner), tuple(into))
        return QuantizedProduct(
            _decode_side(reader, left, shape.left.factors), _decode_side(reader, right, shape.right.factors)
        )
    if kind != "components":
        raise ValueError(f"unknown kind {str(kind)[:40]!r}")
    (m, n), widths, exponent = entry
    bits = tuple(int(b) for b in widths)
    ProductShape.low_rank((m, n), max(1, len(bits)))
    scales, left, right = [], [], []
    for b in bits:
        scales.append(reader.scales(1))
        pair = reader.codes(b, (m + n,))
        left.append(pair[:m])
        right.append(pair[m:])
    held = np.concatenate(scales) if scales else np.zeros(0, np.float16)
    return SpectralCode(tuple(left), tuple(right), held, _exponent(exponent), bits, (m, n))


def _decode_side(reader: _Reader, entry: Any, sizes: tuple[tuple[int, int], ...]) -> QuantizedMatrix:
    bits, exponent, terms = entry
    if type(terms) is not int or terms < 0:
        raise ValueError(f"a side of {terms} terms")
    scales = reader.scales(terms)
    codes = tuple(reader.codes(bits, (terms, m, n)) for m, n in sizes)
    return QuantizedMatrix(codes, scales, _exponent(exponent), bits)


def _exponent(value: Any) -> int:
    if type(value) is not int or abs(value) > 1100:
        raise ValueError(f"an exponent of {value}")
    return value
