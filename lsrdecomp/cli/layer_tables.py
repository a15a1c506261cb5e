"""Tables with a row for each layer, or for each group of layers that became the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lsrdecomp import lora
from lsrdecomp.cli.sheet import Sheet, SheetColumn
from lsrdecomp.lora.files.layer_names import common_prefix, module_role

if TYPE_CHECKING:
    from lsrdecomp.lora.files import Checkpoint, LoraLayer
    from lsrdecomp.lora.measure import Verification
    from lsrdecomp.lora.measure.layer_differences import LayerDifference
    from lsrdecomp.lora.measure.verify_files import LayerCheck
    from lsrdecomp.lora.search import LayerReport, Totals

FEW_LAYERS = 24
"""Up to this many layers each has its row; of more, equal ones share one unless all are asked for.

By hand: what a terminal shows at once.
"""
LAYER = SheetColumn("layer", justify="left", name=True)


def layers_table(layers: Sequence[LayerReport], total: Totals, *, each: bool = False) -> Sheet:
    """Return what each layer became; with statistics, with its error in the Fisher norm too.

    Parameters
    ----------
    layers, total
        As a `Compression` holds them.
    each : bool
        A row for each layer, however many they are.
    """
    has_statistics = total.functional_error is not None

    def group_key(layer: LayerReport) -> Hashable:
        return (
            module_role(layer.name),
            layer.rows,
            layer.columns,
            layer.structure,
            layer.shape,
            layer.separation_ranks,
        )

    def storages(group: list[LayerReport]) -> str:
        return "/".join(sorted({layer.storage for layer in group if layer.parameters}))

    def weight_error(group: list[LayerReport]) -> str:
        mark = "" if all(layer.met for layer in group) else " !"
        return f"{_weight_error(group)}{mark}"

    def output_error(group: list[LayerReport]) -> str:
        if not has_statistics:
            return ""
        errors = [(layer.functional_norm, layer.functional_error) for layer in group]
        return f"{_combined_error(errors):.3g}"

    # What each column says of layers that became the same.
    cells: dict[SheetColumn, Callable[[list[LayerReport]], str]] = {
        SheetColumn("matrix", 6): lambda group: f"{group[0].rows}×{group[0].columns}",
        SheetColumn("rank", 8): lambda group: _range([layer.source_rank for layer in group]),
        SheetColumn("structure", 1, "left"): lambda group: group[0].structure,
        SheetColumn("shape", 7, "left"): lambda group: group[0].shape,
        SheetColumn("terms", 5): lambda group: group[0].terms,
        SheetColumn("parameters"): _parameters,
        SheetColumn("before", 4): lambda group: f"{sum(x.parameters_before for x in group):,}",
        SheetColumn("storage", 3, "left"): storages,
        SheetColumn("weight error", 2 if has_statistics else 0): weight_error,
        SheetColumn("output error (est.)"): output_error,
        SheetColumn("γ", 9): lambda group: f"{max(layer.condition for layer in group):.2f}",
    }
    sums = {
        "layer": f"{total.layers} layers",
        "parameters": f"{total.parameters:,}",
        "before": f"{total.parameters_before:,}",
        "weight error": f"{total.relative_error:.3g}",
    }
    if total.functional_error is not None:
        sums["output error (est.)"] = f"{total.functional_error:.3g}"
    return _sheet(layers, group_key, cells, each, sums)


def checkpoint_table(
    checkpoint: Checkpoint,
    ranks: Sequence[tuple[float, int]],
    *,
    each: bool = False,
) -> Sheet:
    """Return what an adapter holds; ``ranks`` are (‖ΔW‖_F, rank that keeps 99 % of it) by layer."""
    names = [layer.name for layer in checkpoint.layers]
    ranks_by_name = dict(zip(names, ranks, strict=True))

    def structure(layer: Any) -> str:
        if isinstance(layer, lora.files.LoraLayer):
            return "LoRA"
        return str(layer.label)

    def group_key(layer: LoraLayer) -> Hashable:
        return (
            module_role(layer.name),
            layer.layer_type,
            (layer.out_features, layer.in_features),
            layer.rank,
            structure(layer),
            layer.dtype,
        )

    def norm(group: list[LoraLayer]) -> str:
        return f"{math.hypot(*(ranks_by_name[layer.name][0] for layer in group)):.4g}"

    def rank_for_1_percent(group: list[LoraLayer]) -> str:
        return _range([ranks_by_name[layer.name][1] for layer in group])

    cells: dict[SheetColumn, Callable[[list[LoraLayer]], str]] = {
        SheetColumn("kind", 5, "left"): lambda group: group[0].layer_type,
        SheetColumn("matrix", 1): lambda group: f"{group[0].out_features}×{group[0].in_features}",
        SheetColumn("rank"): lambda group: str(group[0].rank),
        SheetColumn("structure", 4, "left"): lambda group: structure(group[0]),
        SheetColumn("parameters"): _parameters,
        SheetColumn("dtype", 3, "left"): lambda group: group[0].dtype,
        SheetColumn("‖ΔW‖", 2): norm,
        SheetColumn("rank for 1 %"): rank_for_1_percent,
    }
    return _sheet(checkpoint.layers, group_key, cells, each)


def verification_table(result: Verification, *, each: bool = False) -> Sheet:
    """Return errors measured anew, beside those the writer recorded if it did.

    A layer that differs has a row of its own.
    """
    recorded = any(layer.recorded_error is not None for layer in result.layers)

    def group_key(layer: LayerCheck) -> Hashable:
        if layer.agrees:
            return module_role(layer.name), layer.recorded_error is None
        return layer.name

    def recorded_error(group: list[LayerCheck]) -> str:
        if not recorded:
            return ""
        if group[0].recorded_error is None:
            return "–"
        errors = [(layer.norm, layer.recorded_error) for layer in group]
        return f"{_combined_error(errors):.3g}"

    def verdict(group: list[LayerCheck]) -> str:
        return "" if group[0].agrees else "differs"

    cells: dict[SheetColumn, Callable[[list[LayerCheck]], str]] = {
        SheetColumn("parameters", 2): _parameters,
        SheetColumn("‖ΔW‖", 3): lambda group: f"{math.hypot(*(layer.norm for layer in group)):.4g}",
        SheetColumn("error now" if recorded else "error"): _weight_error,
        SheetColumn("recorded", 1): recorded_error,
        SheetColumn("", 0, "left"): verdict,
    }
    return _sheet(result.layers, group_key, cells, each)


def difference_table(layers: Sequence[LayerDifference], *, each: bool = False) -> Sheet:
    """Return how far layers of another adapter or model are from a LoRA's, and what they look like.

    Layers of one role that look alike share a row.
    """

    def group_key(layer: LayerDifference) -> Hashable:
        return module_role(layer.name), layer.code

    def error(group: list[LayerDifference]) -> str:
        errors = [layer.relative_error for layer in group if layer.relative_error is not None]
        return f"{max(errors):.3g}" if errors else "–"

    def scale(group: list[LayerDifference]) -> str:
        scales = [layer.scale for layer in group if layer.scale is not None]
        if not scales:
            return ""
        low, high = f"{min(scales):.3g}", f"{max(scales):.3g}"
        return low if low == high else f"{low} to {high}"

    cells: dict[SheetColumn, Callable[[list[LayerDifference]], str]] = {
        SheetColumn("‖ΔW‖", 3): lambda group: f"{math.hypot(*(layer.norm for layer in group)):.4g}",
        SheetColumn("largest error"): error,
        SheetColumn("scale", 2): scale,
        SheetColumn("", 0, "left"): lambda group: group[0].code,
    }
    return _sheet(layers, group_key, cells, each)


def group_name(names: Sequence[str], cut: int) -> str:
    """Return the name of a layer without what all names share, or how many layers of what role.

    >>> names = ["model.layers.0.attn.q_proj", "model.layers.1.attn.q_proj"]
    >>> group_name(names, len("model.layers."))
    '2 layers attn.q_proj'
    """
    if len(names) == 1:
        return names[0][cut:]
    return f"{len(names)} layers {module_role(names[0])}"


def _sheet(
    layers: Sequence[Any],
    group_key: Callable[[Any], Hashable],
    cells: Mapping[SheetColumn, Callable[[list[Any]], str]],
    each: bool,
    sums: Mapping[str, str] | None = None,
) -> Sheet:
    """Return a row for each layer, or of more than `FEW_LAYERS` for each group."""
    is_folded = not each and len(layers) > FEW_LAYERS
    groups: dict[Hashable, list[Any]] = {}
    for index, layer in enumerate(layers):
        key = group_key(layer) if is_folded else index
        groups.setdefault(key, []).append(layer)
    cut = len(common_prefix([layer.name for layer in layers]))

    def name(group: list[Any]) -> str:
        return group_name([layer.name for layer in group], cut)

    columns = {LAYER: name, **cells}
    total = None
    if sums:
        total = [sums.get(column.head, "") for column in columns]
    return Sheet.of(columns, groups.values(), total)


def _parameters(layers: Sequence[Any]) -> str:
    """Return the parameters of layers together."""
    return f"{sum(layer.parameters for layer in layers):,}"


def _weight_error(layers: Sequence[Any]) -> str:
    """Return the relative error of the weights of layers as one."""
    return f"{_combined_error([(layer.norm, layer.relative_error) for layer in layers]):.3g}"


def _combined_error(layers: Sequence[tuple[float | None, float | None]]) -> float:
    """Return the relative error of layers as one, from the norm and the error of each."""
    lost = math.hypot(*((norm or 0.0) * (error or 0.0) for norm, error in layers))
    size = math.hypot(*(norm or 0.0 for norm, _ in layers))
    return lost / size if size > 0.0 else lost


def _range(values: Sequence[int]) -> str:
    """Return the least and the largest value, or the only one."""
    lowest = min(values)
    highest = max(values)
    return f"{lowest}" if lowest == highest else f"{lowest}–{highest}"
