"""Diffusers files, old keys (``.lora.down``, ``.to_q_lora.down``, ``.lora_linear_layer.down``) or new (``.lora_A``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.config import Config, Patterns
from lsrdecomp.checkpoints.files import parse_json
from lsrdecomp.checkpoints.modules import grouped, need, scalar
from lsrdecomp.checkpoints.readers.peft import PREFIX, check_supported, finish
from lsrdecomp.checkpoints.records import Checkpoint, low_rank_layer
from lsrdecomp.checkpoints.tensors import Array, StoredTensor
from lsrdecomp.checkpoints.writers.single_file import write_single
from lsrdecomp.errors import CheckpointError

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
KEYS = ("new", "old")
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
    if alpha is not None:
        raise bundle.metadata_error("without an alpha in the file its scale is 1; leave alpha= out")
    modules, extras = grouped(bundle, SUFFIXES)
    configs = _Configs(bundle)
    layers = []
    for stored, roles in modules.items():
        need(stored, roles, ("up", "down"), ("alpha",))
        name = _module(stored, roles["down"].name)
        layer = low_rank_layer(name, roles["up"], roles["down"], 1.0)
        scale = scalar(roles["alpha"]) / layer.rank if "alpha" in roles else configs.scale(name, layer.rank)
        layers.append(low_rank_layer(name, roles["up"], roles["down"], scale))
    names = [layer.name for layer in layers]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError("is held under two names", path=bundle.weights, tensor=twice)
    return finish(bundle, "diffusers", layers, extras)


def write_diffusers(
    out_file: str | Path,
    *,
    layers: Iterable[tuple[str, Array, Array]],
    source: Checkpoint | None = None,
    extras: Mapping[str, StoredTensor] | None = None,
    storage: str = "float32",
    force: bool = False,
    keys: str = "new",
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a diffusers file with ``ΔW = B @ A``; such files have no scale, so it must be in B already.

    Parameters
    ----------
    keys : {"new", "old"}
        ``.lora_A.weight``, or ``.lora.down.weight`` (``.lora_linear_layer.`` in text encoders).

    Other arguments as for `lsrdecomp.checkpoints.write_lora`; ``out_file`` ends in .safetensors.
    """
    if keys not in KEYS:
        raise CheckpointError(f"keys {keys!r} is not one of {', '.join(KEYS)}")

    def tensors(name: str, up: Array, down: Array) -> Iterable[tuple[str, Array]]:
        old = ".lora_linear_layer." if name.startswith("text_encoder") else ".lora."
        ends = (".lora_A.weight", ".lora_B.weight") if keys == "new" else (f"{old}down.weight", f"{old}up.weight")
        return (f"{name}{ends[0]}", down), (f"{name}{ends[1]}", up)

    return write_single(
        out_file,
        layers=layers,
        tensors=tensors,
        source=source,
        extras=extras,
        storage=storage,
        force=force,
        provenance=provenance,
    )


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
