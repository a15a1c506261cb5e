"""What else makes a LoRA smaller: truncated SVD, PEFT's conversion, LyCORIS's LoKr, integers.

Each arm takes layers and a budget in bytes and says what every layer becomes, as stored, or None
where it has nothing so small. Float16 is two bytes a number, so the same arms answer "at equal
parameters".
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from lsrdecomp.decompose import choose_solver
from lsrdecomp.kronecker.product import SeparatedProduct, low_rank_product
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.lora.search.layers import Layer

HALF = 2
"""Bytes of a float16."""
BLOCK = 64
"""Numbers that share one scale in four bits, as in QLoRA."""
FACTORS = (-1, 2, 4, 8, 16, 32)
"""LyCORIS's ``factor``: the size it aims at for the first factor; -1 is the most even split."""


@dataclass(frozen=True)
class Outcome:
    """What an arm made of all layers."""

    forms: Sequence[Any]  # what a reader gets, one a layer
    parameters: int
    bytes: int
    note: str = ""


Arm = Callable[[Sequence[Layer], float], Outcome | None]


def half(values: Any) -> np.ndarray:
    """Rounded to float16."""
    return np.asarray(values).astype(np.float16).astype(np.float64)


def resized(layers: Sequence[Layer], ranks: Sequence[int], note: str) -> Outcome:
    """Truncate the SVD in float16, singular values in the first factor, as kohya and PEFT do."""
    forms = [
        low_rank_product(half(u[:, :k] * sigma[:k]), half(vh[:k]))
        for (u, sigma, vh), k in zip((layer.pair.svd for layer in layers), ranks, strict=True)
    ]
    size = sum(k * sum(layer.shape) for layer, k in zip(layers, ranks, strict=True))
    return Outcome(forms, size, HALF * size, note)


