"""An adapter as a server would find it: the layers of a file, by the file's own names."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints import Checkpoint, StoredTensor, open_checkpoint
from lsrdecomp.checkpoints.records import Layer, LoraLayer
from lsrdecomp.checkpoints.writers.gguf import import_gguf
from lsrdecomp.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GGUF = "gguf"
MISSING = "the base has no module of that name"


def read_adapter(path: str | Path) -> Checkpoint:
    """Open the adapter at a path, a GGUF file of llama.cpp too; errors as of `open_checkpoint`."""
    path = Path(path)
    return _gguf(path) if path.suffix == ".gguf" else open_checkpoint(path)


def misfit(
    layer: Layer, module: str | None, shapes: Mapping[str, tuple[int, ...] | None]
) -> str | None:
    """Return what is wrong with the module that a layer is for; None if nothing is.

    There is none, or its weight, where its shape is known, has another size.
    """
    if module is None:
        return MISSING
    m, n = layer.out_features, layer.in_features
    weight = shapes[module]
    if weight is None:
        return None
    if len(weight) > 2:
        kernel = layer.kernel or (1,) * (len(weight) - 2)
        fits = weight[0] == m and weight[2:] == kernel and weight[1] * math.prod(kernel) == n
    elif layer.layer_type in ("conv1d", "embedding"):
        fits = weight == (n, m)
    else:
        fits = weight == (m, n)
    return None if fits else f"{m} x {n}, but its weight is {weight} in the base"


def export_command(adapter: Checkpoint, to: str, ending: str, name_of: Callable[[str], Any]) -> str:
    """Return the command that writes a file which is loaded.

    Where a layer has no name there, return why there is none. ``name_of`` gives the name.
    """
    if adapter.format == GGUF:
        return "a GGUF file is for llama.cpp; export what it was made from"
    try:
        for layer in adapter.layers:
            name_of(layer.name)
    except UnsupportedError as error:
        return str(error)
    heads = " --without-heads" if adapter.extras and "profile" not in to else ""
    stem = adapter.path.name.removesuffix(".safetensors")
    out = adapter.path.with_name(f"{stem}{ending}")
    return f"`lsrdecomp export {quote(str(adapter.path))} {to}{heads} --out {quote(str(out))}`"


def task_type(adapter: Checkpoint) -> str | None:
    """Return the task that PEFT would open the base for."""
    task = adapter.config.get("task_type")
    return task if isinstance(task, str) else None


def _gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of pairs ``.lora_a`` (r, n) and ``.lora_b`` (m, r).

    llama.cpp scales by alpha / r, and by 1 where alpha is 0. The config is the file's fields.
    """
    gguf = import_gguf()
    if not path.is_file():
        raise CheckpointError("no such file", path=path)
    try:
        reader = gguf.GGUFReader(path)
        names = ("general.type", "general.architecture", "adapter.type", "adapter.lora.alpha")
        fields = {name: reader.fields[name].contents() for name in names if name in reader.fields}
        tensors = {}
        for stored in reader.tensors:
            shape = tuple(int(side) for side in stored.shape[::-1])
            read = partial(gguf.dequantize, stored.data, stored.tensor_type)
            tensors[stored.name] = StoredTensor(stored.name, shape, "float32", path, read)
    except (OSError, KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"is no GGUF file: {str(error)[:200]}", path=path) from None
    alpha = float(fields.get("adapter.lora.alpha", 0.0))
    layers = []
    others = {}
    for name, tensor in tensors.items():
        module, _, half = name.rpartition(".")
        if half == "lora_b" and f"{module}.lora_a" in tensors:
            continue  # it goes with that half
        up = tensors.get(f"{module}.lora_b") if half == "lora_a" else None
        layer = None if up is None else _gguf_layer(module, up, tensor, alpha)
        if layer is None:
            others[name] = tensor
        else:
            layers.append(layer)
    return Checkpoint(path, GGUF, fields, tuple(layers), others, path)


def _gguf_layer(
    module: str, up: StoredTensor, down: StoredTensor, alpha: float
) -> LoraLayer | None:
    """Return the layer of two halves; None where they do not fit each other."""
    if len(down.shape) != 2 or len(up.shape) != 2:
        return None
    m, rank = up.shape
    is_table = module == "token_embd.weight"
    # Of an embedding the first half is stored transposed
    n, down_rank = down.shape if is_table else down.shape[::-1]
    if down_rank != rank:
        return None
    name = module.removesuffix(".weight")
    layer_type = "embedding" if is_table else "linear"
    scale = alpha / rank if alpha else 1.0
    return LoraLayer(name, layer_type, m, n, rank, scale, down.dtype, up, down)
