"""Tables with a row for each layer, or for each group of layers that became the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lsrdecomp import checkpoints
from lsrdecomp.checkpoints.names import common_prefix, module_role
from lsrdecomp.cli.sheet import Column, Sheet

if TYPE_CHECKING:
    from lsrdecomp.checkpoints import Checkpoint, LoraLayer
    from lsrdecomp.compression import LayerReport, Totals, Verification
    from lsrdecomp.compression.verify import LayerCheck

FOLD_ABOVE = 24
"""Up to this many layers each has its row; of more, those that became the same share one, unless
all are asked for."""

L = TypeVar("L")

LAYER = Column("layer", justify="left", name=True)


def layers_table(layers: Sequence[LayerReport], total: Totals, *, each: bool = False) -> Sheet:
    """What each layer became; with statistics, the error in the Fisher norm stands beside that of the numbers.

    Parameters
    ----------
    layers, total
        As a `Compression` holds them.
    each : bool
        A row for each layer, however many they are.
    """
    functional = total.functional_error is not None

    def became(layer: LayerReport) -> Hashable:
        return (
            module_role(layer.name),
            layer.rows,
            layer.columns,
            layer.structure,
            layer.shape,
            layer.separation_ranks,
        )

    def error(group: list[LayerReport]) -> str:
        missed = "" if all(layer.met for layer in group) else " !"
        return f"{_together(group, lambda x: x.norm, lambda x: x.relative_error):.3g}{missed}"

    def fisher_error(group: list[LayerReport]) -> str:
        return f"{_together(group, lambda x: x.functional_norm, lambda x: x.functional_error):.3g}"

    # What each column says of layers that became the same.
    cells: dict[Column, Callable[[list[LayerReport]], str]] = {
        Column("matrix", 6): lambda group: f"{group[0].rows}×{group[0].columns}",
        Column("rank", 8): lambda group: _range([layer.source_rank for layer in group]),
        Column("structure", 1, "left"): lambda group: group[0].structure,
        Column("shape", 7, "left"): lambda group: group[0].shape,
        Column("terms", 5): lambda group: group[0].terms,
        Column("parameters"): lambda group: f"{sum(layer.parameters for layer in group):,}",
        Column("of", 4): lambda group: f"{sum(layer.parameters_before for layer in group):,}",
        Column("storage", 3, "left"): lambda group: "/".join(
            sorted({x.storage for x in group if x.parameters})
        ),
        Column("error", 2 if functional else 0): error,
        Column("Fisher error"): fisher_error if functional else lambda _: "",
        Column("γ", 9): lambda group: f"{max(layer.condition for layer in group):.2f}",
    }
    sums = {
        "layer": f"{total.layers} layers",
        "parameters": f"{total.parameters:,}",
        "of": f"{total.parameters_before:,}",
        "error": f"{total.relative_error:.3g}",
        "Fisher error": "" if total.functional_error is None else f"{total.functional_error:.3g}",
    }
    return _sheet(layers, became, cells, each, sums)


def checkpoint_table(
    checkpoint: Checkpoint, ranks: Sequence[tuple[float, int]], *, each: bool = False
) -> Sheet:
    """What an adapter holds; ``ranks`` are (‖ΔW‖_F, rank that keeps 99 % of it) by layer."""
    ranks_by_name = dict(zip((layer.name for layer in checkpoint.layers), ranks, strict=True))

    def structure(layer: Any) -> str:
        if isinstance(layer, checkpoints.LoraLayer):
            return "LoRA"
        return str(layer.label)

    def alike(layer: LoraLayer) -> Hashable:
        size = layer.out_features, layer.in_features
        return (
            module_role(layer.name),
            layer.layer_type,
            size,
            layer.rank,
            structure(layer),
            layer.dtype,
        )

    cells: dict[Column, Callable[[list[LoraLayer]], str]] = {
        Column("kind", 5, "left"): lambda group: group[0].layer_type,
        Column("matrix", 1): lambda group: f"{group[0].out_features}×{group[0].in_features}",
        Column("rank"): lambda group: str(group[0].rank),
        Column("structure", 4, "left"): lambda group: structure(group[0]),
        Column("parameters"): lambda group: f"{sum(layer.parameters for layer in group):,}",
        Column("dtype", 3, "left"): lambda group: group[0].dtype,
        Column("‖ΔW‖", 2): lambda group: (
            f"{math.hypot(*(ranks_by_name[layer.name][0] for layer in group)):.4g}"
        ),
        Column("rank for 1 %"): lambda group: _range(
            [ranks_by_name[layer.name][1] for layer in group]
        ),
    }
    return _sheet(checkpoint.layers, alike, cells, each)


def verification_table(result: Verification, *, each: bool = False) -> Sheet:
    """Errors measured anew, beside those the writer recorded if it did; a layer that differs has a row of its own."""
    recorded = any(layer.recorded_error is not None for layer in result.layers)

    def alike(layer: LayerCheck) -> Hashable:
        return (
            (module_role(layer.name), layer.recorded_error is None) if layer.agrees else layer.name
        )

    def was(group: list[LayerCheck]) -> str:
        if group[0].recorded_error is None:
            return "–"
        return f"{_together(group, lambda x: x.norm, lambda x: x.recorded_error):.3g}"

    cells: dict[Column, Callable[[list[LayerCheck]], str]] = {
        Column("parameters", 2): lambda group: f"{sum(layer.parameters for layer in group):,}",
        Column("‖ΔW‖", 3): lambda group: f"{math.hypot(*(layer.norm for layer in group)):.4g}",
        Column("error now" if recorded else "error"): lambda group: (
            f"{_together(group, lambda x: x.norm, lambda x: x.relative_error):.3g}"
        ),
        **({Column("recorded", 1): was} if recorded else {}),
        Column("", 0, "left"): lambda group: "" if group[0].agrees else "differs",
    }
    return _sheet(result.layers, alike, cells, each)


def group_name(names: Sequence[str], cut: int) -> str:
    """The name of a layer without what all names share, or how many layers of what kind.

    >>> group_name(["model.layers.0.attn.q_proj", "model.layers.1.attn.q_proj"], len("model.layers."))
    '2 layers attn.q_proj'
    """
    if len(names) == 1:
        return names[0][cut:]
    return f"{len(names)} layers {module_role(names[0])}"


def _sheet(
    layers: Sequence[Any],
    alike: Callable[[Any], Hashable],
    cells: Mapping[Column, Callable[[list[Any]], str]],
    each: bool,
    sums: Mapping[str, str] | None = None,
) -> Sheet:
    """A row for layers that are alike, in the order of their first; for each layer if they are few or all asked for."""
    cut = len(common_prefix([layer.name for layer in layers]))
    groups: dict[Hashable, list[Any]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault(index if each or len(layers) <= FOLD_ABOVE else alike(layer), []).append(
            layer
        )
    columns = {LAYER: lambda group: group_name([layer.name for layer in group], cut), **cells}
    total = [sums.get(column.head, "") for column in columns] if sums else None
    return Sheet.of(columns, groups.values(), total)


def _together(
    group: Sequence[L], norm: Callable[[L], float | None], error: Callable[[L], float | None]
) -> float:
    """The relative error of all layers of a group as one."""
    lost = math.hypot(*((norm(layer) or 0.0) * (error(layer) or 0.0) for layer in group))
    size = math.hypot(*(norm(layer) or 0.0 for layer in group))
    return lost / size if size > 0.0 else lost


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least}–{most}"
