"""The layers of an adapter: ΔW of each, the norm its error counts in, and how many of them fit in memory together.

The numbers of a stored layer are read when they are asked for and forgotten when those of others
are, so that an adapter of any length takes a few layers' memory. What is small and wanted often
waits in a `SpillCache`.
"""

from __future__ import annotations

import math
import pickle
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import numpy as np

from lsrdecomp.arrays import Array, as_double, namespace
from lsrdecomp.checkpoints import Checkpoint, LoraLayer
from lsrdecomp.checkpoints.records import LOKR_STAYS
from lsrdecomp.errors import BudgetError, CheckpointError
from lsrdecomp.kronecker.product import SeparatedProduct, low_rank_product
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.targets.base import LowRank
from lsrdecomp.targets.weighted import (
    leading_norms,
    weighted_gauge,
    weighted_norm,
    weighted_residual_norm,
)
from lsrdecomp.targets.weights import Identity, NormWeights

T = TypeVar("T")

PAIR_ENTRIES = 2**20
"""Numbers of the pairs solved together, and of those that stay read: 8 MiB in float64, or one layer
if it is larger."""

NORM_ENTRIES = 2**23
"""The same for the weights of their norms."""

LEADING_ENTRIES = 2**19
"""The same for the weights in their leading coordinates, which every step of a solve reads: about
what a processor has at hand without going to memory."""

SMALL = 2
"""Leading coordinates of a stored layer that are this many times fewer than the norm's wait in the
`SpillCache`."""

IN_MEMORY = 8 * 2**20
"""Bytes that a `SpillCache` holds before it moves to disk."""

LARGEST_NORM = 1e140
"""Of ΔW: squares of such norms, and sums of them over all layers of a model, are still finite in
double precision."""


StatisticsByLayer = Mapping[str, NormWeights]
"""What a layer's errors count in, by its name: `Statistics` of calibration, or weights of one's
own."""


# -- a layer ---------------------------------------------------------------------------------------


