"""Names of layers: what they say and share, and what image programs call them.

diffusers writes names in full, kohya's programs flatten them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lsrdecomp.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COMPONENTS = ("unet", "text_encoder", "text_encoder_2", "transformer", "prior")
"""Components of pipelines whose loaders take LoRA."""
KOHYA_PREFIXES = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2"}
"""Prefixes of kohya's names; where there are two text encoders the first is ``lora_te1``."""
LANGUAGE_MODEL = re.compile(
    r"transformer\.(h|wte|wpe|word_embeddings|encoder|decoder|layers?|lm_head)(\.|$)"
)
"""Modules of GPT-2, Bloom, GPT-Neo and others, whose first word is also that of a component of
image pipelines."""
Z_IMAGE = re.compile(
    r"(?:transformer\.|diffusion_model\.|lora_unet_)"
    r"(?P<block>layers|noise_refiner|context_refiner)[._](?P<number>\d+)[._]"
    r"(?:(?P<part>attention|feed_forward)[._](?P<module>to_[qkv]|to_out[._]0|qkv|out|w[123])"
    r"|adaLN_modulation[._](?P<step>[01]))"
)
"""Modules of Z-Image under diffusers' names, those of its checkpoint, and the latter flattened."""
TEXT_LEVEL = "text_model."
CLIP_PARTS = ("encoder.layers.", "embeddings.", "final_layer_norm.")
"""Parts of a CLIP text model. Where they stand at its top, kohya's level ``text_model`` above them
is missing."""


def module_role(name: str) -> str:
    """Return what a layer is, without where it is: the words after the last number in its name.

    >>> module_role("model.layers.11.self_attn.q_proj"), module_role("unet_down_blocks_0_attn_to_q")
    ('self_attn.q_proj', 'attn_to_q')
    """
    without_last_number = re.sub(r"(?<=.)[._]\d+$", "", name)
    return re.split(r"(?:^|[._])\d+[._]", without_last_number)[-1]


