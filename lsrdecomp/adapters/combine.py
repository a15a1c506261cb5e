"""Weighted combinations of LSR adapters as one LSR adapter: checks, the new settings, and the factors filled in."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from lsrdecomp.adapters.combination import SIDEWISE, Combination, CombinedLayer, Factors, combined
from lsrdecomp.adapters.config import LsrConfig
from lsrdecomp.adapters.errors import UnsupportedLayerError
from lsrdecomp.adapters.layer import LsrLayer

WORTH_A_WARNING = 0.01  # relative error


def combine(
    model: nn.Module,
    configs: Mapping[str, Any],
    adapters: Sequence[str],
    weights: Sequence[float],
    how: Combination,
    seed: int | None = None,
) -> tuple[LsrConfig, dict[str, Factors], dict[str, CombinedLayer]]:
    """Settings, factors and errors, by layer, of a combination; the model is left as it is."""
    check(model, configs, adapters, weights)
    if len(adapters) == 1:
        how = Combination("linear")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LsrLayer)}
    made: dict[str, Factors] = {}
    records: dict[str, CombinedLayer] = {}
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        for name, layer in layers.items():
            weighted = [
                (a, w) for a, w in zip(adapters, weights, strict=True) if layer.has_adapter(a) and a not in layer.tied
            ]
            if weighted:
                check_ranks(name, {adapter: layer.r[adapter] for adapter, _ in weighted}, how)
                made[name], records[name] = combined(layer, weighted, how)
    return combined_config(model, [configs[adapter] for adapter in adapters], made), made, records


def check(model: nn.Module, configs: Mapping[str, Any], adapters: Sequence[str], weights: Sequence[float]) -> None:
    """Refuse what is no combination, before anything is made."""
    unknown = [name for name in adapters if name not in configs]
    if unknown:
        raise ValueError(f"Adapter {unknown[0]} does not exist")
    if len(weights) != len(adapters) or not adapters:
        raise ValueError(f"{len(weights)} weights for {len(adapters)} adapters")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be finite, got {list(weights)}")
    for adapter in adapters:
        config = configs[adapter]
        if config.target_parameters:
            raise UnsupportedLayerError(
                f"add_weighted_adapter does not support targeting nn.Parameter (problematic adapter '{adapter}')"
            )
        if config.use_dora:
            raise UnsupportedLayerError(f"adapter {adapter} has DoRA magnitudes (use_dora), which do not add up")
    tied = {frozenset(getattr(configs[adapter], "target_modules_to_tie", None) or ()) for adapter in adapters}
    if len(tied) > 1:
        raise UnsupportedLayerError(
            "some of the adapters tie the layers that share a weight and others do not; set ensure_weight_tying alike"
        )
    twice = [
        name
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper) and sum(a in module.modules_to_save for a in adapters) > 1
    ]
    if twice:
        raise ValueError(
            "Cannot add weighted adapters if they target the same module with modules_to_save, but found "
            f"{len(twice)} such instance(s). They are {', '.join(twice)}"
        )


def check_ranks(name: str, ranks: Mapping[str, int], how: Combination) -> None:
    if how.kind in SIDEWISE and len(set(ranks.values())) > 1:
        listed = ", ".join(f"{rank} in {adapter}" for adapter, rank in ranks.items())
        raise ValueError(
            f"All adapters must have the same r value when using combination_type {how.kind}, but {name} has {listed}; "
            "cat and the kinds with svd take any"
        )


def combined_config(model: nn.Module, configs: Sequence[LsrConfig], made: Mapping[str, Factors]) -> LsrConfig:
    """Settings of the combination of adapters of one model, with the sizes of every layer written out."""
    config: LsrConfig = copy.deepcopy(configs[0])
    targets = [each.target_modules for each in configs]
    if all(isinstance(names, set) for names in targets):
        config.target_modules = set().union(*targets)  # type: ignore[assignment, arg-type]
    elif all(isinstance(names, str) for names in targets):
        config.target_modules = "|".join(f"({name})" for name in targets)
    else:
        raise ValueError("The target_modules of all adapters must be lists, or all of them regular expressions.")
    saved = [name for each in configs for name in each.modules_to_save or ()]
    config.modules_to_save = list(dict.fromkeys(saved)) or None
    config.trainable_token_indices = joint_token_indices(configs)
    config.use_rslora, config.lsr_dropout, config.inner_shape = False, 0.0, None
    # The scale is in the factors, so that every layer's is alpha / r = 1.
    config.r = max(factors.shape.inner_rank for factors in made.values())
    config.lsr_alpha = config.r
    config.rank_pattern, config.alpha_pattern = {}, {}
    config.separation_rank_pattern, config.shape_pattern = {}, {}
    for name, factors in made.items():
        key, shape = f"^{re.escape(name)}", factors.shape
        config.shape_pattern[key] = {"out": list(shape.out), "inner": list(shape.inner), "into": list(shape.into)}
        config.separation_rank_pattern[key] = [len(factors.left[0]), len(factors.right[0])]
        config.alpha_pattern[key] = config.rank_pattern[key] = shape.inner_rank
    return config


@torch.no_grad()
def fill(
    model: nn.Module, adapter: str, adapters: Sequence[str], weights: Sequence[float], made: Mapping[str, Factors]
) -> None:
    """Give a new adapter its factors, token rows, and the modules that one of the combined adapters trains in full."""
    fill_token_rows(model, adapter, adapters, weights)
    for name, module in model.named_modules():
        if name in made:
            assert isinstance(module, LsrLayer)
            for side, factors in ((module.lsr_B, made[name].left), (module.lsr_A, made[name].right)):
                for parameter, factor in zip(side[adapter].factors, factors, strict=True):  # type: ignore[arg-type]
                    parameter.data = factor.clone(memory_format=torch.contiguous_format)
        elif isinstance(module, ModulesToSaveWrapper) and adapter in module.modules_to_save:
            for holder in set(adapters) & set(module.modules_to_save):
                module.modules_to_save[adapter].load_state_dict(module.modules_to_save[holder].state_dict())


def warn_of_loss(adapter: str, kind: str, records: Mapping[str, CombinedLayer]) -> None:
    """Say so where the new adapter is not what was asked for."""
    name, worst = max(records.items(), key=lambda item: item[1].relative_error)
    if worst.relative_error > WORTH_A_WARNING:
        warnings.warn(
            f"adapter {adapter}, combined by {kind!r}, misses up to {worst.relative_error:.0%} of what was asked for "
            f"(at {name}); combination_type='cat' is exact for a weighted sum, a larger svd_rank comes closer",
            stacklevel=3,
        )


def joint_token_indices(configs: Sequence[Any]) -> list[int] | dict[str, list[int]] | None:
    """All rows that any of the adapters trains, in the form in which they say it: one list, or one for each layer."""
    indices_by_config = [config.trainable_token_indices for config in configs if config.trainable_token_indices]
    if not indices_by_config:
        return None
    if all(isinstance(indices, dict) for indices in indices_by_config):
        layers = sorted({layer for indices in indices_by_config for layer in indices})
        return {
            layer: sorted({index for each in indices_by_config for index in each.get(layer, ())}) for layer in layers
        }
    if any(isinstance(indices, dict) for indices in indices_by_config):
        raise UnsupportedLayerError(
            "some of the adapters give trainable_token_indices as a list and others for each layer; write them alike"
        )
    return sorted({index for indices in indices_by_config for index in indices})


@torch.no_grad()
def fill_token_rows(model: nn.Module, adapter: str, adapters: Sequence[str], weights: Sequence[float]) -> None:
    """Give a new adapter the rows ``original + Σ weight · (trained - original)``."""
    for layer in model.modules():
        if not isinstance(layer, TrainableTokensLayer) or layer.tied_adapter or adapter not in layer.token_indices:
            continue
        row_of = {token: row for row, token in enumerate(layer.token_indices[adapter])}
        rows = layer.trainable_tokens_original[adapter].clone()
        for holder, weight in zip(adapters, weights, strict=True):
            if holder in layer.token_indices:
                index = torch.tensor([row_of[token] for token in layer.token_indices[holder]], device=rows.device)
                change = layer.trainable_tokens_delta[holder] - layer.trainable_tokens_original[holder]
                rows.index_add_(0, index, (weight * change).to(rows.dtype))
        layer.trainable_tokens_delta[adapter].data = rows
