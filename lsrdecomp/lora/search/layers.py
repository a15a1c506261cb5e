"""The layers of an adapter: ΔW of each, and the norm in which its error counts.

The numbers of a layer are read from the file when they are asked for, and dropped when those of
other layers are, so that an adapter of any length takes the memory of a few layers. Small values
that are needed often are kept in a `SpillCache`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from lsrdecomp.arrays import (
    Array,
    all_finite,
    as_double,
    namespace,
    norm,
    tail_norms,
    to_numpy,
)
from lsrdecomp.errors import BudgetError, CheckpointError
from lsrdecomp.kronecker.product import SeparatedProduct, low_rank_product
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.lora.files import Checkpoint, LoraLayer
from lsrdecomp.lora.files.records import LOKR_STAYS
from lsrdecomp.lora.search.caches import LRUCache, SpillCache
from lsrdecomp.lora.search.effort import DEFAULT_LIMITS, ResourceLimits
from lsrdecomp.targets.residual import gram_of, pair_distance, thin_row_blocks
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weighted import (
    leading_norms,
    weighted_gauge,
    weighted_norm,
    weighted_residual_norm,
)
from lsrdecomp.targets.weights import Identity, NormWeights

T = TypeVar("T")

LEADING_ENTRIES = 2**19
"""Maximum entries of the reduced weights (`Layer.leading`) of layers solved together, about
as much as a processor's cache holds: every step of a solve reads them."""
MIN_SHRINKAGE = 2
"""Reduced weights are kept in the `SpillCache` if they are this many times smaller than the norm's;
else they are computed again when needed."""
MAX_NORM = 1e140
"""Largest ‖ΔW‖_F. Squares of such norms, and their sums over all layers of a model, are finite in
double precision."""
MIN_ERROR = 1e-5
"""Least error, in units of ‖B‖‖A‖, that the singular gauge, of twelve digits, tells to seven."""
SMALLEST_IN_SINGLE = 1e-12
"""Least ‖B‖ and ‖A‖, and one over the largest, of pairs that are computed so; the same of scales
that are kept beside the numbers of a pair."""

StatisticsByLayer = Mapping[str, NormWeights]
"""Weights of the norm of each layer, by its name: `Statistics` of a calibration, or others."""


@dataclass(slots=True)
class PairAsRead:
    """Both sides of ΔW = scale · B A as they are stored, until they are widened."""

    left: Array
    right: Array
    scale: float

    def widened(self) -> LowRank:
        """Return ΔW in double precision, with the scale folded into B; the numbers stay so."""
        if self.scale != 1.0:
            left = self.left.astype(np.float64)
            left *= self.scale
            self.left = left
            self.scale = 1.0
        self.left = as_double(self.left)
        self.right = as_double(self.right)
        return LowRank(self.left, self.right)


# -- a layer ---------------------------------------------------------------------------------------


