"""Diffusers files written: one safetensors file, layers called by pipeline component and module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lsrdecomp.checkpoints.image_names import COMPONENTS, split_component
from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.checkpoints.tensors import Array, StoredTensor
from lsrdecomp.checkpoints.writers.single_file import write_single
from lsrdecomp.errors import CheckpointError, UnsupportedError

KEYS = ("new", "old")


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

    Raises
    ------
    UnsupportedError
        For a layer that is in no component of a pipeline, and for other tensors: diffusers loads no file that has them.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> up, down = np.ones((4, 1), np.float32), np.ones((1, 6), np.float32)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     file = write_diffusers(Path(place) / "style.safetensors", layers=[("unet.mid_block.attn1.to_q", up, down)])
    ...     print([layer.name for layer in open_checkpoint(file).layers])
    ['unet.mid_block.attn1.to_q']
    """
    if keys not in KEYS:
        raise CheckpointError(f"keys {keys!r} is not one of {', '.join(KEYS)}")

    others = list(extras if extras is not None else (source.extras if source else {}))
    if others:
        text = (
            f"{len(others)} tensors beside the adapter (the first {others[0]}): diffusers loads no file that holds such"
        )
        way_out = "leave them out by --without-heads (extras={}), or write lora, which keeps them"
        raise UnsupportedError(f"{text}; {way_out}", path=out_file)

    def tensors(name: str, up: Array, down: Array) -> Iterable[tuple[str, Array]]:
        if name.startswith("lora_") and "." not in name:
            raise UnsupportedError(f"{name}: a flattened name cannot be undone; write kohya, which diffusers loads too")
        split_component(name, "diffusers", COMPONENTS)
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
