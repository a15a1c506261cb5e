"""The base of all adapter models here: wrapping layers, mixed batches, strict loading."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from peft.tuners.lora.model import _adapter_names_pre_forward_hook
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, replicate_layers
from peft.utils import (
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
    AuxiliaryTrainingWrapper,
    get_quantization_kwargs,
)
from torch import Tensor, nn

from lsrdecomp.errors import AdapterNameError, CheckpointError, UnsupportedLayerError
from lsrdecomp.lora.files.packed import NUMBERS, named_factors
from lsrdecomp.lora.files.packed_index import read_packed_layers
from lsrdecomp.lora.peft.adapted import AdaptedLayer
from lsrdecomp.lora.peft.factors import formed_once
from lsrdecomp.lora.peft.geometry import NOT_LINEAR

if TYPE_CHECKING:
    from collections.abc import Iterator


class KroneckerTuner(BaseTuner):
    """Base of the models; a subclass sets ``prefix`` and the classes of its layers."""

    prefix: str
    merge_shares: dict[str, dict[str, float]]
    """After merging: the share of each adapter's update that rounding left, by layer."""
    tuner_layer_cls: type[AdaptedLayer]
    linear_layer_cls: type[AdaptedLayer]
    """A subclass of ``tuner_layer_cls`` with "Linear" in its name, by which PEFT's "all-linear"
    finds it wrapped."""
    target_module_mapping = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING  # type: ignore[assignment]

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Add an adapter to the layers it targets, as PEFT does.

        Raises
        ------
        AdapterNameError
            For a name that is also that of a parameter.
        """
        # PEFT drops, when it saves one of several adapters, every key that holds another's name as
        # a part.
        parts = ("base_layer", *self.tuner_layer_cls.adapter_layer_names)
        if re.fullmatch(r"factor_\d+", adapter_name) or adapter_name in parts:
            raise AdapterNameError(
                f"{adapter_name!r} is the name of a parameter here; please give the adapter another"
            )
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _check_target_module_compatiblity(
        self, peft_config: Any, model: nn.Module, target_name: str
    ) -> None:
        # Mamba's fused kernels read some weights past any layer around them. PEFT refuses those to
        # LoRA alone.
        try:
            super()._check_target_module_compatiblity(LoraConfig(), model, target_name)
        except ValueError as error:
            message = str(error).replace("LORA", peft_config.peft_type.value, 1)
            raise UnsupportedLayerError(
                f"{message} Or leave out both by exclude_modules=['out_proj', 'conv1d']."
            ) from None

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
        layer = self._layer_around(target, parameter_name)
        if layer is not target:
            layer.set_adapter([adapter_name])
        self._add_to_layer(layer, adapter_name, peft_config, current_key)
        layer._move_adapter_to_device_of_base_layer(adapter_name)
        layer.set_adapter(layer.active_adapters, inference_mode=peft_config.inference_mode)
        if layer is target:
            return
        if adapter_name not in self.active_adapters:
            # A further adapter is not trained until it is made active.
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _layer_around(self, target: nn.Module, parameter_name: str | None) -> AdaptedLayer:
        """Return the layer of ours that a module is already, or a new one around it."""
        del parameter_name  # subclasses that adapt bare parameters ask for it
        if isinstance(target, self.tuner_layer_cls):
            return target
        bare = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        layer_cls = self.tuner_layer_cls if isinstance(bare, NOT_LINEAR) else self.linear_layer_cls
        return layer_cls(target, **get_quantization_kwargs(self.model))

    def _add_to_layer(
        self, layer: AdaptedLayer, adapter_name: str, config: Any, current_key: str
    ) -> None:
        layer.update_layer(adapter_name, config, current_key)

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        if peft_config.layer_replication:
            replicate_layers(model, peft_config.layer_replication)

    def _replace_module(
        self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        # PEFT's own version hands the weight to a module without base_layer, which breaks merging
        # once trainable_token_indices has wrapped the layer.
        setattr(parent, child_name, new_module)
        weight = next((p for p in getattr(child, "base_layer", child).parameters()), None)
        if weight is None:
            return
        for name, module in new_module.named_modules():
            if self.prefix in name and not any(p.is_meta for p in module.parameters()):
                module.to(weight.device)

    def merge_and_unload(
        self,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
        *,
        min_share: float | None = None,
    ) -> nn.Module:
        """Merge the adapters and return the bare base model, as PEFT's other methods do.

        Parameters
        ----------
        progressbar, safe_merge, adapter_names
            As for PEFT's LoRA.
        min_share : float, optional
            Smallest share of ΔW that must survive rounding to the precision of each weight, 0.5 if
            absent. It matters for 16-bit and quantized base models; afterwards `merge_shares` holds
            the shares that survived.

        Raises
        ------
        MergeError
            Naming the first layer that would lose more; the model is then left as it was.
        """
        with self._min_share(adapter_names, min_share):
            merged: nn.Module = super().merge_and_unload(progressbar, safe_merge, adapter_names)
        return merged

    def merge_adapter(
        self,
        adapter_names: list[str] | None = None,
        safe_merge: bool = False,
        *,
        min_share: float | None = None,
    ) -> None:
        """Merge the adapters in place; `unmerge_adapter` takes them out.

        See `merge_and_unload` for ``min_share``.
        """
        with self._min_share(adapter_names, min_share):
            super().merge_adapter(adapter_names, safe_merge)

    def add_weighted_adapter(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse: adapters are combined as LoRAs, which LSR's are exactly, by PEFT."""
        raise TypeError(
            f"{type(self).__name__} does not support add_weighted_adapter; make several adapters "
            "active at once, each scaled by lsrdecomp.lora.peft.rescale, or write LSR adapters as "
            "LoRAs by lsrdecomp.lora.peft.save_pretrained(…, also_lora=True) and combine those"
        )

    @contextmanager
    def _min_share(
        self, adapter_names: list[str] | None, min_share: float | None
    ) -> Iterator[None]:
        """Set what must survive in every layer, and refuse before any weight is changed."""
        layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, AdaptedLayer)
        }
        for layer in layers.values():
            if min_share is not None:
                layer.min_merge_share = min_share
        try:
            for name, layer in layers.items():
                for adapter, share in layer.merge_would_lose(adapter_names).items():
                    raise layer.share_error(adapter, share, name)
            yield
            self.merge_shares = {name: dict(layer.merge_shares) for name, layer in layers.items()}
        finally:
            for layer in layers.values():
                layer.__dict__.pop("min_merge_share", None)

    @contextmanager
    def _enable_peft_forward_hooks(self, *_args: Any, **kwargs: Any) -> Iterator[None]:
        adapter_names = kwargs.pop("adapter_names", None)
        with formed_once():
            if adapter_names is None:
                yield
            else:
                with self._named_rows(adapter_names, kwargs.get("num_beams") or 1):
                    yield

    @contextmanager
    def _named_rows(self, adapter_names: list[str], beams: int) -> Iterator[None]:
        """Send the rows of a batch through the adapters of these names while open."""
        if self.training:
            raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
        self._check_adapter_names(adapter_names)
        repeated = [name for name in adapter_names for _ in range(beams)]
        handles = _pass_adapter_names(self, repeated)
        if len(repeated) != len(adapter_names) and hasattr(self.model, "get_encoder"):
            # Beam search repeats the inputs of the decoder alone; the later hook wins.
            encoder = self.model.get_encoder()
            if encoder is not None and encoder is not self.model:
                handles += _pass_adapter_names(encoder, adapter_names)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check_adapter_names(self, adapter_names: list[str]) -> None:
        names = {"__base__"}
        for module in self.modules():
            if isinstance(module, self.tuner_layer_cls):
                names |= module.scaling.keys()
        unknown = set(adapter_names) - names
        if unknown:
            raise ValueError(
                f"Trying to infer with non-existing adapter(s): {', '.join(sorted(unknown))}"
            )

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        has_sizes = getattr(config, "layers", None) is not None
        remapped: dict[str, Tensor] = super()._remap_adapter_state_dict_for_load(
            model, config, adapter_name, unpack(state_dict, has_sizes=has_sizes)
        )
        wanted: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, cls.tuner_layer_cls):
                keys = [f"{name}.{key}" for key in module.adapter_keys(adapter_name)]
                _check_complete(keys, remapped)
                wanted += keys
        own = [key for key in remapped if cls.prefix in key]
        if own and wanted and remapped.keys().isdisjoint(wanted):
            raise CheckpointError(
                f"none of the {len(own)} tensors of this adapter is of a layer of this model, "
                f"which asks for {wanted[0]} and others: it was made for another base",
                tensor=own[0],
            )
        return remapped


