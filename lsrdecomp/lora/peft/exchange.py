"""LSR adapters as PEFT's LoRA, exactly: an LSR pair, formed, is a LoRA pair."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from lsrdecomp.errors import UnsupportedLayerError
from lsrdecomp.lora.peft.geometry import ConvGeometry, EmbeddingGeometry
from lsrdecomp.lora.peft.layer import LsrLayer
from lsrdecomp.lora.peft.parameters import ParamWrapper

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lsrdecomp.lora.peft.lsr_config import LsrConfig

SHARED_SETTINGS = (
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
"""Settings that LoRA and LSR have under one name."""


@torch.no_grad()
def to_lora(
    model: nn.Module, adapter_name: str = "default"
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Return the PEFT LoRA that computes exactly what an LSR adapter of a model computes.

    No ΔW is formed: the expanded factors are LoRA's. All scaling is baked into ``lora_B``, and
    every layer is padded with zeros to one rank, with ``r`` and ``lora_alpha`` equal to it, so that
    servers that know only one global scale read the adapter rightly.

    Parameters
    ----------
    model : PeftModel
        A model with the adapter.
    adapter_name : str
        The adapter's name in the model.

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
    >>> from lsrdecomp.lora.peft import LsrConfig
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
    rank = common_rank(layers.values(), adapter_name)
    tensors = tensors_beside_factors(model, adapter_name)
    for name, layer in layers.items():
        for key, tensor in lora_tensors(layer, adapter_name, rank).items():
            tensors[f"{name}.{key}"] = tensor
    return lora_config(config, layers.values(), rank), tensors


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
        The directory to write; as PEFT does, an adapter not named ``default`` goes into a subfolder
        of its name.
    adapter_name : str
        The adapter's name in the model.
    also_lora : bool
        Write the same adapter as plain LoRA, exactly, into the subfolder ``lora`` of the adapter's.

    Examples
    --------
    >>> import tempfile
    >>> from lsrdecomp.lora.peft import LsrConfig
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


def common_rank(layers: Iterable[LsrLayer], adapter: str) -> int:
    """Return the rank that every layer can be padded to.

    It is at least the largest rank of a layer, and a multiple of every number of groups: LoRA
    splits the rank of a grouped convolution evenly among its groups.
    """
    largest = 0
    multiple = 1
    for layer in layers:
        groups = getattr(layer.geometry, "groups", 1)
        largest = max(largest, groups * layer.layout[adapter].r)
        multiple = math.lcm(multiple, groups)
    return multiple * math.ceil(largest / multiple)


def tensors_beside_factors(model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Return what PEFT saves of an adapter beside its factors: heads, biases, token rows."""
    factors = re.compile(r"\.lsr_(A|B|magnitude_vector)(\.|$)")
    state = get_peft_model_state_dict(model, adapter_name=adapter)
    return {key: tensor for key, tensor in state.items() if not factors.search(key)}


def lora_config(config: LsrConfig, layers: Iterable[LsrLayer], rank: int) -> LoraConfig:
    """Return the settings under which LoRA computes the same.

    ``lora_alpha`` is the rank, so that LoRA's own scale is 1: the layer's scale is in ``lora_B``.
    """
    shared = {name: getattr(config, name) for name in SHARED_SETTINGS}
    bias = "lora_only" if config.bias == "lsr_only" else config.bias
    transposed = any(getattr(layer.geometry, "transposed", False) for layer in layers)
    return LoraConfig(
        **shared,
        r=rank,
        lora_alpha=rank,
        lora_dropout=config.lsr_dropout,
        bias=bias,  # type: ignore[arg-type]
        use_dora=config.use_dora,
        fan_in_fan_out=transposed,
    )


def lora_tensors(layer: LsrLayer, adapter: str, rank: int) -> dict[str, Tensor]:
    """Return LoRA's tensors of one layer by the ends of their names, padded to ``rank``."""
    if isinstance(layer, ParamWrapper):
        raise UnsupportedLayerError(
            f"{layer.parameter_name}: a targeted parameter cannot be written as plain LoRA"
        )
    geometry = layer.geometry
    left, right = layer.pair(adapter)
    if isinstance(geometry, ConvGeometry):
        tensors = convolution_tensors(geometry, left, right, rank)
    else:
        padded_left = nn.functional.pad(left, (0, rank - left.shape[1]))
        padded_right = nn.functional.pad(right, (0, 0, 0, rank - right.shape[0]))
        if isinstance(geometry, EmbeddingGeometry):
            tensors = {"lora_embedding_A": padded_right, "lora_embedding_B": padded_left}
        else:
            tensors = {"lora_A.weight": padded_right, "lora_B.weight": padded_left}
    magnitude = layer.magnitude(adapter)
    if magnitude is not None:
        shape: tuple[int, ...] = (-1,)
        if isinstance(geometry, ConvGeometry):
            kernel_dimensions = len(geometry.weight_shape) - 2
            shape = (1, -1, *[1] * kernel_dimensions)
        tensors["lora_magnitude_vector"] = magnitude.reshape(shape)
    return {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}


def convolution_tensors(
    geometry: ConvGeometry, left: Tensor, right: Tensor, rank: int
) -> dict[str, Tensor]:
    """Return LoRA's two convolutions, the first with the kernel's window, the second 1 × 1.

    LoRA's A sees all channels and its B is grouped, so each group gets its own copy of Â on its own
    channels, and ``rank / groups`` rows of it.
    """
    if set(geometry.dilation) != {1} or geometry.pad is not None:
        raise UnsupportedLayerError(
            "PEFT's LoRA ignores dilation and padding modes, so it cannot hold this layer"
        )
    groups = geometry.groups
    _, channels, *kernel = geometry.weight_shape
    rows = rank // groups
    window = right.reshape(len(right), channels, *kernel)
    spread = window.new_zeros(groups, rows, groups, channels, *kernel)
    for group in range(groups):
        spread[group, : len(window), group] = window
    padded_left = nn.functional.pad(left, (0, rows - left.shape[1]))
    return {
        "lora_A.weight": spread.reshape(rank, groups * channels, *kernel),
        "lora_B.weight": padded_left.reshape(*padded_left.shape, *[1] * len(kernel)),
    }
