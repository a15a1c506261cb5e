"""Records of a compression: what each layer became, what it cost and what it lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer, before and after; errors are measured on the tensors as written."""

    name: str
    kind: str
    rows: int
    columns: int
    source_rank: int
    structure: str  # "LSR" or "low rank"
    shape: str  # the Kronecker sizes of both sides
    separation_ranks: tuple[int, int]
    parameters_before: int
    parameters: int
    bytes: int
    norm: float  # ‖ΔW‖_F
    relative_error: float  # ‖ΔW − ΔŴ‖_F / ‖ΔW‖_F
    condition: float  # γ, the larger of the two sides
    storage: str
    seconds: float
    met: bool = True  # the plan's tolerance


@dataclass(frozen=True, slots=True)
class Totals:
    """All layers together."""

    layers: int
    parameters_before: int
    parameters: int
    extra_parameters: int  # heads and other saved modules, carried along untouched
    bytes: int  # of the factors, without headers and extras
    relative_error: float  # (Σ‖ΔW − ΔŴ‖²)^½ / (Σ‖ΔW‖²)^½
    worst_error: float
    worst_layer: str
    missed: int  # layers above the tolerance
    seconds: float

    @property
    def ratio(self) -> float:
        """How many times fewer parameters."""
        return self.parameters_before / self.parameters if self.parameters else math.inf


def totals(layers: Sequence[LayerReport], extra_parameters: int = 0) -> Totals:
    """Sum up; relative errors combine through the absolute ones."""
    size = math.hypot(*(layer.norm for layer in layers))
    lost = math.hypot(*(layer.norm * layer.relative_error for layer in layers))
    worst = max(layers, key=lambda layer: layer.relative_error)
    return Totals(
        layers=len(layers),
        parameters_before=sum(layer.parameters_before for layer in layers),
        parameters=sum(layer.parameters for layer in layers),
        extra_parameters=extra_parameters,
        bytes=sum(layer.bytes for layer in layers),
        relative_error=lost / size if size > 0.0 else lost,
        worst_error=worst.relative_error,
        worst_layer=worst.name,
        missed=sum(not layer.met for layer in layers),
        seconds=sum(layer.seconds for layer in layers),
    )


def to_json(layers: Sequence[LayerReport], summary: Totals, **facts: Any) -> dict[str, Any]:
    """Plain values for a JSON file."""
    return {
        **facts,
        "totals": {**asdict(summary), "ratio": summary.ratio},
        "layers": [asdict(layer) for layer in layers],
    }
