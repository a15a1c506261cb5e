"""What an adapter's layers are made of while it trains: ‖ΔW‖, and for sums of Kronecker products λ and γ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lsrdecomp.adapters.factors import KroneckerFactors


@torch.no_grad()
def layer_figures(model: nn.Module, adapter: str = "default") -> Iterator[dict[str, Any]]:
    """One record per adapted layer: ``layer``, ``norm`` = ‖ΔW‖_F and, of each sum of Kronecker products in it, the
    ``weights`` λ_k in descending order and the ``condition`` γ = ‖λ‖₂ / ‖sum‖_F (None while the sum is zero).

    Costs one product of the formed pair per layer; ΔW itself is formed only for kinds that offer nothing smaller. Where
    parameters are sharded over processes (FSDP2), every process has to make this call: a layer's are gathered in turn.
    """
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and isinstance(module, nn.Module) and adapter in _adapters(module):
            with _gathered(module):
                sums = {
                    part.removesuffix(f".{adapter}"): _sum_figures(child)
                    for part, child in module.named_modules()
                    if isinstance(child, KroneckerFactors) and part.endswith(f".{adapter}")
                }
                norm = _norm(module, adapter)
            yield {"layer": name.removeprefix("base_model.model."), "norm": norm, **sums}


@contextmanager
def _gathered(layer: nn.Module) -> Iterator[None]:
    """While open, a layer holds its adapters' sharded parameters whole; its base layer stays as it is."""
    sharded = [
        (module._parameters, name, parameter)
        for part, module in layer.named_modules()
        if part.split(".")[0] != "base_layer"
        for name, parameter in module._parameters.items()
        if hasattr(parameter, "full_tensor")
    ]
    try:
        for held, name, parameter in sharded:
            held[name] = nn.Parameter(parameter.full_tensor(), requires_grad=False)
        yield
    finally:
        for held, name, parameter in sharded:
            held[name] = parameter


def _adapters(module: Any) -> set[str]:
    return {name for part in module.adapter_layer_names for name in getattr(module, part, {})}


def _norm(module: Any, adapter: str) -> float:
    pair = getattr(module, "pair", None)
    if pair is not None:
        left, right = pair(adapter)
        # ‖BA‖² = ⟨BᵀB, AAᵀ⟩ needs no m × n array, and neither Gram matrix is large.
        return math.sqrt(max(0.0, float(((left.T @ left).double() * (right @ right.T).double()).sum())))
    return float(torch.linalg.vector_norm(module.get_delta_weight(adapter).double()))


def _sum_figures(sums: KroneckerFactors) -> dict[str, Any]:
    weights = torch.stack([_norms(factor) for factor in sums.factors]).prod(0)  # (s,)
    size = float(torch.linalg.matrix_norm(sums.matrix().double()))
    together = float(torch.linalg.vector_norm(weights))
    return {
        "weights": sorted(weights.tolist(), reverse=True),
        "condition": together / size if size > 0.0 else None,
    }


def _norms(factor: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(factor.double(), dim=(1, 2))
    return norms
