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
    """The adapter at a path; a GGUF file of llama.cpp too. Errors are those of `open_checkpoint`."""
    path = Path(path)
    return _gguf(path) if path.suffix == ".gguf" else open_checkpoint(path)


def misfit(
    layer: Layer, module: str | None, shapes: Mapping[str, tuple[int, ...] | None]
) -> str | None:
    """What is wrong with the module that a layer is for: there is none, or its weight, if known, has another size."""
    if module is None:
        return MISSING
    m, n, weight = layer.out_features, layer.in_features, shapes[module]
    if weight is None:
        return None
    if len(weight) > 2:
        kernel = layer.kernel or (1,) * (len(weight) - 2)
        fits = weight[0] == m and weight[2:] == kernel and weight[1] * math.prod(kernel) == n
    else:
        fits = weight == ((n, m) if layer.layer_type in ("conv1d", "embedding") else (m, n))
    return None if fits else f"{m} x {n}, but its weight is {weight} in the base"


def export_command(adapter: Checkpoint, to: str, ending: str, name_of: Callable[[str], Any]) -> str:
    """The command that writes a file which is loaded, or why there is none: a layer that it has no name for."""
    if adapter.format == GGUF:
        return "a GGUF file is for llama.cpp; export what it was made from"
    try:
        for layer in adapter.layers:
            name_of(layer.name)
    except UnsupportedError as error:
        return str(error)
    heads = " --without-heads" if adapter.extras and "profile" not in to else ""
    out = adapter.path.with_name(f"{adapter.path.name.removesuffix('.safetensors')}{ending}")
    return f"`lsrdecomp export {quote(str(adapter.path))} {to}{heads} --out {quote(str(out))}`"


def task_type(adapter: Checkpoint) -> str | None:
    """What PEFT would open the base as."""
    task = adapter.config.get("task_type")
    return task if isinstance(task, str) else None


def _gguf(path: Path) -> Checkpoint:
    """Pairs of ``.lora_a`` (r, n) and ``.lora_b`` (m, r); llama.cpp scales by alpha / r, by 1 where alpha is 0.

    The config is the fields of the file.
    """
    gguf = import_gguf()
    if not path.is_file():
        raise CheckpointError("no such file", path=path)
    try:
        reader = gguf.GGUFReader(path)
        names = ("general.type", "general.architecture", "adapter.type", "adapter.lora.alpha")
        fields = {name: reader.fields[name].contents() for name in names if name in reader.fields}
        tensors = {
            stored.name: StoredTensor(
                stored.name,
                tuple(int(side) for side in stored.shape[::-1]),
                "float32",
                path,
                partial(gguf.dequantize, stored.data, stored.tensor_type),
            )
            for stored in reader.tensors
        }
    except (OSError, KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"is no GGUF file: {str(error)[:200]}", path=path) from None
    alpha, layers, others = float(fields.get("adapter.lora.alpha", 0.0)), [], {}
    for name, down in tensors.items():
        module, _, half = name.rpartition(".")
        up = tensors.get(f"{module}.lora_b")
        table = module == "token_embd.weight"  # of an embedding the first half is stored transposed
        fits = (
            up is not None
            and len(down.shape) == len(up.shape) == 2
            and up.shape[1] == down.shape[int(table)]
        )
        if half == "lora_a" and up is not None and fits:
            (m, rank), n = up.shape, down.shape[int(not table)]
            kind, scale = "embedding" if table else "linear", alpha / rank if alpha else 1.0
            layers.append(
                LoraLayer(
                    module.removesuffix(".weight"), kind, m, n, rank, scale, down.dtype, up, down
                )
            )
        elif not (half == "lora_b" and f"{module}.lora_a" in tensors):
            others[name] = down
    return Checkpoint(path, GGUF, fields, tuple(layers), others, path)
