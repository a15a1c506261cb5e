"""How diffusers and kohya-ss's sd-scripts find the modules of an adapter of a diffusion model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lsrdecomp.checkpoints.names import TEXT_LEVEL, diffusers_name, flat_name, kohya_name
from lsrdecomp.serving.adapter import export_command, misfit
from lsrdecomp.serving.report import ModuleFate, ServingCheck

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lsrdecomp.checkpoints import BaseModules, Checkpoint

TEXT_WORDS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
"""Layers of a text encoder that diffusers looks at."""
UNET_PARTS = ("attentions", "resnets", "downsamplers", "upsamplers")
"""What lies in Transformer2DModel, ResnetBlock2D, Downsample2D and Upsample2D, the classes that
kohya-ss visits."""
TEXT_PARTS = ("self_attn", "mlp")


def diffusers(check: ServingCheck, adapter: Checkpoint, base: BaseModules) -> None:
    """Fill a check by the rules of diffusers.

    Names begin with a component, or are kohya's; a name that no module has is passed over with a
    warning.
    """
    if adapter.format not in ("diffusers", "kohya"):
        way_out = export_command(
            adapter, "--to diffusers", "-diffusers.safetensors", diffusers_name
        )
        check.refuse(
            f"diffusers loads files of diffusers and kohya, and this is {adapter.format}: {way_out}"
        )
    if adapter.extras:
        first = next(iter(adapter.extras))
        check.refuse(
            f"{len(adapter.extras)} tensors are no LoRA weights ({first}), at which it stops"
        )
    if _unreadable(adapter, base, check):
        return
    if adapter.format == "kohya":
        modules = _flattened(base, base.shapes)
    else:
        modules = {_without_level(name): name for name in base.shapes}
    lacks_level = False
    for layer in adapter.layers:
        name = _without_level(layer.name)
        is_text = layer.name.startswith("text_encoder")
        lacks_level |= is_text and name == layer.name
        fault = misfit(layer, modules.get(name), base.shapes)
        if fault is None and is_text and not name.endswith(TEXT_WORDS):
            fault = f"diffusers loads only {', '.join(TEXT_WORDS)} of a text encoder"
        if fault is not None and name in modules:
            check.refuse("diffusers raises where a size differs")
        check.modules.append(ModuleFate(layer.name, layer.rank, fault))
    if lacks_level and adapter.format == "diffusers":
        check.notes.append(
            "names without the level text_model fit text encoders of transformers 5 alone"
        )


def kohya(check: ServingCheck, adapter: Checkpoint, base: BaseModules) -> None:
    """Fill a check by the rules of kohya-ss.

    It knows layers by flattened names, of the linear and convolution layers in the classes that it
    visits; others go unseen.
    """
    if adapter.format not in ("kohya", "lycoris"):
        way_out = export_command(adapter, "--to kohya", "-kohya.safetensors", kohya_name)
        check.refuse(
            f"kohya-ss loads files of its own keys, and this is {adapter.format}: {way_out}"
        )
    if _unreadable(adapter, base, check):
        return
    modules = _flattened(base, filter(_is_visited, base.shapes))
    for layer in adapter.layers:
        fault = misfit(layer, modules.get(layer.name), base.shapes)
        if fault is not None and layer.name in modules:
            check.refuse("kohya-ss raises where a size differs")
        check.modules.append(ModuleFate(layer.name, layer.rank, fault))


def _unreadable(adapter: Checkpoint, base: BaseModules, check: ServingCheck) -> bool:
    """Return whether names need not be compared.

    The file is refused for its format, or the base is none of such a model.
    """
    if not base.components:
        check.refuse(
            "the base is no diffusers pipeline, nor a component of one with its config.json"
        )
    if check.refusals:
        check.modules += [ModuleFate(layer.name, layer.rank) for layer in adapter.layers]
    return bool(check.refusals)


def _without_level(name: str) -> str:
    """Return a name without the level text_model of text encoders, which loaders take away."""
    component, _, path = name.partition(".")
    if not component.startswith("text_encoder"):
        return name
    return f"{component}.{path.removeprefix(TEXT_LEVEL)}"


def _flattened(base: BaseModules, names: Iterable[str]) -> Mapping[str, str]:
    """Return names of modules by their flattened names, where they have one."""
    sdxl = "text_encoder_2" in base.components
    modules = {}
    for name in names:
        flat = flat_name(name, sdxl=sdxl)
        if flat is not None:
            modules[flat] = name
    return modules


def _is_visited(name: str) -> bool:
    """Return whether a module lies in a class that kohya-ss visits."""
    parts = TEXT_PARTS if name.startswith("text_encoder") else UNET_PARTS
    return not set(parts).isdisjoint(name.split("."))
