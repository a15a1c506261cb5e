"""Files that say by a key's ending which half of which module a tensor is: image trainers, loralib, mlx-lm, torchtune.

Every such layout is a value of `Pairs`; names of modules are taken as they are, so that new models need nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.config import Config
from lsrdecomp.checkpoints.files import parse_json
from lsrdecomp.checkpoints.format import PREFIX, Roles, finish, grouped, need, refuse_alpha, scalar
from lsrdecomp.checkpoints.readers.peft import Scales, check_supported
from lsrdecomp.checkpoints.records import Checkpoint, LoraLayer, low_rank_layer
from lsrdecomp.checkpoints.tensors import Array, StoredTensor, derived
from lsrdecomp.errors import CheckpointError, UnsupportedError

METADATA = "lora_adapter_metadata"
OTHERS = {".alpha": "alpha", ".lora_mid.weight": "mid"}
# Attention processors of old diffusers files named these four by themselves: in the UNet and in text encoders.
PROCESSOR = "_lora."
UNET_NAMES = {"to_out": "to_out.0"}
TEXT_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
TABLES = ("embed_tokens", "wte")
"""Embeddings of mlx-lm's models."""


@dataclass(frozen=True)
class Pairs:
    """One layout of pairs.

    Parameters
    ----------
    name : str
        What `Checkpoint.format` says.
    endings : tuple of (str, str)
        Endings of keys of A and of B, of all ages of the layout.
    scaled_outside : bool
        Whether the scale is not in the tensors: then from mlx-lm's config, or alpha is asked for. Otherwise it is that
        of an ``.alpha`` beside the pair, or of the config that diffusers keeps in the header, or 1.
    transposed : bool
        Whether A is stored as (n, r) and B as (r, m).
    """

    name: str
    endings: tuple[tuple[str, str], ...]
    scaled_outside: bool = False
    transposed: bool = False

    @cached_property
    def roles(self) -> dict[str, str]:
        """The part of a pair by the ending of its key."""
        halves = {ending: role for both in self.endings for ending, role in zip(both, ("down", "up"), strict=True)}
        return halves | ({".m": "magnitude of DoRA"} if self.scaled_outside else OTHERS)

    def matches(self, bundle: Bundle) -> bool:
        """Some key has one of the endings of A or B, and there is no config, or mlx-lm's for its own layout."""
        if bundle.config is not None and not (self.transposed and "peft_type" not in bundle.config):
            return False
        return any(key.endswith(half) for key in bundle.tensors for both in self.endings for half in both)

    def read(self, bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
        """Layers under the file's own names of modules; names of old attention processors become those of modules."""
        if any(key.startswith(PREFIX) for key in bundle.tensors):
            text = f"a PEFT file without its {bundle.config_path.name}; put that beside it"
            raise CheckpointError(text, path=bundle.weights)
        scale = _mlx_scale(bundle)
        if not self.scaled_outside or scale is not None:
            refuse_alpha(bundle, alpha, None if scale is not None else "the file decides its scale, 1 without an alpha")
        modules, extras = grouped(bundle, self.roles)
        headers = _header_scales(bundle)
        layers: list[LoraLayer] = []
        for stored, roles in modules.items():
            layer = pair_layer(_module(stored, roles), roles, transposed=self.transposed)
            if "alpha" not in roles:
                component, _, module = layer.name.partition(".")
                own = headers[component].of(module, layer.rank) if component in headers else 1.0
                layer = replace(layer, scale=own if scale is None else scale)
            layers.append(layer)
        names = [layer.name for layer in layers]
        if len(set(names)) != len(names):
            twice = next(module for module in names if names.count(module) > 1)
            raise CheckpointError("is held under two names", path=bundle.weights, tensor=twice)
        if not self.scaled_outside or scale is not None:
            config = {} if bundle.config is None else {"base_model_name_or_path": bundle.config.get("model")}
            return finish(bundle, self.name, layers, extras, config=config)
        if alpha is None:
            ranks = ", ".join(map(str, sorted({layer.rank for layer in layers})))
            text = f"a {self.name} file of rank {ranks}: its alpha is not in it"
            way_out = "pass alpha= as it was trained (its script's lora_alpha; of mlx-lm rank times scale)"
            raise CheckpointError(f"{text}; {way_out}", path=bundle.weights)
        layers = [replace(layer, scale=alpha / layer.rank) for layer in layers]
        heads = sorted({key.removeprefix(PREFIX).partition(".")[0] for key in extras})
        return finish(bundle, self.name, layers, extras, config={"lora_alpha": alpha, "modules_to_save": heads or None})


kohya = Pairs("kohya", ((".lora_down.weight", ".lora_up.weight"),))
diffusers = Pairs(
    "diffusers",
    (
        (".lora_A.weight", ".lora_B.weight"),
        (".lora.down.weight", ".lora.up.weight"),
        (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
        ("_lora.down.weight", "_lora.up.weight"),
    ),
)
loralib = Pairs("loralib", ((".lora_A", ".lora_B"),), scaled_outside=True)
torchtune = Pairs("torchtune", ((".lora_a.weight", ".lora_b.weight"),), scaled_outside=True)
mlx = Pairs("mlx", ((".lora_a", ".lora_b"),), scaled_outside=True, transposed=True)


def pair_layer(name: str, roles: Roles, *, transposed: bool = False) -> LoraLayer:
    """One layer from its up, down, optional mid and optional alpha; without an alpha its scale is 1."""
    need(name, roles, ("up", "down"), ("mid", "alpha"))
    up, down = roles["up"], roles["down"]
    if transposed:
        up, down = _transposed(up), _transposed(down)
    if "mid" in roles:
        down = _through(roles["mid"], down)
    elif len(up.shape) == len(down.shape) == 2 and up.shape[1] < down.shape[0] and up.name.endswith(".lora_B"):
        _refuse_merged(name, up, down)
    kind = "embedding" if transposed and name.endswith(TABLES) else "linear"
    layer = low_rank_layer(name, up, down, 1.0, kind=kind)
    if "alpha" not in roles:
        return layer
    return replace(layer, scale=scalar(roles["alpha"]) / layer.rank, alpha=roles["alpha"])


def _header_scales(bundle: Bundle) -> dict[str, Scales]:
    """By component, from the configs that newer diffusers keeps in the header: ``{"unet.r": 8, …}``."""
    text = bundle.metadata.get(METADATA)
    if text is None:
        return {}
    fields: dict[str, dict[str, Any]] = {}
    for key, value in parse_json(text.encode(), bundle.weights, what=METADATA).items():
        component, _, field = key.partition(".")
        fields.setdefault(component, {})[field] = value
    configs = {component: Config({"peft_type": "LORA", **raw}, bundle.weights) for component, raw in fields.items()}
    for config in configs.values():
        check_supported(config)
    return {component: Scales(config) for component, config in configs.items()}


def _mlx_scale(bundle: Bundle) -> float | None:
    """The scale in mlx-lm's adapter_config.json."""
    if bundle.config is None:
        return None
    kind, settings = bundle.config.get("fine_tune_type", "lora"), bundle.config.get("lora_parameters")
    if kind != "lora":
        text = f"fine_tune_type is {ascii(kind)[:40]}: only lora is read; train with --fine-tune-type lora"
        raise UnsupportedError(text, path=bundle.config_path)
    if not isinstance(settings, Mapping):
        raise bundle.config_error("has neither peft_type (PEFT) nor lora_parameters (mlx-lm): whose config is it?")
    return Config(settings, bundle.config_path).number("scale")


def _module(stored: str, roles: Roles) -> str:
    """Module path of an old attention-processor key; other names are their own."""
    key = next(iter(roles.values())).name
    name = stored.replace(".processor.", ".")
    if not key.removeprefix(stored).startswith(PROCESSOR):
        return name
    head, _, last = name.rpartition(".")
    words = TEXT_NAMES if stored.startswith("text_encoder") else UNET_NAMES
    return f"{head}.{words.get(last, last)}" if head else words.get(last, last)


def _transposed(tensor: StoredTensor) -> StoredTensor:
    """The matrix as the records want it, still unread."""
    if len(tensor.shape) != 2:
        raise tensor.error(f"shape {tensor.shape}, expected a matrix; experts stored stacked are not read")
    return replace(tensor, shape=tensor.shape[::-1], fetch=lambda: tensor.read().T)


def _through(mid: StoredTensor, down: StoredTensor) -> StoredTensor:
    """The in side of a LoCon with a middle part: ``A[i, c, …] = Σ_j mid[i, j, …] down[j, c]``."""
    if len(mid.shape) < 3 or mid.shape[1] != down.shape[0] or math.prod(down.shape[2:]) != 1:
        raise CheckpointError(f"shape {mid.shape} does not fit {down.shape}", path=mid.path, tensor=mid.name)

    def product() -> Array:
        inner = down.load().reshape(down.shape[:2]).astype(np.float64)
        return np.moveaxis(np.tensordot(mid.load(), inner, axes=(1, 0)), -1, 1)

    return derived(down, (mid.shape[0], down.shape[1], *mid.shape[2:]), product)


def _refuse_merged(name: str, up: StoredTensor, down: StoredTensor) -> None:
    """loralib's MergedLinear: A of several parts over each other, B of each beside the other."""
    parts, rest = divmod(down.shape[0], max(up.shape[1], 1))
    if rest or not up.shape[1]:
        return
    text = (
        f"ranks {up.shape[1]} and {down.shape[0]}: a MergedLinear of {parts} enabled parts (enable_lora); "
        "which of its parts they are is not in the file, so it is not read. Unfold it: a block-diagonal "
        f"lora_B with all rows of the layer and {down.shape[0]} columns, zero rows for the other parts, "
        f"and {parts} times the alpha"
    )
    raise UnsupportedError(text, path=up.path, tensor=name)
