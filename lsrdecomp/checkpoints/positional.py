"""Layers that a file calls by their position, under the names that a base gives them.

The trainer cloneofsimo/lora (read at 0735440d1865, lora_diffusion/lora.py) numbers the linear
layers that it finds below modules of the classes CrossAttention, Attention and GEGLU of a UNet, and
CLIPAttention of a text encoder, in the order in which the model's parts were made. That order is
not in the file, and it changed between versions of diffusers. So every order known to have been in
use is tried, and one is taken only if the sizes of all layers fit it and no other.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING

from lsrdecomp.checkpoints.pickles import UNNAMED
from lsrdecomp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.checkpoints.base_modules import BaseModules
    from lsrdecomp.checkpoints.records import Checkpoint, Layer

POSITION = re.compile(r"(?P<component>[A-Za-z_0-9]+):(?P<number>[0-9]+)")
UNET_LAYER = re.compile(
    r"unet\.(?P<side>down|up|mid)_blocks?(\.(?P<block>\d+))?"
    r"\.attentions\.(?P<attention>\d+)\.transformer_blocks\.(?P<depth>\d+)"
    r"\.(?P<part>attn1|attn2|ff)\.(?P<projection>to_q|to_k|to_v|to_out\.0|net\.0\.proj)"
)
SIDE_ORDERS = (("down", "up", "mid"), ("down", "mid", "up"))
PART_ORDERS = (("attn1", "ff", "attn2"), ("attn1", "attn2", "ff"))
PROJECTION_ORDER = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj")
TEXT_LAYER = re.compile(
    r"(?P<component>text_encoder(_2)?)\.(text_model\.)?encoder"
    r"\.layers\.(?P<layer>\d+)\.self_attn\.(?P<projection>\w+)"
)
TEXT_PROJECTION_ORDER = ("k_proj", "v_proj", "q_proj", "out_proj")
"""As transformers' CLIPAttention makes them."""


def resolve_positions(checkpoint: Checkpoint, base: BaseModules) -> dict[str, str]:
    """Return the base's name for every layer that is called by its position.

    Raises
    ------
    CheckpointError
        If the layers of a component fit none of the orders in the base, or more than one.
    """
    groups: dict[str, list[Layer]] = {}
    for layer in checkpoint.layers:
        position = POSITION.fullmatch(layer.name)
        if position is not None:
            groups.setdefault(position["component"], []).append(layer)
    names: dict[str, str] = {}
    for component, layers in groups.items():
        layers.sort(key=_number)
        orders = {order for order in _orders(component, base) if _fits(layers, order, base)}
        if len(orders) != 1:
            raise CheckpointError(
                f"its {len(layers)} layers are called by position, and the base has "
                f"{len(orders) or 'no'} orders of as many layers of these sizes; is {base.path} "
                "what it was trained on?",
                path=checkpoint.path,
                tensor=component,
            )
        for layer, name in zip(layers, orders.pop(), strict=True):
            names[layer.name] = name
    return names


def _number(layer: Layer) -> int:
    return int(layer.name.partition(":")[2])


def _orders(component: str, base: BaseModules) -> Iterator[tuple[str, ...]]:
    """Yield the names of a component in every order that they may have been numbered in."""
    if component in ("unet", UNNAMED):
        for sides, parts in product(SIDE_ORDERS, PART_ORDERS):
            yield _unet_layers(base, sides, parts)
    for encoder in ("text_encoder", "text_encoder_2"):
        if component in (encoder, UNNAMED):
            yield _text_layers(base, encoder)


def _unet_layers(
    base: BaseModules, sides: tuple[str, ...], parts: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the attention layers of a UNet, its sides and the parts of a block in these orders."""
    places: dict[str, tuple[int, ...]] = {}
    for name in base.shapes:
        match = UNET_LAYER.fullmatch(name)
        if match is not None:
            places[name] = (
                sides.index(match["side"]),
                int(match["block"] or 0),
                int(match["attention"]),
                int(match["depth"]),
                parts.index(match["part"]),
                PROJECTION_ORDER.index(match["projection"]),
            )
    return tuple(sorted(places, key=places.__getitem__))


def _text_layers(base: BaseModules, encoder: str) -> tuple[str, ...]:
    """Return the attention layers of a text encoder."""
    places: dict[str, tuple[int, int]] = {}
    for name in base.shapes:
        match = TEXT_LAYER.fullmatch(name)
        if match is None or match["component"] != encoder:
            continue
        if match["projection"] in TEXT_PROJECTION_ORDER:
            order = TEXT_PROJECTION_ORDER.index(match["projection"])
            places[name] = int(match["layer"]), order
    return tuple(sorted(places, key=places.__getitem__))


def _fits(layers: list[Layer], names: tuple[str, ...], base: BaseModules) -> bool:
    if not names or len(layers) != len(names):
        return False
    return all(
        (layer.out_features, layer.in_features) == base.shapes[name]
        for layer, name in zip(layers, names, strict=True)
    )
