"""Z-Image's attention: q, k and v in one layer, as its checkpoint has it, or apart, as diffusers.

Fused, B is block-diagonal and A holds those of the three above each other; the rank is their sum.
Taken apart, each gets its rows of B and the whole A.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.errors import UnsupportedError
from lsrdecomp.lora.files.layer_names import diffusers_name, z_image_module
from lsrdecomp.lora.files.records import LoraLayer
from lsrdecomp.lora.files.tensors import derived_tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from lsrdecomp.lora.files.records import Checkpoint, Layer
    from lsrdecomp.lora.files.tensors import Array, StoredTensor

    Pair = tuple[str, Array, Array]

PARTS = ("to_q", "to_k", "to_v")


def fuse_attention(layers: Iterable[Pair]) -> Iterator[Pair]:
    """Yield pairs with q, k and v of a block of Z-Image as one; others as they are.

    A part that does not come is zero. Of three with one A, as they were taken apart, A comes once.
    """
    waiting: dict[str, dict[str, tuple[Array, Array]]] = {}
    for name, up, down in layers:
        block, _, part = (z_image_module(name) or "").rpartition(".")
        if part not in PARTS:
            yield name, up, down
            continue
        parts = waiting.setdefault(block, {})
        parts[part] = up, down
        if len(parts) == len(PARTS):
            yield _fused(block, waiting.pop(block))
    for block, parts in waiting.items():
        yield _fused(block, parts)


def _fused(block: str, parts: dict[str, tuple[Array, Array]]) -> Pair:
    """Return q, k and v of a block as one pair."""
    name = f"diffusion_model.{block}.qkv"
    sizes = {(up.shape[0], down.shape[1]) for up, down in parts.values()}
    if len(sizes) > 1:
        found = ", ".join(f"{rows} x {columns}" for rows, columns in sorted(sizes))
        raise UnsupportedError(f"{block}: q, k and v of sizes {found} are not Z-Image's")
    rows, _ = sizes.pop()
    downs = [down for _, down in parts.values()]
    if len(parts) == len(PARTS) and all(np.array_equal(down, downs[0]) for down in downs):
        return name, np.concatenate([parts[part][0] for part in PARTS]), downs[0]
    up = np.zeros((len(PARTS) * rows, sum(len(down) for down in downs)), downs[0].dtype)
    ordered = []
    column = 0
    for number, part in enumerate(PARTS):
        if part in parts:
            part_up, part_down = parts[part]
            rank = len(part_down)
            up[number * rows : (number + 1) * rows, column : column + rank] = part_up
            ordered.append(part_down)
            column += rank
    return name, up, np.concatenate(ordered)


def split_attention(layers: Iterable[Pair]) -> Iterator[Pair]:
    """Yield pairs with q, k and v of a block of Z-Image apart; others as they are."""
    for name, up, down in layers:
        block, _, part = (z_image_module(name) or "").rpartition(".")
        if part != "qkv":
            yield name, up, down
            continue
        for number, module in enumerate(PARTS):
            rows = _rows_of_part(number, up.shape[0])
            yield f"transformer.{block}.{module}", up[rows], down


def in_diffusers_names(adapter: Checkpoint, known: Collection[str] | None = None) -> Checkpoint:
    """Return an adapter of Z-Image with q, k and v apart, under diffusers' names; others as are.

    Parameters
    ----------
    adapter : Checkpoint
    known : collection of str, optional
        Names of layers: a part that is zero and none of them was put there for one that is missing,
        and is left out.
    """
    layers: list[Layer] = []
    for layer in adapter.layers:
        module = z_image_module(layer.name)
        if module is None:
            layers.append(layer)
        elif module.endswith(".qkv") and isinstance(layer, LoraLayer):
            for number in range(len(PARTS)):
                part = _part(layer, number)
                if known is None or part.name in known or part.up.load().any():
                    layers.append(part)
        else:
            layers.append(replace(layer, name=diffusers_name(layer.name)))
    return replace(adapter, layers=tuple(layers))


def _part(layer: LoraLayer, number: int) -> LoraLayer:
    """Return q, k or v of a fused layer."""
    rows = _rows_of_part(number, layer.out_features)
    size = rows.stop - rows.start

    def up() -> Array:
        whole: Array = layer.up.load(double=True).reshape(layer.out_features, layer.rank)
        return whole[rows]

    block = (z_image_module(layer.name) or "").rpartition(".")[0]
    part: StoredTensor = derived_tensor(layer.up, (size, layer.rank), up)
    return replace(layer, name=f"transformer.{block}.{PARTS[number]}", out_features=size, up=part)


def _rows_of_part(number: int, rows: int) -> slice:
    size, rest = divmod(rows, len(PARTS))
    if rest:
        raise UnsupportedError(f"{rows} rows of q, k and v are not three times as many")
    return slice(number * size, (number + 1) * size)
