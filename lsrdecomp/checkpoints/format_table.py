"""The table of formats, and the one way to open an adapter: from a path, a state dict or a PeftModel."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Protocol

from array_api_compat import is_torch_array

from lsrdecomp.arrays import to_numpy
from lsrdecomp.checkpoints.config import exact_pattern, module_suffixes
from lsrdecomp.checkpoints.format import CONFIG, PREFIX, AdapterFormat, Bundle, open_bundle
from lsrdecomp.checkpoints.packed import NUMBERS, PACKED
from lsrdecomp.checkpoints.readers import lsr
from lsrdecomp.checkpoints.readers.layouts import LAYOUTS
from lsrdecomp.checkpoints.tensors import DTYPES, Array, TensorWriter
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from lsrdecomp.checkpoints.records import Checkpoint

NAMED = re.compile(r".+\.lora_(?:A|B)\.([^.]+)\.weight")
WAY_OUT = "raise max_memory (--max-memory)"

FORMATS: tuple[AdapterFormat, ...] = (*LAYOUTS, lsr)
"""What `open_checkpoint` asks, in this order."""


class Model(Protocol):
    """What saves itself as an adapter directory, as a ``PeftModel`` does."""

    def save_pretrained(self, save_directory: str) -> Any: ...


AdapterSource = str | Path | Mapping[str, Any] | Model
"""What `open_checkpoint` reads."""


def open_checkpoint(
    path: AdapterSource,
    *,
    name: str | None = None,
    alpha: float | None = None,
    max_memory: int | None = None,
) -> Checkpoint:
    """Open an adapter: find its files, tell its format, check every header; numbers are read later, layer by layer.

    Parameters
    ----------
    path : str, Path, mapping or model
        An adapter directory or a weight file; a state dict with the keys of any format, or a
        ``PeftModel``, which are saved to a temporary directory that lives as long as what was read
        from it.
    name : str, optional
        Weight file or sub-directory to take where a directory has several.
    alpha : float, optional
        LoRA alpha, for formats whose files do not hold it, and for state dicts of PEFT.
    max_memory : int, optional
        Bytes that one layer as a LoRA in float64, or one other tensor, may take; larger ones are
        refused before they are read.

    Returns
    -------
    Checkpoint
        Layers, and everything else the files hold, none of it read yet.

    Raises
    ------
    CheckpointError
        One line with file, tensor, numbers and the way out, for anything missing, damaged or
        inconsistent.
    UnsupportedError
        For a sound file whose content is not expressed here: it is refused by name, never dropped.

    Examples
    --------
    >>> from importlib.resources import files
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> len(lora.layers), lora.adapter_parameters
    (12, 73728)

    What a program holds in memory:

    >>> import numpy as np
    >>> pair = {"lora_A.weight": np.ones((2, 6)), "lora_B.weight": np.ones((4, 2))}
    >>> arrays = {f"base_model.model.q_proj.{half}": array for half, array in pair.items()}
    >>> layer, = open_checkpoint(arrays, alpha=4).layers
    >>> layer.name, layer.out_features, layer.in_features, layer.rank, layer.scale
    ('q_proj', 4, 6, 2, 2.0)
    """
    if isinstance(path, str | PathLike):
        bundle = open_bundle(path, name, max_memory)
    else:
        bundle = bundle_in_memory(path, name, alpha)
        alpha = None if bundle.config is not None else alpha
    packed = bundle.tensors.get(PACKED) or bundle.tensors.get(NUMBERS)
    if packed is not None and max_memory is not None and packed.nbytes > max_memory:
        raise packed.error(
            f"its {packed.nbytes} bytes are read whole, above the {max_memory} allowed; {WAY_OUT}"
        )
    _refuse_adapter_names(bundle.tensors, "save it by save_pretrained", bundle.weights)
    for form in FORMATS:
        if form.matches(bundle):
            checkpoint = form.read(bundle, alpha=alpha)
            if max_memory is not None:
                _check_memory(checkpoint, max_memory)
            return checkpoint
    if bundle.tensors and all(re.fullmatch(r"<.+>", key) for key in bundle.tensors):
        raise CheckpointError(
            f"holds {len(bundle.tensors)} token embeddings and no LoRA layer", path=bundle.weights
        )
    examples = ", ".join(map(repr, list(bundle.tensors)[:3])) or "nothing"
    readable = ", ".join(form.name for form in FORMATS)
    text = f"no adapter format known here: it holds {examples}; read are {readable}"
    raise CheckpointError(text, path=bundle.weights)


def _refuse_adapter_names(keys: Iterable[str], way_out: str, path: Path | None = None) -> None:
    """Keys as a running PeftModel has them, ``lora_A.default.weight``: no program reads such files, PEFT included."""
    for key in keys:
        named = NAMED.fullmatch(key)
        if named is not None:
            text = f"names the adapter {named[1]!r} in its keys: saved by state_dict(), which PEFT does not read"
            raise UnsupportedError(
                f"{text}; {way_out}, or take '.{named[1]}' out of the keys", path=path, tensor=key
            )


def _check_memory(checkpoint: Checkpoint, most: int) -> None:
    # Of the factors or of the LoRA they expand to, whichever are more: a small file can imply a
    # huge layer.
    layers = [
        (x.name, max(x.parameters, x.rank * (x.out_features + x.in_features)))
        for x in checkpoint.layers
    ]
    sizes = [(name, numbers, 8) for name, numbers in layers]
    sizes += [
        (key, tensor.parameters, DTYPES[tensor.dtype].itemsize)
        for key, tensor in checkpoint.extras.items()
    ]
    for name, numbers, width in sizes:
        if numbers * width > most:
            text = f"its {numbers} numbers take {numbers * width} bytes, above the {most} allowed; {WAY_OUT}"
            raise CheckpointError(text, path=checkpoint.weights, tensor=name)


# -- adapters in the memory of a program: saved to a temporary directory and read there ------------

DOWN = (".lora_A.weight", ".lora_embedding_A")


class _Folder:
    """A temporary directory that goes when nothing can read from it any more."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="lsrdecomp-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def bundle_in_memory(
    adapter: Mapping[str, Any] | Model, name: str | None, alpha: float | None
) -> Bundle:
    """The bundle of a state dict or a model; of PEFT's keys ``alpha`` goes into the config that they lack."""
    folder = _Folder()
    directory = folder.path / "adapter"
    if isinstance(adapter, Mapping):
        _refuse_adapter_names(
            map(str, adapter), "give the PeftModel itself, or get_peft_model_state_dict of it"
        )
        directory.mkdir()
        arrays = {str(key): _array(str(key), value) for key, value in adapter.items()}
        if any(key.startswith(PREFIX) for key in arrays):
            (directory / CONFIG).write_text(json.dumps(_config(arrays, alpha)), encoding="utf-8")
        with TensorWriter(directory) as writer:
            for key, array in arrays.items():
                writer.add(key, array)
            writer.write(directory / WEIGHTS, {"format": "pt"})
    elif hasattr(adapter, "save_pretrained"):
        adapter.save_pretrained(str(directory))
    else:
        kind = type(adapter).__name__
        raise CheckpointError(
            f"expected a path, a state dict or a PeftModel, got an object of type {kind}"
        )
    bundle = open_bundle(directory, name)
    tied = {
        key: replace(tensor, fetch=partial(_read, tensor.fetch, folder))
        for key, tensor in bundle.tensors.items()
    }
    return replace(bundle, tensors=tied)


