"""Plain pairs written as other programs hold them: as a source came, or under kohya's or diffusers' names."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.config import most_common, patterns
from lsrdecomp.checkpoints.files import read_json
from lsrdecomp.checkpoints.format import CONFIG, MLX_WEIGHTS, PREFIX, scalar
from lsrdecomp.checkpoints.names import diffusers_name, kohya_name
from lsrdecomp.checkpoints.pickles import UNNAMED
from lsrdecomp.checkpoints.readers.layouts import METADATA
from lsrdecomp.checkpoints.records import LOKR_STAYS, Checkpoint, LoraLayer
from lsrdecomp.checkpoints.tensors import Array, StoredTensor
from lsrdecomp.checkpoints.writers.pair_writer import PairWriter
from lsrdecomp.checkpoints.writers.peft import write_lora
from lsrdecomp.checkpoints.writing import new_directory, new_file, write_json
from lsrdecomp.errors import CheckpointError, UnsupportedError, unknown

NAMES = ("same", "kohya", "diffusers")
MODEL_HASH, LEGACY_HASH = "sshs_model_hash", "sshs_legacy_hash"
"""What sd-scripts writes of the tensors' bytes; the second is of a part of the file and left
out."""
Pairs = Iterable[tuple[str, Array, Array]]


def file_or_directory(like: Checkpoint) -> str:
    """What an adapter is when `write_pairs` gives it back as it came: one file, or a directory with a config.

    Parameters
    ----------
    like : Checkpoint

    Returns
    -------
    {"file", "directory"}

    Raises
    ------
    UnsupportedError
        For an adapter that is no file of pairs with keys of their own.
    """
    if like.format == "lsr":
        raise UnsupportedError(
            "is an LSR adapter: name the LoRA that it was made from by --like", path=like.path
        )
    for layer in like.layers:
        if not isinstance(layer, LoraLayer):
            raise UnsupportedError(LOKR_STAYS, path=like.path, tensor=layer.name)
        if ".hada_" in layer.up.name:
            text = (
                "is LoHa, read as the LoRA of the same ΔW, so that it is not given back as it came"
            )
            way_out = "make LSR of it (a directory as --out), or write it as plain LoRA (export --to lora)"
            raise UnsupportedError(f"{text}: {way_out}", path=like.path, tensor=layer.name)
    if like.layers[0].up.name.startswith(f"{UNNAMED}:"):
        raise UnsupportedError("is a pickled list without keys; write lora instead", path=like.path)
    has_config = like.format == "mlx" and (like.weights.parent / CONFIG).is_file()
    return "directory" if has_config or like.format == "peft-lora" else "file"


@dataclass(frozen=True)
class RankRule:
    """What the readers of a format ask of the ranks of its layers."""

    groups: tuple[tuple[int, ...], ...]
    """Layers, by their index, that have one rank in common: experts of one stack; otherwise each is
    alone."""
    least: int
    """1 where every layer must be in the file, since its reader counts them (cloneofsimo)."""
    common: bool
    """Whether all layers that are in the file have one rank, by which one alpha outside of it is
    divided."""


def rank_rule(like: Checkpoint) -> RankRule:
    """What must hold of ranks for `write_pairs` to write no zeros in place of what is left out."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, layer in enumerate(like.layers):
        groups[layer.up.name if isinstance(layer, LoraLayer) else layer.name].append(index)
    common = like.format in ("loralib", "torchtune") and like.config.get("lora_alpha") is not None
    return RankRule(tuple(map(tuple, groups.values())), int(like.format == "cloneofsimo"), common)


