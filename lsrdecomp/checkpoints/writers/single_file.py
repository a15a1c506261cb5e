"""Writing one safetensors file of low-rank pairs, for formats without a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.format import PREFIX
from lsrdecomp.checkpoints.provenance import metadata
from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.checkpoints.tensors import Array, StoredTensor
from lsrdecomp.checkpoints.writers.peft import check_pair
from lsrdecomp.checkpoints.writers.rounding import Rounding
from lsrdecomp.checkpoints.writing import TensorWriter, cast, new_file
from lsrdecomp.errors import CheckpointError

Namer = Callable[[str, Array, Array], Iterable[tuple[str, Array]]]


def write_single(
    out_file: str | Path,
    *,
    layers: Iterable[tuple[str, Array, Array]],
    tensors: Namer,
    source: Checkpoint | None,
    extras: Mapping[str, StoredTensor] | None,
    storage: str,
    force: bool,
    provenance: Mapping[str, Any] | None,
) -> Path:
    """Write the tensors that ``tensors(name, B, A)`` names for each layer; convolutions get their kernel back."""
    out = Path(out_file)
    if out.suffix != ".safetensors":
        raise CheckpointError("the name must end in .safetensors", path=out)
    extras = extras if extras is not None else (source.extras if source else {})
    known = {layer.name: layer for layer in source.layers} if source else {}
    rounding = Rounding()
    with (
        new_file(out, inputs=(source.path, source.weights) if source else (), force=force) as part,
        TensorWriter(out.absolute().parent) as writer,
    ):
        for name, up, down in layers:
            layer = known.get(name)
            check_pair(name, up, down, layer)
            if layer is not None and layer.kernel:
                down = down.reshape(down.shape[0], -1, *layer.kernel)
                up = up.reshape(*up.shape, *(1 for _ in layer.kernel))
            halves = []
            for key, array in tensors(name, np.asarray(up), np.asarray(down)):
                stored = cast(array, storage if array.ndim else "float32", key)
                writer.add(key, stored)
                halves += [stored] if array.ndim else []
            rounding.add(_matrix(up), _matrix(down), _matrix(halves[1]), _matrix(halves[0]))
        if not writer.tensors:
            raise CheckpointError("no layers to write", path=out)
        for key, tensor in extras.items():
            writer.add(key.removeprefix(PREFIX), tensor.read())
        facts = {"sha256": writer.sha256(), **rounding.to_json()}
        writer.write(part, metadata(source, provenance, storage=storage, **facts))
    return out


def _matrix(half: Array) -> Array:
    """Without its kernel."""
    return half.reshape(half.shape[0], -1)
