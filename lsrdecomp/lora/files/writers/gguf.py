"""GGUF files for llama.cpp: layers at their own ranks under the base's tensor names.

llama.cpp multiplies by ``adapter.lora.alpha`` / rank of the tensor, or by the user's scale alone
where alpha is 0. So alpha is 0 and the scale is in B, which is right for mixed ranks too. Names
come from the maps of the `gguf` package.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.lora.files.adapter_config import Config
from lsrdecomp.lora.files.digests import HEADER_KEY
from lsrdecomp.lora.files.file_checks import read_json
from lsrdecomp.lora.files.gguf_files import (
    ADAPTER_TYPE,
    ALPHA,
    ARCHITECTURE,
    GGUF_NAME,
    gguf_digests,
)
from lsrdecomp.lora.files.gguf_files import import_gguf as import_gguf
from lsrdecomp.lora.files.tensors import Array, StoredTensor, cast
from lsrdecomp.lora.files.writers.pair_writer import check_pair
from lsrdecomp.lora.files.writing import new_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lsrdecomp.lora.files.records import Checkpoint, KroneckerLayer, LoraLayer

STORAGES = {"f32": "float32", "f16": "float16", "q8_0": "float16"}
"""Types of the numbers. In q8_0 rows of whole blocks are in eight bits, the rest in float16."""
Q8_BLOCK = 32  # numbers of a row that share a scale

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
for `PERMUTED_ROWS`."""
PERMUTED_ROWS = {"llama": {"attn_q": "heads", "attn_k": "key_heads"}}
"""Matrices whose rows GGUF orders otherwise: the two halves of each head's rotary pairs are
interleaved."""
PREFIXES = ("", "bert.", "roberta.", "language_model.", "model.language_model.")
"""What may stand before a name that llama.cpp's own conversion takes away."""
READ_HIDDEN_STATE = ("attn_q", "attn_k", "attn_v", "attn_qkv", "ffn_up", "ffn_gate")
"""Matrices whose columns are the width of the hidden state."""
SIZE_KEYS = {
    "blocks": "block_count",
    "heads": "attention.head_count",
    "width": "embedding_length",
}
"""Fields of a `GgufBase` by their keys in a GGUF file, which begin with the architecture."""


@dataclass(frozen=True)
class GgufBase:
    """A base as llama.cpp names it: its architecture, its heads and the sizes of its matrices.

    Attributes
    ----------
    path : Path
        Where it was read.
    architecture : str
        llama.cpp's name.
    blocks : int
        How many blocks of layers it has.
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
        """Return the GGUF name of a module, without ``.weight``, or None if it has none there."""
        without_prefix = [
            name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)
        ]
        for level in ("", "model.", "transformer."):
            for option in without_prefix:
                tensor = self._names.get_name(level + option)
                if tensor is not None:
                    return str(tensor)
        return None

    def name_of(self, name: str) -> str:
        """Return the GGUF name of a module; `UnsupportedError` for one that this base has not."""
        tensor = name if GGUF_NAME.fullmatch(name) else self.find(name)
        if tensor is not None and (not self.shapes or tensor in self.shapes):
            return tensor
        would_be = "" if tensor is None else f" (it would be {tensor})"
        raise UnsupportedError(
            f"{name}: has no tensor in a {self.architecture} model of {self.blocks} blocks"
            f"{would_be}; is {self.path} its base?"
        )

    @cached_property
    def _names(self) -> Any:
        """The map of names of the `gguf` package."""
        gguf = import_gguf()
        architecture = next(
            key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture
        )
        return gguf.get_tensor_name_map(architecture, self.blocks)


def read_base(path: str | Path) -> GgufBase:
    """Read what names and orders of rows depend on.

    Parameters
    ----------
    path : str or Path
        A GGUF file, a model's directory with config.json, or such a config. A LoRA in GGUF will do
        for layers that are called by its names.

    Returns
    -------
    GgufBase

    Raises
    ------
    CheckpointError
        If there is no such file or a number is missing in it.
    UnsupportedError
        For an architecture whose names and orders are not known here, by name.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return _base_from_gguf(path)
    return _base_from_config(path / "config.json" if path.is_dir() else path)


