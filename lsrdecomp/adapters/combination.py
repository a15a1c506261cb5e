"""What each way of combining adapters asks for in one layer, and the LSR factors that give it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from peft.utils import merge_utils
from torch import Tensor, nn

from lsrdecomp.adapters.kernels import expand
from lsrdecomp.kronecker.shape import ProductShape

if TYPE_CHECKING:
    from lsrdecomp.adapters.layer import LsrLayer

SIDEWISE = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
SPECTRAL = ("svd", "ties_svd", "dare_linear_svd", "dare_ties_svd", "magnitude_prune_svd")
KINDS = ("cat", *SIDEWISE, *SPECTRAL)

Weighted = Sequence[tuple[str, float]]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Combination:
    """How adapters are combined, in PEFT's words; see `LsrModel.add_weighted_adapter`."""

    kind: str = "svd"
    svd_rank: int | None = None
    svd_clamp: float | None = None
    svd_driver: str | None = None
    density: float | None = None
    majority_sign_method: str = "total"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"Invalid combination_type: {self.kind}; LSR adapters combine by {', '.join(KINDS)}"
            )
        if self.prunes and not (self.density is not None and 0.0 < self.density <= 1.0):
            raise ValueError(
                f"combination_type {self.kind!r} keeps a share of the numbers: pass density above 0 and up to 1, "
                f"got {self.density}"
            )
        if self.majority_sign_method not in ("total", "frequency"):
            raise ValueError(
                f"majority_sign_method must be 'total' or 'frequency', got {self.majority_sign_method!r}"
            )
        if self.svd_rank is not None and self.svd_rank < 1:
            raise ValueError(f"svd_rank must be at least 1, got {self.svd_rank}")
        if self.svd_clamp is not None and not 0.0 <= self.svd_clamp <= 1.0:
            raise ValueError(f"svd_clamp is a quantile from 0 to 1, got {self.svd_clamp}")

    @property
    def prunes(self) -> bool:
        return self.kind not in ("cat", "linear", "svd")

    def elementwise(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Tensors of one shape, pruned, signs elected and summed as the kind says, by PEFT's own functions."""
        name = self.kind.removesuffix("_svd")
        function: Any = getattr(
            merge_utils, "task_arithmetic" if name in ("svd", "linear") else name
        )
        if self.prunes:
            function = partial(function, density=self.density)
        if "ties" in name:
            function = partial(function, majority_sign_method=self.majority_sign_method)
        result: Tensor = function(
            list(tensors), torch.tensor(weights, dtype=tensors[0].dtype).to(tensors[0].device)
        )
        return result


@dataclass(frozen=True, slots=True)
class Factors:
    """An LSR pair weighted as factors: out side, in side."""

    shape: ProductShape
    left: list[Tensor]
    right: list[Tensor]

    @property
    def pair(self) -> Pair:
        return wide(expand(self.left)), wide(expand(self.right))


@torch.no_grad()
def combined(layer: LsrLayer, weighted: Weighted, how: Combination) -> tuple[Factors, float]:
    """Factors of one layer's combination of the adapters ``weighted``, and their relative error as stored.

    ΔW is formed only for the kinds "…_svd" that prune or elect its entries; "svd" takes the QR
    decompositions of the concatenated pair and the SVD of a small core.
    """
    wanted: Pair | Tensor = weighted_pair(layer, weighted)
    if how.kind == "cat":
        factors = concatenated(layer, weighted)
    elif how.kind == "linear":
        factors = summed(layer, weighted)
    elif how.kind in SIDEWISE:
        wanted = sidewise(layer, weighted, how)
        factors = low_rank(layer, weighted, *wanted)
    else:
        rank = how.svd_rank or max(layer.layout[adapter].r for adapter, _ in weighted)
        if how.kind != "svd":
            deltas = [wide(layer.get_delta_weight(adapter)) for adapter, _ in weighted]
            wanted = layer.geometry.to_matrix(
                how.elementwise(deltas, [weight for _, weight in weighted])
            )
        factors = low_rank(layer, weighted, *truncated(wanted, rank, how))
    return factors, relative_distance(factors.pair, wanted)


def weighted_pair(layer: LsrLayer, weighted: Weighted) -> Pair:
    """``Σ weight · ΔW`` exactly, as a pair of sides (m, R) and (R, n) whose inner ranks add."""
    pairs = [(weight, layer.pair(adapter)) for adapter, weight in weighted]
    left = torch.cat([wide(weight * left) for weight, (left, _) in pairs], dim=1)
    return left, torch.cat([wide(right) for _, (_, right) in pairs])


def concatenated(layer: LsrLayer, weighted: Weighted) -> Factors:
    """The exact sum: terms add, and so do the first sizes of the inner rank.

    Where all adapters split the layer alike, the pair ``[B̂_1 … B̂_p][Â_1; …; Â_p]`` keeps that
    split: the j-th adapter's factors are padded with zeros to its own range of the first inner
    size. Otherwise the pairs are expanded.
    """
    shapes = [layer.layout[adapter].shape for adapter, _ in weighted]
    if len({(shape.out, shape.into) for shape in shapes}) > 1:
        return low_rank(layer, weighted, *weighted_pair(layer, weighted))
    rest = [max(sizes) for sizes in zip(*(shape.inner[1:] for shape in shapes), strict=True)]
    inner = (sum(shape.inner[0] for shape in shapes), *rest)
    left_parts: list[list[Tensor]] = [[] for _ in inner]
    right_parts: list[list[Tensor]] = [[] for _ in inner]
    start = 0
    for shape, (adapter, weight) in zip(shapes, weighted, strict=True):
        left, right = scaled_factors(layer, adapter, weight * layer.scaling[adapter], 1.0)
        for index, (mine, whole) in enumerate(zip(shape.inner, inner, strict=True)):
            before = start if index == 0 else 0
            after = whole - mine - before
            left_parts[index].append(nn.functional.pad(left[index], (before, after)))
            right_parts[index].append(nn.functional.pad(right[index], (0, 0, before, after)))
        start += shape.inner[0]
    joined = ProductShape(shapes[0].out, inner, shapes[0].into)
    return Factors(
        joined,
        [torch.cat(parts) for parts in left_parts],
        [torch.cat(parts) for parts in right_parts],
    )


def summed(layer: LsrLayer, weighted: Weighted) -> Factors:
    """The sides added, ``(Σ B̂)(Σ Â)``: terms add where all adapters split the layer alike, else sides are expanded."""
    shapes = {layer.layout[adapter].shape for adapter, _ in weighted}
    if len(shapes) > 1:
        return low_rank(layer, weighted, *sidewise(layer, weighted, Combination("linear")))
    parts = [
        scaled_factors(layer, adapter, *side_weights(layer, adapter, weight))
        for adapter, weight in weighted
    ]
    left, right = (
        [torch.cat(terms) for terms in zip(*side, strict=True)] for side in zip(*parts, strict=True)
    )
    return Factors(shapes.pop(), left, right)


def sidewise(layer: LsrLayer, weighted: Weighted, how: Combination) -> Pair:
    """The kind applied to B̂ and to Â, each adapter's weight split evenly between the two, as PEFT does for LoRA."""
    weights = [side_weights(layer, adapter, weight) for adapter, weight in weighted]
    sides = [layer._sides(adapter) for adapter, _ in weighted]
    right = how.elementwise([wide(side) for side, _ in sides], [weight for _, weight in weights])
    return how.elementwise(
        [wide(side) for _, side in sides], [weight for weight, _ in weights]
    ), right


def truncated(wanted: Pair | Tensor, rank: int, how: Combination) -> Pair:
    """The best approximation of rank ``rank``, padded with zeros to it; clamped as PEFT clamps, if that is asked."""
    if isinstance(wanted, Tensor):
        left, values, right = torch.linalg.svd(wanted, full_matrices=False, driver=how.svd_driver)
    else:
        (before, left), (after, right) = (
            torch.linalg.qr(side) for side in (wanted[0], wanted[1].T)
        )
        inner, values, outer = torch.linalg.svd(
            left @ right.T, full_matrices=False, driver=how.svd_driver
        )
        left, right = before @ inner, outer @ after.T
    left, right = left[:, :rank] * values[:rank], right[:rank]
    if how.svd_clamp is not None:
        limit = float(torch.quantile(torch.cat([left.flatten(), right.flatten()]), how.svd_clamp))
        left, right = left.clamp(-limit, limit), right.clamp(-limit, limit)
    missing = rank - left.shape[1]
    return nn.functional.pad(left, (0, missing)), nn.functional.pad(right, (0, 0, 0, missing))


def low_rank(layer: LsrLayer, weighted: Weighted, left: Tensor, right: Tensor) -> Factors:
    """A pair as one term of the shape ``(m×r ⊗ 1×1 …)(r×n ⊗ 1×1 …)``, in the order and precision of the adapters."""
    order = max(layer.layout[adapter].shape.order for adapter, _ in weighted)
    kind = layer.lsr_A[weighted[0][0]].factors[0]  # type: ignore[index]
    unit, ones = kind.new_ones(1, 1, 1), (1,) * (order - 1)
    shape = ProductShape((left.shape[0], *ones), (right.shape[0], *ones), (right.shape[1], *ones))
    left, right = left.to(kind.dtype).unsqueeze(0), right.to(kind.dtype).unsqueeze(0)
    return Factors(shape, [left, *[unit] * (order - 1)], [right, *[unit] * (order - 1)])


def scaled_factors(
    layer: LsrLayer, adapter: str, out: float, into: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Factors of both sides of an adapter, the first of each times a number."""
    left, right = (list(side[adapter].factors) for side in (layer.lsr_B, layer.lsr_A))  # type: ignore[arg-type]
    return [out * left[0], *left[1:]], [into * right[0], *right[1:]]


def side_weights(layer: LsrLayer, adapter: str, weight: float) -> tuple[float, float]:
    """An adapter's weight and scaling, split between out side and in side; a sign goes to the in side."""
    whole = weight * layer.scaling[adapter]
    root = math.sqrt(abs(whole))
    return root, math.copysign(root, whole)


def relative_distance(made: Pair, wanted: Pair | Tensor) -> float:
    """``‖made - wanted‖_F / ‖wanted‖_F``; pairs are compared without forming them. Absolute where nothing is wanted."""
    if isinstance(wanted, Tensor):
        gap, size = (
            torch.linalg.matrix_norm(made[0] @ made[1] - wanted),
            torch.linalg.matrix_norm(wanted),
        )
    else:
        gap = pair_norm(torch.cat([made[0], -wanted[0]], dim=1), torch.cat([made[1], wanted[1]]))
        size = pair_norm(*wanted)
    return float(gap / size) if size > 0 else float(gap)


def pair_norm(left: Tensor, right: Tensor) -> Tensor:
    """``‖left @ right‖_F`` from triangular factors, accurate to rounding of the sides even where they cancel."""
    norm: Tensor = torch.linalg.matrix_norm(
        torch.linalg.qr(left, "r")[1] @ torch.linalg.qr(right.T, "r")[1].T
    )
    return norm


def wide(tensor: Tensor) -> Tensor:
    """In at least float32: 16-bit numbers have no decompositions."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
