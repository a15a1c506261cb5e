"""Layers in and out of files: ΔW of a stored layer, factors ready to be written, every layer at one given shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lsrdecomp.checkpoints import Checkpoint, LoraLayer
from lsrdecomp.compression.candidates import Candidate, Layer, lsr_candidate, solve_together, stored_as
from lsrdecomp.errors import CheckpointError
from lsrdecomp.product import SeparatedProduct, low_rank_product
from lsrdecomp.separated import SeparatedMatrix
from lsrdecomp.shape import ProductShape, balanced_split
from lsrdecomp.solvers.pair import JointALS
from lsrdecomp.targets import LowRank


def layer_pair(checkpoint: Checkpoint, layer: Any) -> LowRank:
    """ΔW of a LoRA layer with its scale folded into B, in double precision."""
    if not isinstance(layer, LoraLayer):
        text = "is an LSR layer already; compress the LoRA it came from"
        raise CheckpointError(text, path=checkpoint.path, tensor=layer.name)
    left, right = layer.load()
    return LowRank(left.astype(np.float64) * layer.scale, right.astype(np.float64))


def layer_product(layer: Any) -> SeparatedProduct:
    """ΔW of any layer as a separated product: an LSR layer as stored, a LoRA layer as one term a side."""
    first, second = layer.load()
    if isinstance(layer, LoraLayer):
        return low_rank_product(first.astype(np.float64) * layer.scale, second.astype(np.float64))
    left, right = ([factor.astype(np.float64) for factor in side] for side in (first, second))
    return SeparatedProduct(
        SeparatedMatrix.from_factors([left[0] * layer.scale, *left[1:]]), SeparatedMatrix.from_factors(right)
    )


def effective_rank(pair: LowRank) -> int:
    """The inner rank that the layer can use: r, or the smaller side of the matrix where r exceeds it."""
    return min(pair.rank, *pair.shape)


def at_given_terms(
    layers: Sequence[Layer], terms: int, inner: tuple[int, ...] | None, storage: str, solver: JointALS | None = None
) -> list[Candidate]:
    """Every layer as an LSR product of balanced shape, of so many terms a side or as many as the shape can need."""
    groups: dict[Any, list[int]] = {}
    for i, layer in enumerate(layers):
        shape = ProductShape.balanced(layer.pair.shape, inner or balanced_split(effective_rank(layer.pair)))
        groups.setdefault((layer.kind, shape), []).append(i)
    found: dict[int, Candidate] = {}
    for (_, shape), places in groups.items():
        solved = solve_together([layers[i] for i in places], shape, (terms, terms), solver or JointALS())
        for i, solution in zip(places, solved, strict=True):
            found[i] = stored_as(layers[i], lsr_candidate(solution), storage)
    return [found[i] for i in range(len(layers))]


def stored_factors(product: SeparatedProduct) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Factors with the weights folded in, at least one term a side: a zero matrix is written as one zero term."""
    sides = []
    for side, folded in zip((product.left, product.right), product.folded(), strict=True):
        if side.separation_rank == 0:
            folded = tuple(np.zeros((1, *factor.shape[1:])) for factor in folded)
        sides.append(folded)
    return sides[0], sides[1]
