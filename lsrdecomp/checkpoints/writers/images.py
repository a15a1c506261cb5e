"""Files of image programs written: one safetensors file, layers named as kohya's or diffusers' loaders expect them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

NAMES = ("kohya", "diffusers")
KEYS = ("new", "old")


def write_image_file(
    names: str,
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
    """Write a file that kohya's or diffusers' loaders read, with ``ΔW = B @ A``: the scale must be in B already.

    In kohya's, alpha is the rank everywhere. Names that start with ``lora_`` are kept there; diffusers names
    (``unet.…``, ``text_encoder.…``) are flattened, those of text encoders with the level ``text_model`` that such files
    have. In diffusers' there is no scale.

    Parameters
    ----------
    names : {"kohya", "diffusers"}
        Whose names of layers.
    out_file : str or Path
        Ends in .safetensors; must not exist, unless ``force``.
    layers, source, extras, storage, provenance
        As for `lsrdecomp.checkpoints.write_lora`.
    keys : {"new", "old"}
        Of diffusers: ``.lora_A.weight``, or ``.lora.down.weight`` (``.lora_linear_layer.`` in text encoders).

    Returns
    -------
    Path
        ``out_file``.

    Raises
    ------
    UnsupportedError
        For a layer that has no name in such files; for diffusers also for other tensors, with which it loads no file.

    Examples
    --------
    >>> import tempfile
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> up, down = np.ones((4, 1), np.float32), np.ones((1, 6), np.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     layers = [("unet.mid_block.attn1.to_q", up, down)]
    ...     file = write_image_file("kohya", Path(folder) / "style.safetensors", layers=layers)
    ...     print([layer.name for layer in open_checkpoint(file).layers])
    ['lora_unet_mid_block_attn1_to_q']
    """
    out = Path(out_file)
    for value, options, what in ((names, NAMES, "names"), (keys, KEYS, "keys")):
        if value not in options:
            raise CheckpointError(f"{what} {value!r} is not one of {', '.join(options)}")
    if out.suffix != ".safetensors":
        raise CheckpointError("the name must end in .safetensors", path=out)
    extras = extras if extras is not None else (source.extras if source else {})
    if extras and names == "diffusers":
        first = next(iter(extras))
        text = f"{len(extras)} tensors beside the adapter (the first {first}): diffusers loads no file that holds such"
        way_out = "leave them out by --without-heads (extras={}), or write lora, which keeps them"
        raise UnsupportedError(f"{text}; {way_out}", path=out)
    sdxl = source is not None and any(layer.name.startswith("text_encoder_2.") for layer in source.layers)
    with (
        new_file(out, inputs=(source.path, source.weights) if source else (), force=force) as part,
        PairWriter(out.absolute().parent, source) as writer,
    ):
        for name, up, down in layers:
            if names == "kohya":
                module, ends = kohya_name(name, sdxl=sdxl), (".lora_down.weight", ".lora_up.weight")
                writer.add(f"{module}.alpha", np.array(down.shape[0], np.float32))
            else:
                check_diffusers_name(name)
                module, ends = name, _diffusers_ends(name, keys)
            writer.add_pair(name, up, down, (module + ends[0], module + ends[1]), storage)
        for key, tensor in extras.items():
            writer.add(key.removeprefix(PREFIX), tensor.read())
        writer.write(part, writer.record(provenance, storage=storage))
    return out


def _diffusers_ends(name: str, keys: str) -> tuple[str, str]:
    """The endings of A and B."""
    if keys == "new":
        return ".lora_A.weight", ".lora_B.weight"
    old = ".lora_linear_layer" if name.startswith("text_encoder") else ".lora"
    return f"{old}.down.weight", f"{old}.up.weight"


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
