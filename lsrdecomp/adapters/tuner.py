"""What the models of every adapter kind here share: wrapping layers, mixed batches, strict loading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import (
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
    AuxiliaryTrainingWrapper,
    get_quantization_kwargs,
)
from torch import Tensor, nn

from lsrdecomp.adapters.adapted import AdaptedLayer
from lsrdecomp.adapters.errors import AdapterNameError
from lsrdecomp.errors import CheckpointError


class KroneckerTuner(BaseTuner):
    """Base of the models: a subclass sets ``prefix`` and ``tuner_layer_cls``."""

    prefix: str
    tuner_layer_cls: type[AdaptedLayer]
    target_module_mapping = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING  # type: ignore[assignment]

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        # PEFT drops, when it saves one of several adapters, every key that holds another's name as a part.
        parts = ("base_layer", *self.tuner_layer_cls.adapter_layer_names)
        if re.fullmatch(r"factor_\d+", adapter_name) or adapter_name in parts:
            raise AdapterNameError(f"{adapter_name!r} is the name of a parameter here; please give the adapter another")
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, self.tuner_layer_cls):
            target.update_layer(adapter_name, peft_config, current_key)
            return
        layer = self.tuner_layer_cls(target, **get_quantization_kwargs(self.model))
        layer.set_adapter([adapter_name])
        layer.update_layer(adapter_name, peft_config, current_key)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)  # a further adapter is not trained until it is made active
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        # PEFT's own version hands the weight to a module without base_layer, which breaks merging once
        # trainable_token_indices has wrapped the layer.
        setattr(parent, child_name, new_module)
        weight = next((p for p in getattr(child, "base_layer", child).parameters()), None)
        if weight is None:
            return
        for name, module in new_module.named_modules():
            if self.prefix in name and not any(p.is_meta for p in module.parameters()):
                module.to(weight.device)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        adapter_names = kwargs.pop("adapter_names", None)
        if adapter_names is None:
            yield
            return
        if self.training:
            raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
        self._check_adapter_names(adapter_names)
        beams = kwargs.get("num_beams")
        repeated = [name for name in adapter_names for _ in range(beams or 1)]
        handles = _pass_adapter_names(self, repeated)
        encoder = self.model.get_encoder() if hasattr(self.model, "get_encoder") else None
        if len(repeated) != len(adapter_names) and encoder not in (None, self.model):
            # Beam search repeats the inputs of the decoder alone; the later hook wins.
            handles += _pass_adapter_names(encoder, adapter_names)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check_adapter_names(self, adapter_names: list[str]) -> None:
        known = {"__base__"}
        for module in self.modules():
            if isinstance(module, self.tuner_layer_cls):
                known |= module.scaling.keys()
        unknown = set(adapter_names) - known
        if unknown:
            raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(sorted(unknown))}")

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        remapped: dict[str, Tensor] = super()._remap_adapter_state_dict_for_load(
            model, config, adapter_name, state_dict
        )
        present = remapped.keys()
        for name, module in model.named_modules():
            if not isinstance(module, cls.tuner_layer_cls):
                continue
            for container in module.adapter_layer_names:
                part = f"{name}.{container}.{adapter_name}"
                entry = getattr(module, container)
                keys = [f"{part}.{key}" for key in entry[adapter_name].state_dict()] if adapter_name in entry else []
                missing = [key for key in keys if key not in present]
                if missing and len(missing) < len(keys):
                    raise CheckpointError(
                        f"the adapter holds {len(keys) - len(missing)} of the {len(keys)} factors of this layer; "
                        f"the settings ask for order {len(keys)}",
                        tensor=missing[0],
                    )
        return remapped


def _pass_adapter_names(model: nn.Module, adapter_names: list[str]) -> list[torch.utils.hooks.RemovableHandle]:
    hook = partial(_add_adapter_names, adapter_names=adapter_names)
    return [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, AdaptedLayer | AuxiliaryTrainingWrapper)
    ]


def _add_adapter_names(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], adapter_names: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "adapter_names": adapter_names}
