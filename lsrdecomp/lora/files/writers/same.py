"""Plain pairs written in the format of the file that they came from."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import UnsupportedError
from lsrdecomp.gateway import read_json_text
from lsrdecomp.lora.files.adapter_config import most_common, patterns
from lsrdecomp.lora.files.file_checks import read_json
from lsrdecomp.lora.files.format import CONFIG, MLX_WEIGHTS, PREFIX, alpha_scale
from lsrdecomp.lora.files.readers.layouts import METADATA
from lsrdecomp.lora.files.records import LOKR_STAYS, Checkpoint, LoraLayer
from lsrdecomp.lora.files.writers.gguf import read_base, write_gguf
from lsrdecomp.lora.files.writers.pair_writer import PairWriter, check_file_name
from lsrdecomp.lora.files.writers.peft import write_lora
from lsrdecomp.lora.files.writers.table import Writer, find_writer
from lsrdecomp.lora.files.writing import new_directory, new_file, write_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from lsrdecomp.lora.files.records import Layer
    from lsrdecomp.lora.files.tensors import Array, StoredTensor

    Pairs = Iterable[tuple[str, Array, Array]]

GGUF_STORAGES = {"float16": "f16", "float32": "f32", "bfloat16": "f32"}
"""Types of GGUF files that hold the numbers of ours."""
MLX_FORMATS = ("mlx", "mlx-vlm")
PEFT = "peft-"
"""How the formats of directories begin that become PEFT's LoRA, where their layers are pairs."""
MODEL_HASH = "sshs_model_hash"
"""The digest of the tensors' bytes that sd-scripts writes into a header."""
LEGACY_HASH = "sshs_legacy_hash"
"""Its digest of a part of the file, which is left out."""
NETWORK = "ss_network_"
"""Beginning of the keys in which sd-scripts says what it trained."""
NETWORK_DIM = "ss_network_dim"
"""Its rank, "Dynamic" if layers have several."""
TRAINING_COMMENT = "ss_training_comment"


def file_or_directory(like: Checkpoint) -> str:
    """Return what `write_pairs` makes when it writes an adapter in its original format.

    Parameters
    ----------
    like : Checkpoint

    Returns
    -------
    {"file", "directory"}
        One file, or a directory with a config.

    Raises
    ------
    UnsupportedError
        For an adapter that is no file of pairs with keys of their own.
    """
    if like.format == "lsr":
        raise UnsupportedError(
            "is an LSR adapter: name the LoRA that it was made from by --like", path=like.path
        )
    if not any(map(is_pair, like.layers)):
        _refuse_no_pair(like, like.layers[0])
    is_mlx_directory = like.format in MLX_FORMATS and (like.weights.parent / CONFIG).is_file()
    return "directory" if is_mlx_directory or like.format.startswith(PEFT) else "file"


def is_pair(layer: Layer) -> bool:
    """Return whether a layer is a pair in its file, and not read as one, as LoHa is."""
    return isinstance(layer, LoraLayer) and bool(layer.keys)


def _refuse_no_pair(like: Checkpoint, layer: Layer) -> None:
    """Raise `UnsupportedError` for a layer that has no pair in its file to be written as."""
    reason = LOKR_STAYS
    if isinstance(layer, LoraLayer):
        method = "LoHa" if like.format in ("lycoris", "peft-loha") else like.format
        reason = (
            f"is {method}, read as the LoRA of the same ΔW, and is not written in its own "
            "format: make LSR of it (a directory as --out), or write it as plain LoRA (export "
            "--to lora)"
        )
    raise UnsupportedError(reason, path=like.path, tensor=layer.name)


@dataclass(frozen=True)
class RankRule:
    """Ranks that a format's readers ask of its layers.

    Attributes
    ----------
    groups : tuple of tuple of int
        Layers, by their index, that have one rank in common: experts of one stack; otherwise each
        is alone.
    is_common : bool
        Whether all layers that are in the file have one rank: by it one alpha outside of the file
        is divided, or the format's programs load no other.
    """

    groups: tuple[tuple[int, ...], ...]
    is_common: bool


