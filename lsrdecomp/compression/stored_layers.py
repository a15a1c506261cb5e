"""Layers of a checkpoint: read when asked for and forgotten when others are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, partial
from typing import TypeVar

from lsrdecomp.arrays import Array
from lsrdecomp.compression.layers import Layer, fits, norm_entries
from lsrdecomp.compression.spill_cache import SpillCache
from lsrdecomp.targets.base import LowRank
from lsrdecomp.targets.weights import NormWeights

SMALL = 2
"""Leading coordinates so many times smaller than the norm are kept."""

T = TypeVar("T")


class StoredLayer(Layer):
    """A layer in a file: known by its sizes, opened when its numbers are asked for.

    Parameters
    ----------
    name : str
    shape : (m, n)
    rank : int
    read : callable
        Reads the layer with its norm.
    opened : LayerCache
        Where open layers are kept.
    weighted : bool
        Whether it has a norm of its own, which comes with reading.
    read_pair : callable, optional
        Reads the pair alone, which is far less than both.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        rank: int,
        read: Callable[[], Layer],
        opened: LayerCache,
        weighted: bool,
        read_pair: Callable[[], LowRank] | None = None,
    ) -> None:
        self.name = name
        self._shape = shape
        self._rank = rank
        self._weighted = weighted
        self._open = partial(opened.take, self, read)
        self._opened, self._read_pair = opened, read_pair
        self._leading: Callable[[], NormWeights] | None = None
        self._gauge: Callable[[], tuple[Array, Array, Array]] | None = None

    @property
    def pair(self) -> LowRank:
        if self._read_pair is None or not self._weighted or self._opened.holds(self):
            return self._open().pair
        return self._read_pair()

    @property
    def weights(self) -> NormWeights | None:
        return self._open().weights if self._weighted else None

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def norms(self) -> NormWeights:
        return self._open().norms if self._weighted else NormWeights.frobenius(self.shape)

    @property
    def is_frobenius(self) -> bool:
        return not self._weighted

    @property
    def leading(self) -> NormWeights:
        """As `Layer.leading`; kept where it is far smaller than the norm, which takes long to read."""
        if not self._weighted:
            return self.norms
        if self._leading is None:
            found = self._open().leading
            if SMALL * self.leading_entries > self.dense_entries:
                return found
            self._leading = self._opened.keep(found)
        return self._leading()

    @property
    def gauge(self) -> tuple[Array, Array, Array]:
        if self._gauge is None:
            self._gauge = self._opened.keep(self._open().gauge)
        return self._gauge()

    @cached_property
    def leading_entries(self) -> int:
        return norm_entries(self._open().leading) if self._weighted else 0


class LayerCache:
    """The layers that are open, up to so many numbers; those not used for longest are closed first."""

    def __init__(self) -> None:
        self._kept = SpillCache()
        self._open: OrderedDict[int, Layer] = OrderedDict()

    def keep(self, value: T) -> Callable[[], T]:
        """What a layer is wanted for often; the answer reads it back."""
        return self._kept.put(value)

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer is open."""
        return id(layer) in self._open

    def take(self, layer: StoredLayer, read: Callable[[], Layer]) -> Layer:
        """The layer, opened."""
        found = self._open.pop(id(layer), None)
        if found is None:
            self._make_room(layer.parameters, 0)
            found = read()
            self._make_room(layer.parameters, found.dense_entries)
        self._open[id(layer)] = found
        return found

    def _make_room(self, pairs: int, dense: int) -> None:
        while self._open and not fits(
            pairs + sum(layer.parameters for layer in self._open.values()),
            dense + sum(layer.dense_entries for layer in self._open.values()),
        ):
            self._open.popitem(last=False)
