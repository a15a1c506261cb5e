"""Targets, norms and starting products of one size as the stacked arrays of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, as_double, check_device, namespace, to_device, zero_padded
from lsrdecomp.errors import ShapeError
from lsrdecomp.solvers.batched_terms import Stacks
from lsrdecomp.solvers.pair.initialization import as_stacks
from lsrdecomp.solvers.pair.partial_traces import PartialTraces
from lsrdecomp.targets.weighted import pair_norms
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights, Weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.kronecker.product import SeparatedProduct
    from lsrdecomp.kronecker.shape import ProductShape
    from lsrdecomp.targets.target import LowRank

Pair = tuple[Stacks, Stacks]
TraceKey = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WeightedTargets:
    """Targets P Q of one size and their norms, with all that every shape needs of them."""

    left: Array  # P, (L, m, R)
    right: Array  # Q, (L, R, n)
    triangles: tuple[Array, Array]  # R of thin QR factorizations of P and Qᵀ
    norms: NormWeights  # G and C
    weighted_left: Array  # G P
    weighted_right: Array  # C Qᵀ, (L, n, R)
    energy: Array  # ‖G^½ P Q C^½‖², (L,)
    device: str | None = None  # where torch computes; None: where the targets lie
    _traces: dict[TraceKey, PartialTraces] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        targets: Sequence[LowRank],
        weights: Sequence[NormWeights] | None,
        device: str | None = None,
    ) -> WeightedTargets:
        """Stack targets (m, n) and a norm for each of them, on the device if one is given.

        Without weights the norm is the Frobenius norm. Raises `LsrError` if torch cannot compute in
        float64 on the device.
        """
        pairs = stacked_pairs(targets)
        triangles = stacked_triangles(targets)
        norms = stacked_norms(targets, weights)
        if device is not None:
            check_device(device)
            pairs, triangles, norms = to_device((pairs, triangles, norms), device)
        return replace(cls.of_arrays(pairs, triangles, norms), device=device)

    @classmethod
    def of_arrays(
        cls, pair: tuple[Array, Array], triangles: tuple[Array, Array], norms: NormWeights
    ) -> WeightedTargets:
        """Weight P and Q, given the R of thin QR factorizations of P and Qᵀ."""
        left, right = pair
        xp = namespace(left, right)
        if norms.is_frobenius:
            size = xp.linalg.matrix_norm(triangles[0] @ xp.matrix_transpose(triangles[1]))
        else:
            size = pair_norms(left, right, norms)
        return cls(
            left=left,
            right=right,
            triangles=triangles,
            norms=norms,
            weighted_left=norms.output.apply(left),
            weighted_right=norms.input.apply(xp.matrix_transpose(right)),
            energy=size**2,
        )

    def placed(self, pair: Pair) -> Pair:
        """Move a pair to the device of the targets."""
        return pair if self.device is None else to_device(pair, self.device)

    def traces(self, side: int, weight: Weight, sizes: tuple[int, ...]) -> PartialTraces:
        """Return the partial traces of a side's weight at a split of it, which shapes share."""
        key = side, sizes
        if key not in self._traces:
            self._traces[key] = PartialTraces.of(weight, sizes, self.weighted_left)
        return self._traces[key]


def stacked_norms(targets: Sequence[LowRank], weights: Sequence[NormWeights] | None) -> NormWeights:
    """Stack the norms of a batch; without weights the Frobenius norm.

    Raises `ShapeError` if they do not fit the targets.
    """
    matrix_shape = targets[0].shape
    if weights is None:
        return NormWeights.frobenius(matrix_shape)
    if len(weights) != len(targets):
        raise ShapeError(f"{len(weights)} norms for {len(targets)} targets")
    for norm in weights:
        norm.check(matrix_shape)
    output = stack_weights([norm.output for norm in weights])
    input_ = stack_weights([norm.input for norm in weights])
    return NormWeights(output, input_)


