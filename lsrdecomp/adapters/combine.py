"""Weighted combinations are left to PEFT: the commands that combine LSR adapters as LoRAs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from lsrdecomp.adapters.errors import UnsupportedLayerError
from lsrdecomp.adapters.exchange import lora_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lsrdecomp.adapters.config import LsrConfig

FOLDER = "adapters-as-lora"
"""Where the printed commands write the LoRAs."""


def refuse_to_combine(
    configs: Mapping[str, LsrConfig],
    adapters: Sequence[str],
    weights: Sequence[float],
    adapter_name: str,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> NoReturn:
    """Raise `UnsupportedLayerError` with the commands by which PEFT's LoRA combines the adapters.

    Parameters
    ----------
    configs : mapping
        The settings of every adapter of the model, by name.
    adapters, weights, adapter_name
        As for `peft.LoraModel.add_weighted_adapter`.
    arguments, options
        The further arguments of the same call, by position and by name.
    """
    if not adapters:
        raise ValueError("name at least one adapter to combine")
    if len(weights) != len(adapters):
        raise ValueError(f"{len(weights)} weights for {len(adapters)} adapters")
    for adapter in adapters:
        check_addable(adapter, configs)
    pairs = list(zip(adapters, weights, strict=True))
    # PEFT takes the settings of the first adapter, and with them the modules trained in full.
    holders = [adapter for adapter in adapters if configs[adapter].modules_to_save]
    pairs.sort(key=lambda pair: pair[0] not in holders)
    commands = commands_to_combine(pairs, adapter_name, arguments, options)
    if holders:
        commands += commands_to_copy_modules(holders[0], adapter_name)
    indented = "\n".join(f"    {line}" for line in commands)
    raise UnsupportedLayerError(
        "LSR adapters are combined as LoRAs, which they are exactly, by PEFT. "
        f"Where `model` is the PEFT model:\n\n{indented}\n\n"
        "A weighted sum needs no new adapter: make several active at once, each scaled by "
        "lsrdecomp.adapters.rescale."
    )


def check_addable(adapter: str, configs: Mapping[str, LsrConfig]) -> None:
    """Raise where there is no such adapter, or it has parts that PEFT would combine wrongly."""
    if adapter not in configs:
        raise ValueError(f"there is no adapter {adapter!r}; the model has {', '.join(configs)}")
    parts = {"use_dora": "DoRA magnitudes", "trainable_token_indices": "trained token rows"}
    for setting, part in parts.items():
        if getattr(configs[adapter], setting):
            raise UnsupportedLayerError(
                f"adapter {adapter!r} has {part} ({setting}), which do not add up with others'"
            )


def commands_to_combine(
    pairs: Sequence[tuple[str, float]],
    adapter_name: str,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> list[str]:
    """Return the commands that write adapters of `model` as LoRAs, load these, and combine them."""
    adapters = [adapter for adapter, _ in pairs]
    weights = [weight for _, weight in pairs]
    lines = [
        "from peft import PeftModel",
        "from lsrdecomp.adapters import save_pretrained",
        f"for name in {adapters!r}:",
        f"    save_pretrained(model, {FOLDER!r}, name, also_lora=True)",
        "base = model.unload()",
    ]
    for index, adapter in enumerate(adapters):
        folder = lora_folder(FOLDER, adapter).as_posix()
        if index == 0:
            lines.append(f"lora = PeftModel.from_pretrained(base, {folder!r}, {adapter!r})")
        else:
            lines.append(f"lora.load_adapter({folder!r}, {adapter!r})")
    settings = dict(options)
    if "seed" in settings:  # an argument of versions up to 0.3; PEFT draws by torch's generator
        lines += ["import torch", f"_ = torch.manual_seed({settings.pop('seed')!r})"]
    values = [repr(value) for value in (adapters, weights, adapter_name, *arguments)]
    values += [f"{name}={value!r}" for name, value in settings.items()]
    lines.append(f"lora.add_weighted_adapter({', '.join(values)})")
    return lines


def commands_to_copy_modules(holder: str, adapter_name: str) -> list[str]:
    """Return the commands that copy the modules trained in full, which PEFT starts afresh."""
    return [
        "for module in lora.modules():",
        "    copies = getattr(module, 'modules_to_save', {})",
        f"    if {adapter_name!r} in copies:",
        f"        copies[{adapter_name!r}].load_state_dict(copies[{holder!r}].state_dict())",
    ]
