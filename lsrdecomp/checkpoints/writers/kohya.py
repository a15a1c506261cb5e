"""Kohya files written: module names flattened as loaders of such files expect them, alpha equal to the rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.image_names import KOHYA, LANGUAGE, flat_name, split_component
from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.checkpoints.tensors import Array, StoredTensor
from lsrdecomp.checkpoints.writers.single_file import write_single
from lsrdecomp.errors import UnsupportedError


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

    Examples
    --------
    >>> import tempfile
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> up, down = np.ones((4, 1), np.float32), np.ones((1, 6), np.float32)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     file = write_kohya(Path(place) / "style.safetensors", layers=[("unet.mid_block.attn1.to_q", up, down)])
    ...     print([layer.name for layer in open_checkpoint(file).layers])
    ['lora_unet_mid_block_attn1_to_q']
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
    if name.startswith("transformer.") and not LANGUAGE.match(name):
        text = "a transformer's layers have other names and sizes in kohya files (q, k, v in one)"
        raise UnsupportedError(f"{name}: {text}; write diffusers instead")
    split_component(name, "kohya", KOHYA)
    flat = flat_name(name, sdxl=sdxl)
    assert flat is not None
    return flat
