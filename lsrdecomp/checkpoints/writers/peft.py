"""Writing a plain LoRA directory: exact for what is given, in PEFT's form or for servers with one global scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.bundle import CONFIG
from lsrdecomp.checkpoints.config import module_suffixes
from lsrdecomp.checkpoints.format import PREFIX
from lsrdecomp.checkpoints.layers_config import carried_fields, most_common, patterns
from lsrdecomp.checkpoints.provenance import metadata
from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.checkpoints.tensors import Array, StoredTensor
from lsrdecomp.checkpoints.writers.rounding import Rounding
from lsrdecomp.checkpoints.writing import WEIGHTS, TensorWriter, cast, new_directory, write_json
from lsrdecomp.errors import CheckpointError, ShapeError, UnsupportedError

SERVER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM allocates; more is refused
PROFILES = ("peft", "server", "lorax")
HALVES = (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B"))
"""A and B of a layer, and of an embedding."""


def write_lora(
    out_dir: str | Path,
    *,
    layers: Iterable[tuple[str, Array, Array]],
    source: Checkpoint | None = None,
    config: Mapping[str, Any] | None = None,
    extras: Mapping[str, StoredTensor] | None = None,
    storage: str = "float32",
    force: bool = False,
    profile: str = "peft",
    rank: int | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a PEFT LoRA directory with ``ΔW = B @ A``: lora_alpha = r everywhere, so the scale must be in B already.

    Parameters
    ----------
    out_dir : str or Path
        Must not exist, unless ``force``; see `lsrdecomp.checkpoints.writing.new_directory`.
    layers : iterable of (name, B, A)
        B (m, r) and A (r, n), taken one at a time.
    source : Checkpoint, optional
        Where config fields, other tensors and layer kinds (embedding, convolution) come from; never written into.
    config, extras : Mapping, optional
        Instead of the source's.
    storage : str
        Dtype of A and B; arrays already in it keep their bits.
    profile : str
        ``"peft"``. ``"server"``: r = lora_alpha = the largest rank, each layer at its own rank; servers that scale by
        lora_alpha / r of the config alone read that right, and by its patterns PEFT does. ``"lorax"``: one rank for all
        layers, padded with zeros up to one of 1, 8, 16, 32, 64, 128, 256, 320, 512, no patterns, for servers that stack
        the layers of a type. Servers hold no other tensors, so extras are refused by name under both.
    rank : int, optional
        Pad every layer to this rank. Without it the lorax profile gathers all layers first, to see the largest.

    Returns
    -------
    Path
        ``out_dir``.

    Examples
    --------
    >>> import tempfile
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> with tempfile.TemporaryDirectory() as place:
    ...     up, down = np.ones((4, 1), np.float32), np.ones((1, 6), np.float32)
    ...     written = open_checkpoint(write_lora(Path(place) / "lora", layers=[("model.q_proj", up, down)]))
    >>> [(layer.name, layer.shape) for layer in written.layers]
    [('model.q_proj', (4, 6))]
    """
    out = Path(out_dir)
    if profile not in PROFILES:
        raise CheckpointError(f"profile {profile!r} is not one of {', '.join(PROFILES)}")
    config = config if config is not None else (source.config if source else {})
    extras = extras if extras is not None else (source.extras if source else {})
    if profile != "peft" and extras:
        text = f"{len(extras)} tensors beside the adapter ({next(iter(extras))}, …) that servers do not load"
        raise UnsupportedError(text + ": use profile 'peft', or pass extras={} to leave them out", path=out)
    if profile == "lorax" and rank is None:
        layers = list(layers)
        rank = _server_rank(max((down.shape[0] for _, _, down in layers), default=1), out)
    known = {layer.name: layer for layer in source.layers} if source else {}
    ranks: dict[str, int] = {}
    rounding = Rounding()
    with new_directory(out, inputs=(source.path,) if source else (), force=force) as part, TensorWriter(part) as writer:
        for name, up, down in layers:
            layer = known.get(name)
            kind, kernel = (layer.kind, layer.kernel) if layer is not None else ("linear", ())
            check_pair(name, up, down, layer)
            if rank is not None:
                up, down = _padded(name, up, down, rank)
            ranks[name] = down.shape[0]
            keys = [f"{PREFIX}{name}.{half}" for half in HALVES[kind == "embedding"]]
            stored_down, stored_up = (cast(half, storage, key) for half, key in zip((down, up), keys, strict=True))
            rounding.add(up, down, stored_up, stored_down)
            if kind == "conv":
                stored_down = stored_down.reshape(down.shape[0], -1, *kernel)
                stored_up = stored_up.reshape(*up.shape, *(1 for _ in kernel))
            writer.add(keys[0], stored_down)
            writer.add(keys[1], stored_up)
        if not ranks:
            raise CheckpointError("no layers to write", path=out)
        if profile == "server":
            _server_rank(max(ranks.values()), out)
        for key, tensor in extras.items():
            writer.add(key, tensor.read())
        fields = carried_fields(config, set(ranks), set(extras), source, "lora_only")
        if profile != "peft":
            fields["target_modules"] = module_suffixes(ranks)
        if not extras:
            fields["modules_to_save"] = None
        common = max(ranks.values()) if profile == "server" else most_common(ranks)
        fields |= {
            "peft_type": "LORA",
            "r": common,
            "lora_alpha": common,
            "rank_pattern": patterns(ranks, common),
            "alpha_pattern": patterns(ranks, common),
            "fan_in_fan_out": any(name in known and known[name].kind == "conv1d" for name in ranks),
            "use_rslora": False,
            "use_dora": False,
            "lora_dropout": 0.0,
            "init_lora_weights": True,
        }
        facts = {"profile": profile, "storage": storage, "sha256": writer.sha256(), **rounding.to_json()}
        writer.write(part / WEIGHTS, metadata(source, provenance, **facts))
        write_json(part / CONFIG, fields)
    return out


def _server_rank(rank: int, out: Path) -> int:
    for allowed in SERVER_RANKS:
        if rank <= allowed:
            return allowed
    raise UnsupportedError(f"rank {rank} is above {SERVER_RANKS[-1]}, the most a server takes", path=out)


def check_pair(name: str, up: Array, down: Array, layer: Any) -> None:
    """Raise `ShapeError` unless B and A multiply, to the size of the layer if that is known."""
    if up.ndim != 2 or down.ndim != 2 or up.shape[1] != down.shape[0] or 0 in (*up.shape, *down.shape):
        raise ShapeError(f"{name}: B of shape {up.shape} and A of shape {down.shape} do not multiply")
    if layer is not None and (layer.out_features, layer.in_features) != (up.shape[0], down.shape[1]):
        size = f"{layer.out_features} x {layer.in_features}"
        raise ShapeError(f"{name}: B @ A is {up.shape[0]} x {down.shape[1]}, but the layer is {size}")


def _padded(name: str, up: Array, down: Array, rank: int) -> tuple[Array, Array]:
    more = rank - down.shape[0]
    if more < 0:
        raise ShapeError(f"{name}: rank {down.shape[0]}, but all layers are to have {rank}")
    return np.pad(up, ((0, 0), (0, more))), np.pad(down, ((0, more), (0, 0)))
