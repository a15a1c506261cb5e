"""The LSR model: PEFT's view of a base model with LSR adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from peft import LoraModel

from lsrdecomp.adapters.combination import Combination
from lsrdecomp.adapters.combine import combine, fill, warn_of_loss
from lsrdecomp.adapters.config import LsrConfig
from lsrdecomp.adapters.layer import LsrLayer, LsrLinear
from lsrdecomp.adapters.parameters import ParamWrapper
from lsrdecomp.adapters.register import register
from lsrdecomp.adapters.transformers_loading import teach_transformers
from lsrdecomp.adapters.tuner import KroneckerTuner

if TYPE_CHECKING:
    from torch import nn

    from lsrdecomp.adapters.adapted import AdaptedLayer


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

    Examples
    --------
    >>> from lsrdecomp.adapters import LsrConfig
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

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "svd",
        svd_rank: int | None = None,
        svd_clamp: float | None = None,
        svd_full_matrices: bool = True,
        svd_driver: str | None = None,
        density: float | None = None,
        majority_sign_method: str = "total",
        *,
        seed: int | None = None,
    ) -> dict[str, float]:
        """Add an adapter that combines others, as PEFT's LoRA does: the same names, kinds and results.

        Parameters
        ----------
        adapters, weights : list
            The adapters to combine and a weight for each, of any sign. Of one adapter, the
            multiple. A module that one of them trains in full is copied.
        adapter_name : str
            Name of the new adapter. Nothing happens if there is one of that name.
        combination_type : str
            "cat": ``Σ weight · ΔW`` exactly; separation ranks and first inner sizes add. "svd": its
            best approximation of rank ``svd_rank``. "linear": the sides are added, ``(Σ B̂)(Σ Â)``,
            cheap and rough; separation ranks add. "ties" (Yadav et al., 2023), "dare_linear",
            "dare_ties" (Yu et al., 2024) and "magnitude_prune" work on the entries of the sides,
            and with ``_svd`` behind their names on those of ΔW, which is then formed. What has no
            Kronecker structure is stored as plain low rank, ``m×r ⊗ 1×1``; to make it small again,
            save it with ``also_lora=True`` and compress the LoRA.
        svd_rank : int, optional
            Rank of the kinds with svd; the largest of each layer's adapters if absent.
        svd_clamp : float, optional
            Quantile that the entries of the singular factors are clamped to.
        svd_full_matrices : bool
            For PEFT's signature; the reduced SVD gives the same.
        svd_driver : str, optional
            Method of ``torch.linalg.svd``, on a GPU only.
        density : float, optional
            Share of the entries to keep, above 0 and up to 1, for ties, dare and magnitude_prune.
        majority_sign_method : {"total", "frequency"}
            How ties elects signs.
        seed : int, optional
            For dare, which drops entries at random; torch's generator goes on if absent.

        Returns
        -------
        dict of str to float
            ``‖ΔW - T‖_F / ‖T‖_F`` of every layer, measured on the factors as stored; a warning is
            given above 1 %. T is what the kind asks for: ``Σ weight · ΔW`` for "cat", "linear" and
            "svd", the pruned or elected matrix for the other "…_svd", and for the remaining kinds
            the product of the sides so combined.

        Raises
        ------
        ValueError
            For adapters that do not exist, weights that do not fit, ranks that differ where sides
            are added, modules that several adapters train in full.
        UnsupportedLayerError
            For adapters with DoRA or trained token rows, or with tied layers in some of them only.
        """
        if adapter_name in self.peft_config:
            return {}
        how = Combination(
            combination_type, svd_rank, svd_clamp, svd_driver, density, majority_sign_method
        )
        kind, _, targets = LoraModel._check_add_weighted_adapter(
            self,  # type: ignore[arg-type]
            adapters,
            combination_type,
            svd_rank,
        )
        configs: list[LsrConfig] = [self.peft_config[adapter] for adapter in adapters]  # type: ignore[misc]
        how = replace(how, kind=kind)  # of one adapter "linear"
        config, made, errors = combine(self.model, configs, adapters, weights, how, seed)
        config.target_modules = targets
        # The copies of replicated layers are there already.
        replication, config.layer_replication = config.layer_replication, None
        self.peft_config[adapter_name] = config
        try:
            self.inject_adapter(self.model, adapter_name)
        except Exception:
            del self.peft_config[adapter_name]
            raise
        config.layer_replication = replication
        fill(self.model, adapter_name, adapters, made)
        warn_of_loss(adapter_name, combination_type, errors)
        return errors

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
        # Once another adapter has wrapped a layer, PEFT names what is inside the wrapper.
        tied = [name.removesuffix(".base_layer") for name in tied_weight_keys]
        LoraModel._add_targets_to_tie(self, peft_config, tied)  # type: ignore[arg-type]

    _add_modules_to_save_to_tie = LoraModel._add_modules_to_save_to_tie
    _prepare_adapter_config = LoraModel._prepare_adapter_config


register("lsr", LsrConfig, LsrModel)
teach_transformers()
