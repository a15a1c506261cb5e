"""The LSR model: PEFT's view of a base model with LSR adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft import LoraModel

from lsrdecomp.lora.peft.layer import LsrLayer, LsrLinear
from lsrdecomp.lora.peft.lsr_config import LsrConfig
from lsrdecomp.lora.peft.parameters import ParamWrapper
from lsrdecomp.lora.peft.register import register
from lsrdecomp.lora.peft.transformers_loading import teach_transformers
from lsrdecomp.lora.peft.tuner import KroneckerTuner

if TYPE_CHECKING:
    from torch import nn

    from lsrdecomp.lora.peft.adapted import AdaptedLayer


class LsrModel(KroneckerTuner):
    """A base model with LSR adapters.

    Usually made through `peft.get_peft_model` or `peft.PeftModel.from_pretrained`.

    Parameters
    ----------
    model : torch.nn.Module
        The base model; its targeted layers are replaced in place.
    peft_config : LsrConfig
        The settings.
    adapter_name : str
        Name of the adapter.
    low_cpu_mem_usage : bool
        Create the factors on the meta device, to be filled by loading.

    Examples
    --------
    >>> from lsrdecomp.lora.peft import LsrConfig
    >>> from peft import get_peft_model
    >>> from torch import nn
    >>> config = LsrConfig(inner_shape=[2, 2], separation_rank=2, target_modules=["0"])
    >>> model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
    >>> isinstance(model.base_model, LsrModel)
    True
    """

    prefix = "lsr_"
    tuner_layer_cls = LsrLayer
    linear_layer_cls = LsrLinear

    def _layer_around(self, target: nn.Module, parameter_name: str | None) -> AdaptedLayer:
        if parameter_name is None:
            return super()._layer_around(target, parameter_name)
        if isinstance(target, ParamWrapper) and target.parameter_name == parameter_name:
            return target
        return ParamWrapper(target, parameter_name)

    def _add_to_layer(
        self, layer: AdaptedLayer, adapter_name: str, config: Any, current_key: str
    ) -> None:
        tied = getattr(config, "target_modules_to_tie", None) or ()
        if current_key in tied and isinstance(layer, LsrLayer):
            layer.tie(adapter_name, self.model.get_input_embeddings())
        else:
            super()._add_to_layer(layer, adapter_name, config, current_key)

    def _check_new_adapter_config(self, config: Any) -> None:
        super()._check_new_adapter_config(config)
        mine = set(config.target_parameters or ())
        for name, other in self.peft_config.items():
            theirs = set(getattr(other, "target_parameters", None) or ())
            if mine and theirs and mine != theirs:
                raise ValueError(
                    "When using multiple adapters with `target_parameters`, all adapters must "
                    f"target the same set of parameters, but got {sorted(mine)} for the new "
                    f"adapter and {sorted(theirs)} for adapter '{name}'."
                )

    def _add_targets_to_tie(self, peft_config: Any, tied_weight_keys: list[str]) -> None:
        # Once another adapter has wrapped a layer, PEFT names what is inside the wrapper.
        tied = [name.removesuffix(".base_layer") for name in tied_weight_keys]
        LoraModel._add_targets_to_tie(self, peft_config, tied)  # type: ignore[arg-type]

    _add_modules_to_save_to_tie = LoraModel._add_modules_to_save_to_tie
    _prepare_adapter_config = LoraModel._prepare_adapter_config


register("lsr", LsrConfig, LsrModel)
teach_transformers()
