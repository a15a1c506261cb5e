"""An LSR adapter in memory in few bytes: its numbers as stored, and a compressed layout that says what they mean."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lsrdecomp.checkpoints.format import Bundle
from lsrdecomp.checkpoints.readers import lsr
from lsrdecomp.checkpoints.records import Checkpoint, LsrLayer
from lsrdecomp.checkpoints.tensors import DTYPES, FLOATS, StoredTensor

Pair = tuple[list[Tensor], list[Tensor], float]
"""Factors of B, factors of A, and the scale of their product."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """One adapter: its numbers as stored, and what they mean, compressed; equal layouts are held once.

    The layout of an adapter in floats lists its layers: name, scale, and for B and then A the dtype and shape (s, m, n)
    of each factor. That of one with layers in integer codes is its config and the list of its tensors, from which the
    reader of LSR directories makes layers again.
    """

    layout: bytes
    numbers: NDArray[np.uint8]
    coded: bool

    def pairs(self, name: str, words: bytes, device: torch.device) -> dict[str, Pair]:
        """Factors of B and A of every layer, and their scale, on a device; errors call the adapter ``name``."""
        if self.coded:
            return {
                layer.name: (
                    *([torch.from_numpy(each).to(device) for each in side] for side in layer.load()),
                    layer.scale,
                )
                for layer in self._reopened(name, words).layers
            }
        pairs: dict[str, Pair] = {}
        start, numbers = 0, torch.from_numpy(self.numbers).to(device)
        for layer, scale, *sides in _layers(self.layout, words):
            factors: tuple[list[Tensor], list[Tensor]] = ([], [])
            for tensors, side in zip(factors, sides, strict=True):
                for dtype, *shape in side:
                    size = prod(shape) * DTYPES[dtype].itemsize
                    stored = numbers[start : start + size]
                    stored = stored.clone() if start % 8 else stored  # wider numbers begin at multiples of their size
                    tensors.append(stored.view(getattr(torch, dtype)).view(shape))
                    start += size
            pairs[layer] = *factors, scale
        return pairs

    def _reopened(self, name: str, words: bytes) -> Checkpoint:
        """The checkpoint that an adapter with integer codes was taken up from, its tensors in memory."""
        config, metadata, listed = _read(self.layout, words)
        path, start, tensors = Path(name), 0, {}
        for key, dtype, shape in listed:
            size = prod(shape) * DTYPES[dtype].itemsize
            array = self.numbers[start : start + size].copy().view(DTYPES[dtype]).reshape(shape)
            tensors[key] = StoredTensor(key, tuple(shape), dtype, path, partial(np.asarray, array))
            start += size
        return lsr.read(Bundle(path, path, tensors, metadata, config))


def pack(bundle: Bundle, layers: tuple[LsrLayer, ...], words: bytes) -> PackedAdapter:
    """The layers of an LSR directory in few bytes; ``words`` are what zlib begins with."""
    coded = any(layer.dtype not in FLOATS for layer in layers)
    if coded:
        tensors = list(bundle.tensors.values())
        layout: Any = [bundle.config, dict(bundle.metadata), [[t.name, t.dtype, t.shape] for t in tensors]]
    else:
        tensors = [tensor for layer in layers for tensor in (*layer.left, *layer.right)]
        layout = [[each.name, each.scale, _listed(each.left), _listed(each.right)] for each in layers]
    parts = [np.ascontiguousarray(tensor.read()).view(np.uint8).ravel() for tensor in tensors]
    return PackedAdapter(_write(layout, words), np.concatenate(parts), coded)


def _listed(tensors: Sequence[StoredTensor]) -> list[Any]:
    return [[tensor.dtype, *tensor.shape] for tensor in tensors]


def _write(layout: Any, words: bytes) -> bytes:
    """A layout in few bytes; ``words``, the names of the base's layers, are what zlib begins with."""
    packer = zlib.compressobj(9, zdict=words)
    return packer.compress(json.dumps(layout, separators=(",", ":")).encode()) + packer.flush()


def _read(written: bytes, words: bytes) -> Any:
    return json.loads(zlib.decompressobj(zdict=words).decompress(written))


_layers = lru_cache(maxsize=64)(_read)
"""The layers of a layout in floats; read only."""
