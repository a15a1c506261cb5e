"""Files of the original loralib: ``….lora_A`` and ``….lora_B`` beside the head; alpha is not in them."""

from __future__ import annotations

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.format import PREFIX, finish
from lsrdecomp.checkpoints.modules import grouped, need
from lsrdecomp.checkpoints.records import Checkpoint, low_rank_layer
from lsrdecomp.errors import CheckpointError, UnsupportedError

name = "loralib"
SUFFIXES = {".lora_A": "down", ".lora_B": "up"}


def matches(bundle: Bundle) -> bool:
    """Some key ends in .lora_A or .lora_B."""
    return bundle.config is None and any(key.endswith(tuple(SUFFIXES)) for key in bundle.tensors)


def read(bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
    """Layers scaled by ``alpha`` / rank; the tensors beside them are the head, listed as modules to save."""
    modules, extras = grouped(bundle, SUFFIXES)
    layers = []
    for module, roles in modules.items():
        need(module, roles, ("up", "down"))
        up, down = roles["up"], roles["down"]
        if len(up.shape) == len(down.shape) == 2 and up.shape[1] and down.shape[0] % up.shape[1] == 0:
            groups = down.shape[0] // up.shape[1]
            if groups > 1:
                text = (
                    f"ranks {up.shape[1]} and {down.shape[0]}: a MergedLinear of {groups} enabled parts (enable_lora); "
                    "which of its parts they are is not in the file, so it is not read. Unfold it: a block-diagonal "
                    f"lora_B with all rows of the layer and {down.shape[0]} columns, zero rows for the other parts, "
                    f"and {groups} times the alpha"
                )
                raise UnsupportedError(text, path=up.path, tensor=module)
        layers.append(low_rank_layer(module, up, down, 1.0))
    if alpha is None:
        ranks = ", ".join(map(str, sorted({layer.rank for layer in layers})))
        raise CheckpointError(
            f"a loralib file of rank {ranks}: its alpha is not in it; pass alpha= as it was trained (its script's "
            "lora_alpha)",
            path=bundle.weights,
        )
    scaled = [low_rank_layer(layer.name, layer.up, layer.down, alpha / layer.rank) for layer in layers]
    saved = sorted({key.removeprefix(PREFIX).partition(".")[0] for key in extras})
    config = {"lora_alpha": alpha, "modules_to_save": saved or None}
    return finish(bundle, name, scaled, extras, config=config)
