"""An LSR adapter in memory in few bytes: its numbers as stored, and a compressed layout that says what they mean."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.checkpoints.format import Bundle
from lsrdecomp.checkpoints.readers import lsr
from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.checkpoints.tensors import DTYPES, StoredTensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """One adapter: its tensors as stored, and its config and their names, compressed; equal layouts are held once."""

    layout: bytes
    numbers: NDArray[np.uint8]

    def open(self, name: str, words: bytes) -> Checkpoint:
        """What `pack` took up, its tensors in memory; errors call it ``name``."""
        config, tensors = json.loads(zlib.decompressobj(zdict=words).decompress(self.layout))
        path, start, stored = Path(name), 0, {}
        for key, dtype, shape in tensors:
            size = prod(shape) * DTYPES[dtype].itemsize
            array = self.numbers[start : start + size].copy().view(DTYPES[dtype]).reshape(shape)
            stored[key] = StoredTensor(key, tuple(shape), dtype, path, partial(np.asarray, array))
            start += size
        return lsr.read(Bundle(path, path, stored, {}, config))


def pack(bundle: Bundle, words: bytes) -> PackedAdapter:
    """An LSR directory in few bytes; ``words``, the names of the base's layers, are what zlib begins with."""
    tensors = list(bundle.tensors.values())
    layout = [bundle.config, [[tensor.name, tensor.dtype, tensor.shape] for tensor in tensors]]
    packer = zlib.compressobj(9, zdict=words)
    packed = packer.compress(json.dumps(layout, separators=(",", ":")).encode()) + packer.flush()
    return PackedAdapter(
        packed, np.concatenate([np.ascontiguousarray(tensor.read()).view(np.uint8).ravel() for tensor in tensors])
    )
