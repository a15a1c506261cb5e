"""Export of any adapter as a plain LoRA of the same ΔW, for tools that load LoRA."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.checkpoints import (
    BaseModules,
    Checkpoint,
    GgufBase,
    StoredTensor,
    read_base,
    read_modules,
    write_gguf,
    write_lora,
    write_pairs,
)
from lsrdecomp.checkpoints.experts import Stacks
from lsrdecomp.checkpoints.families import EQUAL_SIZES, family, missing_layers
from lsrdecomp.checkpoints.integrity import check_integrity
from lsrdecomp.checkpoints.provenance import read_provenance
from lsrdecomp.checkpoints.writers.peft import PROFILES
from lsrdecomp.compression.layers import layer_product
from lsrdecomp.compression.result import recorded_errors
from lsrdecomp.errors import CheckpointError, UnsupportedError, unknown
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lsrdecomp.checkpoints.tensors import Array

LINEAR_TYPES = ("linear", "conv1d")
EXPORT_FORMATS = ("lora", "same", "gguf", "kohya", "diffusers")


@one_blas_thread
def export_lora(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    to: str = "lora",
    storage: str | None = None,
    profile: str = "common",
    force: bool = False,
    base: str | Path | None = None,
    like: Checkpoint | None = None,
    without_heads: bool = False,
) -> Path:
    """Write a plain LoRA of the same ΔW, with the inner ranks of the LSR layers.

    LSR factors expand to LoRA factors, so nothing is lost beyond rounding to ``storage``.

    Parameters
    ----------
    checkpoint : Checkpoint
    out : path
        A directory for "lora", a file for "kohya", "diffusers" and "gguf"; for "same", the same as
        ``like``.
    to : str
        The format: "lora" (PEFT), "kohya", "diffusers", "gguf" (llama.cpp), or "same" for that of
        ``like``, see `write_pairs`.
    storage : str, optional
        Type of the numbers; absent, the checkpoint's own (float32 for codes), that of ``like`` for
        "same", or f16 for "gguf", which can also have f32 and q8_0.
    profile : str
        For "lora": "common", one rank for all layers, no patterns, and zeros for layers that were
        left out, which every server reads alike; or "peft", each layer at its own rank, for PEFT
        alone. See `lsrdecomp.checkpoints.write_lora`.
    base : path, optional
        For "gguf", which needs it: the base as GGUF file, model directory or config.json; absent,
        the directory that the adapter's config names. For
        "common": its layers that lack a pair, where others of their kind have one, become zeros.
    like : Checkpoint, optional
        For "same": the file whose format to write; absent, the checkpoint itself, which must be a
        LoRA then.
    without_heads : bool
        Leave out all tensors beside the layers: saved heads, biases, token embeddings. A format
        that cannot hold them refuses them otherwise.

    Returns
    -------
    Path
        The directory or file.

    Raises
    ------
    UnsupportedError
        For an unknown format.
    CheckpointError
        If ``out`` exists (unless ``force``), or a file of the checkpoint changed since it was
        written, by its SHA256SUMS or the digests in its header.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress, open_checkpoint
    >>> demo = files("lsrdecomp.cli") / "demo_adapter"
    >>> result = compress(demo, separation_rank=2, inner_shape=(2, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     small = open_checkpoint(result.save(f"{folder}/small"))
    ...     lora = open_checkpoint(export_lora(small, f"{folder}/lora"))
    >>> small.format, lora.format, lora.layers[0].rank
    ('lsr', 'peft-lora', 8)
    """
    checkpoint.watch_source()
    integrity = check_integrity(checkpoint)
    if integrity.changed:
        raise CheckpointError(
            f"{', '.join(integrity.changed)} changed since it was written; copy or compress it "
            f"again, or take it as it is: lsrdecomp verify SOURCE {checkpoint.path} --accept",
            path=checkpoint.weights.parent,
        )
    # 1. Turn every layer into a pair.
    layers: Iterable[tuple[str, Array, Array]] = (
        (layer.name, *layer_product(layer).to_lora()) for layer in checkpoint.layers
    )
    if profile not in PROFILES:
        raise UnsupportedError(f"there is no profile {unknown(profile, PROFILES)}")
    largest_rank = None
    if profile == "common" and to == "lora":
        stacks = Stacks(checkpoint.config, checkpoint.path)
        if not stacks.targets:  # a stack of experts holds zeros for those that are missing
            layers = chain(layers, _zeros_for_missing_layers(checkpoint, base))
        largest_rank = max((layer.rank for layer in checkpoint.layers), default=1)
    extras: dict[str, StoredTensor] | None = {} if without_heads else None
    # 2. Repeat the record of the checkpoint, with which `verify` will compare the file.
    record: dict[str, Any] = {
        "derived_from": read_provenance(checkpoint),
        "recorded": recorded_errors(checkpoint),
    }
    if extras is not None:
        record["left_out"] = sorted(checkpoint.extras)
    # 3. Write the format.
    if to == "same" and (like or checkpoint).format == "gguf":
        to = "gguf"
        base = base or (like or checkpoint).weights
    content: dict[str, Any] = {"layers": layers, "extras": extras, "force": force}
    if to == "gguf":
        gguf_base = _gguf_base(checkpoint, base)
        gguf_storage = _gguf_storage(storage)
        return write_gguf(out, base=gguf_base, source=checkpoint, storage=gguf_storage, **content)
    content["provenance"] = record
    if to == "same":
        return write_pairs(out, source=like or checkpoint, storage=storage, **content)
    storage = storage or checkpoint.storage
    if to == "lora":
        content |= {"profile": profile, "rank": largest_rank}
        return write_lora(out, source=checkpoint, storage=storage, **content)
    if to in ("kohya", "diffusers"):
        return write_pairs(out, source=checkpoint, storage=storage, names=to, **content)
    raise UnsupportedError(f"cannot write {unknown(to, EXPORT_FORMATS)}")


def _zeros_for_missing_layers(
    checkpoint: Checkpoint, base: str | Path | None
) -> Iterator[tuple[str, Array, Array]]:
    """Yield a pair of rank 1 that is zero for each layer that a server would miss.

    Servers that stack the layers of a type, or q, k and v of one, lose all of them where one is
    missing. Which are: those that a compression left out, and those of a base that is given.
    """
    adapted = {layer.name: layer for layer in checkpoint.layers}
    sizes = _sizes_by_family(checkpoint)
    missing: dict[str, tuple[int, int] | None] = {}
    for name in read_provenance(checkpoint).get("dropped", ()):
        word = name.rpartition(".")[2]
        of_kind = sizes.get(family(name)) or sizes.get(word)
        missing[name] = of_kind or sizes.get(EQUAL_SIZES.get(word, word))
    if base is not None:
        modules = read_modules(base)
        linear = [name for name, layer in adapted.items() if layer.layer_type in LINEAR_TYPES]
        for name in missing_layers(linear, modules):
            missing[name] = missing.get(name) or _size_in_base(name, modules, checkpoint)
    for name, size in missing.items():
        if size is None or name in adapted:
            continue  # its size is that of no layer here: nothing stacks with it
        m, n = size
        yield name, np.zeros((m, 1), np.float32), np.zeros((1, n), np.float32)


def _sizes_by_family(checkpoint: Checkpoint) -> dict[str, tuple[int, int] | None]:
    """Return sizes of linear layers by family and by last word; None where several differ."""
    sizes: dict[str, tuple[int, int] | None] = {}
    for layer in checkpoint.layers:
        size = layer.out_features, layer.in_features
        for key in (family(layer.name), layer.name.rpartition(".")[2]):
            is_known = layer.layer_type in LINEAR_TYPES and sizes.get(key, size) == size
            sizes[key] = size if is_known else None
    return sizes


def _size_in_base(name: str, base: BaseModules, checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Return out x in of a linear layer of a base; None where its weight says no such thing."""
    stored = base.find(name)
    shape = None if stored is None else base.shapes[stored]
    if shape is None or len(shape) != 2:
        return None
    is_transposed = any(layer.layer_type == "conv1d" for layer in checkpoint.layers)
    return (shape[1], shape[0]) if is_transposed else (shape[0], shape[1])


def _gguf_storage(storage: str | None) -> str:
    """Return llama.cpp's name of a type; half precision if none is given."""
    words = {None: "f16", "float16": "f16", "float32": "f32"}
    return words.get(storage, storage or "f16")


def _gguf_base(checkpoint: Checkpoint, base: str | Path | None) -> GgufBase:
    """Return the base whose names a GGUF file needs: as given, or as the adapter's config names."""
    if base is None and checkpoint.format == "gguf":
        base = checkpoint.weights
    named = checkpoint.config.get("base_model_name_or_path")
    if base is None and isinstance(named, str) and (Path(named) / "config.json").is_file():
        base = named
    if base is not None:
        return read_base(base)
    text = "names no base"
    if named is not None:
        text = f"its base {ascii(named)[:80]} is no directory here"
    raise CheckpointError(
        f"{text}, and a GGUF file follows its base's names and heads; name it by --base: "
        "a GGUF file, a model directory or its config.json",
        path=checkpoint.path,
    )
