"""Where the embedding and the output layer share one weight: which names to target so that they share one adapter."""

from __future__ import annotations

import re
from typing import Any

from peft.tuners.tuners_utils import find_parameter_name_by_module
from torch import nn


def tie_targets(config: Any, model: nn.Module, tied: list[str]) -> None:
    """Target the embedding alone, and note the modules that will follow it."""
    # Once another adapter has wrapped a layer, PEFT names what is inside the wrapper.
    tied = [name.removesuffix(".base_layer") for name in tied]
    config.target_modules_to_tie = set(tied)
    embedding = find_parameter_name_by_module(model, model.get_input_embeddings())  # type: ignore[operator]
    if isinstance(config.target_modules, str):
        config.target_modules = rf"(?:{config.target_modules}|^{re.escape(embedding)}$)"
    else:
        kept = {name for name in config.target_modules or () if not _ends_one_of(name, tied)}
        config.target_modules = kept | {embedding}


def tie_modules_to_save(config: Any, model: nn.Module, tied: list[str]) -> None:
    """Save the embedding alone, and note the modules that share its copy."""
    config.modules_to_tie = set(tied)
    embedding = find_parameter_name_by_module(model, model.get_input_embeddings())  # type: ignore[operator]
    kept = [name for name in config.modules_to_save or () if not _ends_one_of(name, tied)]
    config.modules_to_save = kept if embedding in kept else [*kept, embedding]


def _ends_one_of(name: str, keys: list[str]) -> bool:
    return any(re.match(rf"(^|.*\.){name}($|\..*)", key) for key in keys)
