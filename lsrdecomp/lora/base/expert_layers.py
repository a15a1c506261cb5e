"""Mixtures of experts as Linear layers, one or more for each expert, so that they can be measured.

transformers 5 holds all experts of a block in two stacked parameters. Measurements hook Linear
layers, so a stack is replaced by Linear layers that compute the same, and an adapter is put on each
of them. The layers are called as the adapter calls them, in one of two ways:

- ``experts.gate_up_proj.3`` and ``experts.down_proj.3``: names that
  `lsrdecomp.lora.files.stacked_experts` gives to the parts of stacked parameters;
- ``experts.3.gate_proj``, ``experts.3.up_proj`` and ``experts.3.down_proj``: names in files for
  older versions of transformers, whose experts were Linear layers.
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

from lsrdecomp.errors import CalibrationError, UnsupportedError
from lsrdecomp.lora.files import open_checkpoint, write_lora
from lsrdecomp.lora.files.adapter_config import check_directory_patterns
from lsrdecomp.lora.files.records import KroneckerLayer, LoraLayer
from lsrdecomp.lora.files.stacked_experts import PARAMETER_ORDER
from lsrdecomp.lora.peft.kernels import expand
from lsrdecomp.precision import unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.files.tensors import Array

PROJECTION_NAMES = (
    ("gate_proj", "up_proj", "down_proj"),  # Qwen, GLM, DeepSeek
    ("w1", "w3", "w2"),  # Mixtral, MiniMax, Phi
)
"""Names of an expert's three layers in files for older versions of transformers. The first two are
the halves of ``gate_up_proj``."""
LEGACY_BLOCK = "block_sparse_moe"
"""Name in older models, such as Mixtral, of the block that is now ``mlp``."""
EXPERT_LAYER = re.compile(r"(?P<block>.+)\.experts\.\d+\.(?P<projection>\w+)")
"""Name of an expert's layer in a file for older versions of transformers."""
EXPERT_NUMBER = re.compile(r"(experts(?:\.\w+)?)\.\d+")
"""Number of an expert in a layer's name; the rest is common to all experts of a stack."""


class LinearExperts(nn.Module):
    """Linear layers that compute the same as one of transformers' modules of stacked experts.

    Every expert reads every token. Its output for tokens that were not sent to it is multiplied by
    0, so that their gradients are 0 and they drop out of the sums. With eight experts, two of which
    a token is sent to, that costs four times as much as the module.

    Parameters
    ----------
    stacked : nn.Module
        transformers' module of experts.
    projections : sequence of str
        Names of the three layers of an expert in the adapter's file, such as w1, w3 and w2: layers
        are then called ``3.w1``. Without them they are called ``gate_up_proj.3``.

    Attributes
    ----------
    layer_names : list of lists of str
        The layers of each expert in the order gate, up, down, or gate and up together, down.
    """

    def __init__(self, stacked: Any, projections: Sequence[str] = ()) -> None:
        super().__init__()
        self.act_fn = stacked.act_fn
        gate_ups, downs = (getattr(stacked, name).data for name in PARAMETER_ORDER)
        self.n_experts = len(gate_ups)
        if projections:
            self.layer_names = self._add_modules_by_expert(gate_ups, downs, projections)
        else:
            self.layer_names = self._add_modules_by_parameter(gate_ups, downs)

    def _add_modules_by_expert(
        self, gate_ups: Tensor, downs: Tensor, projections: Sequence[str]
    ) -> list[list[str]]:
        """Add a module for each expert with its three layers; return their names."""
        names = []
        for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
            gate, up = gate_up.chunk(2)
            layers = map(_frozen_linear, (gate, up, down))
            named_layers = dict(zip(projections, layers, strict=True))
            self.add_module(str(expert), nn.ModuleDict(named_layers))
            names.append([f"{expert}.{name}" for name in projections])
        return names

    def _add_modules_by_parameter(self, gate_ups: Tensor, downs: Tensor) -> list[list[str]]:
        """Add a list of layers, one for each expert, for each stacked parameter; return names."""
        for name, weights in zip(PARAMETER_ORDER, (gate_ups, downs), strict=True):
            self.add_module(name, nn.ModuleList(map(_frozen_linear, weights)))
        return [[f"{name}.{expert}" for name in PARAMETER_ORDER] for expert in range(len(downs))]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts that each token was sent to."""
        total = torch.zeros_like(hidden_states)
        for expert, names in enumerate(self.layer_names):
            *gate_up_layers, down = [self.get_submodule(name) for name in names]
            gate_up = torch.cat([layer(hidden_states) for layer in gate_up_layers], dim=-1)
            gate, up = gate_up.chunk(2, dim=-1)
            # The weight of this expert for each token: 0 where the token was sent elsewhere.
            token_weight = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)
            total = total + (token_weight * down(self.act_fn(gate) * up)).to(total.dtype)
        return total


def attach_adapter(model: nn.Module, adapter: str | Path) -> PeftModel:
    """Put an adapter on a base, as PEFT does; return the PEFT model.

    If the adapter has layers of experts, the base's stacked experts become Linear layers.

    Raises
    ------
    CalibrationError
        For a base whose experts compute something else than `LinearExperts` does, and for a layer
        that the base lacks.
    """
    check_directory_patterns(adapter)
    # 1. Where the base has no stacked experts, or the adapter no layers in them, leave it to PEFT.
    stacks = _stacked_expert_modules(model)
    source = _open_supported(adapter) if stacks else None
    if source is None or not any(".experts." in layer.name for layer in source.layers):
        return PeftModel.from_pretrained(model, str(adapter))
    # 2. Put Linear layers in the place of every stack, under the names that the adapter's file has
    #    for them.
    names = [layer.name for layer in source.layers]
    _replace_stacks(model, stacks, names)
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = next((name for name in names if name not in modules), None)
    if missing is not None:
        raise CalibrationError(
            f"the base has no layer {missing}; "
            "compress this adapter without --base and --statistics"
        )
    # 3. Write the adapter again, as one of plain layers, for PEFT to open: in the file as it is
    #    PEFT would look for stacks.
    config = dict(source.config) | {"target_modules": names}
    config.pop("target_parameters", None)
    with TemporaryDirectory() as directory, _hidden_model_type(model.config):
        rewritten = Path(directory) / "lora"
        layers = map(_low_rank_factors, source.layers)
        write_lora(rewritten, source=source, config=config, layers=layers)
        return PeftModel.from_pretrained(model, str(rewritten))


def least_used_expert(name: str, tokens: Mapping[str, int]) -> str | None:
    """Return the layer of another expert of the same stack that the fewest tokens were sent to.

    Parameters
    ----------
    name : str
        A layer of an expert that no token was sent to.
    tokens : Mapping of name to int
        Number of tokens of each layer that some were sent to.

    Returns
    -------
    str or None
        None if the stack has no such layer, or ``name`` is no layer of an expert.
    """
    stack = _without_number(name)
    same_stack = [other for other in tokens if other != name and _without_number(other) == stack]
    return min(same_stack, key=lambda other: tokens[other], default=None)


def _without_number(name: str) -> str:
    """Return a layer's name without the number of its expert."""
    return EXPERT_NUMBER.sub(r"\1", name)