def stack_weights(weights: Sequence[Weight]) -> Weight:
    """Stack weights of equal size and kind as one weight with a leading batch axis.

    Bases of `LowRankPlusIdentity` weights are padded with zero columns to a common width, which
    changes nothing. Raises `ShapeError` if sizes or kinds differ.
    """
    weight_types = {type(weight) for weight in weights}
    sizes = {weight.size for weight in weights}
    if len(weight_types) != 1 or len(sizes) != 1:
        names = ", ".join(sorted(weight_type.__name__ for weight_type in weight_types))
        raise ShapeError(f"weights to stack must agree: kinds {names}; sizes {sorted(sizes)}")
    low_rank = [weight for weight in weights if isinstance(weight, LowRankPlusIdentity)]
    if not low_rank:
        return weights[0]
    width = max(int(weight.basis.shape[-1]) for weight in low_rank)
    return LowRankPlusIdentity(
        _stack([zero_padded(weight.basis, 1, width) for weight in low_rank]),
        _stack([zero_padded(weight.values, 0, width) for weight in low_rank]),
        _stack([weight.rest for weight in low_rank]),
    )


def _stack(arrays: list[Array]) -> Array:
    return namespace(*arrays).stack(arrays, axis=0)


def stacked_pairs(targets: Sequence[LowRank]) -> tuple[Array, Array]:
    """Stack left and right factors, (L, m, R) and (L, R, n), in double precision.

    Those of lower rank are padded with zeros.
    """
    rank = max(target.rank for target in targets)
    xp = namespace(*(target.left for target in targets))
    lefts = [zero_padded(as_double(target.left), 1, rank) for target in targets]
    rights = [zero_padded(as_double(target.right), 0, rank) for target in targets]
    if len(targets) == 1:  # a view, where stacking would copy the largest arrays there are
        return lefts[0][None, ...], rights[0][None, ...]
    return xp.stack(lefts, axis=0), xp.stack(rights, axis=0)


def stacked_triangles(targets: Sequence[LowRank]) -> tuple[Array, Array]:
    """Stack R of thin QR factorizations of both factors of each target, for `stacked_pairs`.

    Targets remember theirs.
    """
    rank = max(target.rank for target in targets)
    xp = namespace(targets[0].left)
    stacked = []
    for side in zip(*(target.triangles for target in targets), strict=True):
        padded = [zero_padded(zero_padded(triangle, 0, rank), 1, rank) for triangle in side]
        stacked.append(xp.stack(padded, axis=0))
    return stacked[0], stacked[1]


def start_pair(
    starts: Sequence[SeparatedProduct], shape: ProductShape, ranks: tuple[int, int], count: int
) -> Pair:
    """Stack ``count`` starting products, padded with zero terms to ``ranks``.

    Raises `ShapeError` if they are of another number or shape, or have more terms.
    """
    if len(starts) != count:
        raise ShapeError(f"{len(starts)} starts for {count} targets")
    # For each side, the factors of all starts.
    sides: tuple[list[list[Array]], list[list[Array]]] = ([], [])
    for start in starts:
        if start.product_shape != shape:
            raise ShapeError(f"a start of shape {start.product_shape} for a solve of shape {shape}")
        terms = start.separation_ranks
        if terms[0] > ranks[0] or terms[1] > ranks[1]:
            raise ShapeError(f"a start of {terms} terms for a solve with {ranks}")
        left, right = start.folded()
        transposed = [namespace(factor).matrix_transpose(factor) for factor in right]
        for side, factors, rank in zip(sides, (left, transposed), ranks, strict=True):
            side.append([zero_padded(as_double(factor), 0, rank) for factor in factors])
    return _stacked_factors(sides[0]), _stacked_factors(sides[1])


def _stacked_factors(factors_of_starts: list[list[Array]]) -> Stacks:
    """Stack the factors of one side of all starts, position by position."""
    stacked = [_stack(list(factors)) for factors in zip(*factors_of_starts, strict=True)]
    return as_stacks(stacked)