class Layer:
    """A LoRA layer to compress, and the norm its error counts in: known by its sizes, its numbers read when asked for.

    Parameters
    ----------
    name : str
    shape : (m, n)
    rank : int
    read_pair : callable
        Reads ΔW as a `LowRank` with its scale folded in.
    read_norms : callable, optional
        Reads the `NormWeights`; absent, the Frobenius norm.
    cache : SpillCache, optional
        Where its leading norm and its gauge wait; absent, in memory.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        rank: int,
        read_pair: Callable[[], LowRank],
        read_norms: Callable[[], NormWeights] | None = None,
        cache: SpillCache | None = None,
    ) -> None:
        self.name, self.shape, self.rank, self.is_frobenius = name, shape, rank, read_norms is None
        self._read_pair = read_pair
        self._read_norms = read_norms or partial(NormWeights.frobenius, shape)
        self._cache = cache
        self._gauge: Callable[[], tuple[Array, Array, Array]] | None = None
        self._leading: Callable[[], NormWeights] | None = None

    @classmethod
    def of(cls, name: str, pair: LowRank, weights: NormWeights | None = None) -> Layer:
        """A layer whose numbers are at hand."""
        read_norms = None if weights is None or weights.is_frobenius else _in_memory(weights)
        return cls(name, pair.shape, pair.rank, _in_memory(pair), read_norms)

    @property
    def pair(self) -> LowRank:
        return self._read_pair()

    @property
    def norms(self) -> NormWeights:
        return self._read_norms()

    @property
    def leading(self) -> NormWeights:
        """The norm in its leading coordinates: what solves use; see `leading_norms`."""
        if self._leading is None:
            leading = leading_norms(self.norms)
            if self._cache is not None and SMALL * norm_entries(leading) > self.norm_entries:
                return leading  # hardly smaller than the norm itself
            self._leading = self._keep(leading)
        return self._leading()

    @property
    def gauge(self) -> tuple[Array, Array, Array]:
        """S, σ, T of the SVD (B S, σ, T A) in the layer's norm: small, where U and V are as large as the pair."""
        if self._gauge is None:
            pair = self.pair
            self._gauge = self._keep(
                weighted_gauge(as_double(pair.left), as_double(pair.right), self.norms)
            )
        return self._gauge()

    def truncated(self, rank: int) -> tuple[Array, Array]:
        """U√σ (m, rank) and √σ Vᵀ (rank, n): the best approximation of that rank in the layer's norm."""
        pair, (columns, sigma, rows) = self.pair, self.gauge
        root = namespace(sigma).sqrt(sigma[:rank])
        left, right = as_double(pair.left), as_double(pair.right)
        return left @ (columns[:, :rank] * root), (root[:, None] * rows[:rank, :]) @ right

    @cached_property
    def squared_norm(self) -> float:
        """‖G^½ ΔW C^½‖_F²: the loss of dropping the layer."""
        return self.pair.norm**2 if self.is_frobenius else weighted_norm(self.pair, self.norms) ** 2

    def squared_error(self, form: SeparatedProduct | SeparatedMatrix) -> float:
        """‖G^½ (ΔW − M̂) C^½‖_F², from a formed residual."""
        if self.is_frobenius:
            return self.pair.residual_norm(form) ** 2
        return weighted_residual_norm(self.pair, form, self.norms) ** 2

    @property
    def parameters(self) -> int:
        """Numbers in the LoRA pair."""
        return self.rank * sum(self.shape)

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Layers of one kind can be solved together."""
        # A batch of solves shares array shapes, and one way to apply its norms.
        return (*self.shape, type(self.norms.output), type(self.norms.input))

    @cached_property
    def norm_entries(self) -> int:
        """Numbers in the weights of its norm."""
        return norm_entries(self.norms)

    @cached_property
    def leading_entries(self) -> int:
        """The same of `leading`."""
        return norm_entries(self.leading)

    def _keep(self, value: T) -> Callable[[], T]:
        return _in_memory(value) if self._cache is None else self._cache.put(value)


def _in_memory(value: T) -> Callable[[], T]:
    return lambda: value


def norm_entries(norms: NormWeights) -> int:
    """Numbers in the weights of both sides."""
    return sum(
        math.prod(side.basis.shape)
        for side in (norms.output, norms.input)
        if not isinstance(side, Identity)
    )


def batches(layers: Sequence[Layer], *, leading: bool = False) -> list[slice]:
    """Runs of layers that fit in memory together (`PAIR_ENTRIES`, `NORM_ENTRIES`), at least one layer each.

    With ``leading`` their norms count as they are in their leading coordinates.
    """
    runs, start, pairs, norms = [], 0, 0, 0
    most = LEADING_ENTRIES if leading else NORM_ENTRIES
    for i, layer in enumerate(layers):
        entries = layer.leading_entries if leading else layer.norm_entries
        pairs, norms = pairs + layer.parameters, norms + entries
        if i > start and (pairs > PAIR_ENTRIES or norms > most):
            runs.append(slice(start, i))
            start, pairs, norms = i, layer.parameters, entries
    return [*runs, slice(start, len(layers))] if layers else []


# -- in and out of files ---------------------------------------------------------------------------


def open_layers(checkpoint: Checkpoint, statistics: StatisticsByLayer | None = None) -> list[Layer]:
    """The layers of a checkpoint, each read when its numbers are asked for and forgotten when others are.

    Raises `CheckpointError` for a layer that is not a LoRA, `BudgetError` naming a layer that the
    statistics lack.
    """
    # What cannot be compressed is said of all layers before the first is read; errors in different
    # norms cannot share a budget.
    for layer in checkpoint.layers:
        _require_lora(checkpoint, layer)
        if statistics is not None and layer.name not in statistics:
            text = f"{layer.name}: no statistics for this layer; calibrate with this adapter's target modules"
            raise BudgetError(text)

    cache, pairs, norms = (
        SpillCache(),
        Recent(PAIR_ENTRIES, pair_entries),
        Recent(NORM_ENTRIES, norm_entries),
    )

    def stored(layer: LoraLayer) -> Layer:
        read_pair = partial(pairs.get, layer.name, partial(layer_pair, checkpoint, layer))
        read_norms = None
        if statistics is not None:
            read_norms = partial(norms.get, layer.name, partial(statistics.__getitem__, layer.name))
        return Layer(layer.name, layer.shape, layer.rank, read_pair, read_norms, cache)

    return [stored(layer) for layer in checkpoint.layers]


def pair_entries(pair: LowRank) -> int:
    """Numbers in both halves of a pair."""
    return pair.rank * sum(pair.shape)


def layer_pair(checkpoint: Checkpoint, layer: Any) -> LowRank:
    """ΔW of a LoRA layer with its scale folded into B, in double precision.

    Raises `CheckpointError` naming the layer if the size of ΔW leaves the range in which norms can
    be computed.
    """
    _require_lora(checkpoint, layer)
    left, right = layer.load()
    left, right = left.astype(np.float64), right.astype(np.float64)
    # ‖B‖·‖A‖ bounds ‖ΔW‖_F without forming the product.
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
        text = (
            "is an LSR layer already; compress the LoRA it came from"
            if checkpoint.format == "lsr"
            else LOKR_STAYS
        )
        raise CheckpointError(text, path=checkpoint.path, tensor=layer.name)


def layer_product(layer: Any) -> SeparatedProduct:
    """ΔW of any layer as a separated product: an LSR layer as stored, a LoRA layer as one term a side."""
    first, second = layer.load()
    if isinstance(layer, LoraLayer):
        return low_rank_product(first.astype(np.float64) * layer.scale, second.astype(np.float64))
    left, right = ([factor.astype(np.float64) for factor in side] for side in (first, second))
    return SeparatedProduct(
        SeparatedMatrix.from_factors([left[0] * layer.scale, *left[1:]]),
        SeparatedMatrix.from_factors(right),
    )


# -- what waits, and where -------------------------------------------------------------------------


class Recent(Generic[T]):
    """Values as they were last read, up to ``most`` numbers in all; those not used for longest are forgotten first.

    ``entries`` counts the numbers of one.
    """

    def __init__(self, most: int, entries: Callable[[T], int]) -> None:
        self.most, self._entries = most, entries
        self._values: OrderedDict[str, T] = OrderedDict()

    def get(self, name: str, read: Callable[[], T]) -> T:
        value = self._values.pop(name, None)
        if value is None:
            value = read()
            while (
                self._values
                and sum(map(self._entries, [value, *self._values.values()])) > self.most
            ):
                self._values.popitem(last=False)
        self._values[name] = value
        return value


class SpillCache:
    """Values put away and read back with the same bits: in memory while they are few, else in a temporary file.

    The file has no name (it vanishes with the process, also when that is killed) and nobody else
    can write to it: that is why it may hold pickles. It lies where ``TMPDIR`` says.
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - closed when collected
        self._end = 0
        weakref.finalize(self, self._file.close)

    def put(self, value: T) -> Callable[[], T]:
        """Store a value; the answer reads it back. Raises `CheckpointError` if the disk is full."""
        start = self._end
        try:
            self._file.seek(start)
            pickle.dump(value, self._file, protocol=pickle.HIGHEST_PROTOCOL)
            self._end = self._file.tell()
        except OSError as error:
            text = (
                f"factors that wait cannot be kept: {error.strerror}; point TMPDIR to a larger disk"
            )
            raise CheckpointError(text, path=tempfile.gettempdir()) from error
        return partial(self._read, start)

    def _read(self, start: int) -> Any:
        self._file.seek(start)
        return pickle.load(self._file)
