"""Diffusers files, old keys (``.lora.down``, ``.to_q_lora.down``, ``.lora_linear_layer.down``) or new (``.lora_A``)."""

from __future__ import annotations

import math
from typing import Any

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.config import Config, Patterns
from lsrdecomp.checkpoints.files import parse_json
from lsrdecomp.checkpoints.format import PREFIX, finish, refuse_alpha
from lsrdecomp.checkpoints.modules import grouped, need, scalar
from lsrdecomp.checkpoints.readers.peft import check_supported
from lsrdecomp.checkpoints.records import Checkpoint, low_rank_layer
from lsrdecomp.errors import CheckpointError

name = "diffusers"
SUFFIXES = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
    ".lora_linear_layer.down.weight": "down",
    ".lora_linear_layer.up.weight": "up",
    "_lora.down.weight": "down",
    "_lora.up.weight": "up",
    ".alpha": "alpha",
}
METADATA = "lora_adapter_metadata"
# Attention processors of old files named these four by themselves: in the UNet and in text encoders.
UNET_NAMES = {"to_out": "to_out.0"}
TEXT_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


def matches(bundle: Bundle) -> bool:
    """Some key has one of the endings of A or B, and there is no config."""
    ends = tuple(suffix for suffix in SUFFIXES if suffix != ".alpha")
    return bundle.config is None and any(key.endswith(ends) for key in bundle.tensors)


def read(bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
    """Layers under their full names, component first (``unet.…``).

    The scale is alpha / rank where the file has an alpha or a config in its header, else 1, as diffusers does.
    """
    if any(key.startswith(PREFIX) for key in bundle.tensors):
        raise CheckpointError(
            f"a PEFT file without its {bundle.config_path.name}; put that beside it", path=bundle.weights
        )
    refuse_alpha(bundle, alpha, "without an alpha in the file its scale is 1")
    modules, extras = grouped(bundle, SUFFIXES)
    configs = _Configs(bundle)
    layers = []
    for stored, roles in modules.items():
        need(stored, roles, ("up", "down"), ("alpha",))
        module = _module(stored, roles["down"].name)
        layer = low_rank_layer(module, roles["up"], roles["down"], 1.0)
        scale = scalar(roles["alpha"]) / layer.rank if "alpha" in roles else configs.scale(module, layer.rank)
        layers.append(low_rank_layer(module, roles["up"], roles["down"], scale))
    names = [layer.name for layer in layers]
    if len(set(names)) != len(names):
        twice = next(module for module in names if names.count(module) > 1)
        raise CheckpointError("is held under two names", path=bundle.weights, tensor=twice)
    return finish(bundle, name, layers, extras)


def _module(stored: str, key: str) -> str:
    """Module path of an old attention-processor key; other names are their own."""
    name = stored.replace(".processor.", ".")
    if not key.removeprefix(stored).startswith("_lora."):
        return name
    head, _, last = name.rpartition(".")
    words = TEXT_NAMES if stored.startswith("text_encoder") else UNET_NAMES
    return f"{head}.{words.get(last, last)}" if head else words.get(last, last)


class _Configs:
    """LoRA configs of the components, as newer diffusers keeps them in the header: ``{"unet.r": 8, …}``."""

    def __init__(self, bundle: Bundle) -> None:
        self.path = bundle.weights
        self.by_component: dict[str, Config] = {}
        text = bundle.metadata.get(METADATA)
        if text is None:
            return
        packed = parse_json(text.encode(), bundle.weights, what=METADATA)
        fields: dict[str, dict[str, Any]] = {}
        for key, value in packed.items():
            component, _, field = key.partition(".")
            fields.setdefault(component, {})[field] = value
        for component, raw in fields.items():
            self.by_component[component] = Config({"peft_type": "LORA", **raw}, bundle.weights)
            check_supported(self.by_component[component])

    def scale(self, name: str, rank: int) -> float:
        component, _, rest = name.partition(".")
        config = self.by_component.get(component)
        if config is None:
            return 1.0
        alphas = Patterns(config.numbers("alpha_pattern"), "alpha_pattern", self.path)
        alpha = alphas.get(rest, config.number("lora_alpha", 8))
        return alpha / (math.sqrt(rank) if config.flag("use_rslora") else rank)