def common_prefix(names: Sequence[str]) -> str:
    """Return the leading modules that all names share, with the dot; none for one name.

    >>> common_prefix(["model.layers.0.q_proj", "model.layers.1.q_proj"])
    'model.layers.'

    Names of kohya's files have underscores for dots:

    >>> common_prefix(["lora_unet_down_blocks_0_to_q", "lora_unet_down_blocks_1_to_q"])
    'lora_unet_down_blocks_'
    """
    if len(names) < 2:
        return ""
    separator = "_" if all(is_flat(name) for name in names) else "."
    shared = ""
    for parts in zip(*(name.split(separator)[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared += parts[0] + separator
    return shared


def is_flat(name: str) -> bool:
    """Return whether a name is one of kohya's, with underscores for dots."""
    return name.startswith("lora_") and "." not in name


def z_image_module(name: str) -> str | None:
    """Return the module of Z-Image that a layer is, within the model; None for another model's.

    Sources: diffusers 58eb52c0803e, transformer_z_image.py and lora_conversion_utils.py; ComfyUI
    17358c8f73b5, lora.py (Lumina2) and ``z_image_to_diffusers`` of utils.py.

    >>> z_image_module("lora_unet_layers_7_attention_to_out_0")
    'layers.7.attention.to_out.0'
    >>> z_image_module("transformer.transformer_blocks.0.attn.to_q")
    """
    found = Z_IMAGE.fullmatch(name)
    if found is None:
        return None
    block = f"{found['block']}.{found['number']}"
    if found["step"] is not None:
        return f"{block}.adaLN_modulation.{found['step']}"
    module = found["module"].replace("to_out_0", "to_out.0")
    return f"{block}.{found['part']}.{module}"


def diffusers_name(name: str, _sdxl: bool = False) -> str:
    """Return what diffusers' files call a layer: its name, if it is one of a pipeline's component.

    Raises
    ------
    UnsupportedError
        For a layer that such files have no name for.
    """
    module = z_image_module(name)
    if module is not None:
        return f"transformer.{re.sub(r'attention.out$', 'attention.to_out.0', module)}"
    if is_flat(name):
        raise UnsupportedError(
            f"{name}: a flattened name cannot be undone; write kohya, which diffusers loads too"
        )
    _check_component(name, "diffusers", COMPONENTS)
    return name


def kohya_name(name: str, sdxl: bool = False) -> str:
    """Return what kohya's files call a layer; `UnsupportedError` if they have no name for it.

    Of Z-Image they have the names of its checkpoint.
    """
    module = z_image_module(name)
    if module is not None:
        return f"lora_unet_{module.replace('to_out.0', 'out').replace('.', '_')}"
    if is_flat(name):
        return name
    if name.startswith("transformer.") and not LANGUAGE_MODEL.match(name):
        raise UnsupportedError(
            f"{name}: a transformer's layers have other names and sizes in kohya files (q, k, v in "
            "one); write diffusers instead"
        )
    _check_component(name, "kohya", KOHYA_PREFIXES)
    return str(flat_name(name, sdxl=sdxl))


def mlx_name(name: str, _sdxl: bool = False) -> str:
    """Return what mlx-lm's files call a layer of a language model: as transformers does.

    Raises
    ------
    UnsupportedError
        For a layer that is none of a language model, or one expert of several.
    """
    component, _, _ = name.partition(".")
    components = (*COMPONENTS, "diffusion_model", "transformer_blocks")
    is_language_model = LANGUAGE_MODEL.match(name) and z_image_module(name) is None
    if is_flat(name) or (component in components and not is_language_model):
        raise UnsupportedError(
            f"{name}: a layer of an image pipeline, and mlx files are of language models; write "
            "lora instead"
        )
    if ".experts." in name:
        raise UnsupportedError(
            f"{name}: mlx-lm has one module for all experts of a block, whose adapters are stored "
            "otherwise; write lora instead"
        )
    return name


def _check_component(name: str, file_format: str, components: Iterable[str]) -> None:
    """Refuse a layer that is of none of the components of a pipeline."""
    component, _, module = name.partition(".")
    if LANGUAGE_MODEL.match(name):
        reason = f"a layer of a language model, and {file_format} files are of image pipelines"
        raise UnsupportedError(f"{name}: {reason}; write lora instead")
    if component in components and module:
        return
    prefixes = ", ".join(f"{part}." for part in components)
    way_out = "write lora, or same with the LoRA it was made from as --like (like=)"
    raise UnsupportedError(f"{name}: {file_format} files hold layers of {prefixes} only; {way_out}")


def flat_name(name: str, *, sdxl: bool) -> str | None:
    """Return what kohya's files call a layer of a pipeline, or None where they have no name for it.

    Parameters
    ----------
    name : str
        ``unet.…`` or ``text_encoder.…``, with or without the level ``text_model``.
    sdxl : bool
        Whether there are two text encoders.

    Notes
    -----
    Sources: sd-scripts 48d368fa5577, networks/lora.py, ``prefix + "." + name + "." + child_name``
    with dots replaced; LyCORIS f49d30d67059, kohya.py; ComfyUI 17358c8f73b5, comfy/lora.py, whose
    map has the same names.

    Examples
    --------
    >>> flat_name("text_encoder.encoder.layers.0.self_attn.q_proj", sdxl=False)
    'lora_te_text_model_encoder_layers_0_self_attn_q_proj'
    """
    component, _, module = name.partition(".")
    if component not in KOHYA_PREFIXES or not module:
        return None
    prefix = KOHYA_PREFIXES[component]
    if sdxl and component == "text_encoder":
        prefix = "lora_te1"
    if component != "unet" and module.startswith(CLIP_PARTS):
        module = TEXT_LEVEL + module
    return f"{prefix}_{module.replace('.', '_')}"
