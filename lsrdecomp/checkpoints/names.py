"""Names of layers: what all share, and what a layer is apart from where it is."""

from __future__ import annotations

import re
from collections.abc import Sequence


def kind_of(name: str) -> str:
    """What a layer is, without where it is: the words after the last number in its name.

    >>> kind_of("model.layers.11.self_attn.q_proj"), kind_of("unet_down_blocks_0_attn_to_q"), kind_of("unet:7")
    ('self_attn.q_proj', 'attn_to_q', 'unet')
    """
    return re.split(r"(?:^|[._:])\d+[._:]", re.sub(r"(?<=.)[._:]\d+$", "", name))[-1]


def common_prefix(names: Sequence[str]) -> str:
    """Leading modules that all names share, with the dot; none for one name.

    >>> common_prefix(["model.layers.0.q_proj", "model.layers.1.q_proj"])
    'model.layers.'

    Names of kohya's files have underscores for dots:

    >>> common_prefix(["lora_unet_down_blocks_0_to_q", "lora_unet_down_blocks_1_to_q"])
    'lora_unet_down_blocks_'
    """
    mark = "_" if all(name.startswith("lora_") and "." not in name for name in names) else "."
    shared = []
    for parts in zip(*(name.split(mark)[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return mark.join(shared) + mark if shared and len(names) > 1 else ""
