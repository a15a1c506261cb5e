"""Files of the cloneofsimo trainer: ``unet:0:up`` with ranks in the header, or bare lists of up, down, up, down, …."""

from __future__ import annotations

import re

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.format import PREFIX, finish, refuse_alpha
from lsrdecomp.checkpoints.records import Checkpoint, low_rank_layer
from lsrdecomp.checkpoints.tensors import StoredTensor
from lsrdecomp.errors import CheckpointError

name = "cloneofsimo"
KEY = re.compile(r"(?P<name>[A-Za-z_]+:[0-9]+):(?P<half>up|down)")


def matches(bundle: Bundle) -> bool:
    """A bare list, keys such as unet:0:up, or nothing but ``<token>`` embeddings."""
    if bundle.config is not None:
        return False
    tokens = bool(bundle.tensors) and all(re.fullmatch(r"<.+>", key) for key in bundle.tensors)
    return bundle.listed or tokens or any(KEY.fullmatch(key) for key in bundle.tensors)


def read(bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
    """Layers called by their ordinals, as the format does (``unet:0``; ``layer:0`` in a list); the scale is 1."""
    refuse_alpha(bundle, alpha, "this format has no alpha, its scale is 1")
    halves, extras = _list(bundle) if bundle.listed else _named(bundle)
    layers = []
    for module, both in halves.items():
        if len(both) == 1:
            held = next(iter(both.values()))
            raise held.error(f"{module} has one of up and down only; the file is incomplete")
        layer = low_rank_layer(module, both["up"], both["down"], 1.0)
        rank = bundle.metadata.get(f"{module}:rank", str(layer.rank))
        if rank != str(layer.rank):
            raise both["down"].error(
                f"rank {layer.rank} in shape {both['down'].shape}, but {rank[:20]!r} in the header"
            )
        layers.append(layer)
    if not layers:
        raise CheckpointError(f"holds {len(extras)} token embeddings and no LoRA layer", path=bundle.weights)
    return finish(bundle, name, layers, extras)


Halves = dict[str, dict[str, StoredTensor]]


def _named(bundle: Bundle) -> tuple[Halves, dict[str, StoredTensor]]:
    halves: Halves = {}
    extras = {}
    for key, tensor in bundle.tensors.items():
        found = KEY.fullmatch(key)
        if found is None:
            extras[PREFIX + key] = tensor
        else:
            halves.setdefault(found["name"], {})[found["half"]] = tensor
    return halves, extras


def _list(bundle: Bundle) -> tuple[Halves, dict[str, StoredTensor]]:
    halves: Halves = {}
    for position, tensor in enumerate(bundle.tensors.values()):
        halves.setdefault(f"layer:{position // 2}", {})["down" if position % 2 else "up"] = tensor
    return halves, {}
