"""Kohya files: ``lora_unet_….lora_down.weight``, ``.lora_up.weight``, ``.alpha``, convolutions, LoCon's middle part."""

from __future__ import annotations

import math

import numpy as np

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.format import finish, refuse_alpha
from lsrdecomp.checkpoints.modules import Roles, grouped, need, scalar
from lsrdecomp.checkpoints.records import Checkpoint, LoraLayer, low_rank_layer
from lsrdecomp.checkpoints.tensors import Array, StoredTensor, derived
from lsrdecomp.errors import CheckpointError

name = "kohya"
SUFFIXES = {".lora_up.weight": "up", ".lora_down.weight": "down", ".lora_mid.weight": "mid", ".alpha": "alpha"}


def matches(bundle: Bundle) -> bool:
    """Some key ends in .lora_down.weight or .lora_up.weight."""
    ends = (".lora_down.weight", ".lora_up.weight")
    return bundle.config is None and any(key.endswith(ends) for key in bundle.tensors)


def read(bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
    """Layers under the file's own flattened names; without an alpha the scale is 1, as trainers and loaders hold."""
    refuse_alpha(bundle, alpha)
    modules, extras = grouped(bundle, SUFFIXES)
    return finish(bundle, name, [lora_layer(module, roles) for module, roles in modules.items()], extras)


def lora_layer(name: str, roles: Roles) -> LoraLayer:
    """One layer from its up, down, optional mid and optional alpha."""
    need(name, roles, ("up", "down"), ("mid", "alpha"))
    up, down = roles["up"], roles["down"]
    if "mid" in roles:
        down = _through(roles["mid"], down)
    layer = low_rank_layer(name, up, down, 1.0)
    if "alpha" not in roles:
        return layer
    return low_rank_layer(name, up, down, scalar(roles["alpha"]) / layer.rank)


def _through(mid: StoredTensor, down: StoredTensor) -> StoredTensor:
    """The in side of a LoCon with a middle part: ``A[i, c, …] = Σ_j mid[i, j, …] down[j, c]``."""
    if len(mid.shape) < 3 or mid.shape[1] != down.shape[0] or math.prod(down.shape[2:]) != 1:
        raise CheckpointError(f"shape {mid.shape} does not fit {down.shape}", path=mid.path, tensor=mid.name)

    def product() -> Array:
        inner = down.load().reshape(down.shape[:2]).astype(np.float64)
        return np.moveaxis(np.tensordot(mid.load(), inner, axes=(1, 0)), -1, 1)

    return derived(mid, (mid.shape[0], down.shape[1], *mid.shape[2:]), product)
