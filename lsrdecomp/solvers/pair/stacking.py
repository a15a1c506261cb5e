"""Targets, norms and starting products of one shape as the stacked arrays of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from lsrdecomp.arrays import Array, as_double, namespace, zero_padded
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.solvers.pair.initialization import as_stacks
from lsrdecomp.solvers.pair.problem import Pair
from lsrdecomp.targets.base import LowRank
from lsrdecomp.targets.stacked_weights import stack_weights
from lsrdecomp.targets.weights import NormWeights


def stacked_norms(targets: Sequence[LowRank], weights: Sequence[NormWeights] | None) -> NormWeights:
    """The norms of a batch as one, the Frobenius norm where there are none. Raises `ShapeError` if they do not fit."""
    matrix_shape = targets[0].shape
    if weights is None:
        return NormWeights.frobenius(matrix_shape)
    if len(weights) != len(targets):
        raise ShapeError(f"{len(weights)} norms for {len(targets)} targets")
    for norm in weights:
        norm.check(matrix_shape)
    return NormWeights(stack_weights([w.output for w in weights]), stack_weights([w.input for w in weights]))


def stacked_pairs(targets: Sequence[LowRank]) -> tuple[Array, Array]:
    """Left and right factors (L, m, R), (L, R, n) in double precision, lower ranks padded with zeros."""
    rank = max(target.rank for target in targets)
    xp = namespace(*(target.left for target in targets))
    lefts = [zero_padded(as_double(target.left), 1, rank) for target in targets]
    rights = [zero_padded(as_double(target.right), 0, rank) for target in targets]
    if len(targets) == 1:  # a view, where stacking would copy the largest arrays there are
        return lefts[0][None, ...], rights[0][None, ...]
    return xp.stack(lefts, axis=0), xp.stack(rights, axis=0)


def stacked_triangles(targets: Sequence[LowRank]) -> tuple[Array, Array]:
    """R of thin QR factorizations of both factors of each target, for `stacked_pairs`; targets remember theirs."""
    rank = max(target.rank for target in targets)
    xp = namespace(targets[0].left)
    sides = zip(*(target.triangles for target in targets), strict=True)
    left, right = (xp.stack([zero_padded(zero_padded(r, 0, rank), 1, rank) for r in side], axis=0) for side in sides)
    return left, right


def given_pair(starts: Sequence[SeparatedProduct], shape: ProductShape, ranks: tuple[int, int], count: int) -> Pair:
    """Stacks of given starting products, padded with zero terms."""
    if len(starts) != count:
        raise ShapeError(f"{len(starts)} starts for {count} targets")
    sides: list[list[list[Array]]] = [[], []]
    for start in starts:
        if start.product_shape != shape:
            raise ShapeError(f"a start of shape {start.product_shape} for a solve of shape {shape}")
        if any(given > asked for given, asked in zip(start.separation_ranks, ranks, strict=True)):
            raise ShapeError(f"a start of {start.separation_ranks} terms for a solve with {ranks}")
        for side, folded, rank in zip(sides, (start.left.folded(), start.right.mT.folded()), ranks, strict=True):
            side.append([zero_padded(as_double(factor), 0, rank) for factor in folded])
    xp = namespace(sides[0][0][0])
    stacked = [as_stacks([xp.stack(column, axis=0) for column in zip(*side, strict=True)]) for side in sides]
    return stacked[0], stacked[1]
