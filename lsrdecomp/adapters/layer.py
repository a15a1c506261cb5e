"""The LSR layer: ΔW = scaling · B̂Â, each of the two a sum of Kronecker products."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from lsrdecomp.adapters.adapted import AdaptedLayer
from lsrdecomp.adapters.config import LsrConfig
from lsrdecomp.adapters.factors import KroneckerFactors, zero_factor
from lsrdecomp.adapters.layout import LayerLayout, layer_layout


class LsrLayer(AdaptedLayer):
    """LSR adapters beside one layer of the base model.

    ``lsr_A`` holds the in side Â (r × n), ``lsr_B`` the out side B̂ (m × r), as in LoRA. Both are expanded once per
    forward pass and then applied like LoRA, which is cheaper than applying their Kronecker structure token by token.
    """

    adapter_layer_names = ("lsr_A", "lsr_B")
    other_param_names = ("r", "lsr_alpha", "scaling", "lsr_dropout", "layout")

    def __init__(self, base_layer: nn.Module, **quantization: Any) -> None:
        super().__init__(base_layer, **quantization)
        self.lsr_A = nn.ModuleDict()
        self.lsr_B = nn.ModuleDict()
        self.lsr_dropout = nn.ModuleDict()
        self.r: dict[str, int] = {}
        self.lsr_alpha: dict[str, float] = {}
        self.layout: dict[str, LayerLayout] = {}

    def update_layer(self, adapter: str, config: LsrConfig, name: str) -> None:
        """Add an adapter to this layer, or give an existing one new factors.

        Parameters
        ----------
        adapter : str
            Name of the adapter.
        config : LsrConfig
            Its settings.
        name : str
            Full name of this module in the base model, for patterns and for errors.
        """
        layout = layer_layout(config, name, self.geometry.matrix_shape)
        self.layout[adapter] = layout
        self.r[adapter] = layout.r
        self.lsr_alpha[adapter] = layout.alpha
        self.scaling[adapter] = layout.scaling
        self.lsr_dropout[adapter] = nn.Dropout(config.lsr_dropout) if config.lsr_dropout > 0 else nn.Identity()
        out_terms, in_terms = layout.separation_ranks
        self.lsr_A[adapter] = KroneckerFactors(layout.shape.right, in_terms)
        self.lsr_B[adapter] = KroneckerFactors(layout.shape.left, out_terms)
        self.start(adapter, config.init_weights)
        self._move_adapter_to_device_of_base_layer(adapter)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def start(self, adapter: str, init_weights: bool | str = True) -> None:
        """Give an adapter's factors their starting values; see `LsrConfig`.

        The default start gives Â the spread of LoRA's A, entries of variance 1/n, and zeroes one factor of B̂ alone:
        were there two zeros, no gradient would ever reach either.
        """
        into, out = self.lsr_A[adapter], self.lsr_B[adapter]
        if init_weights == "paper":
            for factor in (*into.factors, *out.factors):  # type: ignore[misc]
                nn.init.normal_(factor, std=0.01)
            return
        into.start(1 / math.sqrt(self.in_features))  # type: ignore[operator]
        if init_weights:
            out.start(1.0, zero=zero_factor(self.layout[adapter].shape.left))  # type: ignore[operator]
        else:
            out.start(1 / math.sqrt(self.r[adapter]))  # type: ignore[operator]

    def pair(self, adapter: str) -> tuple[Tensor, Tensor]:
        """``(scaling · B̂, Â)`` of one adapter, formed: shapes (m, r) and (r, n)."""
        left: Tensor = self.lsr_B[adapter].matrix()  # type: ignore[operator]
        right: Tensor = self.lsr_A[adapter].matrix()  # type: ignore[operator]
        return self.scaling[adapter] * left, right

    def delta_matrix(self, adapter: str) -> Tensor:
        left, right = self.pair(adapter)
        return left @ right

    def delta_output(self, adapter: str, x: Tensor) -> Tensor:
        left, right = self.pair(adapter)
        if x.is_floating_point():
            x = self.lsr_dropout[adapter](self._cast_input_dtype(x, right.dtype))
            left, right = left.to(x.dtype), right.to(x.dtype)
        return self.geometry.pair_output(x, left, right)

    def __repr__(self) -> str:
        return "lsr." + super().__repr__()
