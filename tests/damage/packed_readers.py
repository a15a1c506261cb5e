"""Readers of packed layers and of their index, in every version."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from index_of_03 import index_text

from damage.reader import MAX_MEMORY, reader
from lsrdecomp.checkpoints.common_names import COMMON_NAMES
from lsrdecomp.checkpoints.encodings import bytes_of, entry_of
from lsrdecomp.checkpoints.packed import PackedLayer
from lsrdecomp.checkpoints.packed_index import decode_index, encode_index, read_index, read_packed
from lsrdecomp.checkpoints.tensors import FLOATS
from lsrdecomp.formats.quantized import QuantizedMatrix, QuantizedProduct, SpectralCode
from lsrdecomp.kronecker.shape import ProductShape


def _codes() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def side(bits: int, terms: int, *sizes: tuple[int, int]) -> QuantizedMatrix:
        top = 2 ** (bits - 1) - 1
        codes = tuple(rng.integers(-top, top + 1, (terms, *size)).astype(np.int8) for size in sizes)
        return QuantizedMatrix(codes, rng.random(terms).astype(np.float16), -3, bits)

    def short(matrix: QuantizedMatrix) -> QuantizedMatrix:
        return replace(matrix, scales=rng.integers(0, 256, matrix.scales.size).astype(np.uint8))

    parts = [tuple(rng.integers(-1, 2, size).astype(np.int8) for _ in range(2)) for size in (4, 6)]
    without_groups = SpectralCode(*parts, rng.random(2).astype(np.float16), 1, (2, 3), (4, 6))
    steps = tuple(rng.integers(0, 256, count).astype(np.uint8) for count in (5, 2))
    return {
        "a.q": QuantizedProduct(side(4, 3, (2, 2), (2, 1)), side(8, 2, (2, 3), (1, 2))),
        "b": QuantizedProduct(side(4, 0, (2, 1), (2, 1)), side(4, 1, (1, 3), (1, 2))),
        "c": without_groups,
        "d": SpectralCode((), (), np.zeros(0, np.float16), 0, (), (4, 6)),
        "f": QuantizedProduct(short(side(4, 3, (2, 2), (2, 1))), short(side(4, 1, (2, 2), (1, 2)))),
        "e": replace(without_groups, groups=(2, 2**20), steps=steps),
    }


def sound_packed() -> list[bytes]:
    codes = _codes()
    return [_by_01(codes), *(_by_01({name: code}) for name, code in codes.items())]


def _by_01(codes: dict[str, Any]) -> bytes:
    """The tensor of version 0.1."""
    index = zlib.compress(
        json.dumps([[name, *entry_of(code)] for name, code in codes.items()]).encode()
    )
    return len(index).to_bytes(4, "little") + index + _numbers(codes)


def _numbers(codes: dict[str, Any]) -> bytes:
    return b"".join(piece.tobytes() for code in codes.values() for piece in bytes_of(code))


@reader(sound_packed)
def packed(content: bytes, folder: Path) -> None:
    """Packed integer layers of version 0.1."""
    _unpack(read_packed(np.frombuffer(content, np.uint8)))


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


def sound_numbers() -> list[bytes]:
    codes, shape = _codes(), ProductShape((2, 2), (1, 2), (3, 1))
    entries = {name: entry_of(code) for name, code in codes.items()}
    floats = index_text(
        {"q": ["floats", shape.out, shape.inner, shape.into, "bfloat16", 2, 1]},
        {"q": ("conv", (1, 1))},
        exact=True,
    )
    texts = {index_text(entries): _numbers(codes), floats: bytes(2 * shape.parameters(2, 1))}
    opened = {
        zlib.decompress(base64.b85decode(text[2:]), -15): numbers for text, numbers in texts.items()
    }
    return [len(index).to_bytes(2, "little") + index + numbers for index, numbers in opened.items()]


@reader(sound_numbers)
def numbers(content: bytes, folder: Path) -> None:
    """The same with the index of older code."""
    length = 2 + int.from_bytes(content[:2], "little")
    squeezed = zlib.compressobj(wbits=-15)
    text = base64.b85encode(squeezed.compress(content[2:length]) + squeezed.flush()).decode()
    found, body = read_index(f"3:{text}"), content[length:]
    found.config_fields()
    _unpack(found.layers(np.frombuffer(body, np.uint8)))


def sound_indices() -> list[bytes]:
    found = []
    for content in sound_packed():
        length = int.from_bytes(content[:4], "little")
        found.append(zlib.decompress(content[4 : 4 + length]) + b"\0" + content[4 + length :])
    return found


@reader(sound_indices)
def packed_index(content: bytes, folder: Path) -> None:
    """Packed layers with their index laid open: text, a zero byte, codes."""
    text, _, codes = content.partition(b"\0")
    squeezed = zlib.compress(text, 1)
    packed(len(squeezed).to_bytes(4, "little") + squeezed + codes, folder)
