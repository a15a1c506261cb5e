"""The LSR model: PEFT's view of a base model with LSR adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lsrdecomp.adapters.adapted import AdaptedLayer
from lsrdecomp.adapters.combine import check_weights, concatenated_config, fill
from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.adapters.parameters import ParamWrapper
from lsrdecomp.adapters.serving import naming, serve, stop
from lsrdecomp.adapters.tuner import KroneckerTuner
from lsrdecomp.adapters.tying import tie_modules_to_save, tie_targets


class LsrModel(KroneckerTuner):
    """A base model with LSR adapters, usually made through `peft.get_peft_model` or `peft.PeftModel.from_pretrained`.

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
    """

    prefix = "lsr_"
    tuner_layer_cls = LsrLayer

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
        if parameter_name is None:
            super()._create_and_replace(peft_config, adapter_name, target, target_name, parent, current_key)
        elif isinstance(target, ParamWrapper) and target.parameter_name == parameter_name:
            target.update_layer(adapter_name, peft_config, current_key)
        else:
            wrapper = ParamWrapper(target, parameter_name)
            self._add_wrapped(wrapper, adapter_name, peft_config, target_name, parent, current_key, target)

    def _add_to_layer(self, layer: AdaptedLayer, adapter_name: str, config: Any, current_key: str) -> None:
        tied = getattr(config, "target_modules_to_tie", None) or ()
        if current_key in tied and isinstance(layer, LsrLayer):
            layer.tie(adapter_name, self.model.get_input_embeddings(), config.inference_mode)
        else:
            super()._add_to_layer(layer, adapter_name, config, current_key)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        serve(model)

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> Any:
        bare: Any = super()._unload_and_optionally_merge(*args, **kwargs)
        stop(bare)
        return bare

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        with naming(self.model, kwargs.get("adapter_names")), super()._enable_peft_forward_hooks(*args, **kwargs):
            yield

    def add_weighted_adapter(
        self, adapters: list[str], weights: list[float], adapter_name: str, combination_type: str = "cat"
    ) -> None:
        """Add an adapter whose ΔW is ``Σ weight · ΔW`` of others, exactly; separation and inner ranks add.

        Parameters
        ----------
        adapters, weights : list
            The adapters to combine and a weight for each.
        adapter_name : str
            Name of the new adapter.
        combination_type : {"cat"}
            The exact concatenation. Compress the result to make it small again.
        """
        if adapter_name in self.peft_config:
            return
        unknown = [name for name in adapters if name not in self.peft_config]
        if unknown:
            raise ValueError(f"Adapter {unknown[0]} does not exist")
        if combination_type != "cat":
            raise ValueError(f"Invalid combination_type: {combination_type}; LSR adapters combine by 'cat'")
        check_weights(weights, adapters)
        self.peft_config[adapter_name] = concatenated_config(self.model, adapters, self.peft_config)
        try:
            self.inject_adapter(self.model, adapter_name)
        except Exception:
            del self.peft_config[adapter_name]
            raise
        for layer in self.model.modules():
            if isinstance(layer, LsrLayer) and layer.has_adapter(adapter_name):
                fill(layer, adapter_name, adapters, weights)

    def _check_new_adapter_config(self, config: Any) -> None:
        super()._check_new_adapter_config(config)
        mine = set(config.target_parameters or ())
        for name, other in self.peft_config.items():
            theirs = set(getattr(other, "target_parameters", None) or ())
            if mine and theirs and mine != theirs:
                raise ValueError(
                    "When using multiple adapters with `target_parameters`, all adapters must target the same set of "
                    f"parameters, but got {sorted(mine)} for the new adapter and {sorted(theirs)} for adapter '{name}'."
                )

    def _add_targets_to_tie(self, peft_config: Any, tied_weight_keys: list[str]) -> None:
        tie_targets(peft_config, self.model, tied_weight_keys)

    def _add_modules_to_save_to_tie(self, peft_config: Any, tied_weight_keys: list[str]) -> None:
        tie_modules_to_save(peft_config, self.model, tied_weight_keys)
