"""Factors of a student that are rounded, at every step of its training, as they will be stored."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from lsrdecomp.arrays import all_finite, to_numpy
from lsrdecomp.formats.stored import FloatProduct
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.packed_index import stored_layers
from lsrdecomp.lora.peft.layer import LsrLayer
from lsrdecomp.lora.search.quantize import round_factors_like

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import nn

    from lsrdecomp.formats.stored import Stored
    from lsrdecomp.lora.base.base_model import Base


class FactorRounding:
    """Rounds the factors of a student in place, as its layers are stored.

    Layers that are stored in floats are left as they are. A call costs a fiftieth of a step of
    training on the CPU (60 kB, SmolLM2); of a GPU it takes one copy, and brings one back.

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
        self._layers: list[tuple[Stored, int]] = []
        self._parameters: list[nn.Parameter] = []
        for name, module in modules.items():
            if isinstance(stored[name], FloatProduct):
                continue
            left, right = _parameters(module.lsr_B), _parameters(module.lsr_A)
            self._layers.append((stored[name], len(left)))
            self._parameters += [*left, *right]

    def __call__(self) -> None:
        """Round all factors, each near its own numbers; those of a layer with NaN or ∞ stay so."""
        if not self._layers:
            return
        # 1. Copy all factors to the CPU.
        flat = torch.cat([parameter.detach().flatten() for parameter in self._parameters])
        numbers = to_numpy(flat.cpu()).astype(np.float64)
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = np.split(numbers, np.cumsum(sizes)[:-1])
        shapes = [tuple(parameter.shape) for parameter in self._parameters]
        factors = iter([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])
        # 2. Round them there, layer by layer.
        rounded: list[NDArray[np.float64]] = []
        for stored, order in self._layers:
            left, right = (tuple(islice(factors, order)) for _ in range(2))
            if all(map(all_finite, (*left, *right))):  # else the loss shows that training diverged
                left, right = round_factors_like(stored, left, right)
            rounded += [factor.ravel() for factor in (*left, *right)]
        # 3. Copy them back.
        back = torch.from_numpy(np.concatenate(rounded)).to(flat)
        with torch.no_grad():
            for parameter, part in zip(self._parameters, torch.split(back, sizes), strict=True):
                parameter.copy_(part.view_as(parameter))


def lsr_layers(student: Base) -> Iterator[tuple[str, LsrLayer]]:
    """Yield the LSR layers of an open model, with their names in its base."""
    for name, module in student.model.get_base_model().named_modules():  # type: ignore[operator]
        if isinstance(module, LsrLayer):
            yield name, module


def _parameters(side: nn.ModuleDict) -> list[nn.Parameter]:
    return list(side["default"].factors)  # type: ignore[arg-type]