class Layer:
    """A LoRA layer to compress, and the norm in which its error counts.

    Sizes are known from the start; numbers are read when they are asked for.

    Parameters
    ----------
    name : str
    shape : (m, n)
    rank : int
    read_pair : callable
        Reads ΔW as a `PairAsRead`.
    read_norms : callable, optional
        Reads the `NormWeights`; absent, the Frobenius norm.
    cache : SpillCache, optional
        Keeps `leading` and `gauge`; absent, they stay in memory.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        rank: int,
        read_pair: Callable[[], PairAsRead],
        read_norms: Callable[[], NormWeights] | None = None,
        cache: SpillCache | None = None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.rank = rank
        self.is_frobenius = read_norms is None
        self._read_pair = read_pair
        self._read_norms = read_norms or partial(NormWeights.frobenius, shape)
        self._cache = cache
        self._gauge: Callable[[], tuple[Array, Array, Array]] | None = None
        self._leading: Callable[[], NormWeights] | None = None

    @classmethod
    def of(cls, name: str, pair: LowRank, weights: NormWeights | None = None) -> Layer:
        """Return a layer whose numbers are in memory."""
        read_norms = None if weights is None or weights.is_frobenius else in_memory(weights)
        read = in_memory(PairAsRead(pair.left, pair.right, 1.0))
        return cls(name, pair.shape, pair.rank, read, read_norms)

    @property
    def pair(self) -> LowRank:
        """ΔW as a low-rank pair in double precision, read if it is not in memory."""
        return self._read_pair().widened()

    @property
    def pair_as_read(self) -> PairAsRead:
        """The numbers as they are stored, read if they are not in memory."""
        return self._read_pair()

    @property
    def norms(self) -> NormWeights:
        """Weights G and C of the norm ‖G^½ X C^½‖_F, read if they are not in memory."""
        return self._read_norms()

    @property
    def leading(self) -> NormWeights:
        """Reduced weights of the norm, with which shapes are solved.

        Only the leading eigenpairs of G and C are kept, and the other eigenvalues replaced by their
        mean: a solve takes a fraction of the time, and its errors agree with those in the whole
        norm to about a thousandth (`leading_norms`).
        """
        if self._leading is None:
            leading = leading_norms(self.norms)
            is_hardly_smaller = MIN_SHRINKAGE * norm_entries(leading) > self.norm_entries
            if self._cache is not None and is_hardly_smaller:
                return leading  # computed again when needed rather than kept
            self._leading = self._keep(leading)
        return self._leading()

    @property
    def gauge(self) -> tuple[Array, Array, Array]:
        """The SVD ΔW = U σ Vᵀ in the layer's norm, as small matrices S, σ and T.

        U = B S and Vᵀ = T A for the pair ΔW = B A. S and T have only r² numbers, so they are kept
        in place of U and V.
        """
        if self._gauge is not None:
            return self._gauge()
        if self.is_frobenius:
            pair = self.pair_as_read
            columns, sigma, rows = weighted_gauge(pair.left, pair.right, self.norms)
            size = abs(pair.scale)
            gauge = (columns / size, sigma * size, rows)
        else:
            gauge = weighted_gauge(self.pair.left, self.pair.right, self.norms)
        self._gauge = self._keep(gauge)
        return gauge

    @cached_property
    def sigma(self) -> np.ndarray:
        """The singular values in the layer's norm, which stay in memory."""
        return to_numpy(self.gauge[1])

    def truncated(self, rank: int) -> tuple[Array, Array]:
        """Return U√σ (m, rank) and √σ Vᵀ (rank, n): the best approximation of that rank."""
        columns, sigma, rows = self.gauge
        root = namespace(sigma).sqrt(sigma[:rank])
        pair = self.pair
        left, right = as_double(pair.left), as_double(pair.right)
        return left @ (columns[:, :rank] * root), (root[:, None] * rows[:rank, :]) @ right

    @cached_property
    def squared_norm(self) -> float:
        """‖G^½ ΔW C^½‖_F²: the squared error of leaving the layer out.

        In the Frobenius norm the sum of the squared singular values, which a search needs anyway.
        """
        if self.is_frobenius:
            return norm(self.sigma) ** 2
        return weighted_norm(self.pair, self.norms) ** 2

    @cached_property
    def frobenius_norm(self) -> float:
        """‖ΔW‖_F."""
        return math.sqrt(self.squared_norm) if self.is_frobenius else self.pair.norm

    def squared_error(self, approximation: SeparatedProduct | SeparatedMatrix) -> float:
        """Return ‖G^½ (ΔW − M̂) C^½‖_F², computed from the residual."""
        if self.is_frobenius:
            return self.pair.residual_norm(approximation) ** 2
        return weighted_residual_norm(self.pair, approximation, self.norms) ** 2

    def rounded(
        self, rank: int | None, dtype: Any, scale: float = 1.0
    ) -> tuple[tuple[np.ndarray, np.ndarray], float]:
        """Return both sides of a truncation in a storage type, and ‖ΔW − B̂ Â‖_F of what is read.

        With the errors E and F of the sides U and V, the difference is C − (E V + B̂ F). The cut,
        C, is orthogonal to both sides, so of its inner product with the rest only ⟨C, E F⟩ is
        left. That takes products of thin matrices and no QR decomposition, block by block.

        Parameters
        ----------
        rank : int, optional
            The sides are those of `truncated`; absent, the pair itself.
        dtype : dtype
        scale : float
            What readers multiply the left side by: it is stored divided by it.

        Returns
        -------
        (m, rank) and (rank, n), float
            An error that is not finite tells of a number that the type does not hold.
        """
        pair = self.pair_as_read
        left, right = to_numpy(pair.left), to_numpy(pair.right)
        turns: tuple[np.ndarray | None, ...] = (None, None)
        if rank is not None:
            columns, sigma, rows = (to_numpy(array) for array in self.gauge)
            root = np.sqrt(sigma[:rank])
            turns = columns[:, :rank] * root, (root[:, None] * rows[:rank]).T
        with np.errstate(over="ignore", invalid="ignore"):
            new_left, left_cross, left_gram = _round_side(left, pair.scale, turns[0], dtype, scale)
            new_right, right_cross, right_gram = _round_side(right.T, 1.0, turns[1], dtype, 1.0)
        stored = new_left, new_right.T
        errors_are_finite = np.isfinite(np.trace(left_gram) + np.trace(right_gram))
        if not errors_are_finite and not all(map(all_finite, stored)):
            return stored, math.inf
        if rank is None and not (left_gram.any() or right_gram.any()):
            return stored, 0.0
        if not self.is_frobenius:  # what is cut is orthogonal in another norm
            return stored, self._distance(stored, scale)
        left_turn, right_turn = left_cross, right_cross  # Eᵀ U and F Vᵀ
        if rank is None:
            left_square = pair.scale**2 * gram_of(left)
            right_square = gram_of(right.T)
        else:
            left_turn = left_turn @ turns[0]
            right_turn = right_turn @ turns[1]
            left_square = right_square = np.diag(sigma[:rank])
        with np.errstate(over="ignore", invalid="ignore"):
            squared = np.sum(left_gram * right_square) + np.sum(right_gram * left_square)
            squared += np.sum(right_gram * (left_turn + left_turn.T + left_gram))
            squared += 2.0 * np.sum((left_turn + left_gram) * right_turn.T)
            if rank is not None:
                mixed = np.sum(left_cross * right_cross)
                mixed -= np.sum(left_turn * right_turn)
                squared += tail_norms(sigma)[rank] ** 2 - 2.0 * mixed
            size = abs(pair.scale) * _norm_of_side(left) * _norm_of_side(right)
        if not MIN_ERROR * size <= math.sqrt(max(0.0, squared)) < math.inf:
            return stored, self._distance(stored, scale)
        return stored, math.sqrt(squared)

    def rounded_bound(self, rank: int, dtype: Any, scale: float) -> float:
        """Return a bound on the error of `rounded` from singular values alone.

        Every number moves by at most μ of itself and half the spacing of the smallest numbers. So
        ‖E‖ ≤ ε = μ √Σσ + ½ spacing √(m k), and likewise ‖F‖. Infinite in other norms than the
        Frobenius norm, and where a number may not fit the type.
        """
        facts: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        kept = self.sigma[:rank]
        largest = math.sqrt(float(kept[0]))
        if not self.is_frobenius or largest > float(facts.max) * min(1.0, abs(scale)):
            return math.inf
        relative = float(facts.eps) / 2.0 * math.sqrt(float(np.sum(kept)))
        half_spacing = float(facts.smallest_subnormal) / 2.0
        left = relative + abs(scale) * half_spacing * math.sqrt(self.shape[0] * rank)
        right = relative + half_spacing * math.sqrt(self.shape[1] * rank)
        rounding = (left + right) * largest + left * right
        cut = tail_norms(self.sigma)[rank]
        return math.sqrt(cut**2 + rounding**2 + 2.0 * cut * left * right)

    def _distance(self, stored: tuple[np.ndarray, np.ndarray], scale: float) -> float:
        """Return ‖ΔW − B̂ Â‖_F of stored sides, from whole matrices."""
        pair = self.pair
        left, right = (side.astype(np.float64) for side in stored)
        return pair_distance(pair.left, pair.right.T, left * scale, right.T)

    @property
    def parameters(self) -> int:
        """Numbers in the LoRA pair."""
        return self.rank * sum(self.shape)

    @cached_property
    def group_key(self) -> tuple[object, ...]:
        """Key that is equal for layers that can be solved together.

        A batch of solves needs arrays of the same shapes, and norms of the same kinds.
        """
        return (*self.shape, type(self.norms.output), type(self.norms.input))

    @cached_property
    def norm_entries(self) -> int:
        """Numbers in the weights of the norm."""
        return norm_entries(self.norms)

    @cached_property
    def leading_entries(self) -> int:
        """Numbers in the weights of `leading`."""
        return norm_entries(self.leading)

    def _keep(self, value: T) -> Callable[[], T]:
        """Store a value in the cache, if there is one; return a function that reads it back."""
        return in_memory(value) if self._cache is None else self._cache.put(value)


