"""Layers to compress, each with the norm its error counts in, and how many fit in memory together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from lsrdecomp.arrays import Array, as_double, namespace
from lsrdecomp.errors import BudgetError
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.solvers.pair.leading_norm import leading_norms
from lsrdecomp.targets.base import LowRank
from lsrdecomp.targets.weighted import weighted_gauge, weighted_norm, weighted_residual_norm
from lsrdecomp.targets.weights import NormWeights

Form = SeparatedProduct | SeparatedMatrix


class HasWeights(Protocol):
    """Statistics of one layer, as calibration stores them."""

    def weights(self) -> NormWeights: ...


PAIR_ENTRIES = 2**20
"""Numbers of the pairs solved together, and of those kept open: 8 MiB in float64, or one layer if that is larger."""

DENSE_ENTRIES = 2**23
"""The same for the weights of their norms."""

LEADING_ENTRIES = 2**19
"""The same for the weights in their leading coordinates, which every step of a solve reads: about what a processor has
at hand without going to memory."""


class Layer:
    """A LoRA layer to compress, and the norm its error counts in.

    Parameters
    ----------
    name : str
    pair : LowRank, shape (m, n)
        ΔW with its scale folded in.
    weights : NormWeights, optional
        Absent: the Frobenius norm.
    """

    def __init__(self, name: str, pair: LowRank, weights: NormWeights | None = None) -> None:
        self.name = name
        self._pair = pair
        self._weights = weights

    @property
    def pair(self) -> LowRank:
        return self._pair

    @property
    def weights(self) -> NormWeights | None:
        return self._weights

    @property
    def shape(self) -> tuple[int, int]:
        return self.pair.shape

    @property
    def rank(self) -> int:
        """Inner size of the pair."""
        return self.pair.rank

    @cached_property
    def norms(self) -> NormWeights:
        return self.weights if self.weights is not None else NormWeights.frobenius(self.shape)

    @property
    def is_frobenius(self) -> bool:
        """Whether its norm is the plain one."""
        return self.norms.is_frobenius

    @cached_property
    def leading(self) -> NormWeights:
        """The norm in its leading coordinates: what solves use; see `leading_norms`."""
        return leading_norms(self.norms)

    @cached_property
    def gauge(self) -> tuple[Array, Array, Array]:
        """S, σ, T of the SVD (B S, σ, T A) in the layer's norm: small, where U and V are as large as the pair."""
        return weighted_gauge(as_double(self.pair.left), as_double(self.pair.right), self.norms)

    def truncated(self, rank: int) -> tuple[Array, Array]:
        """U√σ (m, rank) and √σ Vᵀ (rank, n): the best approximation of that rank in the layer's norm."""
        pair, (columns, sigma, rows) = self.pair, self.gauge
        root = namespace(sigma).sqrt(sigma[:rank])
        left, right = as_double(pair.left), as_double(pair.right)
        return left @ (columns[:, :rank] * root), (root[:, None] * rows[:rank, :]) @ right

    @cached_property
    def squared_norm(self) -> float:
        """‖G^½ ΔW C^½‖_F²: the loss of dropping the layer."""
        return self.pair.norm**2 if self.norms.is_frobenius else weighted_norm(self.pair, self.norms) ** 2

    def squared_error(self, form: Form) -> float:
        """‖G^½ (ΔW − M̂) C^½‖_F², from a formed residual."""
        if self.norms.is_frobenius:
            return self.pair.residual_norm(form) ** 2
        return weighted_residual_norm(self.pair, form, self.norms) ** 2

    @property
    def parameters(self) -> int:
        """Numbers in the LoRA pair."""
        return self.rank * sum(self.shape)

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Layers of one kind can be solved together."""
        return (*self.shape, type(self.norms.output), type(self.norms.input))

    @cached_property
    def dense_entries(self) -> int:
        """Numbers in the weights of its norm."""
        return norm_entries(self.norms)

    @cached_property
    def is_leading(self) -> bool:
        """Whether the leading coordinates are all there are."""
        return norm_entries(self.leading) == norm_entries(self.norms)

    @cached_property
    def leading_entries(self) -> int:
        """The same of `leading`."""
        return norm_entries(self.leading)


def make_layers(
    pairs: Mapping[str, LowRank], statistics: Mapping[str, HasWeights | NormWeights] | None = None
) -> list[Layer]:
    """Layers from ΔW by name, with the norm of each name's statistics; the Frobenius norm if there are none at all.

    Raises `BudgetError` naming a layer that the statistics lack: errors in different norms cannot share a budget.
    """
    if statistics is None:
        return [Layer(name, pair) for name, pair in pairs.items()]
    layers = []
    for name, pair in pairs.items():
        try:
            found = statistics[name]
        except KeyError:
            raise missing_statistics(name) from None
        layers.append(Layer(name, pair, found if isinstance(found, NormWeights) else found.weights()))
    return layers


def missing_statistics(name: str) -> BudgetError:
    """The error for a layer without statistics among others that have some."""
    return BudgetError(f"{name}: no statistics for this layer; calibrate with this adapter's target modules")


def batches(layers: Sequence[Layer], *, leading: bool = False) -> list[slice]:
    """Runs of layers that fit in memory together (`PAIR_ENTRIES`, `DENSE_ENTRIES`), at least one layer each.

    With ``leading`` their norms count as they are in their leading coordinates.
    """
    runs, start, pairs, dense = [], 0, 0, 0
    most = LEADING_ENTRIES if leading else DENSE_ENTRIES
    for i, layer in enumerate(layers):
        entries = layer.leading_entries if leading else layer.dense_entries
        pairs, dense = pairs + layer.parameters, dense + entries
        if i > start and (pairs > PAIR_ENTRIES or dense > most):
            runs.append(slice(start, i))
            start, pairs, dense = i, layer.parameters, entries
    return [*runs, slice(start, len(layers))] if layers else []


def fits(pairs: int, dense: int) -> bool:
    """Whether layers with so many numbers in their pairs and in their norms are held at once."""
    return pairs <= PAIR_ENTRIES and dense <= DENSE_ENTRIES


def norm_entries(norms: NormWeights) -> int:
    """Numbers in the weights of both sides."""
    sides = norms.output, norms.input
    return sum(math.prod(getattr(side, "matrix", getattr(side, "basis", _NOTHING)).shape) for side in sides)


_NOTHING = np.empty(0)
