"""KAdaptation: ΔW = α Σ_i A_i ⊗ (u_i v_i), with the small slow A_i shared by all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lsrdecomp.errors import ShapeError
from lsrdecomp.lora.peft.adapted import AdaptedLayer
from lsrdecomp.lora.peft.kernels import expand
from lsrdecomp.lora.peft.lsr_config import TargetConfig, positive
from lsrdecomp.lora.peft.register import register
from lsrdecomp.lora.peft.tuner import KroneckerTuner


@dataclass
class KAdaptationConfig(TargetConfig):
    """Settings of a KAdaptation adapter.

    Parameters
    ----------
    terms : int
        Number t of terms, and the size of the shared t × t matrices A_i; it must divide both sides
        of every layer.
    r : int
        Rank of the layer's own factors u_i v_i.
    alpha : float
        Scale of ΔW.
    init_weights : bool
        True: ΔW = 0, the u_i zero and the rest random. False: everything random.

    References
    ----------
    .. [1] X. He, C. Li, P. Zhang, J. Yang and X. E. Wang, Parameter-efficient model adaptation for
       vision transformers, 2023.

    Examples
    --------
    >>> from peft import get_peft_model
    >>> from torch import nn
    >>> config = KAdaptationConfig(target_modules=["0"])
    >>> model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
    >>> sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    192
    """

    terms: int = 4
    r: int = 1
    alpha: float = 1.0
    init_weights: bool = True
    peft_type_name = "KADAPTATION"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("terms", self.terms)
        positive("r", self.r)


class KAdaptationLayer(AdaptedLayer):
    """The fast factors of one layer; the slow ones belong to the model."""

    adapter_layer_names = ("kadaptation_u", "kadaptation_v")
    other_param_names = (*AdaptedLayer.SCALE, "slow")

    def __init__(self, base_layer: nn.Module, **quantization: Any) -> None:
        super().__init__(base_layer, **quantization)
        self.kadaptation_u = nn.ParameterDict()
        self.kadaptation_v = nn.ParameterDict()
        self.slow: dict[str, nn.ParameterDict] = {}  # a plain dict: they are no part of this layer

    def update_layer(self, adapter: str, config: KAdaptationConfig, name: str) -> None:
        t, (rows, columns) = config.terms, self.geometry.matrix_shape
        if rows % t or columns % t:
            raise ShapeError(f"{name}: terms = {t} does not divide the layer's {rows} x {columns}")
        self.set_initial_scale(adapter, config.alpha)
        self.kadaptation_u[adapter] = nn.Parameter(torch.zeros(t, rows // t, config.r))
        self.kadaptation_v[adapter] = nn.Parameter(torch.empty(t, config.r, columns // t))
        nn.init.normal_(self.kadaptation_v[adapter], std=1 / math.sqrt(self.geometry.fan_in))
        if not config.init_weights:
            nn.init.normal_(self.kadaptation_u[adapter], std=1 / math.sqrt(config.r))
        # Here and not by the tuner: the slow factors are made after this, of the type, place and
        # state of these.
        self._move_adapter_to_device_of_base_layer(adapter)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def delta_matrix(self, adapter: str) -> Tensor:
        fast = self.kadaptation_u[adapter] @ self.kadaptation_v[adapter]
        slow = self.slow[adapter][adapter]
        return self.scaling[adapter] * expand([slow.to(fast), fast])

    def delta_output(self, adapter: str, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return self.geometry.matrix_output(x, self.delta_matrix(adapter))
        x = self._cast_input_dtype(x, self.kadaptation_v[adapter].dtype)
        return self.geometry.matrix_output(x, self.delta_matrix(adapter).to(x.dtype))


class KAdaptationLinear(KAdaptationLayer):
    """The fast factors of a linear layer."""


class KAdaptationModel(KroneckerTuner):
    """A base model with KAdaptation adapters.

    ``kadaptation_A`` holds the slow factors of each adapter, (t, t, t).
    """

    prefix = "kadaptation_"
    tuner_layer_cls = KAdaptationLayer
    linear_layer_cls = KAdaptationLinear
    uses_shared_state = True
    # PEFT needs the prefix, and A is the letter of the field.
    kadaptation_A: nn.ParameterDict  # noqa: N815

    def _pre_injection_hook(self, model: nn.Module, config: Any, adapter_name: str) -> None:
        self.kadaptation_A = nn.ParameterDict()

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        before = {name: slow.requires_grad for name, slow in self.kadaptation_A.items()}
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        for name, requires_grad in before.items():  # PEFT keeps these flags for what lies in layers
            self.kadaptation_A[name].requires_grad_(requires_grad)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        slow = self.kadaptation_A[adapter_name]
        if autocast_adapter_dtype and slow.dtype in (torch.float16, torch.bfloat16):
            self.kadaptation_A[adapter_name] = nn.Parameter(
                slow.detach().float(), requires_grad=slow.requires_grad
            )

    def _add_to_layer(
        self, layer: AdaptedLayer, adapter_name: str, config: Any, current_key: str
    ) -> None:
        super()._add_to_layer(layer, adapter_name, config, current_key)
        assert isinstance(layer, KAdaptationLayer)
        own = layer.kadaptation_v[adapter_name]
        if adapter_name not in self.kadaptation_A:
            slow = torch.empty(
                config.terms, config.terms, config.terms, device=own.device, dtype=own.dtype
            )
            nn.init.normal_(slow, std=1 / math.sqrt(config.terms))
            self.kadaptation_A[adapter_name] = nn.Parameter(slow, requires_grad=own.requires_grad)
        layer.slow[adapter_name] = self.kadaptation_A

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        super().set_adapter(adapter_name, inference_mode)
        names = [adapter_name] if isinstance(adapter_name, str) else adapter_name
        for name, slow in self.kadaptation_A.items():
            slow.requires_grad_(name in names and not inference_mode)

    def set_requires_grad(self, adapter_names: Any, requires_grad: bool = True) -> None:
        super().set_requires_grad(adapter_names, requires_grad)
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        for name in names:
            if name in self.kadaptation_A:
                self.kadaptation_A[name].requires_grad_(requires_grad)

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        super()._enable_adapter_layers(enabled)
        for name, slow in self.kadaptation_A.items():
            slow.requires_grad_(enabled and name in self.active_adapters)

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        if adapter_name in self.kadaptation_A:
            del self.kadaptation_A[adapter_name]


register("kadaptation", KAdaptationConfig, KAdaptationModel)
