"""The format of another file again: its keys, types, alphas and metadata, with other numbers for its pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.bundle import CONFIG, MLX_WEIGHTS
from lsrdecomp.checkpoints.config import most_common, patterns
from lsrdecomp.checkpoints.files import read_json
from lsrdecomp.checkpoints.format import scalar
from lsrdecomp.checkpoints.pickles import LISTED
from lsrdecomp.checkpoints.readers.layouts import METADATA
from lsrdecomp.checkpoints.records import Checkpoint, LoraLayer
from lsrdecomp.checkpoints.tensors import Array, StoredTensor
from lsrdecomp.checkpoints.writers.pair_writer import PairWriter
from lsrdecomp.checkpoints.writers.peft import write_lora
from lsrdecomp.checkpoints.writing import new_directory, new_file, write_json
from lsrdecomp.errors import CheckpointError, UnsupportedError

FORMATS = ("kohya", "diffusers", "lycoris", "cloneofsimo", "loralib", "torchtune", "mlx")
"""Formats of one file of pairs; of PEFT there is a directory."""
MODEL_HASH, LEGACY_HASH = "sshs_model_hash", "sshs_legacy_hash"
"""What sd-scripts writes of the tensors' bytes; the second is of a part of the file and left out."""


def check_same(like: Checkpoint) -> None:
    """Refuse an adapter that `write_same` could not give back as it came.

    Parameters
    ----------
    like : Checkpoint

    Raises
    ------
    UnsupportedError
        For an adapter that is no file of pairs with keys of their own.
    """
    odd = next((layer for layer in like.layers if not isinstance(layer, LoraLayer) or ".hada_" in layer.up.name), None)
    if like.format == "lsr":
        raise UnsupportedError("is an LSR adapter: name the LoRA that it was made from by --like", path=like.path)
    if odd is not None or like.format not in (*FORMATS, "peft-lora"):
        text = f"{like.format} holds more than plain pairs, so that it cannot be given back as it came"
        raise UnsupportedError(f"{text}; write lora instead", path=like.path)
    if like.layers[0].up.name.startswith(f"{LISTED}:"):
        raise UnsupportedError("is a pickled list without keys; write lora instead", path=like.path)


def same_is_directory(like: Checkpoint) -> bool:
    """Whether the format of an adapter is a directory with a config, not one file.

    Parameters
    ----------
    like : Checkpoint

    Returns
    -------
    bool
    """
    return like.format == "peft-lora" or (like.format == "mlx" and (like.weights.parent / CONFIG).is_file())


def write_same(
    out: str | Path,
    *,
    like: Checkpoint,
    layers: Iterable[tuple[str, Array, Array]],
    storage: str | None = None,
    extras: Mapping[str, StoredTensor] | None = None,
    force: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write pairs with ``ΔW = B @ A`` as ``like`` holds its own; layers that do not come are left out.

    An alpha keeps its value, and the factor by which alpha / rank differs goes into B. Of PEFT's and mlx-lm's
    directories the config follows the ranks, as does diffusers' config in the header; where a program has one rank for
    all layers (loralib, torchtune), all are padded to the largest.

    Parameters
    ----------
    out : str or Path
        A directory for PEFT and for mlx-lm's directories, else a file that ends in .safetensors.
    like : Checkpoint
        Never written into.
    layers : iterable of (name, B, A)
        Taken one at a time, under the names of ``like``.
    storage : str, optional
        Absent, the type of each layer in ``like``.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UnsupportedError
        For an adapter that is no file of pairs.
    CheckpointError
        If ``out`` exists (unless ``force``), or a name is not one of ``like``.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     halves = ((layer.name, 2.0 * layer.load()[0][:, :1], layer.load()[1][:1]) for layer in lora.layers)
    ...     small = open_checkpoint(write_same(Path(place) / "small", like=lora, layers=halves))
    >>> small.format, small.adapter_parameters
    ('peft-lora', 9216)
    """
    check_same(like)
    extras = like.extras if extras is None else extras
    if like.format == "peft-lora":
        storage = storage or like.storage
        return write_lora(
            out, source=like, layers=layers, storage=storage, extras=extras, force=force, provenance=provenance
        )
    out, inputs = Path(out), (like.path, like.weights)
    if same_is_directory(like):
        with new_directory(out, inputs=inputs, force=force) as part, PairWriter(part, like) as writer:
            _write(part / MLX_WEIGHTS, writer, like, layers, storage, extras, provenance)
            config = read_json(like.weights.parent / CONFIG)
            config["lora_parameters"] = config["lora_parameters"] | {"rank": max(writer.ranks.values())}
            write_json(part / CONFIG, config)
        return out
    if out.suffix != ".safetensors":
        raise CheckpointError("the name must end in .safetensors", path=out)
    with new_file(out, inputs=inputs, force=force) as part, PairWriter(out.absolute().parent, like) as writer:
        _write(part, writer, like, layers, storage, extras, provenance)
    return out


def _write(
    path: Path,
    writer: PairWriter,
    like: Checkpoint,
    layers: Iterable[tuple[str, Array, Array]],
    storage: str | None,
    extras: Mapping[str, StoredTensor],
    provenance: Mapping[str, Any] | None,
) -> None:
    """The tensors of all layers and the header."""
    layers, rank = _with_missing(like, layers), None
    alpha = like.config.get("lora_alpha") if like.format in ("loralib", "torchtune") else None
    if alpha is not None:  # of one rank for all layers
        layers = list(layers)
        rank = max(down.shape[0] for _, _, down in layers)
    for name, up, down in layers:
        layer: LoraLayer = like.layer(name)
        scale = 1.0 if alpha is None else alpha / (rank or 1)
        if layer.alpha is not None:
            scale = scalar(layer.alpha) / down.shape[0]
            writer.add(layer.alpha.name, layer.alpha.read())
        elif like.format == "mlx":
            scale = layer.scale
        keys, transposed = (layer.down.name, layer.up.name), like.format == "mlx"
        writer.add_pair(name, up, down, keys, storage or layer.dtype, rank=rank, scale=scale, transposed=transposed)
    for tensor in extras.values():
        writer.add(tensor.name, tensor.read())
    record = writer.record(provenance)
    writer.write(path, _metadata(like, writer) | record)


def _with_missing(like: Checkpoint, layers: Iterable[tuple[str, Array, Array]]) -> Iterator[tuple[str, Array, Array]]:
    """All layers; zeros for those left out of a file whose reader counts its layers."""
    names = set()
    for name, up, down in layers:
        names.add(name)
        yield name, up, down
    if like.format == "cloneofsimo":
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
        config[f"{component}.rank_pattern"] = config[f"{component}.alpha_pattern"] = patterns(own, common)
        config[f"{component}.use_rslora"] = False
    return json.dumps(config, sort_keys=True)