def rank_rule(like: Checkpoint, to: str = "same") -> RankRule:
    """Return the rule for the ranks of a file that `write_pairs` writes like another.

    Or under the names of another `Writer`, which ``to`` names.
    """
    if to != "same":
        writer = find_writer(to)
        alone = tuple((index,) for index in range(len(like.layers)))
        return RankRule(alone, is_common=isinstance(writer, Writer) and writer.has_one_rank)
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, layer in enumerate(like.layers):
        is_lora = isinstance(layer, LoraLayer)
        groups[layer.up.name if is_lora else layer.name].append(index)
    # mlx-lm loads no directory whose layers differ from the rank in its config.
    is_mlx_directory = like.format == "mlx" and like.config.get("lora_alpha") is None
    return RankRule(
        groups=tuple(map(tuple, groups.values())),
        is_common=_has_one_alpha(like) or is_mlx_directory,
    )


def _has_one_alpha(like: Checkpoint) -> bool:
    """Return whether one alpha outside of the file is divided by the rank of all layers."""
    is_outside = like.format in ("loralib", "torchtune")
    return is_outside and like.config.get("lora_alpha") is not None


def write_same(
    out: Path,
    *,
    layers: Pairs,
    like: Checkpoint,
    storage: str | None,
    extras: Mapping[str, StoredTensor],
    force: bool,
    provenance: Mapping[str, Any] | None,
    carried: Collection[str] = (),
) -> Path:
    """Write pairs in the format of ``like``, as `write_pairs` says."""
    if like.format == "gguf":
        gguf_storage = GGUF_STORAGES.get(storage or like.storage, storage)
        return write_gguf(
            out,
            layers=layers,
            base=read_base(like.weights),
            source=like,
            extras=extras,
            storage=gguf_storage or "f16",
            force=force,
        )
    if like.format.startswith(PEFT):
        return write_lora(
            out,
            source=like,
            layers=layers,
            storage=storage or like.storage,
            extras=extras,
            force=force,
            provenance=provenance,
            carried=carried,
        )
    is_directory = file_or_directory(like) == "directory"  # mlx-lm's
    if not is_directory:
        check_file_name(out)
    open_new = new_directory if is_directory else new_file
    with (
        open_new(out, inputs=(like.path, like.weights), force=force) as part,
        PairWriter(out.absolute().parent, like) as writer,
    ):
        # 1. The pairs, then the other tensors.
        _add_same(writer, like, layers, storage)
        types = {storage or layer.dtype for layer in like.layers if layer.name in writer.ranks}
        for name in carried:
            writer.carry(name, like.layer(name))
        for key, tensor in carried_tensors(like, carried).items():
            writer.add(key, tensor.read())
        for key, tensor in extras.items():
            writer.add(key.removeprefix(PREFIX), tensor.read())
        # 2. What the file says of them.
        record = writer.record(provenance, storage="+".join(sorted(types)))
        header = _same_metadata(like, writer) | record
        if is_directory:
            config = _mlx_config(like, writer.ranks)
            write_json(part / CONFIG, config)
            writer.write(part / MLX_WEIGHTS, writer.with_digests(header, config))
        else:
            writer.write(part, writer.with_digests(header))
    return out


def carried_tensors(like: Checkpoint, carried: Collection[str]) -> dict[str, StoredTensor]:
    """Return what a cut copies: tensors of carried layers, and the ones outside pairs.

    Extras are told apart.
    """
    others = {tensor.name for tensor in like.extras.values()}
    names = set(carried)
    for layer in like.layers:
        if is_pair(layer) and layer.name not in names:
            others.update(layer.keys)
    return {key: tensor for key, tensor in like.tensors.items() if key not in others}


