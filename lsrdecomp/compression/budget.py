"""What all layers together may cost or lose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lsrdecomp.compression.layers import Layer
from lsrdecomp.errors import BudgetError


@dataclass(frozen=True, slots=True)
class Budget:
    """What all layers together may cost, or lose; exactly one of these.

    Parameters
    ----------
    parameters : float, optional
        Numbers in all factors.
    ratio : float, optional
        The same, as "this many times fewer than the LoRA".
    bytes : float, optional
        Bytes of all factors as stored, and of whatever ``overhead`` adds.
    rtol : float, optional
        (Σ‖ΔW − ΔŴ‖²)^½ / (Σ‖ΔW‖²)^½ over all layers, in the norm of the layers.
    kl : float, optional
        Nats: ½ Σ‖G^½ (ΔW − ΔŴ) C^½‖², the second-order estimate of the divergence; for K-FAC weights only.
    layer_rtol : float, optional
        ‖ΔW − ΔŴ‖ / ‖ΔW‖ of every layer on its own, in its norm.
    """

    parameters: float | None = None
    ratio: float | None = None
    bytes: float | None = None
    rtol: float | None = None
    kl: float | None = None
    layer_rtol: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            raise BudgetError(f"one budget is needed, got {given or 'none'}")
        name, value = next(iter(given.items()))
        if not (math.isfinite(value) and value >= 0.0) or (name == "ratio" and value == 0.0):
            raise BudgetError(f"a budget must be finite and not negative, got {name}={value}")

    @property
    def counts_bytes(self) -> bool:
        return self.bytes is not None

    def cost_limit(self, layers: Sequence[Layer]) -> float | None:
        """The most that may be spent; None if the error is bounded instead."""
        if self.ratio is not None:
            return math.fsum(layer.parameters for layer in layers) / self.ratio
        return self.bytes if self.bytes is not None else self.parameters

    def loss_limit(self, layers: Sequence[Layer]) -> float | None:
        """The largest sum of squared errors; None if the size is bounded instead."""
        if self.rtol is not None:
            return self.rtol**2 * math.fsum(layer.squared_norm for layer in layers)
        return None if self.kl is None else 2.0 * self.kl
