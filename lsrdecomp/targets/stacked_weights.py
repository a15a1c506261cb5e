"""Weights of equal size and kind as one weight with a leading batch axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lsrdecomp.arrays import Array, Namespace, namespace, zero_padded
from lsrdecomp.errors import ShapeError
from lsrdecomp.targets.weights import Dense, Diagonal, Identity, KroneckerWeight, LowRankPlusIdentity, Weight


def stack_weights(weights: Sequence[Weight]) -> Weight:
    """Weights of equal size and kind as one weight with a leading batch axis.

    Bases of `LowRankPlusIdentity` weights are padded with zero columns to a common width, which changes nothing.
    Raises `ShapeError` if sizes or kinds differ.
    """
    kinds, sizes = {type(weight) for weight in weights}, {weight.size for weight in weights}
    if len(kinds) != 1 or len(sizes) != 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ShapeError(f"weights to stack must agree: kinds {names}; sizes {sorted(sizes)}")
    each: list[Any] = list(weights)
    if isinstance(each[0], Identity):
        return each[0]
    if isinstance(each[0], Diagonal):
        return Diagonal(_stack([w.values for w in each]))
    if isinstance(each[0], Dense):
        return Dense(_stack([w.matrix for w in each]), _stack([w.symmetric_root for w in each]))
    if isinstance(each[0], KroneckerWeight):
        return KroneckerWeight(tuple(stack_weights(column) for column in zip(*(w.factors for w in each), strict=True)))
    if isinstance(each[0], LowRankPlusIdentity):
        width = max(int(w.basis.shape[-1]) for w in each)
        return LowRankPlusIdentity(
            _stack([zero_padded(w.basis, 1, width) for w in each]),
            _stack([zero_padded(w.values, 0, width) for w in each]),
            _stack([w.rest for w in each]),
        )
    raise ShapeError(f"weights of kind {type(each[0]).__name__} cannot be stacked")


def _stack(arrays: list[Array]) -> Array:
    xp: Namespace = namespace(*arrays)
    return xp.stack(arrays, axis=0)
