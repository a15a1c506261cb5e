"""Experts that transformers 5 holds as two stacked parameters, as Linear layers of their own while they are measured.

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

    from lsrdecomp.checkpoints.tensors import Array

WORDS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""What files call the halves of ``gate_up_proj``, and ``down_proj``: Qwen, GLM, DeepSeek; Mixtral,
MiniMax, Phi."""
OLD_BLOCK = "block_sparse_moe"
"""What Mixtral's kind of models had for ``mlp``."""
NAMED = re.compile(r"(?P<block>.+)\.experts\.\d+\.(?P<word>\w+)")
EXPERT = re.compile(r"(experts(?:\.\w+)?)\.\d+")


class Experts(nn.Module):
    """The same function of tokens as transformers' module of experts.

    Without ``words`` the layers are ``gate_up_proj.3`` and ``down_proj.3``; with them ``3.w1``,
    ``3.w3`` and ``3.w2``.

    Every expert reads every token, and what it says to those that it was not sent is multiplied by
    0: their gradients are 0, and they drop out of the sums. That costs as many times more as there
    are experts to one that a token takes.
    """

    def __init__(self, stacked: Any, words: Sequence[str] = ()) -> None:
        super().__init__()
        self.act_fn = stacked.act_fn
        self.words = words
        gate_ups, downs = (getattr(stacked, name).data for name in PARAMETER_ORDER)
        self.count = len(gate_ups)
        if words:
            for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
                weights = zip(words, (*gate_up.chunk(2), down), strict=True)
                self.add_module(
                    str(expert), nn.ModuleDict({word: _linear(weight) for word, weight in weights})
                )
        else:
            for name, weights in zip(PARAMETER_ORDER, (gate_ups, downs), strict=True):
                self.add_module(name, nn.ModuleList(map(_linear, weights)))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for expert in range(self.count):
            names = [f"{expert}.{word}" for word in self.words] or [
                f"{name}.{expert}" for name in PARAMETER_ORDER
            ]
            *inner, down = map(self.get_submodule, names)
            gate, up = torch.cat([layer(hidden_states) for layer in inner], dim=-1).chunk(2, dim=-1)
            # A token's share of this expert: 0 where it was sent elsewhere.
            weight = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)
            total = total + (weight * down(self.act_fn(gate) * up)).to(total.dtype)
        return total


def with_lora(model: nn.Module, adapter: str | Path) -> PeftModel:
    """A base with an adapter, as PEFT opens it; experts that the adapter has layers of are Linear layers from then on.

    Raises
    ------
    CalibrationError
        For a base whose module of experts computes something else than `Experts` does, and for a
        layer that it lacks.
    """
    # 1. Stacked experts of the base, and whether the adapter has layers in them: if not, PEFT opens
    # it as any other.
    stacks = [
        name
        for name, module in model.named_modules()
        if set(PARAMETER_ORDER) <= {part for part, _ in module.named_parameters(recurse=False)}
    ]
    try:
        source = open_checkpoint(adapter) if stacks else None
    except UnsupportedError:  # as DoRA, which PEFT opens
        source = None
    names = [layer.name for layer in source.layers] if source is not None else []
    if source is None or not any(".experts." in name for name in names):
        return PeftModel.from_pretrained(model, str(adapter))
    # 2. Linear layers in the place of every stack, under the names that the adapter's files have
    # for them.
    matches = [match for match in map(NAMED.fullmatch, names) if match]
    words = next((words for words in WORDS if any(match["word"] in words for match in matches)), ())
    blocks = {match["block"] for match in matches}
    for name in stacks:
        model.set_submodule(name, _checked(name, model.get_submodule(name), words))
        parent, _, block = name.removesuffix(".experts").rpartition(".")
        if block != OLD_BLOCK and f"{parent}.{OLD_BLOCK}" in blocks:
            _rename(model.get_submodule(parent), block, OLD_BLOCK)
    # 3. The adapter written again for layers by name, since PEFT would look for stacks in the file
    # as it is.
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = next((name for name in names if name not in modules), None)
    if missing is not None:
        raise CalibrationError(
            f"the base has no layer {missing}; compress this adapter without --base and --calibrated"
        )
    config = {
        field: value for field, value in source.config.items() if field != "target_parameters"
    }
    with TemporaryDirectory() as directory, _own_names(model.config):
        out = Path(directory) / "lora"
        write_lora(
            out,
            source=source,
            config=config | {"target_modules": names},
            layers=map(_pair, source.layers),
        )
        return PeftModel.from_pretrained(model, str(out))


def least_reached(name: str, tokens: Mapping[str, int]) -> str | None:
    """Of the experts of one layer, the one that fewest tokens were sent to: it stands for one that none was sent to."""
    kind = EXPERT.sub(r"\1", name)
    others = [other for other in tokens if other != name and EXPERT.sub(r"\1", other) == kind]
    return min(others, key=lambda other: tokens[other], default=None)


@contextmanager
def _own_names(config: Any) -> Iterator[None]:
    """Inside, PEFT takes names for what they say; it would stack experts called by name, as the base had them."""
    kind = config.model_type
    config.model_type = ""
    try:
        yield
    finally:
        config.model_type = kind


def _rename(parent: nn.Module, name: str, new: str) -> None:
    """Call a child otherwise; what the parent does still finds it under its first name."""
    child = getattr(parent, name)
    delattr(parent, name)
    object.__setattr__(parent, name, child)
    parent.add_module(new, child)


def _pair(layer: LoraLayer | KroneckerLayer) -> tuple[str, Array, Array]:
    if isinstance(layer, KroneckerLayer):
        left, right = (
            expand([torch.tensor(factor) for factor in side]).numpy() for side in layer.load()
        )
    else:
        left, right = layer.load()
    return layer.name, layer.scale * left, right


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


@torch.no_grad()
def _checked(name: str, stacked: nn.Module, words: Sequence[str]) -> Experts:
    """The experts as Linear layers, if they say to some tokens what the module says."""
    text = (
        f"{name} is a {type(stacked).__name__}, whose experts are not computed as Qwen3-MoE's are"
    )
    try:
        experts = Experts(stacked, words)
        weight = next(experts.parameters())
        # Each expert gets two tokens at half strength: a module that scales or gates otherwise says
        # another thing.
        generator = torch.Generator().manual_seed(0)
        count, width = experts.count, weight.shape[1]
        tokens = torch.randn(2 * count, width, generator=generator).to(weight)
        chosen = torch.arange(2 * count, device=weight.device).remainder(count).unsqueeze(1)
        shares = torch.full((2 * count, 1), 0.5, device=weight.device, dtype=weight.dtype)
        ours, theirs = (module(tokens, chosen, shares).double() for module in (experts, stacked))
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise CalibrationError(
            f"{text}; compress this adapter without --base and --calibrated"
        ) from error
    if (
        not (ours - theirs).norm()
        <= 2**6 * unit_roundoff(str(weight.dtype).removeprefix("torch.")) * theirs.norm()
    ):
        raise CalibrationError(f"{text}; compress this adapter without --base and --calibrated")
    return experts
