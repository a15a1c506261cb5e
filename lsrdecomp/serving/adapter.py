"""An adapter as a server would find it: the layers of a file, by the file's own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.errors import CheckpointError, LsrError, UnsupportedError

GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One low-rank layer; ``shape`` is out x in, ``scale`` what its format multiplies ``B @ A`` by."""

    name: str
    shape: tuple[int, int]
    rank: int
    scale: float
    kind: str = "linear"
    kernel: tuple[int, ...] = ()

    def fits(self, weight: tuple[int, ...] | None) -> bool:
        """Whether it is of the size of a module's stored weight; a weight of unknown size is not held against it."""
        if weight is None:
            return True
        m, n = self.shape
        if len(weight) > 2:
            channels = n
            for side in self.kernel:
                channels //= side
            return weight == (m, channels, *(self.kernel or (1,) * (len(weight) - 2)))
        return weight == ((n, m) if self.kind in ("conv1d", "embedding") else (m, n))


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """What a file or directory holds."""

    path: Path
    format: str  # as `Checkpoint.format`, or "gguf"
    layers: tuple[StoredLayer, ...]
    extras: tuple[str, ...] = ()  # tensors that are no part of a layer
    config: Mapping[str, Any] = field(default_factory=dict)  # of a GGUF file, its fields

    def export(self, to: str, ending: str, name_of: Callable[[str], Any]) -> str:
        """The command that writes a file which is loaded, or why there is none: a layer that it has no name for."""
        if self.format == GGUF:
            return "a GGUF file is for llama.cpp; export what it was made from"
        try:
            for layer in self.layers:
                name_of(layer.name)
        except UnsupportedError as error:
            return str(error)
        heads = " --without-heads" if self.extras and "profile" not in to else ""
        out = self.path.with_name(f"{self.path.name.removesuffix('.safetensors')}{ending}")
        return f"`lsrdecomp export {quote(str(self.path))} {to}{heads} --out {quote(str(out))}`"

    @property
    def task_type(self) -> str | None:
        """What PEFT would open the base as."""
        task = self.config.get("task_type")
        return task if isinstance(task, str) else None


def read_adapter(path: str | Path) -> StoredAdapter:
    """The adapter at a path; a GGUF file of llama.cpp too. Errors are those of `open_checkpoint`."""
    path = Path(path)
    if path.suffix == ".gguf":
        return _gguf(path)
    checkpoint = open_checkpoint(path)
    layers = tuple(
        StoredLayer(x.name, (x.out_features, x.in_features), x.rank, x.scale, x.kind, tuple(x.kernel))
        for x in checkpoint.layers
    )
    return StoredAdapter(path, checkpoint.format, layers, tuple(checkpoint.extras), checkpoint.config)


def _gguf(path: Path) -> StoredAdapter:
    """Pairs of ``.lora_a`` (r, n) and ``.lora_b`` (m, r); llama.cpp scales by alpha / r, by 1 where alpha is 0."""
    try:
        import gguf
    except ImportError as error:
        raise LsrError("GGUF files need the package gguf: pip install gguf") from error
    if not path.is_file():
        raise CheckpointError("no such file", path=path)
    try:
        reader = gguf.GGUFReader(path)
        names = ("general.type", "general.architecture", "adapter.type", "adapter.lora.alpha")
        fields = {name: reader.fields[name].contents() for name in names if name in reader.fields}
        shapes = {tensor.name: tuple(int(side) for side in tensor.shape[::-1]) for tensor in reader.tensors}
    except (OSError, KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"is no GGUF file: {str(error)[:200]}", path=path) from None
    alpha, layers, others = float(fields.get("adapter.lora.alpha", 0.0)), [], []
    for name, shape in shapes.items():
        module, _, half = name.rpartition(".")
        up = shapes.get(f"{module}.lora_b")
        table = module == "token_embd.weight"  # of an embedding the first half is stored transposed
        if half == "lora_a" and up is not None and len(shape) == len(up) == 2 and up[1] == shape[int(table)]:
            rank, kind = up[1], "embedding" if table else "linear"
            size, scale = (up[0], shape[int(not table)]), alpha / rank if alpha else 1.0
            layers.append(StoredLayer(module.removesuffix(".weight"), size, rank, scale, kind))
        elif not (half == "lora_b" and f"{module}.lora_a" in shapes):
            others.append(name)
    return StoredAdapter(path, GGUF, tuple(layers), tuple(others), fields)