def _read(fetch: Callable[[], Array], folder: _Folder) -> Array:
    """A tensor's numbers; ``folder`` is held by the tensors that lie in it."""
    return fetch()


def _config(arrays: Mapping[str, Array], alpha: float | None) -> dict[str, Any]:
    """The adapter_config.json that a state dict of PEFT has lost, but for its alpha."""
    ranks = {
        key.removeprefix(PREFIX).removesuffix(half): len(array)
        for key, array in arrays.items()
        for half in DOWN
        if array.ndim and key.endswith(half)
    }
    if alpha is None:
        text = f"a state dict with PEFT's keys, of rank {', '.join(map(str, sorted(set(ranks.values()))))}"
        way_out = "give open_checkpoint alpha=, as lora_alpha was, or the PeftModel itself"
        raise CheckpointError(f"{text}: its alpha is not in it; {way_out}")
    rank = next(iter(ranks.values()), 1)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {
            exact_pattern(module): own for module, own in ranks.items() if own != rank
        },
        "target_modules": module_suffixes(ranks),
    }


def _array(key: str, value: Any) -> Array:
    """The bits of a tensor; NumPy has no bfloat16 of torch's."""
    try:
        if is_torch_array(value) and str(value.dtype) == "torch.bfloat16":
            import torch

            return (
                value.detach().cpu().contiguous().view(torch.int16).numpy().view(DTYPES["bfloat16"])
            )
        return to_numpy(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"is no tensor that can be stored: {str(error)[:120]}", tensor=key
        ) from None
