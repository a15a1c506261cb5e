"""Adapters in the memory of a program, a state dict or a PeftModel: saved to a temporary directory and read there."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol

from array_api_compat import is_torch_array

from lsrdecomp.arrays import to_numpy
from lsrdecomp.checkpoints.bundle import CONFIG, Bundle, open_bundle
from lsrdecomp.checkpoints.config import exact_pattern
from lsrdecomp.checkpoints.format import PREFIX
from lsrdecomp.checkpoints.safetensors import TensorWriter
from lsrdecomp.checkpoints.tensors import DTYPES, Array
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.errors import CheckpointError

DOWN = (".lora_A.weight", ".lora_embedding_A")


class Model(Protocol):
    """What saves itself as an adapter directory, as a ``PeftModel`` does."""

    def save_pretrained(self, save_directory: str) -> Any: ...


AdapterSource = str | Path | Mapping[str, Any] | Model
"""What `open_checkpoint` reads."""


class _Folder:
    """A temporary directory that goes when nothing can read from it any more."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="lsrdecomp-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def bundle_in_memory(adapter: Mapping[str, Any] | Model, name: str | None, alpha: float | None) -> Bundle:
    """The bundle of a state dict or a model; of PEFT's keys ``alpha`` goes into the config that they lack."""
    folder = _Folder()
    directory = folder.path / "adapter"
    if isinstance(adapter, Mapping):
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
        raise CheckpointError(f"expected a path, a state dict or a PeftModel, got an object of type {kind}")
    bundle = open_bundle(directory, name)
    tied = {key: replace(tensor, fetch=partial(_read, tensor.fetch, folder)) for key, tensor in bundle.tensors.items()}
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
        "rank_pattern": {exact_pattern(module): own for module, own in ranks.items() if own != rank},
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
    }


def _array(key: str, value: Any) -> Array:
    """The bits of a tensor; NumPy has no bfloat16 of torch's."""
    try:
        if is_torch_array(value) and str(value.dtype) == "torch.bfloat16":
            import torch

            return value.detach().cpu().contiguous().view(torch.int16).numpy().view(DTYPES["bfloat16"])
        return to_numpy(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"is no tensor that can be stored: {str(error)[:120]}", tensor=key) from None
