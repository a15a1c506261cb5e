"""Readers of packed layers and of their index."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from damage.reader import MAX_MEMORY, reader
from lsrdecomp.formats.quantized import QuantizedMatrix, QuantizedProduct, SpectralCode
from lsrdecomp.lora.files.common_names import COMMON_NAMES
from lsrdecomp.lora.files.encodings import bytes_of, entry_of
from lsrdecomp.lora.files.packed import PackedLayer
from lsrdecomp.lora.files.packed_index import decode_index, encode_index
from lsrdecomp.lora.files.tensors import FLOATS


def _codes() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def side(bits: int, terms: int, *sizes: tuple[int, int]) -> QuantizedMatrix:
        top = 2 ** (bits - 1) - 1
        codes = tuple(rng.integers(-top, top + 1, (terms, *size)).astype(np.int8) for size in sizes)
        return QuantizedMatrix(codes, rng.random(terms).astype(np.float16), -3, bits)

    parts = [tuple(rng.integers(-1, 2, size).astype(np.int8) for _ in range(2)) for size in (4, 6)]
    steps = tuple(rng.integers(0, 256, count).astype(np.uint8) for count in (5, 2))
    scales = rng.random(2).astype(np.float16)
    return {
        "a.q": QuantizedProduct(side(4, 3, (2, 2), (2, 1)), side(8, 2, (2, 3), (1, 2))),
        "b": QuantizedProduct(side(4, 0, (2, 1), (2, 1)), side(4, 1, (1, 3), (1, 2))),
        "c": SpectralCode((), (), np.zeros(0, np.float16), 0, (), (4, 6), (), ()),
        "d": SpectralCode(*parts, scales, 1, (2, 3), (4, 6), (2, 2**20), steps),
    }


def _numbers(codes: dict[str, Any]) -> bytes:
    return b"".join(piece.tobytes() for code in codes.values() for piece in bytes_of(code))


def _unpack(layers: Mapping[str, PackedLayer]) -> None:
    for layer in layers.values():
        sizes = [shape for side in layer.factor_shapes for shape in side]
        if 8 * sum(math.prod(size) for size in sizes) <= MAX_MEMORY:
            factors = [factor for side in layer.factors() for factor in side]
            assert [factor.shape for factor in factors] == sizes
            assert layer.storage in FLOATS or all(np.isfinite(factor).all() for factor in factors)


def sound_tensors() -> list[bytes]:
    codes = _codes() | {"x": joined()}
    found = []
    for chosen in (codes, {"x.0.y": codes["x"], "x.7.y": codes["x"]}):
        entries = {name: entry_of(code) for name, code in chosen.items()}
        index = encode_index(entries, {"a.q": ("conv", (1, 1))})
        inflate = zlib.decompressobj(-15, zdict=COMMON_NAMES)
        content = inflate.decompress(index) + inflate.unused_data
        found.append(len(content).to_bytes(2, "little") + content + _numbers(chosen))
    return found


def joined() -> QuantizedProduct:
    rng = np.random.default_rng(1)
    sides = []
    for terms, scales, exponent in ((2, [3, 40], -1), (1, [0], -3)):
        codes = tuple(rng.integers(-3, 4, (terms, 2, 2)).astype(np.int8) for _ in range(2))
        sides.append(QuantizedMatrix(codes, np.array(scales, np.uint8), exponent, 3))
    product = QuantizedProduct(*sides)
    assert product.is_joined
    return product


@reader(sound_tensors)
def tensor(content: bytes, folder: Path) -> None:
    """The index of packed layers, laid open, after its length, and their numbers."""
    length = 2 + int.from_bytes(content[:2], "little")
    deflate = zlib.compressobj(wbits=-15, zdict=COMMON_NAMES)
    found = decode_index(deflate.compress(content[2:length]) + deflate.flush())
    found.config_fields()
    _unpack(found.layers(np.frombuffer(content[length:], np.uint8)))
