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

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.readers import lsr
from lsrdecomp.checkpoints.records import Checkpoint, LsrLayer
from lsrdecomp.checkpoints.tensors import DTYPES, FLOATS, StoredTensor

Pair = tuple[list[Tensor], list[Tensor], float]
"""Factors of B, factors of A, and the scale of their product."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One factor: its dtype and its shape (s, m, n)."""

    dtype: str
    shape: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """Where one layer lies in an adapter's numbers: its factors one after the other, those of B before those of A."""

    name: str
    scale: float
    left: tuple[Piece, ...]
    right: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """One adapter: its numbers as stored, and what they mean, compressed; equal layouts are held once.

    The layout of an adapter in floats lists its layers. That of one with layers in integer codes is its config and the
    list of its tensors, from which the reader of LSR directories makes layers again.
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
        found: dict[str, Pair] = {}
        place, numbers = 0, torch.from_numpy(self.numbers).to(device)
        for layer in _layers(self.layout, words):
            factors = []
            for piece in (*layer.left, *layer.right):
                held = numbers[place : place + piece.nbytes]
                held = held.clone() if place % 8 else held  # other dtypes want to begin at multiples of their size
                factors.append(held.view(getattr(torch, piece.dtype)).view(piece.shape))
                place += piece.nbytes
            found[layer.name] = factors[: len(layer.left)], factors[len(layer.left) :], layer.scale
        return found

    def _reopened(self, name: str, words: bytes) -> Checkpoint:
        """The checkpoint that an adapter with integer codes was taken up from, its tensors in memory."""
        config, metadata, listed = _read(self.layout, words)
        path, place, tensors = Path(name), 0, {}
        for key, dtype, shape in listed:
            size = prod(shape) * DTYPES[dtype].itemsize
            array = self.numbers[place : place + size].copy().view(DTYPES[dtype]).reshape(shape)
            tensors[key] = StoredTensor(key, tuple(shape), dtype, path, partial(np.asarray, array))
            place += size
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


@lru_cache(maxsize=64)
def _layers(written: bytes, words: bytes) -> tuple[StoredLayer, ...]:
    return tuple(
        StoredLayer(name, scale, *(tuple(Piece(dtype, tuple(shape)) for dtype, *shape in side) for side in sides))
        for name, scale, *sides in _read(written, words)
    )
