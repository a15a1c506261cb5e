"""PEFT's own LoHa and LoKr directories, always scaled by alpha / r (LyCORIS itself is not, where factors are whole)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.config import Patterns, check_carried
from lsrdecomp.checkpoints.format import PREFIX, Roles, finish, grouped, needed_config, refuse_alpha, without_prefix
from lsrdecomp.checkpoints.readers.lycoris import HADA, LOKR, hadamard_layer, kronecker_layer
from lsrdecomp.checkpoints.records import Checkpoint, Layer
from lsrdecomp.errors import UnsupportedError

EFFECT_FREE = ("use_effective_conv2d",)  # it shows in the shapes


@dataclass(frozen=True, slots=True)
class PeftLycoris:
    """One of the two formats: what its config calls it, the parts of a module, and the layer they make."""

    name: str
    peft_type: str
    parts: Mapping[str, str]
    layer: Callable[[str, Roles, float], Layer]

    def matches(self, bundle: Bundle) -> bool:
        """The config has this peft_type."""
        return bundle.config is not None and bundle.config.get("peft_type") == self.peft_type

    def read(self, bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
        """Layers with the rank and scale that PEFT gives them."""
        config = needed_config(bundle)
        refuse_alpha(bundle, alpha)
        check_carried(config)
        switches = sorted(
            key for key, value in config.raw.items() if key.startswith("use_") and value and key not in EFFECT_FREE
        )
        if switches:
            raise UnsupportedError(f"{switches[0][:60]!r} is set; such an adapter is not read", path=config.path)
        default_rank, default_alpha = config.integer("r", 8), config.number("alpha", 8)
        ranks = Patterns(config.integers("rank_pattern"), "rank_pattern", config.path)
        alphas = Patterns(config.numbers("alpha_pattern"), "alpha_pattern", config.path)
        modules, rest = grouped(bundle, self.parts)
        layers: list[Layer] = []
        for key, roles in modules.items():
            without_prefix(next(iter(roles.values())))
            module = key.removeprefix(PREFIX)
            scale = alphas.get(module, default_alpha) / ranks.get(module, default_rank)
            layers.append(self.layer(module, roles, scale))
        extras = {tensor.name: tensor for tensor in rest.values()}
        return finish(bundle, self.name, layers, extras, parts=f"{self.peft_type} layer")


loha = PeftLycoris("peft-loha", "LOHA", HADA, hadamard_layer)
lokr = PeftLycoris("peft-lokr", "LOKR", LOKR, kronecker_layer)
