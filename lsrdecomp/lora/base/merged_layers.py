"""ΔW of any method of PEFT that merges: a layer's weight after merging minus that before.

One layer at a time is merged in double precision and set back, so that no copy of the model is
made. Of each ΔW a low-rank pair waits in a temporary directory, or ΔW itself where its rank is
full.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor, nn
from transformers import AutoConfig

from lsrdecomp.errors import CheckpointError, UnsupportedError, UnsupportedLayerError
from lsrdecomp.gateway import MAX_NUMBERS, open_pretrained
from lsrdecomp.lora.base.base_files import reachable_base
from lsrdecomp.lora.base.base_model import LOADERS, adapter_task, has_delta
from lsrdecomp.lora.base.open_bases import open_base
from lsrdecomp.lora.files.adapter_config import Config, check_carried
from lsrdecomp.lora.files.format import PREFIX, make_checkpoint, open_bundle
from lsrdecomp.lora.files.readers.peft_methods import SIZE_METHODS, layer_shapes
from lsrdecomp.lora.files.records import NOT_READ, LoraLayer
from lsrdecomp.lora.files.tensors import TensorWriter, first_line, read_header
from lsrdecomp.lora.peft.geometry import ConvGeometry, EmbeddingGeometry, geometry_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

    from peft.tuners.tuners_utils import BaseTunerLayer

    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.files.format import Bundle
    from lsrdecomp.lora.files.tensors import Array, StoredTensor

ROUNDING = 2.0**-22
"""Share of ‖ΔW‖_F that a pair may miss: it is rounded to float32, with a unit roundoff of 2⁻²⁴."""

SMALL_SIDE = 512
"""Shorter sides up to this have an SVD of ΔW at once, in a tenth of a second."""


class LayerUpdate(NamedTuple):
    """What merging adds to one layer."""

    name: str
    layer_type: str
    kernel: tuple[int, ...]
    delta: Tensor  # ΔW, (out, in) in float64
    bias: Tensor | None  # the merged bias, where merging changes it


def merged_checkpoint(
    adapter: str | PathLike[str],
    base: str | Path | None,
    *,
    name: str | None = None,
    max_memory: int | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint | None:
    """Open a PEFT directory of any method that merges, with ΔW of each layer as its base makes it.

    Parameters
    ----------
    adapter : path
    base : str or path, optional
        The base model, by name or directory. Its weights are read only for a method whose ΔW takes
        them; else layers of zeros have the sizes that the file or the base's config tells.
    name : str, optional
        Sub-directory of the adapter.
    max_memory : int, optional
        Bytes that ΔW of a layer may take in float64.
    trust_remote_code : bool
        Whether program code that the base brings may run.

    Returns
    -------
    Checkpoint or None
        None without a base, for a method that needs one.

    Raises
    ------
    CheckpointError
        If the adapter does not fit.
    UnsupportedError
        If PEFT does not merge it, or merging gives a layer a bias that has none.
    """
    bundle = open_bundle(adapter, name, max_memory)
    config = Config(bundle.config or {}, bundle.config_path)
    check_carried(config)
    directory = bundle.weights.parent
    peft_type = config.text("peft_type")
    # 1. Put the adapter on layers of zeros, where ΔW needs only their sizes, or on its base.
    shapes = layer_shapes(peft_type, bundle.tensors)
    if shapes is None and base is not None and peft_type in SIZE_METHODS:
        is_of_weights = config.raw.get("init_weights") == "bat"  # a variant of MiSS
        if not is_of_weights:
            shapes = _shapes_in_base(base, directory, trust=trust_remote_code)
    if shapes is not None:
        _check_memory(shapes, max_memory, bundle)
        model = _on_zeros(directory, shapes)
    elif base is not None:
        plain = open_base(base, directory, trust_remote_code=trust_remote_code)
        model = cast("PeftModel", plain.with_adapter(directory).model)
    else:
        return None
    # 2. Keep a pair of each layer.
    folder = TemporaryDirectory(prefix="lsrdecomp-")
    layers = []
    beside = _beside_method(bundle, model)
    extras = dict(beside)
    tensors = dict(beside)
    for number, update in enumerate(layer_updates(model)):
        stored = _stored_layer(update, Path(folder.name) / f"{number}.safetensors")
        parts = {
            part: _held(tensor, folder, bundle, update.name) for part, tensor in stored.items()
        }
        layer = _lora_layer(update, parts)
        if layer.layer_type in ("linear", "conv1d"):
            keys = f"{PREFIX}{update.name}.lora_A.weight", f"{PREFIX}{update.name}.lora_B.weight"
            tensors |= zip(keys, (layer.down, layer.up), strict=True)
            layer = replace(layer, keys=keys)
        layers.append(layer)
        if "bias" in parts:
            extras[f"{PREFIX}{update.name}.base_layer.bias"] = parts["bias"]
    # 3. Describe it as the plain LoRA that it is read as.
    raw = dict(config.raw)
    if raw.get("bias") != "all" and (raw.get("bias", "none") != "none" or extras != beside):
        raw["bias"] = "lora_only"
    if not isinstance(raw.get("target_modules"), list):
        raw["target_modules"] = sorted(layer.name for layer in layers)
    method = "dora" if config.raw.get("use_dora") else peft_type.lower()
    note = f"{peft_type} on {base}" if base is not None else f"{peft_type}, formed by PEFT"
    return make_checkpoint(
        replace(bundle, tensors=tensors),
        f"peft-{method}",
        layers,
        extras,
        (f"{note}: a low-rank pair for each layer, of the same ΔW in float32",),
        config=raw,
        layer_word=f"{peft_type} layer",
    )


@torch.no_grad()
def layer_updates(model: PeftModel) -> Iterator[LayerUpdate]:
    """Yield what merging adds to each layer, one after the other; the model stays as it is.

    Raises
    ------
    UnsupportedError
        If PEFT cannot merge a layer, or the layer gets a bias that its base has not.
    """
    model.eval()
    for name, module in list(model.get_base_model().named_modules()):
        if not has_delta(module):
            continue
        try:
            yield _layer_update(name, module)
        except (NotImplementedError, UnsupportedLayerError, ValueError, RuntimeError) as error:
            raise UnsupportedError(
                f"PEFT does not merge it: {first_line(error)}; {NOT_READ}", tensor=name
            ) from error


def _layer_update(name: str, module: BaseTunerLayer) -> LayerUpdate:
    """Merge one layer and set it back."""
    layer: Any = module.get_base_layer()
    geometry = geometry_of(layer)
    had_bias = getattr(layer, "bias", None) is not None
    with _in_double_precision(module):
        weight = layer.weight.detach().clone()
        bias = layer.bias.detach().clone() if had_bias else None
        module.merge()
        delta = geometry.to_matrix(layer.weight.detach() - weight)
        merged_bias = getattr(layer, "bias", None)
        if merged_bias is not None:
            merged_bias = merged_bias.detach().clone()
        module.unmerge()
    is_moved = False
    if merged_bias is not None:
        if bias is None:
            raise ValueError("it gives the layer a bias, which the base has not")
        is_moved = not torch.equal(merged_bias, bias)
    layer_type = "linear"
    kernel: tuple[int, ...] = ()
    if isinstance(geometry, EmbeddingGeometry):
        layer_type = "embedding"
    elif isinstance(geometry, ConvGeometry):
        layer_type = "conv"
        kernel = geometry.weight_shape[2:]
    elif geometry.transposed:
        layer_type = "conv1d"
    return LayerUpdate(name, layer_type, kernel, delta, merged_bias if is_moved else None)


@contextmanager
def _in_double_precision(module: Any) -> Iterator[None]:
    """Hold a layer in double precision inside a ``with`` block; set back the very tensors after.

    That includes what it shares with other layers, such as VeRA's projections.
    """
    parameters = [(parameter, parameter.data) for parameter in module.parameters()]
    buffers = [
        (owner, key, buffer)
        for owner in module.modules()
        for key, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        module.double()
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for owner, key, buffer in buffers:
            owner._buffers[key] = buffer


def _shapes_in_base(
    base: str | Path, directory: Path, *, trust: bool
) -> dict[str, tuple[int, int]] | None:
    """Return the sizes (m, n) of the layers that an adapter adapts, by name with PEFT's prefix.

    Of the base only the config is read. None if a layer is none of `nn.Linear`.
    """
    found = reachable_base(base)
    loader: Any = LOADERS[adapter_task(directory)][0]
    try:
        with torch.device("meta"):
            of_base = open_pretrained(AutoConfig, found, trust_remote_code=trust)
            model = loader.from_config(of_base, trust_remote_code=trust)
        config = PeftConfig.from_pretrained(str(directory))
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"no base could be opened: {first_line(error)}", path=base) from error
    if not getattr(config, "target_modules", None):
        return None
    shapes = {}
    for name, module in model.named_modules():
        if check_target_module_exists(config, name):
            if not isinstance(module, nn.Linear):
                return None
            shapes[PREFIX + name] = module.out_features, module.in_features
    return shapes or None


def _on_zeros(directory: Path, shapes: Mapping[str, tuple[int, int]]) -> PeftModel:
    """Return an adapter on Linear layers of zeros: merged, their weights are ΔW."""
    try:
        config: Any = PeftConfig.from_pretrained(str(directory))
        for field in ("task_type", "modules_to_save", "exclude_modules", "layers_to_transform"):
            if hasattr(config, field):
                setattr(config, field, None)
        config.target_modules = [key.removeprefix(PREFIX) for key in shapes]
        model: Any = _linear_layers(shapes)
        return PeftModel.from_pretrained(model, str(directory), config=config)
    except (ValueError, RuntimeError, TypeError, LookupError) as error:
        raise CheckpointError(
            f"PEFT does not open it: {first_line(error)}", path=directory
        ) from error


def _linear_layers(shapes: Mapping[str, tuple[int, int]]) -> nn.Module:
    """Return a model of Linear layers of zeros, by their names with PEFT's prefix."""
    model = nn.Module()
    for key, (rows, columns) in shapes.items():
        *parents, last = key.removeprefix(PREFIX).split(".")
        parent = model
        for part in parents:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        layer = nn.Linear(columns, rows, bias=False, device="meta")
        layer.weight = nn.Parameter(torch.zeros(rows, columns), requires_grad=False)
        parent.add_module(last, layer)
    return model


