"""LSR as PEFT's LoRA, exactly: an LSR pair, formed, is a LoRA pair."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from lsrdecomp.adapters.errors import UnsupportedLayerError
from lsrdecomp.adapters.geometry import ConvGeometry, EmbeddingGeometry
from lsrdecomp.adapters.layer import LsrLayer
from lsrdecomp.adapters.parameters import ParamWrapper

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lsrdecomp.adapters.config import LsrConfig

# Settings that LoRA and LSR share under one name.
COMMON = (
    "task_type",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
)


@torch.no_grad()
def to_lora(
    model: nn.Module, adapter_name: str = "default"
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """A PEFT LoRA adapter that computes exactly what an LSR adapter of a model computes.

    No ΔW is formed: the expanded factors are LoRA's. All scaling is baked into ``lora_B``, and
    every layer is padded with zeros to one rank, with ``r`` and ``lora_alpha`` equal to it, so that
    servers that know only one global scale read the adapter rightly.

    Parameters
    ----------
    model : PeftModel
        A model with the adapter.
    adapter_name : str
        Which of its adapters.

    Returns
    -------
    config : peft.LoraConfig
        Settings; DoRA's magnitudes, ``modules_to_save`` and biases are carried along.
    tensors : dict of str to Tensor
        As `peft.get_peft_model_state_dict` names them.

    Raises
    ------
    UnsupportedLayerError
        For convolutions with dilation or without zero padding, and experts, which PEFT's LoRA
        computes differently.

    Examples
    --------
    >>> from lsrdecomp.adapters import LsrConfig
    >>> from peft import get_peft_model
    >>> from torch import nn
    >>> config = LsrConfig(inner_shape=[2, 2], separation_rank=2, target_modules=["0"])
    >>> model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
    >>> config, tensors = to_lora(model)
    >>> config.r, [tuple(tensor.shape) for tensor in tensors.values()]
    (4, [(4, 64), (64, 4)])
    """
    config: LsrConfig = model.peft_config[adapter_name]  # type: ignore[index, assignment]
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LsrLayer) and module.has_adapter(adapter_name)
    }
    # 1. One rank for all; of the other tensors (heads, biases, tokens) PEFT's own state dict.
    rank = uniform_rank(layers.values(), adapter_name)
    state = get_peft_model_state_dict(model, adapter_name=adapter_name)
    tensors = {
        key: value
        for key, value in state.items()
        if not re.search(r"\.lsr_(A|B|magnitude_vector)(\.|$)", key)
    }
    for name, layer in layers.items():
        tensors.update(
            {
                f"{name}.{key}": value
                for key, value in lora_tensors(layer, adapter_name, rank).items()
            }
        )
    # 2. Settings under which LoRA computes the same: alpha is the rank, since the scale is in B.
    lora = LoraConfig(
        **{name: getattr(config, name) for name in COMMON},
        r=rank,
        lora_alpha=rank,
        lora_dropout=config.lsr_dropout,
        bias={"lsr_only": "lora_only"}.get(config.bias, config.bias),  # type: ignore[arg-type]
        use_dora=config.use_dora,
        fan_in_fan_out=any(
            getattr(layer.geometry, "transposed", False) for layer in layers.values()
        ),
    )
    return lora, tensors


def save_pretrained(
    model: PeftModel,
    folder: str | Path,
    adapter_name: str = "default",
    *,
    also_lora: bool = False,
) -> None:
    """Save one adapter of a model.

    Parameters
    ----------
    model : PeftModel
        A model with the adapter.
    folder : path
        Where to; as PEFT does, an adapter not named ``default`` goes into a subfolder of its name.
    adapter_name : str
        Which adapter.
    also_lora : bool
        Write the same adapter as plain LoRA, exactly, into the subfolder ``lora`` of the adapter's.

    Examples
    --------
    >>> import tempfile
    >>> from lsrdecomp.adapters import LsrConfig
    >>> from peft import get_peft_model
    >>> from torch import nn
    >>> config = LsrConfig(inner_shape=[2, 2], separation_rank=2, target_modules=["0"])
    >>> model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, folder, also_lora=True)
    ...     sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*.safetensors"))
    ['adapter_model.safetensors', 'lora/adapter_model.safetensors']
    """
    model.save_pretrained(str(folder), selected_adapters=[adapter_name])
    if not also_lora:
        return
    target = lora_folder(folder, adapter_name)
    config, tensors = to_lora(model, adapter_name)
    config.inference_mode = True
    config.save_pretrained(str(target))
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})


def lora_folder(folder: str | Path, adapter_name: str) -> Path:
    """Return where `save_pretrained` writes an adapter of a model as plain LoRA."""
    # PEFT writes the adapter named "default" into the folder itself, any other into a subfolder.
    own_folder = Path(folder) if adapter_name == "default" else Path(folder) / adapter_name
    return own_folder / "lora"


def uniform_rank(layers: Iterable[LsrLayer], adapter: str) -> int:
    """The rank that every layer can be padded to: that of the largest, and a multiple of every number of groups."""
    groups = [(layer, getattr(layer.geometry, "groups", 1)) for layer in layers]
    multiple = math.lcm(*(count for _, count in groups))
    return (
        -(-max(layer.layout[adapter].r * count for layer, count in groups) // multiple) * multiple
    )


def lora_tensors(layer: LsrLayer, adapter: str, rank: int) -> dict[str, Tensor]:
    """LoRA's tensors of one layer, padded to ``rank``."""
    if isinstance(layer, ParamWrapper):
        raise UnsupportedLayerError(
            f"{layer.parameter_name}: a targeted parameter cannot be written as plain LoRA"
        )
    left, right = layer.pair(adapter)
    geometry = layer.geometry
    tensors = {}
    if isinstance(geometry, ConvGeometry):
        if set(geometry.dilation) != {1} or geometry.pad is not None:
            raise UnsupportedLayerError(
                "PEFT's LoRA ignores dilation and padding modes, so it cannot hold this layer"
            )
        groups, kernel = geometry.groups, geometry.weight_shape[2:]
        # LoRA's A sees all channels, its B is grouped: group g gets its own copy of Â on its own
        # channels.
        window = right.reshape(len(right), geometry.weight_shape[1], *kernel)
        spread = window.new_zeros(groups, rank // groups, groups, window.shape[1], *kernel)
        for group in range(groups):
            spread[group, : len(window), group] = window
        tensors["lora_A.weight"] = spread.reshape(groups * (rank // groups), -1, *kernel)
        padded = nn.functional.pad(left, (0, rank // groups - left.shape[1]))
        tensors["lora_B.weight"] = padded.reshape(*padded.shape, *[1] * len(kernel))
    else:
        left = nn.functional.pad(left, (0, rank - left.shape[1]))
        right = nn.functional.pad(right, (0, 0, 0, rank - right.shape[0]))
        embedding = isinstance(geometry, EmbeddingGeometry)
        names = (
            ("lora_embedding_A", "lora_embedding_B")
            if embedding
            else ("lora_A.weight", "lora_B.weight")
        )
        tensors.update(zip(names, (right, left), strict=True))
    magnitude = layer.magnitude(adapter)
    if magnitude is not None:
        shape = (
            (1, -1, *[1] * (len(geometry.weight_shape) - 2))
            if isinstance(geometry, ConvGeometry)
            else (-1,)
        )
        tensors["lora_magnitude_vector"] = magnitude.reshape(shape)
    return {key: value.detach().clone().contiguous() for key, value in tensors.items()}
