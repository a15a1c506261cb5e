"""What the adapter benchmark measures beside training steps: forming and contracting alone, and mixed batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.adapters.arms import Side
from benchmarks.adapters.candidate_kernels.arena import ArenaLayer, FactorArena
from benchmarks.adapters.candidate_kernels.triton_support import usable
from benchmarks.adapters.crossovers import interleaved
from lsrdecomp.adapters.kernels import expand_all
from lsrdecomp.adapters.kernels.stacked import expand
from lsrdecomp.kronecker.shape import ProductShape

Form = Callable[[list[list[Tensor]]], list[Tensor]]
LLAMA = ((4096, 4096),) * 4 + ((11008, 4096),) * 2 + ((4096, 11008),)


def expansions(device: torch.device, dtype: torch.dtype, tiny: bool, seed: int) -> list[dict[str, Any]]:
    """Seconds to form all Â and B̂ of a model and contract their gradients: RoBERTa-base's q and v, all of Llama 7B."""
    torch.manual_seed(seed)
    found = []
    problems = [("RoBERTa-base, q,v", ((768, 768),) * (4 if tiny else 24), (2, 2), 16)]
    if not tiny:
        depth = 32 if device.type == "cuda" else 2
        problems.append((f"{depth} blocks of Llama 7B", LLAMA * depth, (4, 4), 8))
    for name, shapes, inner, terms in problems:
        products = [ProductShape.balanced(shape, inner) for shape in shapes]
        sides = [Side(side.factors, terms, 0.1, device) for each in products for side in (each.right, each.left)]
        lists = [side.factors for side in sides]
        gradients = [torch.randn_like(matrix) for matrix in expand_all(lists, dtype=dtype)]
        arenas = {"arena": "torch"} | ({"arena, Triton": "triton"} if device.type == "cuda" and usable(device) else {})

        ways: dict[str, Form] = {
            "layer by layer": lambda lists, dtype=dtype: [expand(each).to(dtype) for each in lists],
            "grouped": lambda lists, dtype=dtype: expand_all(lists, dtype=dtype),
        }
        calls: dict[str, Callable[[], object]] = {
            way: partial(there_and_back, form, lists, gradients) for way, form in ways.items()
        }
        for label, backend in arenas.items():
            layers = [ArenaLayer(each, (terms, terms)) for each in products]
            made = FactorArena(layers, compute_dtype=dtype, device=device, backend=backend)  # type: ignore[arg-type]
            torch.nn.init.normal_(made.flat, std=0.1)
            made.gradients.normal_()
            calls[label] = partial(arena_there_and_back, made)
        times = interleaved(calls, device, 3 if tiny else 7)
        found.append({"model": name, "linears": len(shapes), "inner": inner, "terms": terms, "seconds": times})
        print(f"    forming and contracting, {name}:", "  ".join(f"{n} {1e6 * t:.0f} µs" for n, t in times.items()))
    return found


def there_and_back(form: Form, lists: list[list[Tensor]], gradients: list[Tensor]) -> None:
    for factors in lists:
        for factor in factors:
            factor.grad = None
    torch.autograd.backward(form(lists), gradients)


def arena_there_and_back(arena: FactorArena) -> None:
    arena.flat.grad = None
    token = arena.expand()
    arena._written.update(range(len(arena.layout.layers)))
    token.sum().backward()


def mixed_batches(device: torch.device, dtype: torch.dtype, tiny: bool, seed: int) -> list[dict[str, Any]]:
    """Seconds of a forward pass whose rows name 8 adapters of q and v in two layers of RoBERTa-base."""
    if not (importlib.util.find_spec("peft") and importlib.util.find_spec("transformers")):
        return []
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import RobertaConfig, RobertaModel

    from lsrdecomp.adapters import LsrConfig

    width, count = (64, 2) if tiny else (768, 8)
    names = [f"adapter{number}" for number in range(count)]
    kinds: dict[str, Callable[[], Any]] = {
        "PEFT LoRA": lambda: LoraConfig(r=8, target_modules=["query", "value"], init_lora_weights=False),
        "LSR in PEFT": lambda: LsrConfig(
            r=4, separation_rank=16, target_modules=["query", "value"], init_weights=False
        ),
    }
    models: dict[str, PeftModel] = {}
    for kind, config in kinds.items():
        torch.manual_seed(seed)
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64}
        base = RobertaModel(RobertaConfig(num_hidden_layers=2, vocab_size=1000, **sizes), add_pooling_layer=False)
        models[kind] = get_peft_model(base.to(device, dtype), config(), adapter_name=names[0]).eval()
        for name in names[1:]:
            models[kind].add_adapter(name, config())
    found = []
    for rows, length in ((4, 8),) if tiny else ((64, 1), (16, 32), (8, 128)):
        tokens = torch.randint(5, 1000, (rows, length), device=device)
        rows_names = [names[row % count] for row in range(rows)]
        calls: dict[str, Callable[[], object]] = {
            kind: lambda model=model, tokens=tokens, given=rows_names: model(input_ids=tokens, adapter_names=given)
            for kind, model in models.items()
        }
        with torch.no_grad():
            times = interleaved(calls, device, 3 if tiny else 9)
        found.append({"adapters": count, "rows": rows, "length": length, "seconds": times})
        print(
            f"    {count} adapters, {rows} rows of {length}:",
            "  ".join(f"{n} {1e3 * t:.1f} ms" for n, t in times.items()),
        )
    return found


__all__ = ["expansions", "mixed_batches"]