def _round_side(
    side: np.ndarray, factor: float, turn: np.ndarray | None, dtype: Any, scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round B turn / scale, or B / scale, to a type, block by block in a cache.

    Returns the numbers as stored (m, k), and with the error E of what is read Eᵀ B and Eᵀ E.

    Parameters
    ----------
    side : (m, r)
    factor : float
        B is the side times this.
    turn : (r, k), optional
    dtype : dtype
    scale : float
    """
    rank = side.shape[1]
    kept = rank if turn is None else turn.shape[1]
    lies_by_rows = side.flags.c_contiguous
    stored = np.empty((len(side), kept) if lies_by_rows else (kept, len(side)), dtype)
    stored = stored if lies_by_rows else stored.T
    with_side = np.zeros((kept, rank))
    gram = np.zeros((kept, kept))
    for part in thin_row_blocks(*side.shape):
        block = side[part].astype(np.float64, copy=False)
        if factor != 1.0:
            block = block * factor
        exact = block
        if turn is not None:
            exact = block @ turn if lies_by_rows else (turn.T @ block.T).T
        rounded = (exact if scale == 1.0 else exact / scale).astype(dtype)
        stored[part] = rounded
        error = rounded.astype(np.float64)
        if scale != 1.0:
            error *= scale
        error -= exact
        if error.any():
            with_side += error.T @ block
            gram += error.T @ error
    return stored, with_side, gram


def fits_single(pair: PairAsRead) -> bool:
    """Return whether squares of a pair neither overflow nor underflow in single precision."""
    sizes = [_norm_of_side(to_numpy(side)) for side in (pair.left, pair.right)]
    sizes[0] *= abs(pair.scale)
    return all(SMALLEST_IN_SINGLE < size < 1.0 / SMALLEST_IN_SINGLE for size in sizes)


def in_memory(value: T) -> Callable[[], T]:
    """Return a function that returns the value."""
    return lambda: value


def norm_entries(norms: NormWeights) -> int:
    """Return the number of entries in the weights of both sides; the identity has none."""
    weights = [side for side in (norms.output, norms.input) if not isinstance(side, Identity)]
    return sum(math.prod(side.basis.shape) for side in weights)


def batches(
    layers: Sequence[Layer], limits: ResourceLimits = DEFAULT_LIMITS, *, leading: bool = False
) -> list[slice]:
    """Split layers into consecutive runs that fit in memory together, at least one layer each.

    Parameters
    ----------
    layers : sequence of Layer
    limits : ResourceLimits
    leading : bool
        Count the reduced weights of the norms (`Layer.leading`), not the whole ones.

    Returns
    -------
    list of slice
    """
    max_norm_entries = LEADING_ENTRIES if leading else limits.norm_entries
    runs = []
    start = 0
    pair_sum = 0
    norm_sum = 0
    for i, layer in enumerate(layers):
        layer_norm_entries = layer.leading_entries if leading else layer.norm_entries
        pair_sum += layer.parameters
        norm_sum += layer_norm_entries
        is_too_much = pair_sum > limits.pair_entries or norm_sum > max_norm_entries
        if i > start and is_too_much:
            runs.append(slice(start, i))
            start = i
            pair_sum = layer.parameters
            norm_sum = layer_norm_entries
    if layers:
        runs.append(slice(start, len(layers)))
    return runs


# -- layers of a checkpoint ------------------------------------------------------------------------


def open_layers(
    checkpoint: Checkpoint,
    statistics: StatisticsByLayer | None = None,
    limits: ResourceLimits = DEFAULT_LIMITS,
) -> list[Layer]:
    """Return the layers of a checkpoint, whose numbers are read when they are asked for.

    Raises
    ------
    CheckpointError
        For a layer that is not a LoRA, and for tensors that are no pairs.
    BudgetError
        For a layer that the statistics lack: errors in different norms cannot share a budget.
    """
    # Check all layers before the first is read.
    checkpoint.refuse_carried()
    for layer in checkpoint.layers:
        require_lora(checkpoint, layer)
        if statistics is not None and layer.name not in statistics:
            raise BudgetError(
                f"{layer.name}: no statistics for this layer; calibrate with this adapter's "
                "target modules"
            )

    cache = SpillCache(limits.spill_bytes)
    pairs = LRUCache(limits.pair_entries, pair_entries)
    norms = LRUCache(limits.norm_entries, norm_entries)

    def open_layer(layer: LoraLayer) -> Layer:
        read_pair = partial(pairs.get, layer.name, partial(_read_pair_of, checkpoint, layer))
        read_norms = None
        if statistics is not None:
            read_norms = partial(norms.get, layer.name, partial(statistics.__getitem__, layer.name))
        return Layer(
            layer.name,
            layer.shape,
            layer.rank,
            read_pair,
            read_norms,
            cache,
        )

    return [open_layer(layer) for layer in checkpoint.layers]


def pair_entries(pair: PairAsRead) -> int:
    """Return the number of entries in both matrices of a pair."""
    return int(pair.left.size + pair.right.size)


def layer_pair(checkpoint: Checkpoint, layer: Any) -> LowRank:
    """Return ΔW of a layer with its scale folded into B, in double precision.

    Raises `CheckpointError` if ‖ΔW‖ of a LoRA may exceed `MAX_NORM`.
    """
    if not isinstance(layer, LoraLayer):
        return LowRank(*layer_product(layer).to_lora())
    return _read_pair_of(checkpoint, layer).widened()


def _read_pair_of(checkpoint: Checkpoint, layer: LoraLayer) -> PairAsRead:
    """Return the numbers of a LoRA layer as they are stored, and its scale.

    Raises `CheckpointError` if ‖ΔW‖ may exceed `MAX_NORM`.
    """
    left = layer.up.finite().reshape(layer.out_features, layer.rank)
    right = layer.down.finite().reshape(layer.rank, layer.in_features)
    # ‖B‖·‖A‖ bounds ‖ΔW‖_F without forming the product. No type below double precision has numbers
    # for which it were too large.
    if (
        left.dtype == np.float64
        or right.dtype == np.float64
        or abs(layer.scale) > 1.0 / SMALLEST_IN_SINGLE
    ):
        with np.errstate(over="ignore"):
            size = _norm_of_side(left) * _norm_of_side(right) * abs(layer.scale)
        if not size <= MAX_NORM:
            text = (
                f"‖B‖·‖A‖ times the scale {layer.scale:.3g} is {size:.3g}, above {MAX_NORM:g}, "
                "where squares overflow; correct lora_alpha or the numbers"
            )
            raise CheckpointError(text, path=checkpoint.path, tensor=layer.name)
    if abs(layer.scale) >= SMALLEST_IN_SINGLE:
        return PairAsRead(left, right, layer.scale)
    return PairAsRead(as_double(left) * layer.scale, right, 1.0)


def _norm_of_side(side: np.ndarray) -> float:
    """Return the Frobenius norm of one side, where squares may overflow in single precision."""
    length = float(np.linalg.norm(side.astype(np.float32) if side.dtype.itemsize <= 2 else side))
    return length if math.isfinite(length) else float(np.linalg.norm(side.astype(np.float64)))


def require_lora(checkpoint: Checkpoint, layer: Any) -> None:
    """Raise `CheckpointError` for a layer that is not a LoRA."""
    if isinstance(layer, LoraLayer):
        return
    text = LOKR_STAYS
    if checkpoint.format == "lsr":
        text = "is an LSR layer already; compress the LoRA it came from"
    raise CheckpointError(text, path=checkpoint.path, tensor=layer.name)


def layer_product(layer: Any) -> SeparatedProduct:
    """Return ΔW of any layer as a separated product; that of a LoRA has one term on each side."""
    if isinstance(layer, LoraLayer):
        up, down = layer.load()
        return low_rank_product(up.astype(np.float64) * layer.scale, down.astype(np.float64))
    left, right = ([factor.astype(np.float64) for factor in side] for side in layer.load())
    left[0] = left[0] * layer.scale
    return SeparatedProduct(SeparatedMatrix.from_factors(left), SeparatedMatrix.from_factors(right))
