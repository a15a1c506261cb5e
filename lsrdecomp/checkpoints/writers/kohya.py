"""Kohya files written: module names flattened as loaders of such files expect them, alpha equal to the rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.checkpoints.tensors import Array, StoredTensor
from lsrdecomp.checkpoints.writers.single_file import no_name, write_single
from lsrdecomp.errors import UnsupportedError

COMPONENTS = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2"}
CLIP = ("encoder.layers.", "embeddings.", "final_layer_norm.")
"""Parts of a CLIP text model. Where they stand at its top, kohya's level ``text_model`` above them is missing."""


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

    Names that start with ``lora_`` are kept; diffusers names (``unet.…``, ``text_encoder.…``) are flattened, those of
    text encoders with the level ``text_model`` that such files have. Other arguments as for
    `lsrdecomp.checkpoints.write_lora`; ``out_file`` ends in .safetensors.

    Raises
    ------
    UnsupportedError
        For a layer that has no name in such files.
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
    """The flattened name, in the key layout published by loaders of kohya files; kohya's trainer was not read."""
    if name.startswith("lora_") and "." not in name:
        return name
    component, _, rest = name.partition(".")
    if component == "transformer":
        text = (
            "a transformer's layers have other names and sizes in kohya files (q, k, v in one); write diffusers instead"
        )
        raise UnsupportedError(f"{name}: {text}")
    if component not in COMPONENTS or not rest:
        raise no_name(name, "kohya", COMPONENTS)
    prefix = "lora_te1" if sdxl and component == "text_encoder" else COMPONENTS[component]
    level = "text_model." if component != "unet" and rest.startswith(CLIP) else ""
    return f"{prefix}_{(level + rest).replace('.', '_')}"
