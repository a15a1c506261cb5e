"""Experts of transformers 5, which are two stacked parameters, as Linear layers while measured.

The layers have the names that the experts of a LoRA have: those that
`lsrdecomp.checkpoints.experts` gives to experts of stacked parameters, or a file's own, as of the
models that older versions of transformers built. The LoRA is put on them one by one, so that all
that is measured of Linear layers is measured of experts.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from lsrdecomp.adapters.kernels import expand
from lsrdecomp.calibration.errors import CalibrationError
from lsrdecomp.checkpoints import open_checkpoint, write_lora
from lsrdecomp.checkpoints.experts import PARAMETER_ORDER
from lsrdecomp.checkpoints.records import KroneckerLayer, LoraLayer
from lsrdecomp.errors import UnsupportedError
from lsrdecomp.precision import unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lsrdecomp.checkpoints import Checkpoint
    from lsrdecomp.checkpoints.tensors import Array

PROJECTION_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""What files call the halves of ``gate_up_proj``, and ``down_proj``: Qwen, GLM, DeepSeek; Mixtral,
MiniMax, Phi."""
LEGACY_BLOCK = "block_sparse_moe"
"""What models like Mixtral had for ``mlp``."""
EXPERT_LAYER = re.compile(r"(?P<block>.+)\.experts\.\d+\.(?P<projection>\w+)")
"""Name of one expert's layer in a file of an older version of transformers."""
EXPERT_NUMBER = re.compile(r"(experts(?:\.\w+)?)\.\d+")
"""Part of a layer's name that tells experts of one stack apart."""


class UnstackedExperts(nn.Module):
    """The same function of tokens as transformers' module of experts, made of Linear layers.

    Every expert reads every token, and its output for those that it was not sent is multiplied by
    0: their gradients are 0, and they drop out of the sums. That costs as many times more as there
    are experts to one that a token takes.

    Parameters
    ----------
    stacked : nn.Module
        transformers' module of experts.
    projections : sequence of str
        Names of the three layers of an expert, which are then ``3.w1``, ``3.w3`` and ``3.w2``.
        Without them the layers are ``gate_up_proj.3`` and ``down_proj.3``.
    """

    def __init__(self, stacked: Any, projections: Sequence[str] = ()) -> None:
        super().__init__()
        self.act_fn = stacked.act_fn
        gate_ups, downs = (getattr(stacked, name).data for name in PARAMETER_ORDER)
        self.n_experts = len(gate_ups)
        self.layer_names: list[list[str]] = []
        if projections:
            for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
                weights = (*gate_up.chunk(2), down)
                layers = {name: _linear(w) for name, w in zip(projections, weights, strict=True)}
                self.add_module(str(expert), nn.ModuleDict(layers))
                self.layer_names.append([f"{expert}.{name}" for name in projections])
        else:
            for name, weights in zip(PARAMETER_ORDER, (gate_ups, downs), strict=True):
                self.add_module(name, nn.ModuleList(map(_linear, weights)))
            for expert in range(self.n_experts):
                self.layer_names.append([f"{name}.{expert}" for name in PARAMETER_ORDER])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts that each token was sent to."""
        total = torch.zeros_like(hidden_states)
        for expert, names in enumerate(self.layer_names):
            *gate_up_layers, down = [self.get_submodule(name) for name in names]
            gate_up = torch.cat([layer(hidden_states) for layer in gate_up_layers], dim=-1)
            gate, up = gate_up.chunk(2, dim=-1)
            # A token's share of this expert: 0 where it was sent elsewhere.
            share = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)
            total = total + (share * down(self.act_fn(gate) * up)).to(total.dtype)
        return total


def attach_adapter(model: nn.Module, adapter: str | Path) -> PeftModel:
    """Return a base with an adapter, as PEFT opens it.

    Experts that the adapter has layers of are Linear layers from then on.

    Raises
    ------
    CalibrationError
        For a base whose module of experts computes something else than `UnstackedExperts` does, and
        for a layer that it lacks.
    """
    # 1. Find stacked experts of the base, and layers of the adapter in them. If there are none,
    #    PEFT opens it as any other.
    stacks = _stacked_experts(model)
    source = _open_supported(adapter) if stacks else None
    if source is None or not any(".experts." in layer.name for layer in source.layers):
        return PeftModel.from_pretrained(model, str(adapter))
    # 2. Put Linear layers in the place of every stack, under the names that the adapter's file has
    #    for them.
    names = [layer.name for layer in source.layers]
    _unstack(model, stacks, names)
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = next((name for name in names if name not in modules), None)
    if missing is not None:
        raise CalibrationError(
            f"the base has no layer {missing}; "
            "compress this adapter without --base and --calibrated"
        )
    # 3. Write the adapter again for layers by name, since PEFT would look for stacks in the file as
    #    it is.
    config = dict(source.config) | {"target_modules": names}
    config.pop("target_parameters", None)
    with TemporaryDirectory() as directory, _no_model_type(model.config):
        rewritten = Path(directory) / "lora"
        layers = map(_low_rank_factors, source.layers)
        write_lora(rewritten, source=source, config=config, layers=layers)
        return PeftModel.from_pretrained(model, str(rewritten))


def least_used_expert(name: str, tokens: Mapping[str, int]) -> str | None:
    """Return the expert of the same stack that fewest tokens were sent to; None if there is none.

    Parameters
    ----------
    name : str
        A layer of an expert that no token was sent to.
    tokens : Mapping of name to int
        Tokens of the layers that some were sent to.
    """
    stack = EXPERT_NUMBER.sub(r"\1", name)
    same_stack = [
        other for other in tokens if other != name and EXPERT_NUMBER.sub(r"\1", other) == stack
    ]
    return min(same_stack, key=lambda other: tokens[other], default=None)


def _stacked_experts(model: nn.Module) -> list[str]:
    """Return the names of the modules that hold stacked experts."""
    names = []
    for name, module in model.named_modules():
        parameters = {part for part, _ in module.named_parameters(recurse=False)}
        if parameters.issuperset(PARAMETER_ORDER):
            names.append(name)
    return names


def _open_supported(adapter: str | Path) -> Checkpoint | None:
    """Open an adapter; None for one such as DoRA, which PEFT opens and we do not."""
    try:
        return open_checkpoint(adapter)
    except UnsupportedError:
        return None


def _unstack(model: nn.Module, stacks: Sequence[str], adapter_layers: Sequence[str]) -> None:
    """Put `UnstackedExperts` in the place of stacks, with names as in an adapter's file."""
    # 1. How the file calls projections and blocks.
    matches = [match for match in map(EXPERT_LAYER.fullmatch, adapter_layers) if match]
    found = {match["projection"] for match in matches}
    blocks = {match["block"] for match in matches}
    projections: Sequence[str] = ()
    for candidates in PROJECTION_NAMES:
        if not found.isdisjoint(candidates):
            projections = candidates
            break
    # 2. The same names in the model.
    for name in stacks:
        model.set_submodule(name, _unstacked(name, model.get_submodule(name), projections))
        parent, _, block = name.removesuffix(".experts").rpartition(".")
        if block != LEGACY_BLOCK and f"{parent}.{LEGACY_BLOCK}" in blocks:
            _rename_child(model.get_submodule(parent), block, LEGACY_BLOCK)


