"""Files of the cloneofsimo trainer: ``unet:0:up`` with ranks in the header, or bare lists of up, down, up, down, …."""

from __future__ import annotations

import re

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.format import finish, grouped, need, refuse_alpha
from lsrdecomp.checkpoints.records import Checkpoint, low_rank_layer
from lsrdecomp.errors import CheckpointError

name = "cloneofsimo"
KEY = re.compile(r"[A-Za-z_]+:[0-9]+:(up|down)")


def matches(bundle: Bundle) -> bool:
    """Keys such as unet:0:up, as a bare list gets them too, or nothing but ``<token>`` embeddings."""
    tokens = bool(bundle.tensors) and all(re.fullmatch(r"<.+>", key) for key in bundle.tensors)
    return bundle.config is None and (tokens or any(KEY.fullmatch(key) for key in bundle.tensors))


def read(bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
    """Layers called by their ordinals, as the format does (``unet:0``; ``layer:0`` in a list); the scale is 1."""
    refuse_alpha(bundle, alpha, "this format has no alpha, its scale is 1")
    modules, extras = grouped(bundle, {":up": "up", ":down": "down"})
    layers = []
    for module, roles in modules.items():
        need(module, roles, ("up", "down"))
        layer = low_rank_layer(module, roles["up"], roles["down"], 1.0)
        rank = bundle.metadata.get(f"{module}:rank", str(layer.rank))
        if rank != str(layer.rank):
            raise layer.down.error(f"rank {layer.rank} in shape {layer.down.shape}, but {rank[:20]!r} in the header")
        layers.append(layer)
    if not layers:
        raise CheckpointError(f"holds {len(extras)} token embeddings and no LoRA layer", path=bundle.weights)
    return finish(bundle, name, layers, extras)
