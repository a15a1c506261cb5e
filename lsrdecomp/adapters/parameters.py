"""LSR for single parameters, such as the stacked experts of a mixture, that no module holds alone."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.layer import ParamWrapper as LoraParamWrapper
from peft.tuners.lora.layer import _LoraParameterProxy
from peft.utils import ALLOWED_COMPUTE_DTYPES
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lsrdecomp.adapters.errors import UnsupportedLayerError
from lsrdecomp.adapters.geometry import Geometry, LinearGeometry
from lsrdecomp.adapters.layer import LsrLayer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.adapters.config import LsrConfig


class ParamWrapper(LsrLayer):
    """An LSR adapter beside one parameter of a module; several parameters are wrapped one around the other.

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
                f"lsr.ParamWrapper was initialized with {len(shape)} dimensional Parameter {self.parameter_name}, but "
                "only 2d and 3d are supported."
            )
        self.transposed = len(shape) == 3 and bool(getattr(layer, "is_transposed", False))
        self.copies = shape[0] if len(shape) == 3 else 1
        out, into = shape[-2:][::-1] if self.transposed else shape[-2:]
        return LinearGeometry((out, into))

    def update_layer(self, adapter: str, config: LsrConfig, name: str) -> None:
        for option in ("lsr_dropout", "use_dora"):
            if getattr(config, option):
                raise UnsupportedLayerError(
                    f"lsr.ParamWrapper does not work with {option}; {name} is a parameter."
                )
        super().update_layer(adapter, config, name)

    def get_param(self) -> nn.Parameter:
        return getattr(self.get_base_layer(), self.parameter_name)  # type: ignore[no-any-return]

    def get_base_weight(self) -> Tensor:
        return self.get_param().data

    def set_base_weight(self, weight_data: Tensor) -> None:
        self.get_param().data = weight_data

    def _get_base_layer_device_and_dtype(
        self, base_layer: nn.Module
    ) -> tuple[torch.device, torch.dtype]:
        parameter = self.get_param()
        return parameter.device, parameter.dtype

    def get_delta_weight(self, adapter: str) -> Tensor:
        left, right = self.pair(adapter)
        if self.copies == 1:
            return (left @ right).reshape(self.get_param().shape)
        left = left.reshape(left.shape[0], self.copies, -1).transpose(0, 1)  # (experts, out, r)
        right = right.reshape(self.copies, -1, right.shape[1])  # (experts, r, in)
        return torch.bmm(right.mT, left.mT) if self.transposed else torch.bmm(left, right)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
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
        deltas = [
            self.get_delta_weight(adapter)
            for adapter in self.active_adapters
            if self.has_adapter(adapter)
        ]
        if not deltas:
            yield
            return
        module, name = self.get_base_layer(), self.parameter_name
        parameter, delta = (
            self.get_param(),
            torch.stack(deltas).sum(0) if len(deltas) > 1 else deltas[0],
        )
        trained = parameter.requires_grad
        # To 8-bit floats, which have no addition, PEFT adds in the precision of ΔW.
        narrow = parameter.dtype not in ALLOWED_COMPUTE_DTYPES
        addition: Any = _LoraParameterProxy(delta if narrow else delta.to(parameter.dtype))  # type: ignore[no-untyped-call]
        parametrize.register_parametrization(module, name, addition)
        module.parametrizations[name].original.requires_grad_(trained)  # type: ignore[index, union-attr]
        try:
            with parametrize.cached():
                yield
        finally:
            LoraParamWrapper._remove_parametrizations(self)  # type: ignore[arg-type, no-untyped-call]

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """The bare module, after merging this wrapper and those inside it if asked to."""
        layer: nn.Module = self
        while isinstance(layer, ParamWrapper):
            if merge:
                layer.merge(safe_merge=safe_merge, adapter_names=adapter_names)
            layer = layer.base_layer
        return layer

    def extra_repr(self) -> str:
        return f"parameter_name='{self.parameter_name}'"
