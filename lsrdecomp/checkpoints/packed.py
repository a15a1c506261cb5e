"""Quantised layers in one tensor: an entry for each of many small factors would outweigh the factors.

The tensor ``base_model.model.lsr_packed`` holds bytes: the length of an index as four little-endian bytes, the index as
zlib-compressed JSON, then the codes of each layer in its order. An entry of the index is

    [name, "terms", out, inner, into, [bits, exponent, terms] of the left side, the same of the right side]
    [name, "components", [m, n], [bits of each component], exponent]

A side's codes are its float16 scales, then each factor's codes, packed; a component's are its scale, then u and v. See
`lsrdecomp.formats.quantized` for what they stand for.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import zero_padded
from lsrdecomp.checkpoints.packed_entries import Bytes, Entry, Reader, parse
from lsrdecomp.checkpoints.readers.peft import PREFIX
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.formats.bit_packing import pack
from lsrdecomp.formats.quantized import CodedProduct, QuantizedProduct
from lsrdecomp.kronecker.product import SeparatedProduct

PACKED = f"{PREFIX}lsr_packed"
LONGEST_INDEX = 16 * 2**20


def encode(layers: Mapping[str, CodedProduct]) -> Bytes:
    """All layers as one array of bytes."""
    return np.concatenate([*encoded(layers)[1]])


def encoded(layers: Mapping[str, CodedProduct]) -> tuple[int, Iterator[Bytes]]:
    """The number of bytes, and the bytes in pieces, so that only one layer is held: each is asked for twice."""
    index, size = [], 0
    for name, layer in layers.items():
        entry = _entry(layer)
        index.append([name, *entry])
        size += parse(*entry).size
    header = zlib.compress(json.dumps(index, separators=(",", ":")).encode(), 9)

    def pieces() -> Iterator[Bytes]:
        yield np.frombuffer(len(header).to_bytes(4, "little"), np.uint8)
        yield np.frombuffer(header, np.uint8)
        for layer in layers.values():
            yield from _body(layer)

    return 4 + len(header) + size, pieces()


def decode(packed: Bytes) -> dict[str, CodedProduct]:
    """The layers of `encode`. Raises `CheckpointError` for bytes that `encode` did not write."""
    return {name: layer.decode() for name, layer in read_index(packed).items()}


def read_index(packed: Bytes) -> dict[str, PackedLayer]:
    """The layers of `encode`, their sizes known and checked, their codes not yet unpacked.

    Raises `CheckpointError` for bytes that `encode` did not write.
    """
    try:
        length = int.from_bytes(packed[:4].tobytes(), "little")
        unzip = zlib.decompressobj()
        index = json.loads(unzip.decompress(packed[4 : 4 + length].tobytes(), LONGEST_INDEX))
        layers: dict[str, PackedLayer] = {}
        place = 4 + length
        for name, *entry in index:
            parsed = parse(*entry)
            layers[str(name)] = PackedLayer(parsed, packed[place : place + parsed.size])
            place += parsed.size
        if len(layers) != len(index) or place != packed.size:
            raise CheckpointError(f"{place} of {packed.size} bytes belong to {len(index)} layers")
    except DAMAGE as error:
        raise _damaged(error) from None
    return layers


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer in its bytes."""

    entry: Entry
    codes: Bytes

    @property
    def factor_shapes(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Shapes (s, m_i, r_i) of the out side and (t, r_i, n_i) of the in side, as `factors_of` gives them."""
        left, right = ([(terms, *size) for size in side] for terms, side in self.entry.sides)
        return left, right

    @property
    def storage(self) -> str:
        return self.entry.storage

    def decode(self) -> CodedProduct:
        """The codes, unpacked. Raises `CheckpointError` if they cannot be read."""
        try:
            return self.entry.decode(Reader(self.codes))
        except DAMAGE as error:
            raise _damaged(error) from None


DAMAGE = (LsrError, ValueError, TypeError, KeyError, zlib.error, RecursionError, OverflowError)


def _damaged(error: BaseException) -> CheckpointError:
    text = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:300])
    return CheckpointError(f"packed layers are damaged: {text}", tensor=PACKED)


def named_factors(name: str, layer: CodedProduct) -> dict[str, NDArray[np.float64]]:
    """The factors by the keys they would have in a file of their own."""
    sides = zip("BA", factors_of(layer), strict=True)
    return {
        f"{PREFIX}{name}.lsr_{side}.factor_{i}": np.asarray(factor)
        for side, factors in sides
        for i, factor in enumerate(factors, 1)
    }


def factors_of(layer: CodedProduct) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Factors (s, m_i, r_i) of the out side and (t, r_i, n_i) of the in side, in float64, weights folded in.

    As many terms as the index says, at least one: a term that rounded to zero stays, as zeros.
    """
    product: SeparatedProduct = layer.dequantized()
    terms = [side.scales.size for side in (layer.left, layer.right)] if isinstance(layer, QuantizedProduct) else [1, 1]
    left, right = (
        tuple(zero_padded(factor, 0, max(1, count)) for factor in side.folded())
        for side, count in zip((product.left, product.right), terms, strict=True)
    )
    return left, right


def _entry(layer: CodedProduct) -> list[Any]:
    """What the index says of a layer."""
    if isinstance(layer, QuantizedProduct):
        sides = [[side.bits, side.exponent, int(side.scales.size)] for side in (layer.left, layer.right)]
        return ["terms", layer.shape.out, layer.shape.inner, layer.shape.into, *sides]
    return ["components", layer.matrix_shape, layer.bits, layer.exponent]


def _body(layer: CodedProduct) -> Iterator[Bytes]:
    """The bytes of a layer."""
    if isinstance(layer, QuantizedProduct):
        for side in (layer.left, layer.right):
            yield side.scales.astype("<f2").view(np.uint8)
            yield from (pack(code, side.bits) for code in side.codes)
    else:
        for u, v, scale, bits in zip(layer.left, layer.right, layer.scales, layer.bits, strict=True):
            yield np.array([scale], "<f2").view(np.uint8)
            yield pack(np.concatenate([u, v]), bits)
