"""PEFT's own LoHa and LoKr directories, always scaled by alpha / r (LyCORIS itself is not, where factors are whole)."""

from __future__ import annotations

from collections.abc import Callable

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.config import Config, Patterns
from lsrdecomp.checkpoints.layers_config import check_carried
from lsrdecomp.checkpoints.modules import Roles, grouped
from lsrdecomp.checkpoints.readers.lycoris import HADA, LOKR, hadamard_layer, kronecker_layer
from lsrdecomp.checkpoints.readers.peft import PREFIX
from lsrdecomp.checkpoints.records import Checkpoint, Layer, natural
from lsrdecomp.errors import CheckpointError, UnsupportedError

PARTS = {"LOHA": HADA, "LOKR": LOKR}
EFFECT_FREE = ("use_effective_conv2d",)  # it shows in the shapes
LAYERS: dict[str, Callable[[str, Roles, float], Layer]] = {"LOHA": hadamard_layer, "LOKR": kronecker_layer}


def matches(bundle: Bundle) -> bool:
    """peft_type LOHA or LOKR."""
    return bundle.config is not None and bundle.config.get("peft_type") in ("LOHA", "LOKR")


def read(bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
    """LoHa modules as `LoraLayer`, LoKr modules as `LsrLayer`."""
    if bundle.config is None:
        raise CheckpointError("has no adapter_config.json", path=bundle.path)
    config = Config(bundle.config, bundle.config_path)
    if alpha is not None:
        raise bundle.config_error("alpha is in the config; leave alpha= out")
    check_carried(config)
    switches = sorted(
        key for key, value in config.raw.items() if key.startswith("use_") and value and key not in EFFECT_FREE
    )
    if switches:
        raise UnsupportedError(f"{switches[0][:60]!r} is set; such an adapter is not read", path=config.path)
    kind = config.text("peft_type")
    default_rank, default_alpha = config.integer("r", 8), config.number("alpha", 8)
    ranks = Patterns(config.integers("rank_pattern"), "rank_pattern", config.path)
    alphas = Patterns(config.numbers("alpha_pattern"), "alpha_pattern", config.path)
    modules, rest = grouped(bundle, PARTS[kind])
    layers: list[Layer] = []
    for key, roles in modules.items():
        if not key.startswith(PREFIX):
            held = next(iter(roles.values()))
            raise held.error(f"expected the prefix {PREFIX!r}: PEFT would not load this tensor")
        name = key.removeprefix(PREFIX)
        scale = alphas.get(name, default_alpha) / ranks.get(name, default_rank)
        layers.append(LAYERS[kind](name, roles, scale))
    if not layers:
        raise CheckpointError(f"holds no {kind} layer among {len(bundle.tensors)} tensors", path=bundle.weights)
    extras = {tensor.name: tensor for tensor in rest.values()}
    ordered = tuple(sorted(layers, key=lambda layer: natural(layer.name)))
    form = f"peft-{kind.lower()}"
    return Checkpoint(bundle.path, form, dict(bundle.config), ordered, extras, bundle.weights, dict(bundle.metadata))
