"""Weighted combinations of LSR adapters as one LSR adapter: checks, the new settings, and the factors filled in."""

from __future__ import annotations

import copy
import math
import warnings
from typing import TYPE_CHECKING

import torch
from peft.utils import ModulesToSaveWrapper
from torch import nn

from lsrdecomp.adapters.combination import SIDEWISE, Combination, Factors, combined
from lsrdecomp.adapters.errors import UnsupportedLayerError
from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.checkpoints.packed_index import layer_patterns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lsrdecomp.adapters.config import LsrConfig

WORTH_A_WARNING = 0.01  # relative error


def combine(
    model: nn.Module,
    configs: Sequence[LsrConfig],
    adapters: Sequence[str],
    weights: Sequence[float],
    how: Combination,
    seed: int | None = None,
) -> tuple[LsrConfig, dict[str, Factors], dict[str, float]]:
    """Settings, factors and relative errors, by layer, of a combination; the model is left as it is."""
    check(configs, adapters, weights)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LsrLayer)}
    made: dict[str, Factors] = {}
    errors: dict[str, float] = {}
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        for name, layer in layers.items():
            weighted = [
                (a, w)
                for a, w in zip(adapters, weights, strict=True)
                if layer.has_adapter(a) and a not in layer.tied
            ]
            if weighted:
                check_ranks(
                    name, {adapter: layer.layout[adapter].r for adapter, _ in weighted}, how
                )
                made[name], errors[name] = combined(layer, weighted, how)
    return combined_config(configs, made), made, errors


def check(configs: Sequence[LsrConfig], adapters: Sequence[str], weights: Sequence[float]) -> None:
    """Refuse what PEFT's check lets on and is no combination here, before anything is made."""
    if len(weights) != len(adapters):
        raise ValueError(f"{len(weights)} weights for {len(adapters)} adapters")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be finite, got {list(weights)}")
    for adapter, config in zip(adapters, configs, strict=True):
        if config.use_dora:
            raise UnsupportedLayerError(
                f"adapter {adapter} has DoRA magnitudes (use_dora), which do not add up"
            )
        if config.trainable_token_indices:
            raise UnsupportedLayerError(
                f"adapter {adapter} trains token rows (trainable_token_indices), too"
            )
    if (
        len({frozenset(getattr(config, "target_modules_to_tie", None) or ()) for config in configs})
        > 1
    ):
        raise UnsupportedLayerError(
            "some of the adapters tie the layers that share a weight and others do not; set ensure_weight_tying alike"
        )


def check_ranks(name: str, ranks: Mapping[str, int], how: Combination) -> None:
    if how.kind in SIDEWISE and len(set(ranks.values())) > 1:
        listed = ", ".join(f"{rank} in {adapter}" for adapter, rank in ranks.items())
        raise ValueError(
            f"All adapters must have the same r value when using combination_type {how.kind}, but {name} has {listed}; "
            "cat and the kinds with svd take any"
        )


def combined_config(configs: Sequence[LsrConfig], made: Mapping[str, Factors]) -> LsrConfig:
    """Settings of the combination of adapters of one model, with the sizes of every layer written out."""
    config = copy.deepcopy(configs[0])
    saved = [name for each in configs for name in each.modules_to_save or ()]
    config.modules_to_save = list(dict.fromkeys(saved)) or None
    config.use_rslora, config.lsr_dropout, config.inner_shape = False, 0.0, None
    # The scale is in the factors, so that every layer's is alpha / r = 1.
    config.r = max(factors.shape.inner_rank for factors in made.values())
    config.lsr_alpha = config.r
    sizes = {
        name: (each.shape, (len(each.left[0]), len(each.right[0]))) for name, each in made.items()
    }
    for field, pattern in layer_patterns(sizes).items():
        setattr(config, field, pattern)
    return config


@torch.no_grad()
def fill(
    model: nn.Module, adapter: str, adapters: Sequence[str], made: Mapping[str, Factors]
) -> None:
    """Give a new adapter its factors, and the modules that one of the combined adapters trains in full."""
    for name, module in model.named_modules():
        if name in made:
            assert isinstance(module, LsrLayer)
            for side, factors in (
                (module.lsr_B, made[name].left),
                (module.lsr_A, made[name].right),
            ):
                for parameter, factor in zip(side[adapter].factors, factors, strict=True):  # type: ignore[arg-type]
                    parameter.data = factor.clone(memory_format=torch.contiguous_format)
        elif isinstance(module, ModulesToSaveWrapper) and adapter in module.modules_to_save:
            for holder in set(adapters) & set(module.modules_to_save):
                module.modules_to_save[adapter].load_state_dict(
                    module.modules_to_save[holder].state_dict()
                )


def warn_of_loss(adapter: str, kind: str, errors: Mapping[str, float]) -> None:
    """Say so where the new adapter is not what was asked for."""
    name, worst = max(errors.items(), key=lambda item: item[1])
    if worst > WORTH_A_WARNING:
        warnings.warn(
            f"adapter {adapter}, combined by {kind!r}, misses up to {worst:.0%} of what was asked for "
            f"(at {name}); combination_type='cat' is exact for a weighted sum, a larger svd_rank comes closer",
            stacklevel=3,
        )
