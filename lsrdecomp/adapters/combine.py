"""Weighted sums of LSR adapters as one LSR adapter, exactly: terms add, and so do the first sizes of the inner rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from lsrdecomp.adapters.config import LsrConfig
from lsrdecomp.adapters.errors import UnsupportedLayerError
from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.shape import ProductShape


def concatenated_config(model: nn.Module, adapters: Sequence[str], configs: dict[str, Any]) -> LsrConfig:
    """Settings of the sum of several adapters of one model, with the sizes of every layer written out."""
    for adapter in adapters:
        if configs[adapter].use_dora:
            raise UnsupportedLayerError(f"adapter {adapter} has DoRA magnitudes, which do not add up")
        if configs[adapter].target_parameters:
            raise UnsupportedLayerError(f"adapter {adapter} targets parameters, which cannot be combined yet")
    shared = [
        name
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper) and sum(a in module.modules_to_save for a in adapters) > 1
    ]
    if shared:
        raise ValueError(f"Cannot add adapters that each train their own copy of a module, but found {shared}.")
    config: LsrConfig = copy.deepcopy(configs[adapters[0]])
    targets = [configs[adapter].target_modules for adapter in adapters]
    if all(isinstance(names, set) for names in targets):
        config.target_modules = set().union(*targets)  # type: ignore[assignment]
    elif all(isinstance(names, str) for names in targets):
        config.target_modules = "|".join(f"({name})" for name in targets)
    else:
        raise ValueError("The target_modules of all adapters must be lists, or all of them regular expressions.")
    config.use_rslora, config.lsr_alpha, config.lsr_dropout = False, 1, 0.0
    config.rank_pattern, config.alpha_pattern = {}, {}
    config.separation_rank_pattern, config.shape_pattern = {}, {}
    for name, layer in model.named_modules():
        if isinstance(layer, LsrLayer) and any(layer.has_adapter(adapter) for adapter in adapters):
            shape, left, right = concatenated(layer, adapters, [1.0] * len(adapters))
            key = f"^{name}"
            config.shape_pattern[key] = {"out": shape.out, "inner": shape.inner, "into": shape.into}
            config.separation_rank_pattern[key] = [len(left[0]), len(right[0])]
            # The scale is in the factors, so that every layer's is alpha / r = 1.
            config.alpha_pattern[key] = config.rank_pattern[key] = shape.inner_rank
    return config


@torch.no_grad()
def concatenated(
    layer: LsrLayer, adapters: Sequence[str], weights: Sequence[float]
) -> tuple[ProductShape, list[Tensor], list[Tensor]]:
    """Shape, out-side and in-side factors of ``Σ weight · ΔW`` of one layer, scaling baked in.

    Where all adapters split the layer alike, the pair ``[B̂_1 … B̂_p][Â_1; …; Â_p]`` keeps that split: the j-th adapter's
    factors are padded with zeros to its own range of the first inner size. Otherwise the pairs are expanded.
    """
    held = [(adapter, weight) for adapter, weight in zip(adapters, weights, strict=True) if layer.has_adapter(adapter)]
    shapes = [layer.layout[adapter].shape for adapter, _ in held]
    pairs = []
    for adapter, weight in held:
        left = list(layer.lsr_B[adapter].factors)  # type: ignore[arg-type]
        right = list(layer.lsr_A[adapter].factors)  # type: ignore[arg-type]
        left[0] = left[0] * (weight * layer.scaling[adapter])
        pairs.append((left, right))
    if len({(shape.out, shape.into) for shape in shapes}) > 1:
        return expanded(layer, held)
    rest = [max(sizes) for sizes in zip(*(shape.inner[1:] for shape in shapes), strict=True)]
    inner = (sum(shape.inner[0] for shape in shapes), *rest)
    left_parts: list[list[Tensor]] = [[] for _ in inner]
    right_parts: list[list[Tensor]] = [[] for _ in inner]
    start = 0
    for shape, (left, right) in zip(shapes, pairs, strict=True):
        for index, (mine, whole) in enumerate(zip(shape.inner, inner, strict=True)):
            before = start if index == 0 else 0
            after = whole - mine - before
            left_parts[index].append(nn.functional.pad(left[index], (before, after)))
            right_parts[index].append(nn.functional.pad(right[index], (0, 0, before, after)))
        start += shape.inner[0]
    joined = ProductShape(shapes[0].out, inner, shapes[0].into)
    return joined, [torch.cat(parts) for parts in left_parts], [torch.cat(parts) for parts in right_parts]


def expanded(layer: LsrLayer, held: Sequence[tuple[str, float]]) -> tuple[ProductShape, list[Tensor], list[Tensor]]:
    """The same sum as plain low rank, for adapters that split the layer differently."""
    pairs = [(weight, layer.pair(adapter)) for adapter, weight in held]
    left = torch.cat([weight * left for weight, (left, _) in pairs], dim=1)
    right = torch.cat([right for _, (_, right) in pairs])
    one = left.new_ones(1, 1, 1)
    order = max(layer.layout[adapter].shape.order for adapter, _ in held)
    ones = (1,) * (order - 1)
    shape = ProductShape((left.shape[0], *ones), (right.shape[0], *ones), (right.shape[1], *ones))
    return shape, [left.unsqueeze(0), *[one] * (order - 1)], [right.unsqueeze(0), *[one] * (order - 1)]


def fill(layer: LsrLayer, adapter: str, adapters: Sequence[str], weights: Sequence[float]) -> None:
    """Copy the concatenated factors into a new adapter of the layer."""
    _, left, right = concatenated(layer, adapters, weights)
    for side, factors in ((layer.lsr_B, left), (layer.lsr_A, right)):
        for parameter, factor in zip(side[adapter].factors, factors, strict=True):  # type: ignore[arg-type]
            parameter.data.copy_(factor)


def check_weights(weights: Sequence[float], adapters: Sequence[str]) -> None:
    if len(weights) != len(adapters) or not adapters:
        raise ValueError(f"{len(weights)} weights for {len(adapters)} adapters")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be finite, got {list(weights)}")
