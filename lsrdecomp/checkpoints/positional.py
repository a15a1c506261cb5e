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

from lsrdecomp.checkpoints.pickles import LISTED
from lsrdecomp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.checkpoints.base_modules import BaseModules
    from lsrdecomp.checkpoints.records import Checkpoint, Layer

POSITION = re.compile(r"(?P<part>[A-Za-z_0-9]+):(?P<number>[0-9]+)")
UNET = re.compile(
    r"unet\.(?P<side>down|up|mid)_blocks?(\.(?P<block>\d+))?\.attentions\.(?P<place>\d+)\.transformer_blocks\."
    r"(?P<depth>\d+)\.(?P<part>attn1|attn2|ff)\.(?P<word>to_q|to_k|to_v|to_out\.0|net\.0\.proj)"
)
SIDES = (("down", "up", "mid"), ("down", "mid", "up"))
PARTS = (("attn1", "ff", "attn2"), ("attn1", "attn2", "ff"))
WORDS = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj")
TEXT = re.compile(
    r"(?P<part>text_encoder(_2)?)\.(text_model\.)?encoder\.layers\.(?P<layer>\d+)\.self_attn\.(?P<word>\w+)"
)
TEXT_WORDS = ("k_proj", "v_proj", "q_proj", "out_proj")
"""As transformers' CLIPAttention makes them."""


def resolve_positions(checkpoint: Checkpoint, base: BaseModules) -> dict[str, str]:
    """The base's name for every layer that is called by its position; empty if there is none.

    Raises
    ------
    CheckpointError
        If the layers of a part fit none of the orders in the base, or more than one.
    """
    groups: dict[str, list[Layer]] = {}
    for layer in checkpoint.layers:
        position = POSITION.fullmatch(layer.name)
        if position is not None:
            groups.setdefault(position["part"], []).append(layer)
    names: dict[str, str] = {}
    for part, layers in groups.items():
        ordered = sorted(layers, key=lambda layer: int(layer.name.partition(":")[2]))
        fitting = {order for order in _orders(part, base) if _fits(ordered, order, base)}
        if len(fitting) != 1:
            fit = f"the base has {len(fitting) or 'no'}"
            text = f"its {len(layers)} layers are called by position, and {fit} orders of as many layers of these sizes"
            raise CheckpointError(
                f"{text}; is {base.path} what it was trained on?", path=checkpoint.path, tensor=part
            )
        names |= {
            layer.name: name for layer, name in zip(ordered, next(iter(fitting)), strict=True)
        }
    return names


def _orders(part: str, base: BaseModules) -> Iterator[tuple[str, ...]]:
    """Names of a part in every order that they may have been numbered in."""
    if part in ("unet", LISTED):
        for sides, parts in product(SIDES, PARTS):
            yield _sorted_unet(base, sides, parts)
    for encoder in ("text_encoder", "text_encoder_2"):
        if part in (encoder, LISTED):
            yield _sorted_text(base, encoder)


def _sorted_unet(
    base: BaseModules, sides: tuple[str, ...], parts: tuple[str, ...]
) -> tuple[str, ...]:
    matches = {name: match for name in base.shapes if (match := UNET.fullmatch(name)) is not None}

    def place(name: str) -> tuple[int, ...]:
        match = matches[name]
        block = int(match["block"] or 0)
        inner = (
            int(match["place"]),
            int(match["depth"]),
            parts.index(match["part"]),
            WORDS.index(match["word"]),
        )
        return sides.index(match["side"]), block, *inner

    return tuple(sorted(matches, key=place))


def _sorted_text(base: BaseModules, encoder: str) -> tuple[str, ...]:
    matches = {name: match for name in base.shapes if (match := TEXT.fullmatch(name)) is not None}
    names = [
        name
        for name, match in matches.items()
        if match["part"] == encoder and match["word"] in TEXT_WORDS
    ]
    return tuple(
        sorted(
            names,
            key=lambda name: (int(matches[name]["layer"]), TEXT_WORDS.index(matches[name]["word"])),
        )
    )


def _fits(layers: list[Layer], names: tuple[str, ...], base: BaseModules) -> bool:
    if not names or len(layers) != len(names):
        return False
    shapes = [base.shapes[name] for name in names]
    return all(
        (layer.out_features, layer.in_features) == shape
        for layer, shape in zip(layers, shapes, strict=True)
    )