def _check_memory(
    shapes: Mapping[str, tuple[int, int]], max_memory: int | None, bundle: Bundle
) -> None:
    """Refuse a layer whose ΔW would take more than is allowed: a small file can imply much."""
    for name, (rows, columns) in shapes.items():
        size = 8 * rows * columns
        limit = 8 * MAX_NUMBERS if max_memory is None else max_memory
        if size > limit:
            raise CheckpointError(
                f"its ΔW of {rows} x {columns} takes {size} bytes, above the {limit} allowed; "
                "raise max_memory (--max-memory)",
                path=bundle.weights,
                tensor=name,
            )


# -- pairs of the same ΔW --------------------------------------------------------------------------


def low_rank_pair(delta: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the pair (B, A) of the smallest rank within `ROUNDING` of ΔW; None at full rank.

    Parameters
    ----------
    delta : Tensor, shape (m, n), float64

    Notes
    -----
    A layer of some hundred rows has an SVD. For a larger one it is that of a random range finder
    with four times as many columns each time (Halko, Martinsson and Tropp, 2011), so that it costs
    O(m n r).
    """
    norm = float(delta.norm())
    rows, columns = delta.shape
    if not math.isfinite(norm):
        return None  # whoever reads it is told which layer is not finite
    if norm == 0.0:
        return delta.new_zeros(rows, 1), delta.new_zeros(1, columns)
    full_rank = min(rows, columns)
    basis = torch.eye(rows, dtype=delta.dtype, device=delta.device)
    coefficients = delta
    if full_rank > SMALL_SIDE:
        generator = torch.Generator().manual_seed(0)
        width = 0
        while True:
            if 2 * width == full_rank - full_rank % 2:
                return None  # a pair of more than half the rank would hardly take fewer numbers
            width = min(max(32, 4 * width), full_rank // 2)
            draws = torch.randn(columns, width, generator=generator, dtype=delta.dtype)
            basis = torch.linalg.qr(delta @ draws.to(delta.device)).Q
            coefficients = basis.T @ delta
            if float((delta - basis @ coefficients).norm()) <= ROUNDING * norm:
                break
    left, sigma, right = torch.linalg.svd(coefficients, full_matrices=False)
    tails = sigma.square().flip(0).cumsum(0).flip(0).sqrt()
    rank = max(1, int((tails > ROUNDING * norm).sum()))
    if rank * (rows + columns) >= rows * columns:
        return None
    root = sigma[:rank].sqrt()
    return basis @ (left[:, :rank] * root), root[:, None] * right[:rank]


def _stored_layer(update: LayerUpdate, path: Path) -> dict[str, StoredTensor]:
    """Write the pair of a layer in float32, or ΔW itself, and its bias if merging changes it."""
    pair = low_rank_pair(update.delta)
    parts = {"delta": update.delta} if pair is None else {"up": pair[0], "down": pair[1]}
    if update.bias is not None:
        parts["bias"] = update.bias
    with TensorWriter(path.parent) as writer:
        for part, tensor in parts.items():
            writer.add(part, tensor.cpu().numpy().astype(np.float32))
        writer.write(path, {})
    return dict(read_header(path).tensors)


def _held(
    tensor: StoredTensor, folder: TemporaryDirectory[str], bundle: Bundle, name: str
) -> StoredTensor:
    """Return a tensor that keeps its temporary directory, and is called as its layer is."""
    fetch = partial(_read_in, folder, tensor)
    return replace(tensor, name=name, path=bundle.weights, fetch=fetch)


def _read_in(_folder: TemporaryDirectory[str], tensor: StoredTensor) -> Array:
    """Read a tensor; its temporary directory lives as long as whoever can call this."""
    return tensor.read()


def _lora_layer(update: LayerUpdate, parts: Mapping[str, StoredTensor]) -> LoraLayer:
    """Return the layer of a stored pair, or of ΔW and an identity on its shorter side."""
    rows, columns = update.delta.shape
    if "delta" in parts:
        delta = parts["delta"]
        rank = min(rows, columns)
        identity = replace(delta, shape=(rank, rank), fetch=partial(np.eye, rank, dtype=np.float32))
        up, down = (delta, identity) if columns == rank else (identity, delta)
    else:
        up, down = parts["up"], parts["down"]
        rank = up.shape[1]
    return LoraLayer(
        update.name,
        update.layer_type,
        rows,
        columns,
        rank,
        1.0,
        "float32",
        up,
        down,
        update.kernel,
    )


def _beside_method(bundle: Bundle, model: PeftModel) -> dict[str, StoredTensor]:
    """Return the tensors of a file that are no part of its method: heads, biases, token rows."""
    tuner: Any = model.base_model
    stem = re.match(r"[^_]*_", tuner.prefix)
    assert stem is not None
    of_method = re.compile(rf"(^|\.){stem[0]}")
    return {key: tensor for key, tensor in bundle.tensors.items() if of_method.search(key) is None}
