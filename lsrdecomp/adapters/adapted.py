"""A layer of the base model with additive adapters beside it: forward, mixed batches, merge and unmerge.

What ΔW is made of is the subclass's duty; how it acts in the layer is the geometry's.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils import quantization_extra_repr, resolve_quantization_backend
from torch import Tensor, nn

from lsrdecomp.adapters.errors import MergeError
from lsrdecomp.adapters.geometry import geometry_of


class AdaptedLayer(nn.Module, BaseTunerLayer):
    """Base of the adapter layers of every structure.

    A subclass names its parameter containers in ``adapter_layer_names`` and says what ΔW is through `delta_matrix` and
    `delta_output`.
    """

    def __init__(self, base_layer: nn.Module, **quantization: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        inner = self.get_base_layer()
        self.quantization_backend = resolve_quantization_backend(inner, **quantization)
        self.geometry = geometry_of(inner, quantized=self.quantization_backend is not None)
        self.out_features, self.in_features = self.geometry.matrix_shape
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.scaling: dict[str, float] = {}

    def update_layer(self, adapter: str, config: Any, name: str) -> None:
        """Add an adapter to this layer, whose full name in the base model is ``name``."""
        raise NotImplementedError

    def delta_matrix(self, adapter: str) -> Tensor:
        """ΔW of one adapter as a matrix (out, in), scaling included."""
        raise NotImplementedError

    def delta_output(self, adapter: str, x: Tensor) -> Tensor:
        """What ΔW of one adapter adds to the layer's output."""
        raise NotImplementedError

    def has_adapter(self, adapter: str) -> bool:
        return adapter in self.scaling

    def get_delta_weight(self, adapter: str) -> Tensor:
        """ΔW of one adapter in the shape of the layer's weight."""
        return self.geometry.to_weight(self.delta_matrix(adapter))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapter_names = kwargs.pop("adapter_names", None)
        if adapter_names is not None:
            self._check_mixed_batch(x, adapter_names)
        if self.disable_adapters and self.merged:
            self.unmerge()
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        if self.quantization_backend is not None:
            result = self.quantization_backend.maybe_clone_base_result(result)
        if adapter_names is not None:
            return self._mixed_batch(x, result, adapter_names)
        dtype = result.dtype
        for adapter in self.active_adapters:
            if self.has_adapter(adapter):
                result = result + self._scaled_delta(adapter, x)
        return result.to(dtype)

    def _scaled_delta(self, adapter: str, x: Tensor) -> Tensor:
        delta = self.delta_output(adapter, x)
        # Some embedding layers multiply what they looked up.
        embed_scale = self._get_embed_scale()  # type: ignore[no-untyped-call]
        return delta if embed_scale is None else delta * embed_scale.to(delta.dtype)

    def _check_mixed_batch(self, x: Tensor, adapter_names: Sequence[str]) -> None:
        if len(x) != len(adapter_names):
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(adapter_names)} and {len(x)} respectively."
            )
        if self.merged:
            raise ValueError(
                "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
            )

    def _mixed_batch(self, x: Tensor, result: Tensor, adapter_names: Sequence[str]) -> Tensor:
        result = result.clone()
        for adapter in dict.fromkeys(adapter_names):
            if self.has_adapter(adapter):
                rows = [index for index, name in enumerate(adapter_names) if name == adapter]
                result[rows] += self._scaled_delta(adapter, x[rows]).to(result.dtype)
        return result

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add ΔW of the active (or the named) adapters to the layer's weight.

        The sum is taken in at least float32 and rounded once to the weight's own precision.

        Raises
        ------
        MergeError
            With ``safe_merge``, if the sum is not finite; the weight is then left as it was.
        """
        for adapter in check_adapters_to_merge(self, adapter_names):
            if not self.has_adapter(adapter):
                continue
            weight = self.get_base_weight()
            merged = self._added(weight, self.get_delta_weight(adapter), 1)
            if safe_merge and not torch.isfinite(merged).all():
                raise MergeError(f"NaNs detected in the merged weights. The adapter {adapter} seems to be broken")
            self.set_base_weight(merged)
            self.merged_adapters.append(adapter)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take every merged ΔW out of the layer's weight again, up to rounding."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        while self.merged_adapters:
            adapter = self.merged_adapters.pop()
            if self.has_adapter(adapter):
                self.set_base_weight(self._added(self.get_base_weight(), self.get_delta_weight(adapter), -1))

    @staticmethod
    def _added(weight: Tensor, delta: Tensor, sign: int) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        return (weight.to(wide) + sign * delta.to(weight.device, wide)).to(weight.dtype)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return True

    def extra_repr(self) -> str:
        return str(quantization_extra_repr(self))
