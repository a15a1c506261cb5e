"""The LSR layer: ΔW = scaling · B̂Â, each of the two a sum of Kronecker products."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from lsrdecomp.errors import ShapeError
from lsrdecomp.lora.peft.adapted import AdaptedLayer, dropout, row_norms
from lsrdecomp.lora.peft.factors import KroneckerFactors, Magnitudes, zero_factor
from lsrdecomp.lora.peft.lsr_config import LayerLayout, LsrConfig, layer_layout


class LsrLayer(AdaptedLayer):
    """LSR adapters beside one layer of the base model.

    ``lsr_A`` holds the input side Â (r × n) and ``lsr_B`` the output side B̂ (m × r), as in LoRA.
    Both are formed in a forward pass and then applied like LoRA, which is cheaper than applying
    their Kronecker structure token by token.

    Examples
    --------
    >>> from lsrdecomp.lora.peft import LsrConfig
    >>> from peft import get_peft_model
    >>> from torch import nn
    >>> config = LsrConfig(inner_shape=[2, 2], separation_rank=2, target_modules=["0"])
    >>> model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
    >>> layer = model.base_model.model[0]
    >>> isinstance(layer, LsrLayer), tuple(layer.get_delta_weight("default").shape)
    (True, (64, 64))
    """

    adapter_layer_names: tuple[str, ...] = ("lsr_A", "lsr_B", "lsr_magnitude_vector")
    other_param_names: tuple[str, ...] = (*AdaptedLayer.SCALE, "lsr_dropout", "layout", "tied")

    copies = 1
    """Matrices of the layer's shape that lie side by side; more than one for stacked experts."""

    def __init__(self, base_layer: nn.Module, **quantization: Any) -> None:
        super().__init__(base_layer, **quantization)
        self.lsr_A = nn.ModuleDict()
        self.lsr_B = nn.ModuleDict()
        self.lsr_magnitude_vector = Magnitudes()
        self.lsr_dropout = nn.ModuleDict()
        self.layout: dict[str, LayerLayout] = {}
        # A plain dict, since the other layer is not a part of this one.
        self.tied: dict[str, LsrLayer] = {}

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
        layout = layer_layout(config, name, self.geometry.matrix_shape, self.copies)
        self.layout[adapter] = layout
        self.set_initial_scale(adapter, layout.scaling)
        self.lsr_dropout[adapter] = dropout(config.lsr_dropout)
        output_terms, input_terms = layout.separation_ranks
        self.lsr_A[adapter] = KroneckerFactors(layout.shape.right, input_terms)
        self.lsr_B[adapter] = KroneckerFactors(layout.shape.left, output_terms)
        self.initialize(adapter, config.init_weights)
        if config.use_dora:
            self._move_adapter_to_device_of_base_layer(adapter)  # where the norms are computed
            self.lsr_magnitude_vector[adapter] = self._initial_magnitude(adapter)

    def tie(self, adapter: str, other: LsrLayer) -> None:
        """Use another layer's adapter here, transposed, because the two layers share one weight.

        An embedding looks up rows of the weight that the output layer multiplies by, so the one's
        ΔW is the other's transposed and a transposed sum of Kronecker products is one with
        transposed factors: nothing is stored here.
        """
        if self.geometry.matrix_shape != other.geometry.matrix_shape[::-1]:
            raise ShapeError(
                f"a layer of shape {self.geometry.matrix_shape} cannot be tied to "
                f"{other.geometry.matrix_shape}"
            )
        self.tied[adapter] = other
        self.layout[adapter] = other.layout[adapter]
        self.set_initial_scale(adapter, other.initial_scaling[adapter])
        self.lsr_dropout[adapter] = copy.deepcopy(other.lsr_dropout[adapter])

    def merged_elsewhere(self, adapter: str) -> bool:
        """Return whether another layer that shares this one's weight does the merging."""
        other = self.tied.get(adapter)
        return other is not None and other.weight.data_ptr() == self.weight.data_ptr()

    @torch.no_grad()
    def _initial_magnitude(self, adapter: str) -> nn.Parameter:
        """Return DoRA's magnitudes, which start as the row norms of W + ΔW."""
        delta = self.delta_matrix(adapter)
        if delta.is_meta:
            return nn.Parameter(delta.new_empty(delta.shape[0]))
        weight = self.geometry.to_matrix(self.get_base_weight())
        return nn.Parameter(row_norms(weight.to(delta.device), delta).to(delta.dtype))

    def initialize(self, adapter: str, init_weights: bool | str = True) -> None:
        """Set an adapter's factors to their starting values; see `LsrConfig`.

        The default start gives Â entries of variance 1/n, or 1 where an embedding looks one of them
        up, and zeroes one factor of B̂ alone: were there two zeros, no gradient would ever reach
        either.
        """
        input_side: Any = self.lsr_A[adapter]
        output_side: Any = self.lsr_B[adapter]
        layout = self.layout[adapter]
        if init_weights == "paper":
            for factor in (*input_side.factors, *output_side.factors):
                nn.init.normal_(factor, std=0.01)
            return
        input_side.initialize(1 / math.sqrt(self.geometry.fan_in))
        if init_weights:
            output_side.initialize(1.0, zero=zero_factor(layout.shape.left))
        else:
            output_side.initialize(1 / math.sqrt(layout.r))

    def pair(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Return ``(scaling · B̂, Â)`` of one adapter, formed: shapes (m, r) and (r, n)."""
        right, left = self._sides(adapter)
        scaling = self.scaling[adapter]
        if scaling != 1.0:
            left = left * scaling
        return left, right

    def _sides(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Return Â and B̂ of one adapter, formed."""
        if adapter in self.tied:
            right, left = self.tied[adapter]._sides(adapter)
            return left.T, right.T
        return self.lsr_A[adapter](), self.lsr_B[adapter]()

    def magnitude(self, adapter: str) -> Tensor | None:
        """Return DoRA's trained row norms of one adapter, or None without DoRA."""
        if adapter not in self.lsr_magnitude_vector:
            return None
        magnitude: Tensor = self.lsr_magnitude_vector(adapter)
        return magnitude

    def delta_matrix(self, adapter: str) -> Tensor:
        """Return ΔW of one adapter as a matrix (out, in), scaling included."""
        left, right = self.pair(adapter)
        return left @ right

    def delta_output(self, adapter: str, x: Tensor) -> Tensor:
        """Return what ΔW of one adapter adds to the layer's output, without forming ΔW."""
        left, right = self.pair(adapter)
        if x.is_floating_point():  # an embedding reads token numbers
            # Gradients of the factors would underflow in float16, for which PEFT too computes in
            # float32.
            if x.dtype not in (right.dtype, torch.bfloat16):
                x = self._cast_input_dtype(x, right.dtype)
            if self.training:
                x = self.lsr_dropout[adapter](x)
            if x.dtype != right.dtype:
                left = left.to(x.dtype)
                right = right.to(x.dtype)
        return self.geometry.pair_output(x, left, right)

    def __repr__(self) -> str:
        """Return the layer as PEFT shows its own, with the method's name before it."""
        return "lsr." + super().__repr__()


class LsrLinear(LsrLayer):
    """LSR adapters beside a linear layer."""
