"""The arms of the adapter benchmark: each wraps the named linear layers of a model in one kind of adapter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.adapters.candidate_kernels.arena import ArenaLayer, FactorArena
from benchmarks.adapters.candidate_kernels.modes import applied
from benchmarks.adapters.candidate_kernels.triton_support import usable
from lsrdecomp.adapters.kernels import Expandable, Grouping, adapted_linear, apply
from lsrdecomp.kronecker.shape import ProductShape, balanced_split

FROZEN, LORA, LORA_NARROW, LOKR = "frozen base", "PEFT LoRA", "PEFT LoRA, narrow", "PEFT LoKr"
OURS, OURS_EQUAL, LSR = "our LoRA", "our LoRA, equal rank", "LSR blas"


@dataclass(frozen=True, slots=True)
class Sizes:
    """``rank`` and ``terms`` of LSR, ``lora_rank`` of LoRA and LoKr."""

    rank: tuple[int, int] = (2, 2)
    terms: int = 16
    lora_rank: int = 8


@dataclass(slots=True)
class Prepared:
    """A model with one kind of adapter."""

    model: nn.Module
    parameters: list[nn.Parameter]
    open: ExitStack = field(default_factory=ExitStack)

    def run(self, inputs: Any) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = self.model(*inputs)
        return outputs


Build = Callable[[nn.Module, Sequence[str], Sizes], Prepared]


class Side(Expandable):
    """One sum of Kronecker products with ordinary parameters."""

    def __init__(self, shapes: Sequence[tuple[int, int]], terms: int, std: float, device: torch.device) -> None:
        super().__init__()
        share = (std**2 / terms) ** (0.5 / len(shapes))
        self.held = nn.ParameterList(share * torch.randn(terms, m, n, device=device) for m, n in shapes)

    @property
    def factors(self) -> list[Tensor]:
        return list(self.held)


class Wrapped(nn.Module):
    """A frozen linear layer and something added to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base


class LsrLinear(Wrapped):
    def __init__(self, base: nn.Linear, sizes: Sizes, mode: Any) -> None:
        super().__init__(base)
        shape = ProductShape.balanced((base.out_features, base.in_features), sizes.rank)
        device = base.weight.device
        self.right = Side(shape.right.factors, sizes.terms, base.in_features**-0.5, device)
        self.left = Side(shape.left.factors, sizes.terms, 0.1, device)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        pair = self.right.matrix(), self.left.matrix()
        return applied(x, self.base.weight, self.base.bias, *pair, 0.5, self.mode)