def same_rank(layers: Sequence[Layer], budget: float) -> Outcome | None:
    """kohya's resize_lora with ``--new_rank``."""
    rank = int(budget // (HALF * sum(sum(layer.shape) for layer in layers)))
    if rank < 1:
        return None
    return resized(layers, [min(rank, layer.rank) for layer in layers], f"rank {rank}")


def same_energy(layers: Sequence[Layer], budget: float) -> Outcome | None:
    """Truncate every layer at the smallest rank that keeps one share of ‖ΔW‖².

    PEFT's conversion with a float as rank does so, and kohya's ``sv_fro``.
    """
    shares = [
        np.cumsum(sigma**2) / np.sum(sigma**2) for sigma in (layer.pair.svd[1] for layer in layers)
    ]
    return by_level(layers, [share[:-1] for share in shares], budget)


def same_ratio(layers: Sequence[Layer], budget: float) -> Outcome | None:
    """kohya's ``sv_ratio``: the singular values above a share of the largest one."""
    with np.errstate(divide="ignore"):
        return by_level(
            layers,
            [sigma[0] / sigma[1:] for sigma in (layer.pair.svd[1] for layer in layers)],
            budget,
        )


def by_level(
    layers: Sequence[Layer], levels: Sequence[np.ndarray], budget: float
) -> Outcome | None:
    """Truncate all layers at one threshold, the largest that the budget allows.

    Every layer has rank one, and one more for each level below the threshold.
    """
    ranks, left = [1] * len(layers), budget - HALF * sum(sum(layer.shape) for layer in layers)
    if left < 0:
        return None
    steps = sorted((float(level), i) for i, own in enumerate(levels) for level in own)
    for level, i in steps:
        left -= HALF * sum(layers[i].shape)
        if left < 0 or not math.isfinite(level):
            break
        ranks[i] += 1
    return resized(layers, ranks, f"ranks {min(ranks)} to {max(ranks)}")


def peft_arm(layers: Sequence[Layer]) -> Arm:
    """Run PEFT's convert_to_lora with an integer rank, once.

    Smaller ranks are its first columns and rows.
    """
    most = max(1, max(layer.rank for layer in layers) // 2)
    converted = [peft_conversion(layer, most) for layer in layers]

    def arm(layers: Sequence[Layer], budget: float) -> Outcome | None:
        rank = int(budget // (HALF * sum(sum(layer.shape) for layer in layers)))
        if not 1 <= rank <= most:
            return None
        forms = [low_rank_product(half(b[:, :rank]), half(a[:rank])) for b, a in converted]
        size = sum(rank * sum(layer.shape) for layer in layers)
        return Outcome(forms, size, HALF * size, f"rank {rank}")

    return arm


def peft_conversion(layer: Layer, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(B, A) that PEFT makes of one layer."""
    import torch
    from peft import LoraConfig, convert_to_lora, get_peft_model

    m, n = layer.shape
    linear = torch.nn.utils.skip_init(torch.nn.Linear, n, m, bias=False)
    config = LoraConfig(r=layer.rank, lora_alpha=layer.rank, target_modules=["only"])
    model = get_peft_model(torch.nn.ModuleDict({"only": linear}), config)
    found = model.base_model.model["only"]
    with torch.no_grad():
        for parameter, values in (
            (found.lora_A, layer.pair.right),
            (found.lora_B, layer.pair.left),
        ):
            parameter["default"].weight.copy_(torch.as_tensor(values))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*already a LoRA adapter")
        _, state = convert_to_lora(model, rank=min(rank, m, n))
    sides = {key.split(".")[-2]: value.numpy().astype(np.float64) for key, value in state.items()}
    return sides["lora_B"], sides["lora_A"]


def lokr_arm(layers: Sequence[Layer]) -> Arm:
    """Choose one factor and one dimension for all layers, as LyCORIS does, nearest the budget.

    LyCORIS extracts LoRAs only. So its own `factorization` says the sizes of W1 ⊗ W2, the best such
    product in the Frobenius norm is found here, and W2 is truncated by SVD to the dimension where
    that is below half its size.
    """
    from lycoris.functional.general import factorization

    table = [[_LokrFit.of(layer, factorization, factor) for layer in layers] for factor in FACTORS]

    def arm(layers: Sequence[Layer], budget: float) -> Outcome | None:
        best: tuple[float, Outcome] | None = None
        for factor, fits in zip(FACTORS, table, strict=True):
            for dim in (1, 2, 4, 8, 16, 32, 64, 128, None):
                size = sum(fit.parameters(dim) for fit in fits)
                error = sum(fit.squared_error(dim) for fit in fits)
                if HALF * size <= budget and (best is None or error < best[0]):
                    note = f"factor {factor}, {'full' if dim is None else f'dim {dim}'}"
                    best = error, Outcome([fit.form(dim) for fit in fits], size, HALF * size, note)
        return None if best is None else best[1]

    return arm


@dataclass(frozen=True)
class _LokrFit:
    """The nearest W1 ⊗ W2 of given sizes, ‖W1‖ = 1, and the SVD of W2."""

    first: np.ndarray
    svd: tuple[np.ndarray, np.ndarray, np.ndarray]
    squared_norm: float  # of the layer

    @classmethod
    def of(
        cls, layer: Layer, factorization: Callable[[int, int], tuple[int, int]], factor: int
    ) -> _LokrFit:
        (out_1, out_2), (in_1, in_2) = (factorization(size, factor) for size in layer.shape)
        shape = KroneckerShape(((out_1, in_1), (out_2, in_2)))
        nearest = choose_solver(layer.pair, shape).solve(layer.pair, shape, rank=1).approximation
        first, second = (np.asarray(factor[0]) for factor in nearest.factors)
        return cls(
            first,
            np.linalg.svd(float(nearest.weights[0]) * second, full_matrices=False),
            layer.squared_norm,
        )

    def _low(self, dim: int | None) -> bool:
        m, n = self.svd[0].shape[0], self.svd[2].shape[1]
        return dim is not None and dim < max(m, n) / 2 and dim < len(self.svd[1])  # LyCORIS's rule

    def parameters(self, dim: int | None) -> int:
        m, n = self.svd[0].shape[0], self.svd[2].shape[1]
        return self.first.size + (dim * (m + n) if dim is not None and self._low(dim) else m * n)

    def squared_error(self, dim: int | None) -> float:
        """Before rounding: the residual of the nearest product is orthogonal to W1 ⊗ anything."""
        kept = self.svd[1][: dim if self._low(dim) else None]
        return self.squared_norm - float(np.sum(kept**2))

    def form(self, dim: int | None) -> Any:
        u, sigma, vh = self.svd
        second = (
            half(u[:, :dim] * sigma[:dim]) @ half(vh[:dim])
            if self._low(dim)
            else half((u * sigma) @ vh)
        )
        return SeparatedMatrix.from_factors((half(self.first)[None], second[None]))


def absmax(vectors: np.ndarray, bits: int, block: int | None = None) -> tuple[np.ndarray, int]:
    """Round vectors to integers at their largest entry, one float16 scale for each or each block.

    The rule of torchao's symmetric weights and of bitsandbytes' int8.
    """
    count, size = vectors.shape
    step = block or size
    blocks = np.pad(vectors, ((0, 0), (0, -size % step))).reshape(count, -1, step)
    scale = half(np.max(np.abs(blocks), axis=2, keepdims=True) / (2 ** (bits - 1) - 1))
    codes = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    codes = np.clip(codes, 1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
    values = (codes * scale).reshape(count, -1)[:, :size]
    return values, math.ceil(vectors.size * bits / 8) + HALF * scale.size


def normal_float(vectors: np.ndarray, block: int = BLOCK) -> tuple[np.ndarray, int]:
    """bitsandbytes' NF4: 16 levels, one float32 scale for each block."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    given = torch.as_tensor(vectors, dtype=torch.float32).contiguous()
    codes, state = quantize_4bit(given, blocksize=block, quant_type="nf4")
    return dequantize_4bit(codes, state).numpy().astype(
        np.float64
    ), codes.numel() + 4 * state.absmax.numel()


Quantizer = Callable[[np.ndarray], tuple[np.ndarray, int]]
INT8: Quantizer = partial(absmax, bits=8)
INT4: Quantizer = partial(absmax, bits=4, block=BLOCK)


def in_integers(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], quantizer: Quantizer, note: str
) -> Outcome:
    """Both factors of every pair (B, A), the vectors of each rank as rows."""
    forms: list[SeparatedProduct] = []
    total = 0
    for left, right in pairs:
        (b, out_bytes), (a, in_bytes) = (
            quantizer(np.ascontiguousarray(left.T)),
            quantizer(np.asarray(right)),
        )
        forms.append(low_rank_product(b.T, a))
        total += out_bytes + in_bytes
    return Outcome(forms, sum(b.size + a.size for b, a in pairs), total, note)


def quantized_lora(quantizer: Quantizer) -> Arm:
    """The factors as found, in integers: one size only."""

    def arm(layers: Sequence[Layer], budget: float) -> Outcome | None:
        found = in_integers(
            [(layer.pair.left, layer.pair.right) for layer in layers], quantizer, "as found"
        )
        return found if found.bytes <= budget else None

    return arm


def resized_integers_arm(layers: Sequence[Layer]) -> Arm:
    """Truncate the SVD at one rank for all layers, in eight or four bits, nearest the budget."""
    table: list[tuple[float, Outcome]] = []
    for rank in range(1, max(layer.rank for layer in layers) + 1):
        pairs = []
        for u, sigma, vh in (layer.pair.svd for layer in layers):
            root = np.sqrt(sigma[:rank])
            pairs.append((u[:, :rank] * root, root[:, None] * vh[:rank]))
        for name, quantizer in (("int8", INT8), ("int4", INT4)):
            outcome = in_integers(pairs, quantizer, f"rank {rank}, {name}")
            lost = math.fsum(
                layer.squared_error(form) for layer, form in zip(layers, outcome.forms, strict=True)
            )
            table.append((lost, outcome))

    def arm(layers: Sequence[Layer], budget: float) -> Outcome | None:
        allowed = [(lost, outcome) for lost, outcome in table if outcome.bytes <= budget]
        return min(allowed, key=lambda entry: entry[0])[1] if allowed else None

    return arm


def arms(layers: Sequence[Layer]) -> tuple[dict[str, Arm], list[str]]:
    """All arms by name, and what is missing for others."""
    found: dict[str, Arm] = {
        "SVD, same rank": same_rank,
        "SVD, same energy": same_energy,
        "SVD, same ratio": same_ratio,
        "SVD, same rank, int8 or int4": resized_integers_arm(layers),
        "LoRA int8": quantized_lora(INT8),
        "LoRA int4": quantized_lora(INT4),
    }
    missing = []
    for name, package, make in (
        ("PEFT convert_to_lora", "peft", peft_arm),
        ("LoKr", "lycoris", lokr_arm),
        ("LoRA NF4", "bitsandbytes", lambda layers: quantized_lora(normal_float)),
    ):
        if find_spec(package):
            found[name] = make(layers)
        else:
            missing.append(f"{name}: {package} is not installed")
    return found, missing
