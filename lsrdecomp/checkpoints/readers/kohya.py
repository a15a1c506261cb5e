"""Kohya files: ``lora_unet_….lora_down.weight``, ``.lora_up.weight``, ``.alpha``, convolutions, LoCon's middle part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.modules import Roles, grouped, need, scalar
from lsrdecomp.checkpoints.readers.peft import finish
from lsrdecomp.checkpoints.records import Checkpoint, LoraLayer, low_rank_layer
from lsrdecomp.checkpoints.tensors import Array, StoredTensor, derived
from lsrdecomp.checkpoints.writers.single_file import write_single
from lsrdecomp.errors import CheckpointError, UnsupportedError

SUFFIXES = {".lora_up.weight": "up", ".lora_down.weight": "down", ".lora_mid.weight": "mid", ".alpha": "alpha"}
COMPONENTS = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2", "transformer": "lora_unet"}


def matches(bundle: Bundle) -> bool:
    """Some key ends in .lora_down.weight or .lora_up.weight."""
    ends = (".lora_down.weight", ".lora_up.weight")
    return bundle.config is None and any(key.endswith(ends) for key in bundle.tensors)


def read(bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
    """Layers under the file's own flattened names; without an alpha the scale is 1, as trainers and loaders hold."""
    if alpha is not None:
        raise bundle.metadata_error("alpha is in the file; leave alpha= out")
    modules, extras = grouped(bundle, SUFFIXES)
    return finish(bundle, "kohya", [lora_layer(name, roles) for name, roles in modules.items()], extras)


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


def write_kohya(
    out_file: str | Path,
    *,
    layers: Iterable[tuple[str, Array, Array]],
    source: Checkpoint | None = None,
    extras: Mapping[str, StoredTensor] | None = None,
    storage: str = "float32",
    force: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a kohya file with ``ΔW = B @ A``: alpha is the rank everywhere, so the scale must be in B already.

    Names that start with ``lora_`` are kept; diffusers names (``unet.…``, ``text_encoder.…``) are flattened. Other
    arguments as for `lsrdecomp.checkpoints.write_lora`; ``out_file`` ends in .safetensors.
    """
    sdxl = source is not None and any(layer.name.startswith("text_encoder_2.") for layer in source.layers)

    def tensors(name: str, up: Array, down: Array) -> Iterable[tuple[str, Array]]:
        flat = _flat(name, sdxl)
        yield f"{flat}.lora_down.weight", down
        yield f"{flat}.lora_up.weight", up
        yield f"{flat}.alpha", np.array(float(down.shape[0]))

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


def _flat(name: str, sdxl: bool) -> str:
    if name.startswith("lora_") and "." not in name:
        return name
    component, _, rest = name.partition(".")
    if component not in COMPONENTS or not rest:
        known = ", ".join(f"{component}." for component in COMPONENTS)
        raise UnsupportedError(f"{name}: kohya files name layers of {known} only; write PEFT or diffusers instead")
    prefix = "lora_te1" if sdxl and component == "text_encoder" else COMPONENTS[component]
    return f"{prefix}_{rest.replace('.', '_')}"


def _through(mid: StoredTensor, down: StoredTensor) -> StoredTensor:
    """The in side of a LoCon with a middle part: ``A[i, c, …] = Σ_j mid[i, j, …] down[j, c]``."""
    if len(mid.shape) < 3 or mid.shape[1] != down.shape[0] or math.prod(down.shape[2:]) != 1:
        raise CheckpointError(f"shape {mid.shape} does not fit {down.shape}", path=mid.path, tensor=mid.name)

    def product() -> Array:
        inner = down.load().reshape(down.shape[:2]).astype(np.float64)
        return np.moveaxis(np.tensordot(mid.load(), inner, axes=(1, 0)), -1, 1)

    return derived(mid, (mid.shape[0], down.shape[1], *mid.shape[2:]), product)
