"""Config fields that follow from the layers: the common value, and patterns only for those that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from lsrdecomp.checkpoints.config import Config, exact_pattern
from lsrdecomp.checkpoints.records import Checkpoint

Value = TypeVar("Value")


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(count) is int for count in value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(word, str | None) for word in value.values())


def _tokens(value: Any) -> bool:
    return _counts(value) or (isinstance(value, dict) and all(map(_counts, value.values())))


# What says which modules are meant and what else is trained; everything else in a config is about training LoRA.
CARRIED: dict[str, tuple[str, tuple[Callable[[Any], bool], ...]]] = {
    "base_model_name_or_path": ("text", (_text,)),
    "revision": ("text", (_text,)),
    "task_type": ("text", (_text,)),
    "auto_mapping": ("a map from text to text", (_map,)),
    "target_modules": ("text or a list of text", (_text, _words)),
    "exclude_modules": ("text or a list of text", (_text, _words)),
    "layers_to_transform": ("an integer or a list of integers", (lambda value: type(value) is int, _counts)),
    "layers_pattern": ("text or a list of text", (_text, _words)),
    "modules_to_save": ("a list of text", (_words,)),
    "trainable_token_indices": ("a list of integers, or a map to such lists", (_tokens,)),
    "bias": ("text", (_text,)),
}


def check_carried(config: Config) -> None:
    """Raise `CheckpointError` for a field that will be written again and is not what PEFT expects there."""
    for field, (expected, kinds) in CARRIED.items():
        value = config.raw.get(field)
        missing = value is None and (field != "bias" or field not in config.raw)
        if not missing and not any(kind(value) for kind in kinds):
            raise config.error(field, expected)


def missing_modules(config: Mapping[str, Any], extras: Iterable[str]) -> tuple[str, ...]:
    """A note if ``modules_to_save`` names a module of which the file holds no tensor."""
    named = config.get("modules_to_save")
    held = [f".{key.rpartition('.')[0]}." for key in extras]
    missing = [name for name in named or () if isinstance(name, str) and not any(f".{name}." in key for key in held)]
    if not missing:
        return ()
    return (
        f"modules_to_save names {', '.join(map(ascii, missing))[:200]}, of which the file holds no tensor: "
        "it stays as the base has it, and untrained where the base has none",
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
