"""Factors of a student that are rounded, at every step of its training, as they will be stored."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

from lsrdecomp.arrays import all_finite, to_numpy
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.packed_index import stored_layers
from lsrdecomp.lora.peft.layer import LsrLayer
from lsrdecomp.lora.search.quantize import round_factors_like

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import nn

    from lsrdecomp.formats.stored import Factors
    from lsrdecomp.lora.base.base_model import Base


class FactorRounding:
    """Rounds the factors of a student in place, as its layers are stored.

    A call costs a fiftieth of a step of training on the CPU (60 kB, SmolLM2).

    Parameters
    ----------
    student : Base
        A base with a compressed adapter.
    written : path
        The directory of the adapter.
    """

    def __init__(self, student: Base, written: Path) -> None:
        modules = dict(lsr_layers(student))
        stored = stored_layers(open_checkpoint(written)) if modules else {}
        self._layers = [
            (stored[name], _parameters(module.lsr_B), _parameters(module.lsr_A))
            for name, module in modules.items()
        ]

    def __call__(self) -> None:
        """Round all factors, each near its own numbers; those of a layer with NaN or ∞ stay so."""
        for stored, left, right in self._layers:
            sides = _numbers(left), _numbers(right)
            if not all(map(all_finite, chain(*sides))):
                continue  # the loss shows that training diverged
            rounded = round_factors_like(stored, *sides)
            for parameters, factors in zip((left, right), rounded, strict=True):
                _set(parameters, factors)


def lsr_layers(student: Base) -> Iterator[tuple[str, LsrLayer]]:
    """Yield the LSR layers of an open model, with their names in its base."""
    for name, module in student.model.get_base_model().named_modules():  # type: ignore[operator]
        if isinstance(module, LsrLayer):
            yield name, module


def _parameters(side: nn.ModuleDict) -> list[nn.Parameter]:
    return list(side["default"].factors)  # type: ignore[arg-type]


def _numbers(parameters: Sequence[nn.Parameter]) -> Factors:
    return tuple(to_numpy(parameter.detach().double().cpu()) for parameter in parameters)


def _set(parameters: Sequence[nn.Parameter], factors: Factors) -> None:
    with torch.no_grad():
        for parameter, factor in zip(parameters, factors, strict=True):
            parameter.copy_(torch.from_numpy(factor))
