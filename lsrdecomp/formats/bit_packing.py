"""Small integers as a dense run of bits."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.errors import PrecisionError

Codes: TypeAlias = NDArray[np.int8]


def pack(codes: Codes, bits: int) -> NDArray[np.uint8]:
    """Codes as a dense run of ``bits``-bit numbers, offset to be unsigned, most significant bit first."""
    unsigned = (codes.reshape(-1).astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    return np.packbits(np.unpackbits(unsigned[:, None], axis=1)[:, 8 - bits :])


def packed_size(count: int, bits: int) -> int:
    """Bytes of ``count`` packed codes."""
    return -(-count * bits // 8)


def unpack(packed: NDArray[np.uint8], bits: int, shape: tuple[int, ...]) -> Codes:
    """The codes of `pack`. Raises `PrecisionError` if the bytes are not as many as the shape needs."""
    count = math.prod(shape)
    needed = packed_size(count, bits)
    if packed.size != needed:
        raise PrecisionError(f"{packed.size} bytes of {bits}-bit codes, but shape {shape} needs {needed}")
    digits = np.unpackbits(packed)[: count * bits].reshape(count, bits)
    padded = np.concatenate([np.zeros((count, 8 - bits), dtype=np.uint8), digits], axis=1)
    unsigned = np.packbits(padded, axis=1)[:, 0].astype(np.int16)
    codes: Codes = (unsigned - 2 ** (bits - 1)).astype(np.int8).reshape(shape)
    return codes