def write_pairs(
    out: str | Path,
    *,
    layers: Pairs,
    source: Checkpoint | None = None,
    names: str = "same",
    storage: str | None = None,
    extras: Mapping[str, StoredTensor] | None = None,
    force: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write pairs with ``ΔW = B @ A``, the scale in B, as ``source`` holds its own or as image programs name them.

    "same": keys, types, alphas and metadata are the source's; layers that do not come are left out.
    An alpha keeps its value, and the factor by which alpha / rank differs goes into B. Of PEFT's
    and mlx-lm's directories the config follows the ranks, as does diffusers' config in the header;
    where a program has one rank for all layers (loralib, torchtune), all are padded to the largest.

    "kohya": alpha is the rank everywhere. Names that start with ``lora_`` are kept; diffusers'
    (``unet.…``, ``text_encoder.…``) are flattened, those of text encoders with the level
    ``text_model`` that such files have. "diffusers": there is no scale.

    Parameters
    ----------
    out : str or Path
        A directory for PEFT and for mlx-lm's directories, else a file that ends in .safetensors.
        Must not exist, unless ``force``.
    layers : iterable of (name, B, A)
        B (m, r) and A (r, n), taken one at a time.
    source : Checkpoint, optional
        Gives sizes, kernels and other tensors; never written into. Of "same" also the format.
    names : {"same", "kohya", "diffusers"}
        Whose names of layers.
    storage : str, optional
        Type of A and B; absent, that of each layer in the source, or float32.
    extras : Mapping, optional
        Instead of the source's other tensors.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UnsupportedError
        For a layer that has no name in such files, a source that is no file of pairs; for diffusers
        also for other tensors, with which it loads no file.
    CheckpointError
        If ``out`` exists (unless ``force``), or a name is not one of the source.

    Examples
    --------
    >>> import tempfile
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> up, down = np.ones((4, 1), np.float32), np.ones((1, 6), np.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     layers = [("unet.mid_block.attn1.to_q", up, down)]
    ...     style = open_checkpoint(write_pairs(f"{folder}/style.safetensors", layers=layers, names="kohya"))
    ...     half = open_checkpoint(
    ...         write_pairs(f"{folder}/half.safetensors", source=style, layers=[(style.layers[0].name, up / 2, down)])
    ...     )
    ...     print(half.layers[0].name, half.layers[0].load()[0].max())
    lora_unet_mid_block_attn1_to_q 0.5
    """
    out = Path(out)
    if names not in NAMES:
        raise CheckpointError(f"no names {unknown(names, NAMES)}")
    extras = extras if extras is not None else (source.extras if source else {})
    like = source if names == "same" else None
    directory = like is not None and file_or_directory(like) == "directory"
    if like is not None and like.format == "peft-lora":
        storage = storage or like.storage
        return write_lora(
            out,
            source=like,
            layers=layers,
            storage=storage,
            extras=extras,
            force=force,
            provenance=provenance,
        )
    if like is None and names == "same":
        raise CheckpointError("names 'same' are those of a source, and none was given")
    if not directory and out.suffix != ".safetensors":
        raise CheckpointError("the name must end in .safetensors", path=out)
    inputs, new = (
        (source.path, source.weights) if source else (),
        new_directory if directory else new_file,
    )
    with (
        new(out, inputs=inputs, force=force) as part,
        PairWriter(out.absolute().parent, source) as writer,
    ):
        if like is None:
            _add_named(writer, names, layers, storage or "float32")
        else:
            _add_same(writer, like, layers, storage)
        if (
            extras and names == "diffusers"
        ):  # said last: where a layer has no name either, leaving them out is no help
            text = f"{len(extras)} tensors beside the adapter (the first {next(iter(extras))})"
            way_out = (
                "leave them out by --without-heads (extras={}), or write lora, which keeps them"
            )
            raise UnsupportedError(
                f"{text}: diffusers loads no file that holds such; {way_out}", path=out
            )
        for key, tensor in extras.items():
            writer.add(key.removeprefix(PREFIX), tensor.read())
        record = writer.record(provenance, **({} if like else {"storage": storage or "float32"}))
        header = record if like is None else _metadata(like, writer) | record
        writer.write(part / MLX_WEIGHTS if directory else part, header)
        if like is not None and directory:
            config = read_json(like.weights.parent / CONFIG)
            config["lora_parameters"] = config["lora_parameters"] | {
                "rank": max(writer.ranks.values())
            }
            write_json(part / CONFIG, config)
    return out


def _add_named(writer: PairWriter, names: str, layers: Pairs, storage: str) -> None:
    """The pairs of all layers as kohya's or diffusers' loaders expect them."""
    sdxl = any(layer.startswith("text_encoder_2.") for layer in writer.layers)
    for name, up, down in layers:
        if names == "kohya":
            module, ends = kohya_name(name, sdxl=sdxl), (".lora_down.weight", ".lora_up.weight")
            writer.add(f"{module}.alpha", np.array(down.shape[0], np.float32))
        else:
            module, ends = diffusers_name(name), (".lora_A.weight", ".lora_B.weight")
        writer.add_pair(name, up, down, (module + ends[0], module + ends[1]), storage)


def _add_same(writer: PairWriter, like: Checkpoint, layers: Pairs, storage: str | None) -> None:
    """The pairs of all layers under the keys that ``like`` has for them."""
    rule, rank, scale_of_all = rank_rule(like), None, 1.0
    if rule.least:
        layers = _with_missing(like, layers)
    if rule.common:
        layers = list(layers)
        rank = max(down.shape[0] for _, _, down in layers)
        scale_of_all = like.config["lora_alpha"] / rank
    for name, up, down in layers:
        layer: LoraLayer = like.layer(name)
        scale = scale_of_all
        if layer.alpha is not None:
            scale = scalar(layer.alpha) / down.shape[0]
            writer.add(layer.alpha.name, layer.alpha.read())
        elif like.format == "mlx":
            scale = layer.scale
        keys, transposed = (layer.down.name, layer.up.name), like.format == "mlx"
        writer.add_pair(
            name,
            up,
            down,
            keys,
            storage or layer.dtype,
            rank=rank,
            scale=scale,
            transposed=transposed,
        )


def _with_missing(like: Checkpoint, layers: Pairs) -> Iterator[tuple[str, Array, Array]]:
    """All layers; zeros for those left out of a file whose reader counts its layers."""
    names = set()
    for name, up, down in layers:
        names.add(name)
        yield name, up, down
    for layer in like.layers:
        if layer.name not in names:
            yield layer.name, np.zeros((layer.out_features, 1)), np.zeros((1, layer.in_features))


def _metadata(like: Checkpoint, writer: PairWriter) -> dict[str, str]:
    """That of ``like``, with what it says of ranks and hashes made true."""
    facts = {key: value for key, value in like.metadata.items() if key != LEGACY_HASH}
    if MODEL_HASH in facts:
        facts[MODEL_HASH] = writer.sha256()
    for name, rank in writer.ranks.items():
        if f"{name}:rank" in facts:
            facts[f"{name}:rank"] = str(rank)
    if METADATA in facts:
        facts[METADATA] = _header_config(json.loads(facts[METADATA]), writer.ranks)
    return facts


def _header_config(config: dict[str, Any], ranks: Mapping[str, int]) -> str:
    """diffusers' config of the components, with alpha equal to the rank everywhere."""
    components: dict[str, dict[str, int]] = {}
    for name, rank in ranks.items():
        component, _, module = name.partition(".")
        components.setdefault(component, {})[module] = rank
    for component, own in components.items():
        if not any(key.startswith(f"{component}.") for key in config):
            continue
        common = most_common(own)
        config[f"{component}.r"] = config[f"{component}.lora_alpha"] = common
        config[f"{component}.rank_pattern"] = config[f"{component}.alpha_pattern"] = patterns(
            own, common
        )
        config[f"{component}.use_rslora"] = False
    return json.dumps(config, sort_keys=True)
