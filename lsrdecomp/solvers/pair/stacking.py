"""Targets, norms and starting products of one size as the stacked arrays of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, as_double, check_device, namespace, placed, zero_padded
from lsrdecomp.errors import ShapeError
from lsrdecomp.solvers.batched_terms import Stacks
from lsrdecomp.solvers.pair.initialization import as_stacks
from lsrdecomp.solvers.pair.partial_traces import PartialTraces
from lsrdecomp.targets.weighted import pair_norms
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights, Weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.kronecker.separated import SeparatedProduct
    from lsrdecomp.kronecker.shape import ProductShape
    from lsrdecomp.targets.base import LowRank

Pair = tuple[Stacks, Stacks]


@dataclass(frozen=True, slots=True)
class WeightedTargets:
    """Targets P Q of one size and their norms, with what every shape needs of them."""

    left: Array  # P, (L, m, R)
    right: Array  # Q, (L, R, n)
    triangles: tuple[Array, Array]  # R of thin QR factorizations of P and Qᵀ
    norms: NormWeights  # G and C
    weighted_left: Array  # G P
    weighted_right: Array  # C Qᵀ, (L, n, R)
    energy: Array  # ‖G^½ P Q C^½‖², (L,)
    device: str | None = None  # where torch computes; None: where the targets lie
    _traces: dict[tuple[int, tuple[int, ...]], PartialTraces] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        targets: Sequence[LowRank],
        weights: Sequence[NormWeights] | None,
        device: str | None = None,
    ) -> WeightedTargets:
        """Of targets (m, n) and a norm for each of them; absent, the Frobenius norm. With a device they are put there.

        Raises `LsrError` if torch cannot compute in float64 on the device.
        """
        arrays = stacked_pairs(targets), stacked_triangles(targets), stacked_norms(targets, weights)
        if device is not None:
            check_device(device)
            arrays = placed(arrays, device)
        return replace(cls.of_arrays(*arrays), device=device)

    @classmethod
    def of_arrays(
        cls, pair: tuple[Array, Array], triangles: tuple[Array, Array], norms: NormWeights
    ) -> WeightedTargets:
        """Of P and Q, and the R of thin QR factorizations of P and Qᵀ."""
        (left, right), xp = pair, namespace(*pair)
        if norms.is_frobenius:
            size = xp.linalg.matrix_norm(triangles[0] @ xp.matrix_transpose(triangles[1]))
        else:
            size = pair_norms(left, right, norms)
        weighted_right = norms.input.apply(xp.matrix_transpose(right))
        return cls(left, right, triangles, norms, norms.output.apply(left), weighted_right, size**2)

    def placed(self, pair: Pair) -> Pair:
        """A pair where the targets lie."""
        return pair if self.device is None else placed(pair, self.device)

    def traces(self, side: int, weight: Weight, sizes: tuple[int, ...]) -> PartialTraces:
        """Partial traces of the weight of a side at a split of it, which shapes share."""
        key = side, sizes
        if key not in self._traces:
            self._traces[key] = PartialTraces.of(weight, sizes, self.weighted_left)
        return self._traces[key]


def stacked_norms(targets: Sequence[LowRank], weights: Sequence[NormWeights] | None) -> NormWeights:
    """The norms of a batch as one, the Frobenius norm where there are none. Raises `ShapeError` if they do not fit."""
    matrix_shape = targets[0].shape
    if weights is None:
        return NormWeights.frobenius(matrix_shape)
    if len(weights) != len(targets):
        raise ShapeError(f"{len(weights)} norms for {len(targets)} targets")
    for norm in weights:
        norm.check(matrix_shape)
    return NormWeights(
        stack_weights([w.output for w in weights]), stack_weights([w.input for w in weights])
    )


def stack_weights(weights: Sequence[Weight]) -> Weight:
    """Weights of equal size and kind as one weight with a leading batch axis.

    Bases of `LowRankPlusIdentity` weights are padded with zero columns to a common width, which
    changes nothing. Raises `ShapeError` if sizes or kinds differ.
    """
    kinds, sizes = {type(weight) for weight in weights}, {weight.size for weight in weights}
    if len(kinds) != 1 or len(sizes) != 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ShapeError(f"weights to stack must agree: kinds {names}; sizes {sorted(sizes)}")
    each = [weight for weight in weights if isinstance(weight, LowRankPlusIdentity)]
    if not each:
        return weights[0]
    width = max(int(w.basis.shape[-1]) for w in each)
    return LowRankPlusIdentity(
        _stack([zero_padded(w.basis, 1, width) for w in each]),
        _stack([zero_padded(w.values, 0, width) for w in each]),
        _stack([w.rest for w in each]),
    )


def _stack(arrays: list[Array]) -> Array:
    return namespace(*arrays).stack(arrays, axis=0)


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
    left, right = (
        xp.stack([zero_padded(zero_padded(r, 0, rank), 1, rank) for r in side], axis=0)
        for side in sides
    )
    return left, right


def start_pair(
    starts: Sequence[SeparatedProduct], shape: ProductShape, ranks: tuple[int, int], count: int
) -> Pair:
    """Stacks of starting products, padded with zero terms."""
    if len(starts) != count:
        raise ShapeError(f"{len(starts)} starts for {count} targets")
    sides: list[list[list[Array]]] = [[], []]
    for start in starts:
        if start.product_shape != shape:
            raise ShapeError(f"a start of shape {start.product_shape} for a solve of shape {shape}")
        if any(terms > most for terms, most in zip(start.separation_ranks, ranks, strict=True)):
            raise ShapeError(f"a start of {start.separation_ranks} terms for a solve with {ranks}")
        left, right = start.folded()
        right = tuple(namespace(factor).matrix_transpose(factor) for factor in right)
        for side, factors, rank in zip(sides, (left, right), ranks, strict=True):
            side.append([zero_padded(as_double(factor), 0, rank) for factor in factors])
    xp = namespace(sides[0][0][0])
    stacked = [
        as_stacks([xp.stack(column, axis=0) for column in zip(*side, strict=True)])
        for side in sides
    ]
    return stacked[0], stacked[1]