@torch.no_grad()
def _unstacked(name: str, stacked: nn.Module, projections: Sequence[str]) -> UnstackedExperts:
    """Return experts as Linear layers, if they compute what the module computes.

    Raises
    ------
    CalibrationError
        If they do not.
    """
    message = (
        f"{name} is a {type(stacked).__name__}, whose experts are not computed as Qwen3-MoE's are; "
        "compress this adapter without --base and --calibrated"
    )
    try:
        experts = UnstackedExperts(stacked, projections)
        weight = next(experts.parameters())
        # Each expert gets two tokens at half strength: a module that scales or gates otherwise has
        # another output.
        n_tokens = 2 * experts.n_experts
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(n_tokens, weight.shape[1], generator=generator).to(weight)
        index = torch.arange(n_tokens, device=weight.device).remainder(experts.n_experts)
        halves = torch.full((n_tokens, 1), 0.5, device=weight.device, dtype=weight.dtype)
        found = experts(tokens, index.unsqueeze(1), halves).double()
        expected = stacked(tokens, index.unsqueeze(1), halves).double()
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise CalibrationError(message) from error
    rounding = 2**6 * unit_roundoff(str(weight.dtype).removeprefix("torch."))
    if not (found - expected).norm() <= rounding * expected.norm():
        raise CalibrationError(message)
    return experts


@contextmanager
def _no_model_type(config: Any) -> Iterator[None]:
    """Hide the type of a model from PEFT for a block.

    PEFT would stack experts called by name, as it does for types of models that had them so.
    """
    model_type = config.model_type
    config.model_type = ""
    try:
        yield
    finally:
        config.model_type = model_type


def _rename_child(parent: nn.Module, name: str, new: str) -> None:
    """Register a child under another name; the parent's code still finds it under the first."""
    child = getattr(parent, name)
    delattr(parent, name)
    object.__setattr__(parent, name, child)
    parent.add_module(new, child)


def _low_rank_factors(layer: LoraLayer | KroneckerLayer) -> tuple[str, Array, Array]:
    """Return a layer's name and two factors of its ΔW."""
    if isinstance(layer, KroneckerLayer):
        left, right = (
            expand([torch.tensor(factor) for factor in side]).numpy() for side in layer.load()
        )
    else:
        left, right = layer.load()
    return layer.name, layer.scale * left, right


def _linear(weight: Tensor) -> nn.Linear:
    """Return a frozen Linear layer that shares the memory of its weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
