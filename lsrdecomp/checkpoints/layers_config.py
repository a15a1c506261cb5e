"""Config fields that follow from the layers: the common value, and patterns only for those that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from lsrdecomp.checkpoints.config import exact_pattern
from lsrdecomp.checkpoints.records import Checkpoint

Value = TypeVar("Value")

# What says which modules are meant and what else is trained; everything else in a config is about training LoRA.
CARRIED = (
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "modules_to_save", "trainable_token_indices"),
)


def most_common(values: Mapping[str, Value]) -> Value:
    """The value most layers share; of equally many the first met."""
    return Counter(values.values()).most_common(1)[0][0]


def patterns(values: Mapping[str, Value], default: Value) -> dict[str, Value]:
    """Exact module patterns for the values that differ from the default."""
    return {exact_pattern(name): value for name, value in values.items() if value != default}


def carried_fields(
    config: Mapping[str, Any], names: set[str], extras: set[str], source: Checkpoint | None, only: str
) -> dict[str, Any]:
    """Fields of the new config taken from the old one, so that PEFT finds the same modules again.

    Parameters
    ----------
    names, extras
        Modules and other tensors that are written.
    only : str
        PEFT's word for "biases of adapted modules": ``"lora_only"`` or ``"lsr_only"``.
    """
    fields = {field: config[field] for field in CARRIED if config.get(field) is not None}
    same = source is not None and names == {layer.name for layer in source.layers}
    if "target_modules" not in fields or not same:
        for field in ("exclude_modules", "layers_to_transform", "layers_pattern"):
            fields.pop(field, None)
        fields["target_modules"] = sorted(names)
    bias = config.get("bias", "none")
    held = any(key.endswith(".bias") for key in extras)
    fields["bias"] = "none" if not held or bias not in ("all", "lora_only", "lsr_only") else bias
    if fields["bias"] not in ("none", "all"):
        fields["bias"] = only
    fields["inference_mode"] = True
    for field in ("base_model_name_or_path", "task_type", "modules_to_save"):
        fields.setdefault(field, None)
    return fields
