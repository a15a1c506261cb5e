"""GGUF files for llama.cpp: each layer at its own rank under the base's own tensor names, the scale in B.

llama.cpp multiplies by ``adapter.lora.alpha`` / rank of the tensor, or by the user's scale alone
where alpha is 0. So alpha is 0 and the scale is in B, which is right for mixed ranks too. Names
come from the maps of the `gguf` package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.checkpoints.config import Config
from lsrdecomp.checkpoints.files import read_json
from lsrdecomp.checkpoints.tensors import Array, StoredTensor, cast
from lsrdecomp.checkpoints.writers.pair_writer import check_pair
from lsrdecomp.checkpoints.writing import new_file
from lsrdecomp.errors import CheckpointError, LsrError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lsrdecomp.checkpoints.records import Checkpoint, KroneckerLayer, LoraLayer

STORAGES = {"f32": "float32", "f16": "float16", "q8_0": "float16"}
"""Types of the numbers; in q8_0 what has rows of a multiple of 32 is in blocks of eight bits, the
rest in float16."""

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gpt2": "gpt2",
    "bert": "bert",
    "roberta": "bert",
}
"""transformers' ``model_type`` and llama.cpp's name, where GGUF holds the matrices as they are, but
for `PERMUTED`."""
PERMUTED = {"llama": {"attn_q": "heads", "attn_k": "key_heads"}}
"""Matrices whose rows GGUF orders otherwise: the two halves of each head's rotary pairs are
interleaved."""
PREFIXES = ("", "bert.", "roberta.", "language_model.", "model.language_model.")
"""What may stand before a name that llama.cpp's own conversion takes away."""


@dataclass(frozen=True)
class GgufBase:
    """What must be known of the base: its architecture, its heads, and where known the sizes of its matrices.

    Attributes
    ----------
    architecture : str
        llama.cpp's name.
    blocks : int
    heads, key_heads : int
        Attention heads of the queries, and of keys and values.
    width : int
        Of the hidden state.
    shapes : Mapping of str to (m, n)
        Matrices by GGUF name without ``.weight``; empty if the base was described by a config.
    """

    path: Path
    architecture: str
    blocks: int
    heads: int
    key_heads: int
    width: int
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def find(self, name: str) -> str | None:
        """The GGUF name of a module, without ``.weight``, or None for a module that has none there."""
        options = [name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)]
        options += [f"model.{option}" for option in options] + [
            f"transformer.{option}" for option in options
        ]
        return next(
            (tensor for tensor in map(self._names.get_name, options) if tensor is not None), None
        )

    def name_of(self, name: str) -> str:
        """The GGUF name of a module of this base, `UnsupportedError` for one that has none."""
        tensor = self.find(name)
        if tensor is None or (self.shapes and tensor not in self.shapes):
            missing = "" if tensor is None else f" (it would be {tensor})"
            text = f"has no tensor in a {self.architecture} model of {self.blocks} blocks{missing}"
            raise UnsupportedError(f"{name}: {text}; is {self.path} its base?")
        return tensor

    @cached_property
    def _names(self) -> Any:
        gguf = import_gguf()
        architecture = next(
            key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture
        )
        return gguf.get_tensor_name_map(architecture, self.blocks)