def _mlx_config(like: Checkpoint, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the config of a directory of mlx-lm or mlx-vlm, whose rank is the largest."""
    config = read_json(like.weights.parent / CONFIG)
    rank = {"rank": max(ranks.values())}
    if "lora_parameters" not in config:
        return config | rank
    config["lora_parameters"] = config["lora_parameters"] | rank
    return config


def _add_same(writer: PairWriter, like: Checkpoint, layers: Pairs, storage: str | None) -> None:
    """Add the pairs of all layers under the keys that ``like`` has for them."""
    rule = rank_rule(like)
    common_rank = None
    if rule.is_common:
        layers = list(layers)
        common_rank = max(down.shape[0] for _, _, down in layers)
    for name, up, down in layers:
        layer = like.layer(name)
        if not is_pair(layer):
            _refuse_no_pair(like, layer)
        if layer.alpha is not None:
            writer.add(layer.alpha.name, layer.alpha.read())
        scale = _stored_scale(like, layer, common_rank or down.shape[0])
        writer.add_pair(
            name,
            up,
            down,
            (layer.down.name, layer.up.name),
            storage or layer.dtype,
            rank=common_rank,
            scale=scale,
            transposed=like.format in MLX_FORMATS,
        )


def _stored_scale(like: Checkpoint, layer: LoraLayer, rank: int) -> float:
    """Return what readers multiply a pair of this rank by, in a file like another."""
    if layer.alpha is not None:
        return alpha_scale(layer.alpha, rank)
    if like.format in MLX_FORMATS:
        return layer.scale
    if _has_one_alpha(like):
        return float(like.config["lora_alpha"]) / rank
    return 1.0


def stored_type(
    like: Checkpoint, name: str, *, storage: str | None, rank: int, to: str = "same"
) -> tuple[str, float]:
    """Return the type in which `write_pairs` stores a layer, and the scale beside it.

    Readers multiply B by the scale.

    Parameters
    ----------
    like : Checkpoint
    name : str
    storage : str, optional
        Type of the pairs; absent, that of the layer in ``like``.
    rank : int
        The rank that the file gives the layer, zeros included.
    to : str
        The format that is written; of others than "same" no scale stands beside the pairs.
    """
    layer = like.layer(name)
    if to != "same":
        return storage or layer.dtype, 1.0
    if like.format == "gguf":
        return "float64", 1.0  # in blocks: measured when it is written
    if like.format.startswith(PEFT):
        storage = storage or like.storage
    return storage or layer.dtype, _stored_scale(like, layer, rank)


def _same_metadata(like: Checkpoint, writer: PairWriter) -> dict[str, str]:
    """Return the metadata of ``like``, with what it says of ranks and hashes made true."""
    metadata = {key: value for key, value in like.metadata.items() if key != LEGACY_HASH}
    if MODEL_HASH in metadata:
        metadata[MODEL_HASH] = writer.sha256()
    metadata |= _network_metadata(metadata, writer.ranks)
    if METADATA in metadata:
        metadata[METADATA] = _header_config(read_json_text(metadata[METADATA]), writer)
    return metadata


def _network_metadata(metadata: Mapping[str, str], ranks: Mapping[str, int]) -> dict[str, str]:
    """Return what sd-scripts' resize_lora says of a network's rank; alphas keep their value."""
    if not any(key.startswith(NETWORK) for key in metadata):
        return {}
    found = set(ranks.values())
    dim = str(found.pop()) if len(found) == 1 else "Dynamic"
    before = metadata.get(NETWORK_DIM, "unknown")
    if dim == before:
        return {}
    comment = f"dimension is resized from {before} to {dim}"
    if metadata.get(TRAINING_COMMENT):
        comment += f"; {metadata[TRAINING_COMMENT]}"
    return {NETWORK_DIM: dim, TRAINING_COMMENT: comment}


def _header_config(config: dict[str, Any], writer: PairWriter) -> str:
    """Update diffusers' config of the components: their ranks, and the alphas that go with them."""
    for component in sorted({name.partition(".")[0] for name in writer.ranks}):
        if not any(key.startswith(f"{component}.") for key in config):
            continue
        for field, pattern, values in (
            ("r", "rank_pattern", writer.ranks),
            ("lora_alpha", "alpha_pattern", writer.alphas),
        ):
            of_component = {
                name.removeprefix(f"{component}."): value
                for name, value in values.items()
                if name.startswith(f"{component}.")
            }
            common = most_common(of_component)
            config[f"{component}.{field}"] = common
            config[f"{component}.{pattern}"] = patterns(of_component, common)
        config[f"{component}.use_rslora"] = False
    return json.dumps(config, sort_keys=True)