def _base_from_config(path: Path) -> GgufBase:
    raw = read_json(path)
    if isinstance(raw.get("text_config"), dict):  # of a model that reads images too
        raw = {**raw, **raw["text_config"]}
    model_type = str(raw.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise _unknown_architecture(model_type, path)
    config = Config(raw, path)

    def size(name: str, name_in_gpt2: str) -> int:
        is_gpt2 = name not in raw and name_in_gpt2 in raw
        return config.integer(name_in_gpt2 if is_gpt2 else name)

    heads = size("num_attention_heads", "n_head")
    key_heads = heads
    if raw.get("num_key_value_heads") is not None:
        key_heads = config.integer("num_key_value_heads")
    blocks = size("num_hidden_layers", "n_layer")
    width = size("hidden_size", "n_embd")
    return GgufBase(path, ARCHITECTURES[model_type], blocks, heads, key_heads, width)


def _base_from_gguf(path: Path) -> GgufBase:
    gguf = import_gguf()
    try:
        reader = gguf.GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        if ADAPTER_TYPE in reader.fields:
            return _base_from_adapter(path, architecture, reader.tensors)
        sizes = {
            name: int(reader.fields[f"{architecture}.{key}"].contents())
            for name, key in SIZE_KEYS.items()
        }
        key_heads = sizes["heads"]
        stored_key_heads = reader.fields.get(f"{architecture}.attention.head_count_kv")
        if stored_key_heads is not None:
            key_heads = int(stored_key_heads.contents())
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
        raise _unknown_architecture(architecture, path)
    return GgufBase(path, architecture, key_heads=key_heads, shapes=shapes, **sizes)


def _base_from_adapter(path: Path, architecture: str, tensors: Iterable[Any]) -> GgufBase:
    """Describe a base by a LoRA for it: names and sizes of the matrices that it adapts.

    It says nothing of heads, and layers under its own names have their rows in order.
    """
    halves = {tensor.name: [int(size) for size in tensor.shape] for tensor in tensors}
    shapes = {}
    for key, (columns, _) in halves.items():
        name = key.removesuffix(".weight.lora_a")
        other = halves.get(f"{name}.weight.lora_b")
        if name != key and other is not None:
            shapes[name] = other[1], columns
    return GgufBase(path, architecture, 0, 0, 0, 0, shapes)


def _unknown_architecture(name: str, path: Path) -> UnsupportedError:
    known = ", ".join(sorted(ARCHITECTURES))
    return UnsupportedError(
        f"architecture {name[:60]!r}: its names and orders in GGUF are not known here; "
        f"known: {known}",
        path=path,
    )


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
    source : Checkpoint, optional
        Gives the sizes and types of layers, and the other tensors; never written into.
    extras : Mapping, optional
        Instead of the source's other tensors.
    storage : str
        "f16", "f32" or "q8_0".
    force : bool
        Whether a file that is there may be replaced.

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
    gguf = import_gguf()
    out = Path(out_file)
    if source is not None:
        source.refuse_carried()
    if extras is None:
        extras = source.extras if source else {}
    _check_request(out, storage, extras)
    source_layers = {layer.name: layer for layer in source.layers} if source else {}
    with new_file(out, inputs=(source.path,) if source else (), force=force) as part:
        # The header says adapter and alpha 0: llama.cpp then takes B A as it is.
        writer = gguf.GGUFWriter(part, base.architecture)
        header = {ARCHITECTURE: base.architecture, ADAPTER_TYPE: "lora", ALPHA: "0.0"}
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
        stored: dict[str, Array] = {}
        for name, up, down in layers:
            stored |= _add_layer(writer, name, up, down, base, source_layers.get(name), storage)
        if not stored:
            raise CheckpointError("no layers to write", path=out)
        if source is not None:
            source.check_source()
        writer.add_string(HEADER_KEY, gguf_digests(stored, header).text)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return out


def _check_request(out: Path, storage: str, extras: Mapping[str, StoredTensor]) -> None:
    """Refuse what GGUF files do not hold, before anything is written."""
    if out.suffix != ".gguf":
        raise CheckpointError("the name must end in .gguf", path=out)
    if storage not in STORAGES:
        raise CheckpointError(
            f"storage {storage!r} is not one of {', '.join(STORAGES)}, what GGUF files hold"
        )
    if extras:
        raise UnsupportedError(
            f"{len(extras)} tensors beside the adapter (the first {next(iter(extras))}) that "
            "llama.cpp does not load; leave them out by --without-heads (extras={}), or write "
            "lora, which keeps them",
            path=out,
        )


def _add_layer(
    writer: Any,
    name: str,
    up: Array,
    down: Array,
    base: GgufBase,
    layer: LoraLayer | KroneckerLayer | None,
    storage: str,
) -> dict[str, Array]:
    """Add a layer under the base's name and in its order of rows, of the size that it has.

    Returns what a reader gets, by key.
    """
    check_pair(name, up, down, layer)
    tensor = base.name_of(name)
    _check_layer(name, tensor, up, down, layer, base)
    ordered_up = np.asarray(up)
    if tensor != name:  # of a GGUF file the rows are in order already
        ordered_up = _in_base_order(tensor, ordered_up, base)
    stored = {}
    for key, half in ((f"{tensor}.weight.lora_a", down), (f"{tensor}.weight.lora_b", ordered_up)):
        stored[key] = _add_tensor(writer, key, cast(half, STORAGES[storage], name), storage)
    return stored


def _add_tensor(writer: Any, key: str, array: Array, storage: str) -> Array:
    """Add a matrix, in eight bits where that is asked for and its rows are whole blocks.

    Returns what a reader gets of it.
    """
    array = np.ascontiguousarray(array)
    if storage != "q8_0" or array.shape[1] % Q8_BLOCK:
        writer.add_tensor(key, array)
        return array
    gguf = import_gguf()
    eight_bits = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(array.astype(np.float32), eight_bits)
    writer.add_tensor(key, blocks, raw_dtype=eight_bits)
    return np.asarray(gguf.quants.dequantize(blocks, eight_bits), np.float32)


def _check_layer(
    name: str,
    tensor: str,
    up: Array,
    down: Array,
    layer: LoraLayer | KroneckerLayer | None,
    base: GgufBase,
) -> None:
    """Refuse a layer that llama.cpp does not load, or that is not of the size the base has."""
    if layer is not None and layer.layer_type not in ("linear", "conv1d"):
        raise UnsupportedError(
            f"{name}: a layer of kind {layer.layer_type!r} is not loaded by llama.cpp; write lora "
            "instead"
        )
    rows, columns = up.shape[0], down.shape[1]
    expected = base.shapes.get(tensor)
    if expected is None and tensor.rpartition(".")[2] in READ_HIDDEN_STATE:
        expected = rows, base.width
    if expected is not None and (rows, columns) != expected:
        raise CheckpointError(
            f"{name}: {rows} x {columns}, but {expected[0]} x {expected[1]} in the base "
            f"{base.path}; export for the base it was trained on"
        )


def in_module_names(adapter: Checkpoint, modules: Iterable[str], base: GgufBase) -> Checkpoint:
    """Return a LoRA of llama.cpp by the names of modules, with their order of rows.

    Layers of other modules keep their names.
    """
    module_of = {base.find(module): module for module in modules}

    def renamed(layer: Any) -> Any:
        module = module_of.get(layer.name)
        if module is None:
            return layer
        rows = partial(_in_module_order, layer.name, layer.up, base)
        return replace(layer, name=module, up=replace(layer.up, fetch=rows))

    return replace(adapter, layers=tuple(map(renamed, adapter.layers)))


def _in_module_order(tensor: str, up: StoredTensor, base: GgufBase) -> Array:
    """Return B with its rows as transformers orders those of this matrix."""
    array = up.read()
    heads = _heads_of_pairs(tensor, array, base)
    if heads is None:
        return array
    pairs = array.reshape(heads, -1, 2, array.shape[1])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _in_base_order(tensor: str, up: Array, base: GgufBase) -> Array:
    """Return B with its rows as GGUF orders those of this matrix."""
    heads = _heads_of_pairs(tensor, up, base)
    if heads is None:
        return up
    halves = up.reshape(heads, 2, -1, up.shape[1])
    return halves.swapaxes(1, 2).reshape(up.shape)


def _heads_of_pairs(tensor: str, up: Array, base: GgufBase) -> int | None:
    """Return the heads whose rows GGUF orders otherwise; None where it leaves them."""
    which_heads = PERMUTED_ROWS.get(base.architecture, {}).get(tensor.rpartition(".")[2])
    if which_heads is None:
        return None
    heads = int(getattr(base, which_heads))
    rows = len(up)
    if rows % (2 * heads):
        raise CheckpointError(
            f"{tensor}: {rows} rows are not {heads} heads of pairs, as {base.path} says"
        )
    return heads
