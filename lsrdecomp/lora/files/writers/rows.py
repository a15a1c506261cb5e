"""How each row of `lsrdecomp.lora.files.writers.table` is written."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.lora.files.format import CONFIG, PREFIX
from lsrdecomp.lora.files.fused_attention import fuse_attention, split_attention
from lsrdecomp.lora.files.stacked_experts import Stacks
from lsrdecomp.lora.files.writers.gguf import GgufBase, read_base, write_gguf
from lsrdecomp.lora.files.writers.missing import zeros_for_missing_layers
from lsrdecomp.lora.files.writers.pair_writer import PairWriter, check_file_name
from lsrdecomp.lora.files.writers.peft import write_lora
from lsrdecomp.lora.files.writers.same import write_same
from lsrdecomp.lora.files.writers.table import Export, OwnWriter, Writer
from lsrdecomp.lora.files.writing import new_directory, new_file, write_json

if TYPE_CHECKING:
    from lsrdecomp.lora.files.records import Checkpoint
    from lsrdecomp.lora.files.writers.table import Pairs


def write_export(row: Writer | OwnWriter, export: Export) -> Path:
    """Write an adapter in the format of a row, whole or not at all, and return its path."""
    if row.name != "same" and export.source is not None:
        export.source.refuse_carried()
    if isinstance(row, Writer):
        return _write_named(row, export)
    return OWN[row.name](export)


def _write_named(row: Writer, export: Export) -> Path:
    """Write pairs under the names of a format, with the scale in B."""
    out = export.out
    if row.config is None:
        check_file_name(out)
    source = export.source
    inputs = (source.path, source.weights) if source else ()
    open_new = new_file if row.config is None else new_directory
    storage = export.float_storage
    with (
        open_new(out, inputs=inputs, force=export.force) as part,
        PairWriter(out.absolute().parent, source) as writer,
    ):
        _add_layers(row, writer, export.layers, storage)
        _add_extras(row, writer, export)
        header = writer.record(export.provenance, storage=storage)
        if row.config is None:
            writer.write(part, writer.with_digests(header))
        else:
            config = row.config(export, writer.ranks)
            write_json(part / CONFIG, config)
            writer.write(part / row.weights, writer.with_digests(header, config))
    return out


def _add_layers(row: Writer, writer: PairWriter, layers: Pairs, storage: str) -> None:
    has_two_encoders = any(layer.startswith("text_encoder_2.") for layer in writer.layers)
    down_ending, up_ending = row.endings
    rank = None
    if row.has_one_rank:
        layers = list(layers)
        rank = max((down.shape[0] for _, _, down in layers), default=None)
    if row.name in REGROUP:
        layers = REGROUP[row.name](layers)
    for name, up, down in layers:
        module = row.name_of(name, has_two_encoders)
        layer = writer.layers.get(name)
        if row.transposed and layer is not None and layer.kernel:
            raise UnsupportedError(
                f"{name}: a convolution, which {row.name} files do not hold; write lora instead"
            )
        if row.has_alphas:
            writer.add(f"{module}.alpha", np.array(down.shape[0], np.float32))
        keys = module + down_ending, module + up_ending
        writer.add_pair(name, up, down, keys, storage, rank=rank, transposed=row.transposed)


def _add_extras(row: Writer, writer: PairWriter, export: Export) -> None:
    """Add the other tensors, or refuse them.

    That is said last: where a layer has no name either, leaving them out is no help.
    """
    extras = export.other_tensors
    if extras and not row.takes_extras:
        raise UnsupportedError(
            f"{len(extras)} tensors beside the adapter (the first {next(iter(extras))}): "
            f"{row.name} loads no file that holds such; leave them out by --without-heads "
            "(extras={}), or write lora, which keeps them",
            path=export.out,
        )
    for key, tensor in extras.items():
        writer.add(key.removeprefix(PREFIX), tensor.read())


def _write_peft(export: Export) -> Path:
    """Write the directory; in the common profile with zeros for layers that are missing."""
    source = export.source
    layers = export.layers
    largest_rank = None
    if export.profile == "common" and source is not None:
        if not Stacks(source.config, source.path).targets:
            # A stack of experts holds zeros for those that are missing.
            layers = chain(layers, zeros_for_missing_layers(source, export.base))
        largest_rank = max((layer.rank for layer in source.layers), default=1)
    return write_lora(
        export.out,
        layers=layers,
        source=source,
        extras=export.extras,
        storage=export.float_storage,
        force=export.force,
        profile=export.profile,
        rank=largest_rank,
        provenance=export.provenance,
    )


def _write_gguf(export: Export) -> Path:
    """Write the file for the base that is given, or that the source names."""
    assert export.source is not None
    return write_gguf(
        export.out,
        layers=export.layers,
        base=_gguf_base(export.source, export.base),
        source=export.source,
        extras=export.extras,
        storage=_gguf_storage(export.storage),
        force=export.force,
    )


def _write_like(export: Export) -> Path:
    """Write what ``like`` is, or else the source."""
    like = export.like or export.source
    assert like is not None
    if like.format == "gguf":
        return _write_gguf(replace(export, base=export.base or like.weights))
    return write_same(
        export.out,
        layers=export.layers,
        like=like,
        storage=export.storage,
        extras=like.extras if export.extras is None else export.extras,
        force=export.force,
        provenance=export.provenance,
    )


OWN = {"lora": _write_peft, "gguf": _write_gguf, "same": _write_like}
"""What writes the rows that are an `OwnWriter`, by name."""
REGROUP = {"kohya": fuse_attention, "diffusers": split_attention}
"""What rows do first where their programs have q, k and v in one layer, or in three."""


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
