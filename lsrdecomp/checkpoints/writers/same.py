"""The format of another file again: its keys, types, alphas and metadata, with other numbers for its pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.bundle import CONFIG, MLX_WEIGHTS
from lsrdecomp.checkpoints.files import read_json
from lsrdecomp.checkpoints.layers_config import most_common, patterns
from lsrdecomp.checkpoints.modules import scalar
from lsrdecomp.checkpoints.provenance import metadata
from lsrdecomp.checkpoints.readers import pairs
from lsrdecomp.checkpoints.records import Checkpoint, LoraLayer
from lsrdecomp.checkpoints.tensors import Array, StoredTensor
from lsrdecomp.checkpoints.writers.peft import check_pair, write_lora
from lsrdecomp.checkpoints.writers.rounding import Rounding
from lsrdecomp.checkpoints.writing import TensorWriter, cast, new_directory, new_file, write_json
from lsrdecomp.errors import CheckpointError, UnsupportedError

FORMATS = ("kohya", "diffusers", "lycoris", "cloneofsimo", "loralib", "torchtune", "mlx")
"""Formats of one file of pairs; of PEFT there is a directory."""
MODEL_HASH, LEGACY_HASH = "sshs_model_hash", "sshs_legacy_hash"
"""What sd-scripts writes of the tensors' bytes; the second is of a part of the file and left out."""


def check_same(like: Checkpoint) -> None:
    """Raise `UnsupportedError` for an adapter that is no file of pairs with keys of their own."""
    odd = next((layer for layer in like.layers if not isinstance(layer, LoraLayer) or ".hada_" in layer.up.name), None)
    if like.format == "lsr":
        raise UnsupportedError("is an LSR adapter: name the LoRA that it was made from by --like", path=like.path)
    if odd is not None or like.format not in (*FORMATS, "peft-lora"):
        text = f"{like.format} holds more than plain pairs, so that it cannot be given back as it came"
        raise UnsupportedError(f"{text}; write lora, kohya or diffusers", path=like.path)
    if like.layers[0].up.name.isdecimal():
        raise UnsupportedError("is a pickled list without keys; write lora instead", path=like.path)


def same_is_directory(like: Checkpoint) -> bool:
    """Whether the format of an adapter is a directory with a config, not one file."""
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
    if same_is_directory(like):
        with new_directory(out, inputs=(like.path, like.weights), force=force) as part, TensorWriter(part) as writer:
            ranks = _write(part / MLX_WEIGHTS, writer, like, layers, storage, extras, provenance)
            config = read_json(like.weights.parent / CONFIG)
            config["lora_parameters"] = config["lora_parameters"] | {"rank": max(ranks.values())}
            write_json(part / CONFIG, config)
        return Path(out)
    out = Path(out)
    if out.suffix != ".safetensors":
        raise CheckpointError("the name must end in .safetensors", path=out)
    with (
        new_file(out, inputs=(like.path, like.weights), force=force) as part,
        TensorWriter(out.absolute().parent) as writer,
    ):
        _write(part, writer, like, layers, storage, extras, provenance)
    return out


def _write(
    path: Path,
    writer: TensorWriter,
    like: Checkpoint,
    layers: Iterable[tuple[str, Array, Array]],
    storage: str | None,
    extras: Mapping[str, StoredTensor],
    provenance: Mapping[str, Any] | None,
) -> dict[str, int]:
    """The tensors of all layers and the header; ranks by the names of layers."""
    layers, rank = _with_missing(like, layers), None
    alpha = like.config.get("lora_alpha") if like.format in ("loralib", "torchtune") else None
    if alpha is not None:
        layers = list(layers)
        rank = max(down.shape[0] for _, _, down in layers)
    ranks: dict[str, int] = {}
    rounding = Rounding()
    for name, up, down in layers:
        layer = like.layer(name)
        check_pair(name, up, down, layer)
        if rank is not None:
            more = rank - down.shape[0]
            up, down = np.pad(up, ((0, 0), (0, more))), np.pad(down, ((0, more), (0, 0)))
        ranks[name] = down.shape[0]
        scale = 1.0 if alpha is None else alpha / ranks[name]
        if layer.alpha is not None:
            scale = scalar(layer.alpha) / ranks[name]
            writer.add(layer.alpha.name, layer.alpha.read())
        elif like.format == "mlx":
            scale = layer.scale
        kind = storage or layer.dtype
        halves = cast(up / scale, kind, layer.up.name), cast(down, kind, layer.down.name)
        rounding.add(up, down, halves[0].astype(np.float64) * scale, halves[1])
        for key, half in zip((layer.up.name, layer.down.name), _shaped(like, layer, *halves), strict=True):
            writer.add(key, half)
    if not ranks:
        raise CheckpointError("no layers to write", path=path)
    for tensor in extras.values():
        writer.add(tensor.name, tensor.read())
    writer.write(path, _metadata(like, ranks, writer, rounding, provenance))
    return ranks


def _with_missing(like: Checkpoint, layers: Iterable[tuple[str, Array, Array]]) -> Iterator[tuple[str, Array, Array]]:
    """All layers; zeros for those left out of a file whose reader counts its layers."""
    given = set()
    for name, up, down in layers:
        given.add(name)
        yield name, up, down
    if like.format == "cloneofsimo":
        for layer in like.layers:
            if layer.name not in given:
                yield layer.name, np.zeros((layer.out_features, 1)), np.zeros((1, layer.in_features))


def _shaped(like: Checkpoint, layer: LoraLayer, up: Array, down: Array) -> tuple[Array, Array]:
    if like.format == "mlx":
        return up.T, down.T
    if not layer.kernel:
        return up, down
    return up.reshape(*up.shape, *(1 for _ in layer.kernel)), down.reshape(down.shape[0], -1, *layer.kernel)


def _metadata(
    like: Checkpoint,
    ranks: Mapping[str, int],
    writer: TensorWriter,
    rounding: Rounding,
    provenance: Mapping[str, Any] | None,
) -> dict[str, str]:
    """That of ``like``, with what it says of ranks and hashes made true, and our record."""
    digest = writer.sha256()
    found = {key: value for key, value in like.metadata.items() if key != LEGACY_HASH}
    if MODEL_HASH in found:
        found[MODEL_HASH] = digest
    for name, rank in ranks.items():
        if f"{name}:rank" in found:
            found[f"{name}:rank"] = str(rank)
    if pairs.METADATA in found:
        found[pairs.METADATA] = _header_config(json.loads(found[pairs.METADATA]), ranks)
    return found | metadata(like, provenance, sha256=digest, **rounding.to_json())


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