def _check_complete(keys: list[str], state_dict: dict[str, Tensor]) -> None:
    """Raise `CheckpointError` where an adapter holds some of the tensors of a layer and not all."""
    missing = [key for key in keys if key not in state_dict]
    # None at all is a layer that the adapter leaves alone; PEFT warns of that.
    if missing and len(missing) < len(keys):
        raise CheckpointError(
            f"the adapter holds {len(keys) - len(missing)} of the {len(keys)} tensors its settings "
            "ask for in this layer",
            tensor=missing[0],
        )


def unpack(state_dict: dict[str, Tensor], *, has_sizes: bool) -> dict[str, Tensor]:
    """Return a state dict in which layers stored as one tensor of bytes are factors of their own.

    Parameters
    ----------
    state_dict : dict
    has_sizes : bool
        Whether the settings have the sizes of these layers, in their field ``layers``.

    Raises
    ------
    CheckpointError
        If there are such bytes and no sizes: PEFT then made other layers than they are of.
    """
    if NUMBERS not in state_dict:
        return state_dict
    if not has_sizes:
        raise CheckpointError(
            "the settings lack the sizes of the layers, which the weight file has; read them by "
            "LsrConfig.from_pretrained(DIRECTORY), or pass no config",
            tensor=NUMBERS,
        )
    tensors = dict(state_dict)
    layers = read_packed_layers(tensors.pop(NUMBERS).cpu().numpy())
    for key, factor in named_factors(layers).items():
        tensors[key] = torch.from_numpy(factor)
    return tensors


def _pass_adapter_names(
    model: nn.Module, adapter_names: list[str]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Have every layer know which adapter each row of the next batch is for."""
    hook = partial(_adapter_names_pre_forward_hook, adapter_names=adapter_names)
    return [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, AdaptedLayer | AuxiliaryTrainingWrapper)
    ]
