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
    """
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) + "." if shared and len(names) > 1 else ""