class LoraLinear(Wrapped):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__(base)
        device = base.weight.device
        self.right = nn.Parameter(torch.randn(rank, base.in_features, device=device) * base.in_features**-0.5)
        self.left = nn.Parameter(0.1 * torch.randn(base.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return adapted_linear(x, self.base.weight, self.base.bias, self.right, self.left, 0.5, mode="blas")


class KronaLinear(Wrapped):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        (a, c), (b, d) = balanced_split(base.out_features), balanced_split(base.in_features)
        device = base.weight.device
        self.first = nn.Parameter(0.1 * torch.randn(1, a, b, device=device))
        self.second = nn.Parameter(0.1 * torch.randn(1, c, d, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + apply([self.first, self.second], x)  # type: ignore[no-any-return]


class ArenaLinear(Wrapped):
    def __init__(self, base: nn.Linear, held: dict[str, Any], layer: int, fused: bool) -> None:
        super().__init__(base)
        self.held, self.layer, self.fused = held, layer, fused

    def forward(self, x: Tensor) -> Tensor:
        arena, token = self.held["arena"], self.held["token"]
        return arena.linear(token, self.layer, x, self.base.weight, self.base.bias, fused=self.fused)  # type: ignore[no-any-return]


def targets(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Linear]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(name == each or name.endswith(f".{each}") for each in names)
    ]


def replaced(model: nn.Module, names: Sequence[str], make: Callable[[int, nn.Linear], nn.Module]) -> Prepared:
    model.requires_grad_(False)
    for index, (name, base) in enumerate(targets(model, names)):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, make(index, base))
    return Prepared(model, trained(model))


def model_dtype(model: nn.Module) -> torch.dtype:
    return next(each.dtype for each in model.parameters() if not each.requires_grad)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def lsr(mode: str) -> Build:
    def build(model: nn.Module, names: Sequence[str], sizes: Sizes) -> Prepared:
        prepared = replaced(model, names, lambda _, base: LsrLinear(base, sizes, mode))
        prepared.open.enter_context(Grouping(model, model_dtype(model)))
        return prepared

    return build


def arena(backend: Any, fused: bool = False) -> Build:
    def build(model: nn.Module, names: Sequence[str], sizes: Sizes) -> Prepared:
        found = [base for _, base in targets(model, names)]
        shapes = [ProductShape.balanced((base.out_features, base.in_features), sizes.rank) for base in found]
        made = FactorArena(
            [ArenaLayer(shape, (sizes.terms, sizes.terms), 0.5) for shape in shapes],
            compute_dtype=found[0].weight.dtype,
            device=found[0].weight.device,
            backend=backend,
        )
        nn.init.normal_(made.flat, std=0.1)
        made.matrices.fill_(float("nan"))  # a launch that misses an entry shows
        if made.backend == "torch":  # which leaves the padding as it was made: zero
            for group in made.layout.classes:
                group.stack(made.matrices)[:, group.rank :] = 0
        held: dict[str, Any] = {"arena": made}
        prepared = replaced(model, names, lambda index, base: ArenaLinear(base, held, index, fused))
        prepared.model.register_forward_pre_hook(lambda *_: held.update(token=made.expand()))
        prepared.parameters = [made.flat]
        return prepared

    return build


def peft(config: Callable[[Sequence[str], Sizes], Any], **options: Any) -> Build:
    def build(model: nn.Module, names: Sequence[str], sizes: Sizes) -> Prepared:
        from peft import inject_adapter_in_model

        model.requires_grad_(False)
        inject_adapter_in_model(config(names, sizes), model)
        if options.get("narrow"):
            for parameter in trained(model):
                parameter.data = parameter.data.bfloat16()
        elif next(model.parameters()).dtype == torch.bfloat16:  # what get_peft_model does by default
            for parameter in trained(model):
                parameter.data = parameter.data.float()
        return Prepared(model, trained(model))

    return build


def lora_config(names: Sequence[str], sizes: Sizes) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=sizes.lora_rank, lora_alpha=sizes.lora_rank, target_modules=list(names), init_lora_weights=False
    )


def lokr_config(names: Sequence[str], sizes: Sizes) -> Any:
    from peft import LoKrConfig

    return LoKrConfig(r=sizes.lora_rank, alpha=sizes.lora_rank, target_modules=list(names), init_weights=False)


def lsr_config(names: Sequence[str], sizes: Sizes) -> Any:
    from lsrdecomp.adapters import LsrConfig

    return LsrConfig(
        r=sizes.rank[0] * sizes.rank[1],
        inner_shape=list(sizes.rank),
        separation_rank=sizes.terms,
        target_modules=list(names),
        init_weights=False,
    )


def lycoris(bypass: bool) -> Build:
    def build(model: nn.Module, names: Sequence[str], sizes: Sizes) -> Prepared:
        from lycoris.modules.lokr import LokrModule

        model.requires_grad_(False)
        parameters = []
        for name, base in targets(model, names):
            rank = sizes.lora_rank
            made = LokrModule(name.replace(".", "_"), base, 1.0, rank, rank, bypass_mode=bypass).to(base.weight.device)
            made.apply_to()
            parameters += trained(made)
        return Prepared(model, parameters)

    return build


def frozen(model: nn.Module, names: Sequence[str], sizes: Sizes) -> Prepared:
    return Prepared(model.requires_grad_(False), [])


def arms(device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Build], list[str]]:
    """The arms that can run here, by name, and why others cannot."""
    found: dict[str, Build] = {FROZEN: frozen}
    missing = []
    if importlib.util.find_spec("peft"):
        found[LORA] = peft(lora_config)
        if dtype == torch.bfloat16:
            found[LORA_NARROW] = peft(lora_config, narrow=True)
        found[LOKR] = peft(lokr_config)
        found["LSR in PEFT"] = peft(lsr_config)
    else:
        missing.append("peft is not installed")
    if importlib.util.find_spec("lycoris"):
        found["LyCORIS LoKr, rebuild"], found["LyCORIS LoKr, bypass"] = lycoris(False), lycoris(True)
    else:
        missing.append("lycoris is not installed")
    found[OURS] = lambda model, names, sizes: replaced(model, names, lambda _, base: LoraLinear(base, sizes.lora_rank))
    found[OURS_EQUAL] = lambda model, names, sizes: replaced(
        model, names, lambda _, base: LoraLinear(base, sizes.rank[0] * sizes.rank[1])
    )
    found["KronA"] = lambda model, names, sizes: replaced(model, names, lambda _, base: KronaLinear(base))
    found["LSR plain"], found[LSR] = lsr("plain"), lsr("blas")
    if dtype != torch.bfloat16:
        found["LSR merged"] = lsr("merged")
    found["LSR arena"] = arena("torch")
    if usable(device) and device.type == "cuda":
        found["LSR fused"] = lsr("fused")
        found["LSR arena, Triton"], found["LSR arena, fused"] = arena("triton"), arena("triton", fused=True)
    else:
        missing.append("Triton kernels need a GPU and triton: their arms are left out")
    return found, missing
