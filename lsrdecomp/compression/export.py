"""Export of any adapter as a plain LoRA of the same ΔW, for tools that load LoRA."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.checkpoints import (
    Checkpoint,
    GgufBase,
    StoredTensor,
    read_base,
    read_modules,
    write_gguf,
    write_lora,
    write_pairs,
)
from lsrdecomp.checkpoints.integrity import check_integrity
from lsrdecomp.checkpoints.positional import resolve_positions
from lsrdecomp.checkpoints.provenance import read_provenance
from lsrdecomp.compression.layers import layer_product
from lsrdecomp.compression.result import recorded_errors
from lsrdecomp.errors import CheckpointError, UnsupportedError, unknown
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lsrdecomp.checkpoints.tensors import Array

EXPORT_FORMATS = ("lora", "same", "gguf", "kohya", "diffusers")


@one_blas_thread
def export_lora(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    to: str = "lora",
    storage: str | None = None,
    profile: str = "peft",
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
        For "lora": "peft"; "server", each layer at its own rank under one global scale and without
        the head; or "lorax", padded to one rank, with zeros for layers that were left out. See
        `lsrdecomp.checkpoints.write_lora`.
    base : path, optional
        For "gguf", which needs it: the base as GGUF file, model directory or config.json; absent,
        the directory that the adapter's config names. For "kohya" and "diffusers", if layers are
        called by position: the pipeline that they were trained on, which has their names.
    like : Checkpoint, optional
        For "same": the file whose format to write; absent, the checkpoint itself, which must be a
        LoRA then.
    without_heads : bool
        Leave out all tensors beside the layers: saved heads, biases, token embeddings. The profiles
        server and lorax always do. A format that cannot hold them refuses them otherwise.

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
    ('lsr', 'peft-lora', 4)
    """
    checkpoint.watch_source()
    integrity = check_integrity(checkpoint)
    if integrity.changed:
        fields = f" ({', '.join(integrity.fields)})" if integrity.fields else ""
        raise CheckpointError(
            f"{', '.join(integrity.changed)}{fields} changed since it was written; copy or "
            "compress it again, or take it as it is: lsrdecomp verify SOURCE "
            f"{checkpoint.weights.parent} --accept",
            path=checkpoint.weights.parent,
        )
    # 1. Turn every layer into a pair; layers called by position get the base's names.
    names = {}
    if base is not None and to in ("kohya", "diffusers"):
        names = resolve_positions(checkpoint, read_modules(base))
    layers: Iterable[tuple[str, Array, Array]] = (
        (names.get(layer.name, layer.name), *layer_product(layer).to_lora())
        for layer in checkpoint.layers
    )
    if profile == "lorax" and to == "lora":
        layers = chain(layers, _zeros_for_dropped_layers(checkpoint))
    is_for_server = to == "lora" and profile != "peft"
    extras: dict[str, StoredTensor] | None = {} if without_heads or is_for_server else None
    # 2. Repeat the record of the checkpoint, with which `verify` will compare the file.
    record: dict[str, Any] = {
        "derived_from": read_provenance(checkpoint),
        "recorded": recorded_errors(checkpoint),
    }
    if extras is not None:
        record["left_out"] = sorted(checkpoint.extras)
    if names:
        record["renamed"] = {new: old for old, new in names.items()}
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
        return write_lora(out, source=checkpoint, storage=storage, profile=profile, **content)
    if to in ("kohya", "diffusers"):
        return write_pairs(out, source=checkpoint, storage=storage, names=to, **content)
    raise UnsupportedError(f"cannot write {unknown(to, EXPORT_FORMATS)}")


def _zeros_for_dropped_layers(checkpoint: Checkpoint) -> Iterator[tuple[str, Array, Array]]:
    """Yield a pair of rank 1 that is zero for each layer that a compression left out.

    A server that stacks all layers of a type needs every one of them.
    """
    sizes: dict[str, set[tuple[int, int]]] = {}
    for layer in checkpoint.layers:
        of_type = sizes.setdefault(layer.name.rpartition(".")[2], set())
        of_type.add((layer.out_features, layer.in_features))
    for name in read_provenance(checkpoint).get("dropped", ()):
        of_type = sizes.get(name.rpartition(".")[2], set())
        if len(of_type) != 1:
            raise UnsupportedError(
                f"{name} was dropped, and its size is not known from {len(of_type)} sizes of "
                "layers like it; export with the profile server",
                path=checkpoint.path,
            )
        ((m, n),) = of_type
        yield name, np.zeros((m, 1), np.float32), np.zeros((1, n), np.float32)


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
