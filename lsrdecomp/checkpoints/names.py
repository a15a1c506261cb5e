"""Names of layers: what they say and share, and what image programs call them: diffusers in full, kohya flattened."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lsrdecomp.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COMPONENTS = ("unet", "text_encoder", "text_encoder_2", "transformer", "prior")
"""Components of pipelines whose loaders take LoRA."""
KOHYA = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2"}
"""Prefixes of kohya's names; where there are two text encoders the first is ``lora_te1``."""
LANGUAGE = re.compile(
    r"transformer\.(h|wte|wpe|word_embeddings|encoder|decoder|layers?|lm_head)(\.|$)"
)
"""Modules of GPT-2, Bloom, GPT-Neo and others, whose first word is also that of a component of
image pipelines."""
TEXT_LEVEL = "text_model."
CLIP = ("encoder.layers.", "embeddings.", "final_layer_norm.")
"""Parts of a CLIP text model. Where they stand at its top, kohya's level ``text_model`` above them
is missing."""


def module_role(name: str) -> str:
    """What a layer is, without where it is: the words after the last number in its name.

    >>> module_role("model.layers.11.self_attn.q_proj"), module_role("unet_down_blocks_0_attn_to_q"), module_role("unet:7")
    ('self_attn.q_proj', 'attn_to_q', 'unet')
    """
    return re.split(r"(?:^|[._:])\d+[._:]", re.sub(r"(?<=.)[._:]\d+$", "", name))[-1]


def common_prefix(names: Sequence[str]) -> str:
    """Leading modules that all names share, with the dot; none for one name.

    >>> common_prefix(["model.layers.0.q_proj", "model.layers.1.q_proj"])
    'model.layers.'

    Names of kohya's files have underscores for dots:

    >>> common_prefix(["lora_unet_down_blocks_0_to_q", "lora_unet_down_blocks_1_to_q"])
    'lora_unet_down_blocks_'
    """
    mark = "_" if all(name.startswith("lora_") and "." not in name for name in names) else "."
    shared = []
    for parts in zip(*(name.split(mark)[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return mark.join(shared) + mark if shared and len(names) > 1 else ""


def diffusers_name(name: str) -> str:
    """What diffusers' files call a layer: its name, if it is one; `UnsupportedError` for what they have no name for."""
    if name.startswith("lora_") and "." not in name:
        raise UnsupportedError(
            f"{name}: a flattened name cannot be undone; write kohya, which diffusers loads too"
        )
    _check_component(name, "diffusers", COMPONENTS)
    return name


def kohya_name(name: str, *, sdxl: bool = False) -> str:
    """What kohya's files call a layer; `UnsupportedError` for one that they have no name for."""
    if name.startswith("lora_") and "." not in name:
        return name
    if name.startswith("transformer.") and not LANGUAGE.match(name):
        text = "a transformer's layers have other names and sizes in kohya files (q, k, v in one)"
        raise UnsupportedError(f"{name}: {text}; write diffusers instead")
    _check_component(name, "kohya", KOHYA)
    return str(flat_name(name, sdxl=sdxl))


def _check_component(name: str, form: str, components: Iterable[str]) -> None:
    """`UnsupportedError` for a layer that is of none of the components of a pipeline."""
    component, _, module = name.partition(".")
    if LANGUAGE.match(name):
        text = f"a layer of a language model, and {form} files are of image pipelines"
        raise UnsupportedError(f"{name}: {text}; write lora instead")
    if component in components and module:
        return
    if ":" in name:
        text = f"called by its position in the trainer's list of modules, and {form} files call layers by their names"
        raise UnsupportedError(
            f"{name}: {text}; name the base by --base, or write lora, which keeps it as it is"
        )
    parts = ", ".join(f"{part}." for part in components)
    text = f"{form} files hold layers of {parts} only"
    raise UnsupportedError(
        f"{name}: {text}; write lora, or same with the LoRA it was made from as --like (like=)"
    )


def flat_name(name: str, *, sdxl: bool) -> str | None:
    """What kohya's files call a layer of a pipeline, or None for a layer that they have no name for.

    Parameters
    ----------
    name : str
        ``unet.…`` or ``text_encoder.…``, with or without the level ``text_model``.
    sdxl : bool
        Whether there are two text encoders.

    Sources: sd-scripts 48d368fa5577, networks/lora.py, ``prefix + "." + name + "." + child_name``
    with dots replaced; LyCORIS f49d30d67059, kohya.py; ComfyUI 17358c8f73b5, comfy/lora.py, whose
    map has the same names.

    >>> flat_name("text_encoder.encoder.layers.0.self_attn.q_proj", sdxl=False)
    'lora_te_text_model_encoder_layers_0_self_attn_q_proj'
    """
    component, _, module = name.partition(".")
    if component not in KOHYA or not module:
        return None
    prefix = "lora_te1" if sdxl and component == "text_encoder" else KOHYA[component]
    level = TEXT_LEVEL if component != "unet" and module.startswith(CLIP) else ""
    return f"{prefix}_{(level + module).replace('.', '_')}"
