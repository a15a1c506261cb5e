"""Trained token rows of combined adapters: a row's change is the weighted sum of its changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from torch import nn

from lsrdecomp.adapters.errors import UnsupportedLayerError


def joint_token_indices(configs: Sequence[Any]) -> list[int] | dict[str, list[int]] | None:
    """All rows that any of the adapters trains, in the form in which they say it: one list, or one for each layer."""
    given = [config.trainable_token_indices for config in configs if config.trainable_token_indices]
    if not given:
        return None
    if all(isinstance(indices, dict) for indices in given):
        layers = sorted({layer for indices in given for layer in indices})
        return {layer: sorted({index for one in given for index in one.get(layer, ())}) for layer in layers}
    if any(isinstance(indices, dict) for indices in given):
        raise UnsupportedLayerError(
            "some of the adapters give trainable_token_indices as a list and others for each layer; write them alike"
        )
    return sorted({index for indices in given for index in indices})


@torch.no_grad()
def fill_token_rows(model: nn.Module, adapter: str, adapters: Sequence[str], weights: Sequence[float]) -> None:
    """Give a new adapter the rows ``original + Σ weight · (trained - original)``."""
    for layer in model.modules():
        if not isinstance(layer, TrainableTokensLayer) or layer.tied_adapter or adapter not in layer.token_indices:
            continue
        places = {token: place for place, token in enumerate(layer.token_indices[adapter])}
        rows = layer.trainable_tokens_original[adapter].clone()
        for holder, weight in zip(adapters, weights, strict=True):
            if holder in layer.token_indices:
                index = torch.tensor([places[token] for token in layer.token_indices[holder]], device=rows.device)
                change = layer.trainable_tokens_delta[holder] - layer.trainable_tokens_original[holder]
                rows.index_add_(0, index, (weight * change).to(rows.dtype))
        layer.trainable_tokens_delta[adapter].data = rows
