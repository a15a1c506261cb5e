"""LSR for single parameters, such as stacked experts, that no module holds alone."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.layer import ParamWrapper as LoraParamWrapper
from peft.tuners.lora.layer import _LoraParameterProxy
from peft.utils import ALLOWED_COMPUTE_DTYPES
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lsrdecomp.errors import UnsupportedLayerError
from lsrdecomp.lora.peft.geometry import Geometry, LinearGeometry
from lsrdecomp.lora.peft.layer import LsrLayer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.lora.peft.lsr_config import LsrConfig


class ParamWrapper(LsrLayer):
    """An LSR adapter beside one parameter of a module; wrappers of several are nested.

    PEFT recognises the class by this name. A parameter of three dimensions is a stack of expert
    matrices: B̂ and Â are one sum of Kronecker products each for all of them, cut into one piece
    per expert.
    """

    def __init__(self, base_layer: nn.Module, parameter_name: str, **quantization: Any) -> None:
        self.parameter_name = parameter_name
        super().__init__(base_layer, **quantization)

    def _geometry_of(self, layer: nn.Module) -> Geometry:
        shape = self.get_param().shape
        if len(shape) not in (2, 3):
            raise UnsupportedLayerError(
                f"lsr.ParamWrapper was initialized with {len(shape)} dimensional Parameter "
                f"{self.parameter_name}, but only 2d and 3d are supported."
            )
        is_stacked = len(shape) == 3
        self.copies = shape[0] if is_stacked else 1
        self.transposed = is_stacked and bool(getattr(layer, "is_transposed", False))
        rows, columns = shape[-2:]
        return LinearGeometry((columns, rows) if self.transposed else (rows, columns))

    def update_layer(self, adapter: str, config: LsrConfig, name: str) -> None:
        """Add an adapter, without what works on a layer's input or output alone."""
        for option in ("lsr_dropout", "use_dora"):
            if getattr(config, option):
                raise UnsupportedLayerError(
                    f"lsr.ParamWrapper does not work with {option}; {name} is a parameter."
                )
        super().update_layer(adapter, config, name)

    def get_param(self) -> nn.Parameter:
        """Return the adapted parameter."""
        return getattr(self.get_base_layer(), self.parameter_name)  # type: ignore[no-any-return]

    def get_base_weight(self) -> Tensor:
        """Return the numbers of the adapted parameter."""
        return self.get_param().data

    def set_base_weight(self, weight_data: Tensor) -> None:
        """Set the numbers of the adapted parameter."""
        self.get_param().data = weight_data

    def _get_base_layer_device_and_dtype(
        self, base_layer: nn.Module
    ) -> tuple[torch.device, torch.dtype]:
        del base_layer  # which holds other parameters too
        parameter = self.get_param()
        return parameter.device, parameter.dtype

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return ΔW of one adapter in the shape of the parameter."""
        left, right = self.pair(adapter)
        if self.copies == 1:
            return (left @ right).reshape(self.get_param().shape)
        left = left.reshape(left.shape[0], self.copies, -1).transpose(0, 1)  # (experts, out, r)
        right = right.reshape(self.copies, -1, right.shape[1])  # (experts, r, in)
        if self.transposed:
            return torch.bmm(right.transpose(-1, -2), left.transpose(-1, -2))
        return torch.bmm(left, right)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Return that PEFT cannot convert it: all experts share factors."""
        del adapter_name
        return False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the module's output with the parameter adapted."""
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError("lsr.ParamWrapper does not support mixed adapter batches.")
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged:
            return self.base_layer(x, *args, **kwargs)  # type: ignore[no-any-return]
        with self._adapted_parameter():
            return self.base_layer(x, *args, **kwargs)  # type: ignore[no-any-return]

    @contextmanager
    def _adapted_parameter(self) -> Iterator[None]:
        """Add ΔW of the active adapters to the parameter for a block, as PEFT does."""
        deltas = [
            self.get_delta_weight(adapter)
            for adapter in self.active_adapters
            if self.has_adapter(adapter)
        ]
        if not deltas:
            yield
            return
        delta = torch.stack(deltas).sum(0) if len(deltas) > 1 else deltas[0]
        parameter = self.get_param()
        is_trained = parameter.requires_grad
        # To 8-bit floats, which have no addition, PEFT adds in the precision of ΔW.
        if parameter.dtype in ALLOWED_COMPUTE_DTYPES:
            delta = delta.to(parameter.dtype)
        module: Any = self.get_base_layer()
        addition: Any = _LoraParameterProxy(delta)  # type: ignore[no-untyped-call]
        parametrize.register_parametrization(module, self.parameter_name, addition)
        original = module.parametrizations[self.parameter_name].original
        original.requires_grad_(is_trained)
        try:
            with parametrize.cached():
                yield
        finally:
            LoraParamWrapper._remove_parametrizations(self)  # type: ignore[arg-type, no-untyped-call]

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return the bare module, after merging this wrapper and those inside it if asked to."""
        layer: nn.Module = self
        while isinstance(layer, ParamWrapper):
            if merge:
                layer.merge(safe_merge=safe_merge, adapter_names=adapter_names)
            layer = layer.base_layer
        return layer

    def extra_repr(self) -> str:
        """Return the name of the parameter."""
        return f"parameter_name='{self.parameter_name}'"
