"""Experts that transformers 5 holds as two stacked parameters, as Linear layers of their own while they are measured.

The layers have the names that `lsrdecomp.checkpoints.experts` gives the experts of a LoRA on such parameters, and the
LoRA is put on them one by one, so that all that is measured of Linear layers is measured of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from lsrdecomp.adapters.kernels import expand
from lsrdecomp.calibration.fisher import CalibrationError
from lsrdecomp.checkpoints import open_checkpoint, write_lora
from lsrdecomp.checkpoints.records import LoraLayer, LsrLayer
from lsrdecomp.checkpoints.tensors import Array
from lsrdecomp.precision import unit_roundoff

NAMES = ("gate_up_proj", "down_proj")


class Experts(nn.Module):
    """The same function of tokens as transformers' module of experts.

    Every expert reads every token, and what it says to those that it was not sent is multiplied by 0: their gradients
    are 0, and they drop out of the sums. That costs as many times more as there are experts to one that a token takes.
    """

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        self.act_fn = stacked.act_fn
        for name in NAMES:
            self.add_module(name, nn.ModuleList(map(_linear, getattr(stacked, name).data)))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):  # type: ignore[arg-type]
            weight = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)
            gate, up = gate_up(hidden_states).chunk(2, dim=-1)
            total = total + (weight * down(self.act_fn(gate) * up)).to(total.dtype)
        return total


def with_stacked_lora(model: nn.Module, adapter: str | Path) -> PeftModel:
    """A base with a LoRA, or LSR, whose config has ``target_parameters``; experts are Linear layers from then on.

    Raises
    ------
    CalibrationError
        For a base whose module of experts computes something else than `Experts` does.
    """
    for name, module in list(model.named_modules()):
        if set(NAMES) <= {part for part, _ in module.named_parameters(recurse=False)}:
            model.set_submodule(name, _checked(name, module))
    source = open_checkpoint(adapter)
    names = [layer.name for layer in source.layers]
    config = {field: value for field, value in source.config.items() if field != "target_parameters"}
    with TemporaryDirectory() as directory:
        out = Path(directory) / "lora"
        write_lora(out, source=source, config=config | {"target_modules": names}, layers=map(_pair, source.layers))
        return PeftModel.from_pretrained(model, str(out))


def least_reached(name: str, tokens: Mapping[str, int]) -> str | None:
    """Of the experts of one stack, the one that fewest tokens were sent to: it stands for one that none was sent to."""
    stack, _, number = name.rpartition(".")
    others = [other for other in tokens if number.isdecimal() and other.rpartition(".")[0] == stack]
    return min(others, key=lambda other: tokens[other], default=None)


def _pair(layer: LoraLayer | LsrLayer) -> tuple[str, Array, Array]:
    if isinstance(layer, LsrLayer):
        left, right = (expand([torch.tensor(factor) for factor in side]).numpy() for side in layer.load())
    else:
        left, right = layer.load()
    return layer.name, layer.scale * left, right


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


@torch.no_grad()
def _checked(name: str, stacked: nn.Module) -> Experts:
    """The experts as Linear layers, if they say to some tokens what the module says."""
    text = f"{name} is a {type(stacked).__name__}, whose experts are not computed as Qwen3-MoE's are"
    try:
        experts = Experts(stacked)
        weight = experts.gate_up_proj[0].weight  # type: ignore[index, union-attr]
        generator = torch.Generator().manual_seed(0)
        count, width = len(experts.gate_up_proj), weight.shape[1]  # type: ignore[arg-type]
        tokens = torch.randn(2 * count, width, generator=generator).to(weight)
        chosen = torch.arange(2 * count, device=weight.device).remainder(count).unsqueeze(1)
        shares = torch.full((2 * count, 1), 0.5, device=weight.device, dtype=weight.dtype)
        ours, theirs = (module(tokens, chosen, shares).double() for module in (experts, stacked))
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise CalibrationError(f"{text}; compress this adapter without --base and --calibrated") from error
    if not (ours - theirs).norm() <= 2**6 * unit_roundoff(str(weight.dtype).removeprefix("torch.")) * theirs.norm():
        raise CalibrationError(f"{text}; compress this adapter without --base and --calibrated")
    return experts
