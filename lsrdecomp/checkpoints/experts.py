"""Experts that PEFT stores stacked, as parameters that ``target_parameters`` names: one layer for each expert.

Of E experts and rank r, ``lora_A`` is (E·r, n) with the rows of an expert together, ``lora_B`` is
(m, r·E) with the columns of a component together (PEFT 0.21, lora/layer.py, ``ParamWrapper``).
Where a module has two such parameters, the first in the model's order is wrapped first and stored
under one more ``.base_layer``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from lsrdecomp.checkpoints.records import LoraLayer
    from lsrdecomp.checkpoints.tensors import Array, StoredTensor

INNER = ".base_layer"
ORDER = ("gate_up_proj", "down_proj")
"""As transformers' modules of experts define them."""


class Stacks:
    """The stacked parameters of a config, called by module and parameter: ``model.layers.0.mlp.experts.down_proj``."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.targets: Sequence[str] = config.get("target_parameters") or ()
        self.path = path

    def of_key(self, key: str) -> str | None:
        """The parameter whose halves are stored under a key; None for a key that is a module's own."""
        module = key
        while module.endswith(INNER):
            module = module.removesuffix(INNER)
        parameters = self._parameters(module)
        depth = (len(key) - len(module)) // len(INNER)
        if not parameters and not depth:
            return None
        if depth >= len(parameters):
            text = (
                f"wraps {depth + 1} parameters, of which target_parameters names {len(parameters)}"
            )
            raise CheckpointError(text, path=self.path, tensor=key)
        return f"{module}.{parameters[-1 - depth]}"

    def key_of(self, parameter: str) -> str:
        """The key under which the halves of a parameter are stored."""
        module, _, word = parameter.rpartition(".")
        parameters = self._parameters(module)
        return module + INNER * (len(parameters) - 1 - parameters.index(word))

    def stack_of(self, name: str) -> str | None:
        """The parameter that the layer of an expert is in, by its name; None for a layer of a module."""
        parameter, _, number = name.rpartition(".")
        module, _, word = parameter.rpartition(".")
        return parameter if number.isdecimal() and word in self._parameters(module) else None

    def check_all_there(self, layers: Iterable[str]) -> None:
        """Raise `CheckpointError` for a parameter that no layer is an expert of."""
        parents = [f".{name.rpartition('.')[0]}" for name in layers]
        missing = [
            target
            for target in self.targets
            if not any(name.endswith(f".{target}") for name in parents)
        ]
        if missing:
            text = f"target_parameters names {ascii(missing[0])[:80]}, of which the file holds no tensor"
            raise CheckpointError(text, path=self.path)

    def _parameters(self, module: str) -> list[str]:
        words = [
            word
            for parent, _, word in (target.rpartition(".") for target in self.targets)
            if module == parent or module.endswith(f".{parent}")
        ]
        if len(words) > 1 and set(words) != set(ORDER):
            text = f"target_parameters names {', '.join(words)} of one module: their order in the model is not known"
            raise UnsupportedError(text, path=self.path, tensor=module)
        return sorted(words, key=ORDER.index) if len(words) > 1 else words


def expert_layers(
    whole: LoraLayer, rank: int, path: Path, read: Callable[[StoredTensor], Array]
) -> Iterator[LoraLayer]:
    """A layer for each expert of a stack, called by its number; ``read`` is asked for the stored halves."""
    count, rest = divmod(whole.rank, rank)
    if rest or whole.kernel:
        text = f"shape {whole.down.shape} is no stack of experts of rank {rank}; correct r or rank_pattern in {path.name}"
        raise whole.down.error(text)

    def up(expert: int) -> Array:
        return np.ascontiguousarray(read(whole.up).reshape(-1, rank, count)[:, :, expert])

    def down(expert: int) -> Array:
        return np.ascontiguousarray(read(whole.down).reshape(count, rank, -1)[expert])

    for expert in range(count):
        yield replace(
            whole,
            name=f"{whole.name}.{expert}",
            rank=rank,
            up=replace(whole.up, shape=(whole.out_features, rank), fetch=partial(up, expert)),
            down=replace(whole.down, shape=(rank, whole.in_features), fetch=partial(down, expert)),
        )


def stacked(pairs: Mapping[int, tuple[Array, Array]], count: int) -> tuple[Array, Array]:
    """B and A of experts as they are stored: of the largest rank, zero for experts that are left out."""
    rank = max(down.shape[0] for _, down in pairs.values())
    up, down = next(iter(pairs.values()))
    ups = np.zeros((len(up), rank, count), up.dtype)
    downs = np.zeros((count, rank, down.shape[1]), down.dtype)
    for expert, (up, down) in pairs.items():
        ups[:, : up.shape[1], expert] = up
        downs[expert, : len(down)] = down
    return ups.reshape(len(ups), -1), downs.reshape(-1, downs.shape[2])
