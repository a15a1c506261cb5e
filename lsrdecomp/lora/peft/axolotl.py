"""A plugin of axolotl: ``adapter: lsr`` in its settings trains an LSR adapter.

It is named in the settings of a run::

    plugins:
      - lsrdecomp.lora.peft.axolotl.LsrPlugin
    adapter: lsr
    lora_r: 16
    lora_alpha: 16
    lora_target_modules: [q_proj, v_proj]
    lsr:
      separation_rank: 8
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from axolotl.integrations.base import AdapterCapabilities, BasePlugin
from peft import PeftModel, get_peft_model
from pydantic import BaseModel, Field

from lsrdecomp.lora.peft.lsr_config import LsrConfig

if TYPE_CHECKING:
    from torch import nn

FIELDS = {
    "lora_r": "r",
    "lora_alpha": "lsr_alpha",
    "lora_dropout": "lsr_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_exclude_modules": "exclude_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_layers_pattern": "layers_pattern",
    "peft_layer_replication": "layer_replication",
    "peft_trainable_token_indices": "trainable_token_indices",
    "peft_ensure_weight_tying": "ensure_weight_tying",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
}
"""Axolotl's names of settings that LSR has too, and the fields of `LsrConfig`."""
OF_LORA = ("peft_init_lora_weights", "loraplus_lr_ratio", "relora")
"""Settings of axolotl that are about LoRA's own factors."""


class LsrArguments(BaseModel):
    """What the plugin adds to axolotl's settings."""

    lsr: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of LsrConfig that LoRA has no name for, such as separation_rank.",
    )


class LsrPlugin(BasePlugin):  # type: ignore[misc]
    """Makes ``adapter: lsr`` an adapter of axolotl."""

    def get_input_args(self) -> str:
        """Return where axolotl finds `LsrArguments`."""
        return f"{__name__}.{LsrArguments.__name__}"

    def get_adapter_capabilities(self) -> list[AdapterCapabilities]:
        """Return the name of the adapter, which axolotl's loader for LoRA cannot load."""
        return [AdapterCapabilities(name="lsr")]

    def load_adapter(
        self, model: nn.Module, cfg: Any, inference: bool = False, config_only: bool = False
    ) -> tuple[PeftModel | None, LsrConfig] | None:
        """Put an adapter on a model, a new one or that of ``lora_model_dir``.

        Returns None if the run has another adapter, which is left to axolotl.
        """
        if cfg.adapter != "lsr":
            return None
        config = lsr_config(model, cfg)
        if config_only:
            return None, config
        options = {}
        if cfg.peft_autocast_adapter_dtype is not None:
            options["autocast_adapter_dtype"] = cfg.peft_autocast_adapter_dtype
        if cfg.lora_model_dir:
            adapted = PeftModel.from_pretrained(
                model, cfg.lora_model_dir, is_trainable=not inference, **options
            )
        else:
            adapted = get_peft_model(model, config, **options)
        return adapted, config


def lsr_config(model: nn.Module, cfg: Any) -> LsrConfig:
    """Return the settings of an adapter in the words of PEFT.

    Raises
    ------
    ValueError
        For settings that are LoRA's alone, and as `LsrConfig` does.
    """
    for name in OF_LORA:
        if cfg.get(name):
            raise ValueError(f"{name} is for LoRA: leave it out with adapter: lsr")
    is_classifier = "SequenceClassification" in type(model).__name__
    fields: dict[str, Any] = {"task_type": "SEQ_CLS" if is_classifier else "CAUSAL_LM"}
    for theirs, ours in FIELDS.items():
        if cfg.get(theirs) is not None:
            fields[ours] = cfg[theirs]
    if cfg.lora_target_linear:
        fields["target_modules"] = "all-linear"
    return LsrConfig(**(fields | dict(cfg.get("lsr") or {})))
