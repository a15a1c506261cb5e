"""verify: the errors of a written adapter, measured anew from the two directories alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lsrdecomp.checkpoints import Checkpoint
from lsrdecomp.checkpoints.provenance import provenance
from lsrdecomp.compression.run import layer_pair, layer_product
from lsrdecomp.errors import CheckpointError

AGREEMENT = 1e-9
"""Measured and recorded errors are the same computation on the same stored numbers; this much may differ by library."""


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """One layer measured anew."""

    name: str
    parameters: int
    norm: float  # ‖ΔW‖_F of the source
    relative_error: float  # measured now
    recorded_error: float | None  # as the writer measured it, if it said

    @property
    def agrees(self) -> bool:
        """Whether the writer's figure, if there is one, is what is measured now."""
        if self.recorded_error is None:
            return True
        return math.isclose(self.relative_error, self.recorded_error, rel_tol=AGREEMENT, abs_tol=1e-12)


@dataclass(frozen=True, slots=True)
class Verification:
    """All layers of a written adapter against its source."""

    layers: tuple[LayerCheck, ...]
    relative_error: float  # over all layers together
    source_recorded: bool  # the writer named its source
    source_matches: bool  # … and it has the bytes it had then

    @property
    def passed(self) -> bool:
        return all(layer.agrees for layer in self.layers) and (self.source_matches or not self.source_recorded)


def verify(source: Checkpoint, written: Checkpoint) -> Verification:
    """Measure ‖ΔW − ΔŴ‖_F / ‖ΔW‖_F of every layer of ``written`` against ``source``.

    Raises `CheckpointError` if a layer of the source is missing or has another size.
    """
    record = provenance(written)
    recorded: dict[str, Any] = (
        record.get("relative_errors", {}) if isinstance(record.get("relative_errors"), dict) else {}
    )
    origin = record.get("source", {}) if isinstance(record.get("source"), dict) else {}
    extra = {layer.name for layer in written.layers} - {layer.name for layer in source.layers}
    if extra:
        raise CheckpointError(f"layer {min(extra)!r} is not in the source {source.path}", path=written.path)
    checks, size, lost = [], 0.0, 0.0
    for layer in source.layers:
        pair, other = layer_pair(source, layer), written.layer(layer.name)
        if (other.out_features, other.in_features) != pair.shape:
            raise CheckpointError(
                f"{other.out_features} x {other.in_features}, but {pair.shape[0]} x {pair.shape[1]} in {source.path}",
                path=written.path,
                tensor=layer.name,
            )
        error = pair.residual_norm(layer_product(other))
        size, lost = math.hypot(size, pair.norm), math.hypot(lost, error)
        relative = error / pair.norm if pair.norm > 0.0 else error
        checks.append(LayerCheck(layer.name, other.parameters, pair.norm, relative, recorded.get(layer.name)))
    return Verification(
        tuple(checks),
        lost / size if size > 0.0 else lost,
        source_recorded="sha256" in origin,
        source_matches=origin.get("sha256") == source.source_sha256,
    )
