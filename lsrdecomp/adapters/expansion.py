"""Which Kronecker sums a forward pass of an adapted model will need, so that they can be formed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lsrdecomp.adapters.kernels.grouping import Expandable, Grouping
from lsrdecomp.adapters.layer import LsrLayer

ATTRIBUTE = "_lsr_grouping"


class SidesInUse:
    """The sums of the active adapters of some layers, or of those that the rows of a batch name."""

    def __init__(self, layers: Sequence[LsrLayer]) -> None:
        self.layers = layers
        self.named: Sequence[str] = ()

    def __call__(self) -> Iterator[tuple[Expandable, torch.dtype | None]]:
        seen = set()
        for layer in self.layers:
            for side, dtype in layer.sides_in_use(self.named):
                if side not in seen:  # tied layers share theirs
                    seen.add(side)
                    yield side, dtype


def attach(model: nn.Module) -> None:
    """Let every forward pass of ``model`` begin by forming what its LSR layers need; call it again for new layers."""
    sides = SidesInUse([module for module in model.modules() if isinstance(module, LsrLayer)])
    detach(model)
    grouping = Grouping(sides)
    grouping.attach(model)
    setattr(model, ATTRIBUTE, grouping)


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    grouping: Grouping | None = vars(model).pop(ATTRIBUTE, None)
    if grouping is not None:
        grouping.detach()


@contextmanager
def naming(model: nn.Module, adapters: Sequence[str] | None) -> Iterator[None]:
    """Within the context the rows of a batch name their adapters, instead of the active ones."""
    grouping: Grouping | None = vars(model).get(ATTRIBUTE)
    if grouping is None or adapters is None:
        yield
        return
    sides = grouping.select
    assert isinstance(sides, SidesInUse)
    sides.named = tuple(dict.fromkeys(adapters))
    try:
        yield
    finally:
        sides.named = ()
