"""Before anything is timed: every arm of ours against float64, with fresh inputs and poisoned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.adapters.arms import ArenaLinear, Build, KronaLinear, LoraLinear, LsrLinear, Sizes
from benchmarks.adapters.models import Case, make, sample

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CASE = Case("check", "stack", (3, 43), ((96, 64), (64, 64), (64, 160), (96, 64)))


def kron_sum(factors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for first, second in zip(*factors, strict=True):
        total = total + torch.kron(first.contiguous(), second.contiguous())
    return total


def delta(layer: nn.Module, held: dict[int, Tensor]) -> Tensor:
    """ΔW in float64 from the definition, as a function of float64 copies of the parameters."""

    def exact(parameter: Tensor) -> Tensor:
        return held.setdefault(id(parameter), parameter.detach().double().cpu().requires_grad_())

    if isinstance(layer, LsrLinear):
        sides = [[exact(factor) for factor in side.factors] for side in (layer.left, layer.right)]
        return 0.5 * kron_sum(sides[0]) @ kron_sum(sides[1])
    if isinstance(layer, LoraLinear):
        return 0.5 * exact(layer.left) @ exact(layer.right)
    if isinstance(layer, KronaLinear):
        return kron_sum([exact(layer.first), exact(layer.second)])
    assert isinstance(layer, ArenaLinear)
    arena = layer.held["arena"]
    flat = exact(arena.flat)
    right, left = arena.layout.right[layer.layer], arena.layout.left[layer.layer]
    return 0.5 * kron_sum(left.views(flat)) @ kron_sum(right.views(flat))


def poison(device: torch.device) -> None:
    """Leave NaN in memory that allocations will reuse, so that an entry never written shows."""
    blocks = [torch.full((size,), float("nan"), device=device) for size in (1 << 22, 1 << 18, 1 << 14, 1 << 12)]
    del blocks


def worst_error(build: Build, device: torch.device, dtype: torch.dtype, seed: int) -> float:
    """Largest relative error of outputs, input gradients and parameter gradients."""
    model = make(CASE, device, dtype, seed)
    prepared = build(model, [f"linear_{i}" for i in range(len(CASE.shapes))], Sizes(terms=5))
    inputs, gradients = sample(CASE, device, dtype, seed + 1)
    for parameter in prepared.parameters:
        parameter.grad = None
    poison(device)
    outputs = prepared.run(inputs)
    poison(device)
    torch.autograd.backward(outputs, gradients)
    held: dict[int, Tensor] = {}
    pairs = []
    layers = list(prepared.model.layers.values())  # type: ignore[union-attr, operator]
    for layer, x, dy, y in zip(layers, inputs, gradients, outputs, strict=True):
        base: Any = layer.base
        weight = base.weight.double().cpu() + delta(layer, held)
        leaf = x.detach().double().cpu().requires_grad_()
        expected = leaf @ weight.T + base.bias.double().cpu()
        expected.backward(dy.double().cpu())
        pairs += [(y, expected), (x.grad, leaf.grad)]
    pairs += [(parameter.grad, held[id(parameter)].grad) for parameter in prepared.parameters]
    prepared.open.close()
    return max(_relative(ours, theirs) for ours, theirs in pairs)


def _relative(ours: Tensor, exact: Tensor) -> float:
    error = float((ours.detach().double().cpu() - exact.detach()).norm() / exact.detach().norm())
    return error if error == error else float("inf")


def check(arms: dict[str, Build], device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, float]:
    """Errors of our arms; those that run through PEFT or belong to others are tested elsewhere."""
    ours = [name for name in arms if (name.startswith(("LSR", "our", "KronA")) and "PEFT" not in name)]
    return {name: worst_error(arms[name], device, dtype, seed) for name in ours}


__all__ = ["BOUNDS", "check"]
