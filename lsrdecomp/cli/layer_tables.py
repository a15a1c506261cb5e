"""Tables with a row for each layer, or for each group of layers that became the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lsrdecomp import checkpoints
from lsrdecomp.checkpoints.names import common_prefix, kind_of
from lsrdecomp.cli.sheet import Column, Sheet

if TYPE_CHECKING:
    from lsrdecomp.checkpoints import Checkpoint, LoraLayer
    from lsrdecomp.compression import LayerReport, Totals, Verification
    from lsrdecomp.compression.verify import LayerCheck

FOLD_ABOVE = 24
"""Up to this many layers each has its row; of more, those that became the same share one, unless all are asked for."""

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
    sheet = Sheet(
        (
            LAYER,
            Column("matrix", 6),
            Column("rank", 8),
            Column("structure", 1, "left"),
            Column("shape", 7, "left"),
            Column("terms", 5),
            Column("parameters"),
            Column("of", 4),
            Column("storage", 3, "left"),
            Column("error", 2 if functional else 0),
            Column("Fisher error"),
            Column("γ", 9),
        )
    )
    cut = common_prefix([layer.name for layer in layers])

    def became(layer: LayerReport) -> Hashable:
        return kind_of(layer.name), layer.rows, layer.columns, layer.structure, layer.shape, layer.separation_ranks

    for group in grouped(layers, became, each):
        first = group[0]
        left, right = first.separation_ranks
        parameters = sum(layer.parameters for layer in group)
        missed = "" if all(layer.met for layer in group) else " !"
        sheet.add_row(
            group_name([layer.name for layer in group], len(cut)),
            f"{first.rows}×{first.columns}",
            _range([layer.source_rank for layer in group]),
            first.structure,
            first.shape,
            (f"{left}" if left == right else f"{left}+{right}") if first.structure != "drop" else "",
            f"{parameters:,}",
            f"{sum(layer.parameters_before for layer in group):,}",
            "/".join(sorted({layer.storage for layer in group if layer.parameters})),
            f"{_together(group, lambda x: x.norm, lambda x: x.relative_error):.3g}{missed}",
            f"{_together(group, lambda x: x.functional_norm, lambda x: x.functional_error):.3g}" if functional else "",
            f"{max(layer.condition for layer in group):.2f}",
        )
    sheet.total = (
        f"{total.layers} layers",
        *[""] * 5,
        f"{total.parameters:,}",
        f"{total.parameters_before:,}",
        "",
        f"{total.relative_error:.3g}",
        f"{total.functional_error:.3g}" if total.functional_error is not None else "",
        "",
    )
    return sheet


def checkpoint_table(checkpoint: Checkpoint, ranks: Sequence[tuple[float, int]], *, each: bool = False) -> Sheet:
    """What an adapter holds; ``ranks`` are (‖ΔW‖_F, rank that keeps 99 % of it) by layer."""
    sheet = Sheet(
        (
            LAYER,
            Column("kind", 5, "left"),
            Column("matrix", 1),
            Column("rank"),
            Column("structure", 4, "left"),
            Column("parameters"),
            Column("dtype", 3, "left"),
            Column("‖ΔW‖", 2),
            Column("rank for 1 %"),
        )
    )
    cut = common_prefix([layer.name for layer in checkpoint.layers])
    ranks_by_name = dict(zip((layer.name for layer in checkpoint.layers), ranks, strict=True))

    def structure(layer: Any) -> str:
        if isinstance(layer, checkpoints.LoraLayer):
            return "LoRA"
        return f"{layer.left_rank}+{layer.right_rank} × {layer.shape}"

    def alike(layer: LoraLayer) -> Hashable:
        size = layer.out_features, layer.in_features
        return kind_of(layer.name), layer.kind, size, layer.rank, structure(layer), layer.dtype

    for group in grouped(checkpoint.layers, alike, each):
        first = group[0]
        norms = [ranks_by_name[layer.name][0] for layer in group]
        sheet.add_row(
            group_name([layer.name for layer in group], len(cut)),
            first.kind,
            f"{first.out_features}×{first.in_features}",
            str(first.rank),
            structure(first),
            f"{sum(layer.parameters for layer in group):,}",
            first.dtype,
            f"{math.hypot(*norms):.4g}",
            _range([ranks_by_name[layer.name][1] for layer in group]),
        )
    return sheet


def verification_table(result: Verification, *, each: bool = False) -> Sheet:
    """Errors measured anew, beside those the writer recorded if it did; a layer that differs has a row of its own."""
    recorded = any(layer.recorded_error is not None for layer in result.layers)
    beside = (Column("recorded", 1), Column("", 0, "left")) if recorded else (Column("", 0, "left"),)
    error = Column("error now" if recorded else "error")
    sheet = Sheet((LAYER, Column("parameters", 2), Column("‖ΔW‖", 3), error, *beside))
    cut = common_prefix([layer.name for layer in result.layers])

    def alike(layer: LayerCheck) -> Hashable:
        return (kind_of(layer.name), layer.recorded_error is None) if layer.agrees else layer.name

    for group in grouped(result.layers, alike, each):
        has_record = group[0].recorded_error is not None
        was = f"{_together(group, lambda x: x.norm, lambda x: x.recorded_error):.3g}" if has_record else "–"
        sheet.add_row(
            group_name([layer.name for layer in group], len(cut)),
            f"{sum(layer.parameters for layer in group):,}",
            f"{math.hypot(*(layer.norm for layer in group)):.4g}",
            f"{_together(group, lambda x: x.norm, lambda x: x.relative_error):.3g}",
            *([was] if recorded else []),
            "" if group[0].agrees else "differs",
        )
    return sheet


def grouped(layers: Sequence[L], key: Callable[[L], Hashable], each: bool) -> Iterable[list[L]]:
    """Layers that share a key, in the order of their first; each alone if they are few or all are asked for."""
    if each or len(layers) <= FOLD_ABOVE:
        return [[layer] for layer in layers]
    groups: dict[Hashable, list[L]] = {}
    for layer in layers:
        groups.setdefault(key(layer), []).append(layer)
    return groups.values()


def group_name(names: Sequence[str], cut: int) -> str:
    """The name of a layer without what all names share, or how many layers of what kind.

    >>> group_name(["model.layers.0.attn.q_proj", "model.layers.1.attn.q_proj"], len("model.layers."))
    '2 layers attn.q_proj'
    """
    if len(names) == 1:
        return names[0][cut:]
    return f"{len(names)} layers {kind_of(names[0])}"


def _together(group: Sequence[L], norm: Callable[[L], float | None], error: Callable[[L], float | None]) -> float:
    """The relative error of all layers of a group as one."""
    lost = math.hypot(*((norm(layer) or 0.0) * (error(layer) or 0.0) for layer in group))
    size = math.hypot(*(norm(layer) or 0.0 for layer in group))
    return lost / size if size > 0.0 else lost


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least}–{most}"
