"""Experts that PEFT stores stacked, as ``target_parameters`` names them: one layer for each expert.

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

    from lsrdecomp.lora.files.records import LoraLayer
    from lsrdecomp.lora.files.tensors import Array, StoredTensor

WRAPPED = ".base_layer"
"""What PEFT puts behind a module's name for each parameter that was wrapped after this one."""
PARAMETER_ORDER = ("gate_up_proj", "down_proj")
"""Parameters in the order in which transformers' modules of experts define them."""


class Stacks:
    """The stacked parameters of a config, called by module and parameter.

    Such a name is ``model.layers.0.mlp.experts.down_proj``.

    Parameters
    ----------
    config : mapping
        An adapter_config.json.
    path : Path
        What errors name.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.targets: Sequence[str] = config.get("target_parameters") or ()
        self.path = path

    def parameter_of_key(self, key: str) -> str | None:
        """Return the parameter whose halves lie under a key; None for a key of a module itself."""
        module = key
        depth = 0
        while module.endswith(WRAPPED):
            module = module.removesuffix(WRAPPED)
            depth += 1
        parameters = self._parameters(module)
        if not parameters and not depth:
            return None
        if depth >= len(parameters):
            text = (
                f"wraps {depth + 1} parameters, of which target_parameters names {len(parameters)}"
            )
            raise CheckpointError(text, path=self.path, tensor=key)
        return f"{module}.{parameters[-1 - depth]}"

    def key_of_parameter(self, parameter: str) -> str:
        """Return the key under which the halves of a parameter are stored."""
        module, _, word = parameter.rpartition(".")
        parameters = self._parameters(module)
        depth = len(parameters) - 1 - parameters.index(word)
        return module + WRAPPED * depth

    def parameter_of_layer(self, name: str) -> str | None:
        """Return the parameter that the layer of an expert is in; None for a layer of a module."""
        parameter, _, number = name.rpartition(".")
        module, _, word = parameter.rpartition(".")
        return parameter if number.isdecimal() and word in self._parameters(module) else None

    def check_complete(self, layers: Iterable[str]) -> None:
        """Refuse a config with a parameter of which no layer is an expert."""
        parameters = [f".{name.rpartition('.')[0]}" for name in layers]
        for target in self.targets:
            if not any(parameter.endswith(f".{target}") for parameter in parameters):
                raise CheckpointError(
                    f"target_parameters names {ascii(target)[:80]}, of which the file holds no "
                    "tensor",
                    path=self.path,
                )

    def _parameters(self, module: str) -> list[str]:
        """Return the parameters of a module that are targets, in the model's order."""
        words = []
        for target in self.targets:
            parent, _, word = target.rpartition(".")
            if module == parent or module.endswith(f".{parent}"):
                words.append(word)
        if len(words) < 2:
            return words
        if set(words) != set(PARAMETER_ORDER):
            raise UnsupportedError(
                f"target_parameters names {', '.join(words)} of one module: their order in the "
                "model is not known",
                path=self.path,
                tensor=module,
            )
        return sorted(words, key=PARAMETER_ORDER.index)


def expert_layers(
    stack: LoraLayer, rank: int, path: Path, read: Callable[[StoredTensor], Array]
) -> Iterator[LoraLayer]:
    """Yield a layer for each expert of a stack, called by its number.

    Parameters
    ----------
    stack : LoraLayer
        All experts as one layer, of the sum of their ranks.
    rank : int
        Rank of an expert.
    path : Path
        The config, for errors.
    read : callable
        Reads a stored half; experts are loaded one by one, so one that remembers is of use.
    """
    count, remainder = divmod(stack.rank, rank)
    if remainder or stack.kernel:
        raise stack.down.error(
            f"shape {stack.down.shape} is no stack of experts of rank {rank}; correct r or "
            f"rank_pattern in {path.name}"
        )

    def up(expert: int) -> Array:
        halves = read(stack.up).reshape(-1, rank, count)
        return np.ascontiguousarray(halves[:, :, expert])

    def down(expert: int) -> Array:
        halves = read(stack.down).reshape(count, rank, -1)
        return np.ascontiguousarray(halves[expert])

    for expert in range(count):
        yield replace(
            stack,
            name=f"{stack.name}.{expert}",
            rank=rank,
            up=replace(stack.up, shape=(stack.out_features, rank), fetch=partial(up, expert)),
            down=replace(stack.down, shape=(rank, stack.in_features), fetch=partial(down, expert)),
        )


def stack_experts(pairs: Mapping[int, tuple[Array, Array]], count: int) -> tuple[Array, Array]:
    """Lay B and A of experts out as they are stored.

    Parameters
    ----------
    pairs : mapping of int to (B, A)
        By the expert's number; experts that are left out are zero.
    count : int
        How many experts there are.

    Returns
    -------
    (B, A)
        (m, r·E) and (E·r, n), r being the largest rank.
    """
    rank = max(down.shape[0] for _, down in pairs.values())
    first_up, first_down = next(iter(pairs.values()))
    ups = np.zeros((len(first_up), rank, count), first_up.dtype)
    downs = np.zeros((count, rank, first_down.shape[1]), first_down.dtype)
    for expert, (up, down) in pairs.items():
        ups[:, : up.shape[1], expert] = up
        downs[expert, : len(down)] = down
    return ups.reshape(len(ups), -1), downs.reshape(-1, downs.shape[2])
