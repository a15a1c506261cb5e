"""Files of image programs written: one safetensors file, layers named as kohya's or diffusers' loaders expect them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.format import PREFIX
from lsrdecomp.checkpoints.names import COMPONENTS, KOHYA, LANGUAGE, flat_name, split_component
from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.checkpoints.tensors import Array, StoredTensor
from lsrdecomp.checkpoints.writers.pair_writer import PairWriter
from lsrdecomp.checkpoints.writing import new_file
from lsrdecomp.errors import CheckpointError, UnsupportedError

KEYS = ("new", "old")


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
    text encoders with the level ``text_model`` that such files have.

    Parameters
    ----------
    out_file : str or Path
        Ends in .safetensors; must not exist, unless ``force``.
    layers, source, extras, storage, provenance
        As for `lsrdecomp.checkpoints.write_lora`.

    Returns
    -------
    Path
        ``out_file``.

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

    def module_of(name: str) -> tuple[str, str, str]:
        return kohya_name(name, sdxl=sdxl), ".lora_down.weight", ".lora_up.weight"

    return _write(out_file, layers, module_of, source, extras, storage, force, provenance, alphas=True)


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
    out_file : str or Path
        Ends in .safetensors; must not exist, unless ``force``.
    layers, source, extras, storage, provenance
        As for `lsrdecomp.checkpoints.write_lora`.
    keys : {"new", "old"}
        ``.lora_A.weight``, or ``.lora.down.weight`` (``.lora_linear_layer.`` in text encoders).

    Returns
    -------
    Path
        ``out_file``.

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

    def module_of(name: str) -> tuple[str, str, str]:
        check_diffusers_name(name)
        if keys == "new":
            return name, ".lora_A.weight", ".lora_B.weight"
        old = ".lora_linear_layer" if name.startswith("text_encoder") else ".lora"
        return name, f"{old}.down.weight", f"{old}.up.weight"

    return _write(out_file, layers, module_of, source, extras, storage, force, provenance)


def kohya_name(name: str, *, sdxl: bool = False) -> str:
    """What kohya's files call a layer; `UnsupportedError` for one that they have no name for."""
    if name.startswith("lora_") and "." not in name:
        return name
    if name.startswith("transformer.") and not LANGUAGE.match(name):
        text = "a transformer's layers have other names and sizes in kohya files (q, k, v in one)"
        raise UnsupportedError(f"{name}: {text}; write diffusers instead")
    split_component(name, "kohya", KOHYA)
    return str(flat_name(name, sdxl=sdxl))


def check_diffusers_name(name: str) -> None:
    """Raise `UnsupportedError` for a layer that diffusers' files do not name."""
    if name.startswith("lora_") and "." not in name:
        raise UnsupportedError(f"{name}: a flattened name cannot be undone; write kohya, which diffusers loads too")
    split_component(name, "diffusers", COMPONENTS)


def _write(
    out_file: str | Path,
    layers: Iterable[tuple[str, Array, Array]],
    module_of: Callable[[str], tuple[str, str, str]],
    source: Checkpoint | None,
    extras: Mapping[str, StoredTensor] | None,
    storage: str,
    force: bool,
    provenance: Mapping[str, Any] | None,
    *,
    alphas: bool = False,
) -> Path:
    """``module_of`` gives the file's name of a layer and the endings of A and B; with ``alphas``, the rank is one."""
    out = Path(out_file)
    if out.suffix != ".safetensors":
        raise CheckpointError("the name must end in .safetensors", path=out)
    extras = extras if extras is not None else (source.extras if source else {})
    with (
        new_file(out, inputs=(source.path, source.weights) if source else (), force=force) as part,
        PairWriter(out.absolute().parent, source) as writer,
    ):
        for name, up, down in layers:
            module, down_end, up_end = module_of(name)
            writer.add_pair(name, up, down, (module + down_end, module + up_end), storage)
            if alphas:
                writer.add(f"{module}.alpha", np.array(down.shape[0], np.float32))
        for key, tensor in extras.items():
            writer.add(key.removeprefix(PREFIX), tensor.read())
        writer.write(part, writer.record(provenance, storage=storage))
    return out
