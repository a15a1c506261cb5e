"""Zeros in place of layers that a server would miss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.lora.files.base_modules import BaseModules, read_modules
from lsrdecomp.lora.files.families import EQUAL_SIZES, family, missing_layers
from lsrdecomp.lora.files.provenance import read_provenance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lsrdecomp.lora.files.records import Checkpoint
    from lsrdecomp.lora.files.tensors import Array

LINEAR_TYPES = ("linear", "conv1d")


def zeros_for_missing_layers(
    checkpoint: Checkpoint, base: str | Path | None
) -> Iterator[tuple[str, Array, Array]]:
    """Yield a pair of rank 1 that is zero for each layer that a server would miss.

    Servers that stack the layers of a type, or q, k and v of one, lose all of them where one is
    missing. Missing are layers that a compression left out, and those of a given base.
    """
    adapted = {layer.name: layer for layer in checkpoint.layers}
    sizes = _sizes_by_family(checkpoint)
    missing: dict[str, tuple[int, int] | None] = {}
    for name in read_provenance(checkpoint).get("dropped", ()):
        word = name.rpartition(".")[2]
        of_kind = sizes.get(family(name)) or sizes.get(word)
        missing[name] = of_kind or sizes.get(EQUAL_SIZES.get(word, word))
    if base is not None:
        modules = read_modules(base)
        linear = [name for name, layer in adapted.items() if layer.layer_type in LINEAR_TYPES]
        for name in missing_layers(linear, modules):
            missing[name] = missing.get(name) or _size_in_base(name, modules, checkpoint)
    for name, size in missing.items():
        if size is None or name in adapted:
            continue  # its size is that of no layer here: nothing stacks with it
        m, n = size
        yield name, np.zeros((m, 1), np.float32), np.zeros((1, n), np.float32)


def _sizes_by_family(checkpoint: Checkpoint) -> dict[str, tuple[int, int] | None]:
    """Return sizes of linear layers by family and by last word; None where several differ."""
    sizes: dict[str, tuple[int, int] | None] = {}
    for layer in checkpoint.layers:
        size = layer.out_features, layer.in_features
        for key in (family(layer.name), layer.name.rpartition(".")[2]):
            is_known = layer.layer_type in LINEAR_TYPES and sizes.get(key, size) == size
            sizes[key] = size if is_known else None
    return sizes


def _size_in_base(name: str, base: BaseModules, checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Return out x in of a linear layer of a base; None where its weight says no such thing."""
    stored = base.find(name)
    shape = None if stored is None else base.shapes[stored]
    if shape is None or len(shape) != 2:
        return None
    is_transposed = any(layer.layer_type == "conv1d" for layer in checkpoint.layers)
    return (shape[1], shape[0]) if is_transposed else (shape[0], shape[1])