def read_base(path: str | Path) -> GgufBase:
    """The base at a path: a GGUF file, a model's directory with config.json, or such a config.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    GgufBase
        What names and orders of rows depend on.

    Raises
    ------
    CheckpointError
        If there is no such file or a number is missing in it.
    UnsupportedError
        For an architecture whose names and orders are not known here, by name.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    config = path / "config.json" if path.is_dir() else path
    raw = read_json(config)
    raw = {**raw, **(raw["text_config"] if isinstance(raw.get("text_config"), dict) else {})}
    kind = str(raw.get("model_type"))
    if kind not in ARCHITECTURES:
        raise _unknown(kind, config)
    sizes = Config(raw, config)

    def size(name: str, older: str) -> int:
        return sizes.integer(older if name not in raw and older in raw else name)

    heads = size("num_attention_heads", "n_head")
    keys = heads if raw.get("num_key_value_heads") is None else sizes.integer("num_key_value_heads")
    blocks, width = size("num_hidden_layers", "n_layer"), size("hidden_size", "n_embd")
    return GgufBase(config, ARCHITECTURES[kind], blocks, heads, keys, width)


def write_gguf(
    out_file: str | Path,
    *,
    layers: Iterable[tuple[str, Array, Array]],
    base: GgufBase,
    source: Checkpoint | None = None,
    extras: Mapping[str, StoredTensor] | None = None,
    storage: str = "f16",
    force: bool = False,
) -> Path:
    """Write a LoRA for llama.cpp with ``ΔW = B @ A``; the scale must be in B already.

    Parameters
    ----------
    out_file : str or Path
        Ends in .gguf; must not exist, unless ``force``.
    layers : iterable of (name, B, A)
        B (m, r) and A (r, n), taken one at a time; ranks may differ.
    base : GgufBase
        As `read_base` gives it.
    storage : str
        "f16", "f32" or "q8_0".

    Returns
    -------
    Path
        ``out_file``.

    Raises
    ------
    UnsupportedError
        For a layer without a name in such files, a kind of layer or other tensors that llama.cpp
        does not load.
    CheckpointError
        If a layer is not of the size the base has, or ``out_file`` exists.
    """
    gguf, out = import_gguf(), Path(out_file)
    if out.suffix != ".gguf":
        raise CheckpointError("the name must end in .gguf", path=out)
    if storage not in STORAGES:
        raise CheckpointError(
            f"storage {storage!r} is not one of {', '.join(STORAGES)}, what GGUF files hold"
        )
    extras = extras if extras is not None else (source.extras if source else {})
    if extras:
        text = f"{len(extras)} tensors beside the adapter (the first {next(iter(extras))}) that llama.cpp does not load"
        way_out = "leave them out by --without-heads (extras={}), or write lora, which keeps them"
        raise UnsupportedError(f"{text}; {way_out}", path=out)
    source_layers = {layer.name: layer for layer in source.layers} if source else {}
    empty = True
    with new_file(out, inputs=(source.path,) if source else (), force=force) as part:
        # The header says adapter and alpha 0: llama.cpp then takes B A as it is.
        writer = gguf.GGUFWriter(part, base.architecture)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
        for name, up, down in layers:
            # Under the base's own name and in its order of rows, if it is of the size that the base
            # has.
            layer = source_layers.get(name)
            check_pair(name, up, down, layer)
            tensor = base.name_of(name)
            _check(name, tensor, up, down, layer, base)
            for end, array in (
                ("lora_a", down),
                ("lora_b", _ordered(tensor, np.asarray(up), base)),
            ):
                key = f"{tensor}.weight.{end}"
                stored = np.ascontiguousarray(cast(array, STORAGES[storage], name))
                if storage == "q8_0" and stored.shape[1] % 32 == 0:
                    eight = gguf.GGMLQuantizationType.Q8_0
                    writer.add_tensor(
                        key, gguf.quants.quantize(stored.astype(np.float32), eight), raw_dtype=eight
                    )
                else:
                    writer.add_tensor(key, stored)
            empty = False
        if empty:
            raise CheckpointError("no layers to write", path=out)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return out


def _check(
    name: str,
    tensor: str,
    up: Array,
    down: Array,
    layer: LoraLayer | KroneckerLayer | None,
    base: GgufBase,
) -> None:
    if layer is not None and layer.layer_type not in ("linear", "conv1d"):
        raise UnsupportedError(
            f"{name}: a layer of kind {layer.layer_type!r} is not loaded by llama.cpp; write lora instead"
        )
    size = up.shape[0], down.shape[1]
    wanted = base.shapes.get(tensor)
    if wanted is None and tensor.rpartition(".")[2] in (
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_qkv",
        "ffn_up",
        "ffn_gate",
    ):
        wanted = size[0], base.width
    if wanted is not None and size != wanted:
        text = f"{size[0]} x {size[1]}, but {wanted[0]} x {wanted[1]} in the base {base.path}"
        raise CheckpointError(f"{name}: {text}; export for the base it was trained on")


def _ordered(tensor: str, up: Array, base: GgufBase) -> Array:
    """B with its rows as GGUF orders those of this matrix."""
    heads = PERMUTED.get(base.architecture, {}).get(tensor.rpartition(".")[2])
    if heads is None:
        return up
    count = int(getattr(base, heads))
    if up.shape[0] % (2 * count):
        raise CheckpointError(
            f"{tensor}: {up.shape[0]} rows are not {count} heads of pairs, as {base.path} says"
        )
    return up.reshape(count, 2, -1, up.shape[1]).swapaxes(1, 2).reshape(up.shape)


FACTS = {"blocks": "block_count", "heads": "attention.head_count", "width": "embedding_length"}


def _from_gguf(path: Path) -> GgufBase:
    gguf = import_gguf()
    try:
        reader = gguf.GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        facts = {
            key: int(reader.fields[f"{architecture}.{name}"].contents())
            for key, name in FACTS.items()
        }
        keys = reader.fields.get(f"{architecture}.attention.head_count_kv")
        key_heads = facts["heads"] if keys is None else int(keys.contents())
        shapes = {
            tensor.name.removesuffix(".weight"): tuple(int(size) for size in tensor.shape[::-1])
            for tensor in reader.tensors
            if tensor.name.endswith(".weight")
        }
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=path) from None
    except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"is no GGUF model: {str(error)[:200]}", path=path) from None
    if architecture not in ARCHITECTURES.values():
        raise _unknown(architecture, path)
    return GgufBase(path, architecture, key_heads=key_heads, shapes=shapes, **facts)


def _unknown(kind: str, path: Path) -> UnsupportedError:
    architectures = ", ".join(sorted(ARCHITECTURES))
    text = f"architecture {kind[:60]!r}: its names and orders in GGUF are not known here; known: {architectures}"
    return UnsupportedError(text, path=path)


def import_gguf() -> Any:
    """The package, or how to get it."""
    try:
        import gguf
    except ImportError as error:
        raise LsrError("GGUF files need the package gguf: pip install gguf") from error
    return gguf
