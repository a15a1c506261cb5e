"""Layers in and out of files: ΔW of a stored layer, factors ready to be written, every layer at one given shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lsrdecomp.checkpoints import Checkpoint, LoraLayer
from lsrdecomp.compression.candidates import Keep, Lsr, keep, lsr_candidate, solve_together
from lsrdecomp.compression.layers import HasWeights, Layer, batches, make_layers, missing_statistics
from lsrdecomp.compression.materialize import Materialized, materialize
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.spill_cache import SpillCache
from lsrdecomp.compression.stored_layers import LayerCache, StoredLayer
from lsrdecomp.errors import CheckpointError
from lsrdecomp.kronecker.product import SeparatedProduct, low_rank_product
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import ProductShape, balanced_split
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.targets.base import LowRank
from lsrdecomp.targets.weights import NormWeights

SOLVER = JointALS(tolerance=5e-4, initializations=1, single=True)
"""Of layers at given terms: ends after about eight sweeps, in the median half a thousandth above where hundreds end."""


LARGEST_NORM = 1e140
"""Of ΔW: squares of such norms, and sums of them over all layers of a model, are still finite in double precision."""


def layer_pair(checkpoint: Checkpoint, layer: Any) -> LowRank:
    """ΔW of a LoRA layer with its scale folded into B, in double precision.

    Raises `CheckpointError` naming the layer if the size of ΔW leaves the range in which norms can be computed.
    """
    _require_lora(checkpoint, layer)
    left, right = layer.load()
    left, right = left.astype(np.float64), right.astype(np.float64)
    with np.errstate(over="ignore"):
        size = float(np.linalg.norm(left)) * float(np.linalg.norm(right)) * abs(layer.scale)
    if not size <= LARGEST_NORM:
        text = (
            f"‖B‖·‖A‖ times the scale {layer.scale:.3g} is {size:.3g}, above {LARGEST_NORM:g}, where squares overflow; "
            "correct lora_alpha or the numbers"
        )
        raise CheckpointError(text, path=checkpoint.path, tensor=layer.name)
    left *= layer.scale
    return LowRank(left, right)


def _require_lora(checkpoint: Checkpoint, layer: Any) -> None:
    if not isinstance(layer, LoraLayer):
        text = "is an LSR layer already; compress the LoRA it came from"
        if checkpoint.format != "lsr":
            text = (
                "is LoKr, a Kronecker product, which no truncation makes smaller without losing much: it stays as it is"
            )
        raise CheckpointError(text, path=checkpoint.path, tensor=layer.name)


def layer_product(layer: Any) -> SeparatedProduct:
    """ΔW of any layer as a separated product: an LSR layer as stored, a LoRA layer as one term a side."""
    first, second = layer.load()
    if isinstance(layer, LoraLayer):
        return low_rank_product(first.astype(np.float64) * layer.scale, second.astype(np.float64))
    left, right = ([factor.astype(np.float64) for factor in side] for side in (first, second))
    return SeparatedProduct(
        SeparatedMatrix.from_factors([left[0] * layer.scale, *left[1:]]), SeparatedMatrix.from_factors(right)
    )


def stored_layers(
    checkpoint: Checkpoint, statistics: Mapping[str, HasWeights | NormWeights] | None = None
) -> list[Layer]:
    """The layers of a checkpoint, each read when its numbers are asked for and forgotten when others are.

    Raises `CheckpointError` for a layer that is not a LoRA, `BudgetError` naming a layer that the statistics lack.
    """
    opened = LayerCache()
    known = None if statistics is None else set(statistics)
    for layer in checkpoint.layers:
        _require_lora(checkpoint, layer)
        if known is not None and layer.name not in known:
            raise missing_statistics(layer.name)

    def read(layer: LoraLayer) -> Layer:
        return make_layers({layer.name: read_pair(layer)}, statistics)[0]

    def read_pair(layer: LoraLayer) -> LowRank:
        return layer_pair(checkpoint, layer)

    return [
        StoredLayer(
            layer.name,
            layer.shape,
            layer.rank,
            partial(read, layer),
            opened,
            statistics is not None,
            partial(read_pair, layer),
        )
        for layer in checkpoint.layers
    ]


def effective_rank(pair: LowRank | Layer) -> int:
    """The inner rank that the layer can use: r, or the smaller side of the matrix where r exceeds it."""
    return min(pair.rank, *pair.shape)


def at_given_terms(
    layers: Sequence[Layer],
    terms: int,
    inner: tuple[int, ...] | None,
    storage: str,
    solver: JointALS | None = None,
    cache: SpillCache | None = None,
) -> Iterator[tuple[int, Materialized]]:
    """Every layer as an LSR product of balanced shape, of so many terms a side or as many as the shape can need.

    Yields place and candidate, layers of one kind together; their factors wait in the cache.
    """
    cache = cache or SpillCache()
    groups: dict[Any, list[int]] = {}
    for i, layer in enumerate(layers):
        shape = ProductShape.balanced(layer.shape, inner or balanced_split(effective_rank(layer)))
        groups.setdefault((layer.kind, shape), []).append(i)
    for (_, shape), places in groups.items():
        for part in batches([layers[i] for i in places]):
            batch = places[part]
            solved = solve_together([layers[i] for i in batch], shape, (terms, terms), solver or SOLVER)
            for i, solution in zip(batch, solved, strict=True):
                candidate: Lsr | Keep = lsr_candidate(solution, cache)
                if candidate.parameters > layers[i].parameters and storage not in INTEGER_BITS:
                    candidate = keep(layers[i])  # so many terms take more numbers than the pair itself, which is exact
                asked = replace(candidate, price=replace(candidate.price, storage=storage))
                yield i, materialize(layers[i], asked, cache)


def stored_factors(product: SeparatedProduct) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Factors with the weights folded in, at least one term a side: a zero matrix is written as one zero term."""
    sides = []
    for side, folded in zip((product.left, product.right), product.folded(), strict=True):
        if side.separation_rank == 0:
            folded = tuple(np.zeros((1, *factor.shape[1:])) for factor in folded)
        sides.append(folded)
    return sides[0], sides[1]
