"""Layers of a kind: the same word in every numbered block, and what servers stack with it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lsrdecomp.lora.files.base_modules import BaseModules

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
STACKED_WITH = {
    "q_proj": ("k_proj", "v_proj"),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj", "k_proj"),
    "gate_proj": ("up_proj",),
    "up_proj": ("gate_proj",),
}
"""Layers that SGLang 0.5.23 stacks in one buffer: where one of them is adapted the others are
looked for."""
EQUAL_SIZES = {
    "k_proj": "v_proj",
    "v_proj": "k_proj",
    "gate_proj": "up_proj",
    "up_proj": "gate_proj",
}
"""Layers of a block that have one size in every architecture that has both."""


def family(name: str) -> str:
    """Return what a layer shares with those like it: its name without numbers.

    Examples
    --------
    >>> family("model.layers.11.self_attn.q_proj")
    'model.layers.#.self_attn.q_proj'
    """
    return NUMBER.sub("#", name)


def stack_mates(name: str) -> Iterator[str]:
    """Yield the names of the layers that a server may stack with one.

    Examples
    --------
    >>> list(stack_mates("layers.0.mlp.up_proj"))
    ['layers.0.mlp.gate_proj']
    """
    block, dot, word = name.rpartition(".")
    for other in STACKED_WITH.get(word, ()):
        yield f"{block}{dot}{other}"


def names_in_all_blocks(name: str, base: BaseModules) -> Iterator[str]:
    """Yield the names of a layer like this one in every block of a base, as transformers calls it.

    The first number in it is that of the block.
    """
    first = NUMBER.search(name)
    if first is None:
        yield name
        return
    numbers = {int(match[0]) for stored in base.shapes if (match := NUMBER.search(stored))}
    for number in sorted(numbers):
        yield f"{name[: first.start()]}{number}{name[first.end() :]}"


def missing_layers(names: Iterable[str], base: BaseModules) -> list[str]:
    """Return layers of a base without a pair where others of their kind, or stack, have one."""
    adapted = set(names)
    missing = set()
    for name in adapted:
        for like in (name, *stack_mates(name)):
            for candidate in names_in_all_blocks(like, base):
                if candidate not in adapted and base.find(candidate) is not None:
                    missing.add(candidate)
    return sorted(missing)