def _stacked_expert_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that hold stacked experts."""
    names = []
    for name, module in model.named_modules():
        parameters = {part for part, _ in module.named_parameters(recurse=False)}
        if parameters.issuperset(PARAMETER_ORDER):
            names.append(name)
    return names


def _open_supported(adapter: str | Path) -> Checkpoint | None:
    """Open an adapter; return None for one that PEFT opens and we do not, such as DoRA."""
    try:
        return open_checkpoint(adapter)
    except UnsupportedError:
        return None


def _replace_stacks(model: nn.Module, stacks: Sequence[str], adapter_layers: Sequence[str]) -> None:
    """Replace stacks of a model by `LinearExperts`, with names as in an adapter's file."""
    # 1. The names of projections and blocks in the file, if it is one for older versions.
    matches = [match for match in map(EXPERT_LAYER.fullmatch, adapter_layers) if match]
    file_projections = {match["projection"] for match in matches}
    file_blocks = {match["block"] for match in matches}
    projections: Sequence[str] = ()
    for candidates in PROJECTION_NAMES:
        if not file_projections.isdisjoint(candidates):
            projections = candidates
            break
    # 2. The same names in the model.
    for name in stacks:
        stacked = model.get_submodule(name)
        model.set_submodule(name, _checked_linear_experts(name, stacked, projections))
        parent, _, block = name.removesuffix(".experts").rpartition(".")
        if block != LEGACY_BLOCK and f"{parent}.{LEGACY_BLOCK}" in file_blocks:
            _rename_child(model.get_submodule(parent), block, LEGACY_BLOCK)


@torch.no_grad()
def _checked_linear_experts(
    name: str, stacked: nn.Module, projections: Sequence[str]
) -> LinearExperts:
    """Return experts as Linear layers, after a comparison with the module on random tokens.

    Raises
    ------
    CalibrationError
        If the two compute different outputs.
    """
    message = (
        f"{name} is a {type(stacked).__name__}, whose experts are not computed as Qwen3-MoE's are; "
        "compress this adapter without --base and --statistics"
    )
    try:
        experts = LinearExperts(stacked, projections)
        weight = next(experts.parameters())
        # Two tokens for each expert, with a weight of ½: a module that scales or gates in another
        # way has another output.
        n_tokens = 2 * experts.n_experts
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(n_tokens, weight.shape[1], generator=generator).to(weight)
        index = torch.arange(n_tokens, device=weight.device).remainder(experts.n_experts)
        halves = torch.full((n_tokens, 1), 0.5, device=weight.device, dtype=weight.dtype)
        actual = experts(tokens, index.unsqueeze(1), halves).double()
        expected = stacked(tokens, index.unsqueeze(1), halves).double()
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise CalibrationError(message) from error
    tolerance = 2**6 * unit_roundoff(str(weight.dtype).removeprefix("torch."))
    if not (actual - expected).norm() <= tolerance * expected.norm():
        raise CalibrationError(message)
    return experts


@contextmanager
def _hidden_model_type(config: Any) -> Iterator[None]:
    """Hide a model's type from PEFT inside a ``with`` block.

    For types whose experts were Linear layers in older versions, PEFT converts an adapter of such
    layers to one of stacks; here the layers exist.
    """
    model_type = config.model_type
    config.model_type = ""
    try:
        yield
    finally:
        config.model_type = model_type


def _rename_child(parent: nn.Module, name: str, new: str) -> None:
    """Register a child module under a new name; as an attribute it keeps its old one."""
    child = getattr(parent, name)
    delattr(parent, name)
    object.__setattr__(parent, name, child)
    parent.add_module(new, child)


def _low_rank_factors(layer: LoraLayer | KroneckerLayer) -> tuple[str, Array, Array]:
    """Return a layer's name and two matrices whose product is its ΔW."""
    if isinstance(layer, KroneckerLayer):
        left, right = (_expanded_side(factors) for factors in layer.load())
    else:
        left, right = layer.load()
    return layer.name, layer.scale * left, right


def _expanded_side(factors: Sequence[Array]) -> Array:
    """Return the matrix that Kronecker factors stand for."""
    return expand([torch.tensor(factor) for factor in factors]).numpy()


def _frozen_linear(weight: Tensor) -> nn.Linear:
    """Return a frozen Linear layer that shares the memory of its weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
