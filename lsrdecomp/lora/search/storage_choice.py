"""The plain way to every goal: truncated SVD of all layers, in the storage that keeps most.

Without a base only the weights can be matched, and in their Frobenius norm hardly anything is
nearer than truncated SVD. So no LSR product is solved here, and singular values decide alone: what
a layer would lose at each rank in floats, and at each number of bits in integers, is known before
anything is rounded. `choose_storage` spends one budget on all layers, and then makes what it chose.

A layer offers

1. truncated SVDs of every rank in a floating type,
2. codes of its components in as many bits as reverse water-filling gives each (`water_fill`), or of
   one width where numbers are counted,
3. in eight bits the columns and rows of its own pair, which is nearer where those are uniform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import tail_norms
from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.allocation import PartOptions, within_cost
from lsrdecomp.formats.number_formats import step_count
from lsrdecomp.formats.quantized import COMPONENT_BYTES
from lsrdecomp.formats.stored import FloatProduct
from lsrdecomp.lora.files.progress import Counter
from lsrdecomp.lora.search.candidates import (
    MAX_CODE_SIZES,
    Candidate,
    DropCandidate,
    KeepCandidate,
    LowRankCandidate,
    Materialized,
    StoredSummary,
    drop,
    keep,
)
from lsrdecomp.lora.search.plain_svd import FLOAT_NOISE
from lsrdecomp.lora.search.quantize import INTEGER_BITS, stored_pair
from lsrdecomp.lora.search.search import FittedLayers
from lsrdecomp.lora.search.spectral_codes import (
    GAUSSIAN_ERROR,
    GROUPS,
    MAX_BITS,
    ComponentCodes,
    equal_width_levels,
    layer_svd,
    own_pair_losses,
    own_vectors,
    water_fill,
)
from lsrdecomp.precision import numpy_dtype, precision

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lsrdecomp.formats.quantized import SpectralCode
    from lsrdecomp.lora.files.progress import OnStep
    from lsrdecomp.lora.search.caches import SpillCache
    from lsrdecomp.lora.search.layers import Layer
    from lsrdecomp.lora.search.plan import Budget

Doubles = NDArray[np.float64]

MAX_TRIES = 6
"""Times that a layer is rounded until it is within its tolerance as written. Each asks for a loss
that is smaller by what the last one missed, and the last for the nearest there is."""

OWN_PAIR_SHARE = 0.25
"""Least budget with room for own pairs, as a share of a byte or parameter for each of the LoRA's:
with less, hardly any layer keeps all its components in eight bits."""

OWN_PAIR_RTOL = 0.05
"""Tolerance of a layer from which no own pair is offered: codes of six bits, which are smaller,
have an error of 0.03."""

MAX_SIZES = 2**15
"""Sizes in bits that all layers offer together, where each has more than `MAX_CODE_SIZES`: an
allocation looks at every one of them."""

LEVEL_COST = COMPONENT_BYTES + 1
"""Bytes of the scale, width and group of a component."""


@dataclass(frozen=True, slots=True)
class Offers:
    """What a layer may become, before anything is rounded.

    Attributes
    ----------
    ranks, bytes, losses : ndarray
        Rank, bytes, and expected squared error of each offer.
    make : callable
        Returns the candidate of an offer.
    """

    ranks: NDArray[np.int64]
    bytes: Doubles
    losses: Doubles
    make: Callable[[int], Candidate]

    @classmethod
    def joined(cls, parts: Sequence[Offers]) -> Offers:
        """Return the offers of several kinds as one."""
        starts = np.cumsum([0, *(len(part.ranks) for part in parts)])

        def make(k: int) -> Candidate:
            place = int(np.searchsorted(starts, k, side="right")) - 1
            return parts[place].make(k - int(starts[place]))

        return cls(
            np.concatenate([part.ranks for part in parts]),
            np.concatenate([part.bytes for part in parts]),
            np.concatenate([part.losses for part in parts]),
            make,
        )

    def of_ranks(self, lowest: int, highest: float) -> Offers:
        """Return the offers of some ranks; a layer that has no such rank offers its largest."""
        lowest = min(lowest, int(self.ranks.max()))
        places = np.flatnonzero((self.ranks >= lowest) & (self.ranks <= highest))
        if len(places) == len(self.ranks):
            return self
        return Offers(
            self.ranks[places],
            self.bytes[places],
            self.losses[places],
            lambda k: self.make(int(places[k])),
        )


class PlainTable:
    """What all layers offer, and the factors that were made so far.

    Attributes
    ----------
    layers : sequence of Layer
        Each is read, and read again when it is made; under a budget that bounds each layer alone
        it is made as it is read.
    storages : tuple of str
        Element types that each layer may choose from.
    cache : SpillCache
        Keeps factors.
    budgets : sequence of Budget
        The budgets to prepare for. Where none has room for it, own pairs are not offered.
    on_step : callable, optional
        Called with a `ProgressUpdate` after each layer is read.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        storages: Sequence[str],
        cache: SpillCache,
        budgets: Sequence[Budget] = (),
        on_step: OnStep | None = None,
    ) -> None:
        self.layers = layers
        self.storages = tuple(storages)
        self.cache = cache
        self._offers: dict[tuple[int, bool], Offers] = {}
        self._made: dict[tuple[int, Candidate], Materialized] = {}
        self._own_pairs: list[Offers | None] = []
        has_room = not budgets or any(map(self._has_room, budgets))
        has_eight_bits = any(INTEGER_BITS.get(name, 0) >= MAX_BITS for name in storages)
        read = Counter(on_step, "reading", len(layers), "layers")
        for i, layer in enumerate(layers):
            is_coded = layer.squared_norm > 0.0 and has_eight_bits and has_room
            self._own_pairs.append(_own_pair(layer) if is_coded else None)
            for budget in budgets:
                if _is_of_each_layer(budget):  # made now, while the numbers are in memory
                    candidate = self.offers(i, budget).make(self._choice_alone(i, budget))
                    self.made_within(i, candidate, budget)
            read.add()

    def _has_room(self, budget: Budget) -> bool:
        """Return whether a budget may be met by own pairs."""
        if budget.layer_rtol is not None:
            return budget.layer_rtol < OWN_PAIR_RTOL
        least = OWN_PAIR_SHARE * sum(layer.parameters for layer in self.layers)
        return (budget.cost or math.inf) >= least

    def offers(self, i: int, budget: Budget) -> Offers:
        """Return what a layer may become under a budget."""
        layer = self.layers[i]
        in_bytes = budget.parameters is None
        if (i, in_bytes) not in self._offers:
            self._offers[i, in_bytes] = self._offered(i, in_bytes=in_bytes)
        highest = math.inf if budget.max_rank is None else budget.max_rank
        return self._offers[i, in_bytes].of_ranks(min(budget.min_rank, layer.rank), highest)

    def chosen(self, budget: Budget) -> tuple[list[Candidate], bool]:
        """Return the candidate of each layer, not made yet, and whether none has a nearer one.

        Raises `BudgetError` if a rank that every layer must have costs too much.
        """
        offers = [self.offers(i, budget) for i in range(len(self.layers))]
        if _is_of_each_layer(budget):
            choice = [self._choice_alone(i, budget) for i in range(len(self.layers))]
        else:
            options = [
                PartOptions(self._costs(layer, offer, budget), offer.losses)
                for offer, layer in zip(offers, self.layers, strict=True)
            ]
            cost = math.inf if budget.cost is None else budget.cost
            try:
                choice = within_cost(options, cost)
            except BudgetError as error:
                unit = "bytes" if budget.counts_bytes else "parameters"
                least = math.fsum(option.costs.min() for option in options)
                raise BudgetError(
                    f"a rank of {budget.min_rank} in every layer takes {least:,.0f} {unit}, and "
                    f"{cost:,.0f} are allowed: allow more, or layers to be left out"
                ) from error
        is_nearest = all(
            offer.losses[k] <= offer.losses.min() for offer, k in zip(offers, choice, strict=True)
        )
        return [offer.make(k) for offer, k in zip(offers, choice, strict=True)], is_nearest

    def _choice_alone(self, i: int, budget: Budget) -> int:
        """Return which offer a layer takes by a tolerance of its own, or a rank."""
        max_loss = (budget.layer_rtol or 0.0) ** 2 * self.layers[i].squared_norm
        return _smallest_within(self.offers(i, budget), max_loss)

    def made(self, i: int, candidate: Candidate) -> Materialized:
        """Return a candidate with its factors, made and measured once."""
        if (i, candidate) not in self._made:
            self._made[i, candidate] = _made(self.layers[i], candidate, self.cache)
        return self._made[i, candidate]

    def made_within(self, i: int, candidate: Candidate, budget: Budget) -> Materialized:
        """Return the candidate, or the next larger one that is within the tolerance as written."""
        made = self.made(i, candidate)
        if budget.layer_rtol is None:
            return made
        max_loss = budget.layer_rtol**2 * self.layers[i].squared_norm
        offers = self.offers(i, budget)
        asked = max_loss
        for left in range(MAX_TRIES - 1, 0, -1):
            found = made.candidate.squared_error
            if found <= max_loss * (1.0 + 1e-12):
                return made
            asked = 0.0 if left == 1 else min(0.97 * asked, asked * max_loss / found)
            other = self.made(i, offers.make(_smallest_within(offers, asked)))
            if other.candidate.squared_error < found:
                made = other
        return made

    def _offered(self, i: int, *, in_bytes: bool) -> Offers:
        """Return what a layer may become in some storages.

        Where parameters are counted only in the widest of them, which is the nearest.
        """
        layer = self.layers[i]
        floats = [name for name in self.storages if name not in INTEGER_BITS]
        max_bits = max(INTEGER_BITS.get(name, 0) for name in self.storages)
        own_pair = self._own_pairs[i]
        if layer.squared_norm == 0.0:
            return _in_floats(layer, floats[0] if floats else "float16")
        fits = bool(floats) and float(layer.sigma[0]) <= precision(floats[0]).largest ** 2
        parts = [_left_out(layer) if max_bits and not fits else _in_floats(layer, floats[0])]
        if in_bytes and max_bits:
            most = max(MAX_CODE_SIZES, MAX_SIZES // len(self.layers))
            parts.append(_in_bits(layer, max_bits, most))
        elif max_bits and not fits:
            parts.append(_of_one_width(layer, max_bits))
        if own_pair is not None and (in_bytes or not fits):
            parts.append(own_pair)
        return Offers.joined(parts)

    def _costs(self, layer: Layer, offers: Offers, budget: Budget) -> Doubles:
        """Return the costs of offers in the unit of a budget."""
        if budget.counts_bytes:
            return offers.bytes
        return np.asarray(offers.ranks * sum(layer.shape), dtype=np.float64)


def choose_storage(table: PlainTable, budget: Budget) -> FittedLayers:
    """Choose rank and storage of each layer for a budget of any kind, and make their factors.

    Parameters
    ----------
    table : PlainTable
        It serves any number of budgets.
    budget : Budget
        Where bytes are counted or errors bounded, the fewest bytes decide between storages; where
        parameters are counted, the nearest of the storages.

    Raises
    ------
    BudgetError
        If a rank that every layer must have costs too much.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.lora.search.caches import SpillCache
    >>> from lsrdecomp.lora.search.layers import Layer
    >>> from lsrdecomp.lora.search.plan import Budget
    >>> from lsrdecomp.targets.target import LowRank
    >>> layer = Layer.of("square", LowRank(np.eye(64)[:, :4], np.eye(64)[:4]))
    >>> table = PlainTable([layer], ["float16", "int8", "int4"], SpillCache())
    >>> chosen = choose_storage(table, Budget(bytes=200.0)).chosen[0].candidate
    >>> chosen.storage, chosen.bytes <= 200
    ('int2-3', True)
    """
    # A LoRA of zeros is written as one.
    if budget.min_rank == 0 and not any(layer.squared_norm for layer in table.layers):
        budget = replace(budget, min_rank=1)
    candidates, is_nearest = table.chosen(budget)
    made = [table.made_within(i, each, budget) for i, each in enumerate(candidates)]
    return FittedLayers(tuple(made), None, is_nearest, solved_layers=0)


def _is_of_each_layer(budget: Budget) -> bool:
    """Return whether a budget bounds each layer alone, by a tolerance or a rank."""
    return budget.layer_rtol is not None or budget.parameters == math.inf


def _made(layer: Layer, candidate: Candidate, cache: SpillCache) -> Materialized:
    """Make the factors of a candidate, and measure them in the Frobenius norm.

    As `candidates.materialize`, without what only LSR products need. Codes are the nearest ones to
    singular vectors: to fit either side to the other's codes lowers the error by 1 % and doubles
    the time.
    """
    if isinstance(candidate, DropCandidate):
        return Materialized(candidate, None)
    stored: FloatProduct | SpectralCode
    if isinstance(candidate, LowRankCandidate) and candidate.bits:
        is_own = candidate.unrotated
        rank = candidate.rank
        vectors = own_vectors(layer) if is_own else layer_svd(layer, rank, single=True)
        levels = list(zip(candidate.bits, candidate.groups, strict=True))
        stored, loss = ComponentCodes(layer, vectors).code(levels)
    elif isinstance(candidate, KeepCandidate):
        stored, loss = _rounded(layer, candidate.storage, None)
        if loss > 0.0:  # singular vectors may lose less by rounding, or fit the type if it did not
            other, other_loss = _rounded(layer, candidate.storage, layer.rank)
            if other_loss < loss:
                stored, loss = other, other_loss
    else:
        stored, loss = _rounded(layer, candidate.storage, candidate.rank)
    if loss == math.inf:
        stored_pair(*layer.truncated(candidate.rank), candidate.storage)  # says what does not fit
    summary = StoredSummary(
        str(stored.shape),
        (1, 1),
        _condition(layer.sigma[: candidate.rank]),
        stored.parameters,
        stored.bytes,
        stored.storage,
    )
    made = replace(candidate, bytes=stored.bytes, storage=stored.storage, squared_error=float(loss))
    return Materialized(made, cache.put(stored), summary)


def _rounded(layer: Layer, storage: str, rank: int | None) -> tuple[FloatProduct, float]:
    """Return a truncation, or the pair, in a floating type, and its squared error.

    That is infinite if the type does not hold it.
    """
    (left, right), error = layer.rounded(rank, numpy_dtype(storage))
    return FloatProduct((left[None],), (right[None],), storage), error**2


def _condition(sigma: Doubles) -> float:
    """Return γ of the pair U√σ, √σVᵀ, see `SeparatedProduct.condition`."""
    energy = float(np.sum(sigma**2))
    return math.sqrt(2.0 * float(np.sum(sigma) * sigma[0]) / energy) if energy > 0.0 else 1.0


def _smallest_within(offers: Offers, max_loss: float) -> int:
    """Return the offer of fewest bytes within a loss, or else that of least loss."""
    within = np.flatnonzero(offers.losses <= max_loss)
    if len(within) == 0:
        return int(np.lexsort((offers.bytes, offers.losses))[0])
    order = np.lexsort((offers.losses[within], offers.bytes[within]))
    return int(within[order[0]])


def _left_out(layer: Layer) -> Offers:
    """Return the offer to leave a layer out."""
    return Offers(
        np.zeros(1, dtype=np.int64),
        np.zeros(1),
        np.array([layer.squared_norm]),
        lambda _: drop(layer),
    )


def _in_floats(layer: Layer, storage: str) -> Offers:
    """Return truncated SVDs of every rank in a floating type; of rank 0 the layer is left out."""
    sigma = layer.sigma
    # What rounding both sides of a component adds: relative to its size, and near the smallest
    # numbers of the type as much as these are apart.
    relative = 2.0 * FLOAT_NOISE * precision(storage).unit_roundoff ** 2
    facts: Any = ml_dtypes.finfo(numpy_dtype(storage))  # type: ignore[no-untyped-call]
    spacing = float(facts.smallest_subnormal)
    rounding = relative * sigma**2 + sigma * sum(layer.shape) * spacing**2 / 12.0
    losses = np.asarray(tail_norms(sigma)) ** 2
    losses[1:] += np.cumsum(rounding)
    ranks = np.arange(len(losses))
    n_bytes = np.ceil(ranks * sum(layer.shape) * precision(storage).bytes)

    def make(rank: int) -> Candidate:
        if rank == 0:
            return drop(layer)
        if rank == layer.rank:
            return replace(keep(layer), storage=storage, bytes=int(n_bytes[rank]))
        return LowRankCandidate(
            parameters=rank * sum(layer.shape),
            squared_error=float(losses[rank]),
            storage=storage,
            bytes=int(n_bytes[rank]),
            rank=rank,
        )

    return Offers(ranks, n_bytes, losses, make)


def _in_bits(layer: Layer, max_bits: int, most: int) -> Offers:
    """Return codes of the components in as many bits as steps of water-filling give them.

    Of more steps than the most, some are left out, evenly.
    """
    filling = water_fill(layer, max_bits)
    steps = np.arange(len(filling))
    if len(steps) > most:
        steps = np.unique(np.linspace(0, len(steps) - 1, most).astype(np.int64))
    ranks = np.cumsum(filling.heights == 1)[steps]
    n_bytes = filling.bytes[steps] + (LEVEL_COST - COMPONENT_BYTES) * ranks + 1.0
    losses = filling.losses[steps]

    def make(k: int) -> Candidate:
        levels = [level for level in filling[int(steps[k])] if level[0]]
        return _codes(layer, levels, float(n_bytes[k]), float(losses[k]))

    return Offers(ranks, n_bytes, losses, make)


def _of_one_width(layer: Layer, bits: int) -> Offers:
    """Return codes of the largest components in one width, for every rank."""
    sigma = layer.sigma
    energies = sigma[sigma > 0.0] ** 2
    ranks = np.arange(1, len(energies) + 1)
    noise = 2.0 * GAUSSIAN_ERROR[bits][GROUPS.index(64)]
    kept = np.cumsum(energies)
    losses = np.maximum(float(kept[-1]) - kept, 0.0) + noise * kept

    def make(k: int) -> Candidate:
        return _codes(layer, equal_width_levels(layer, bits, k + 1), 0.0, float(losses[k]))

    # Bytes only break ties here.
    sizes = np.asarray(ranks * sum(layer.shape), dtype=np.float64)
    return Offers(ranks, sizes, losses, make)


def _own_pair(layer: Layer) -> Offers:
    """Return codes of eight bits of the pair's own columns and rows, for each of `GROUPS`."""
    rank, losses = own_pair_losses(layer)
    n_bytes = []
    for group in GROUPS:
        steps = sum(step_count(size, group) for size in layer.shape)
        n_bytes.append(rank * (sum(layer.shape) + steps + LEVEL_COST) + 1.0)

    def make(k: int) -> Candidate:
        levels = [(MAX_BITS, GROUPS[k])] * rank
        return replace(_codes(layer, levels, n_bytes[k], losses[k]), unrotated=True)

    ranks = np.full(len(GROUPS), rank)
    return Offers(ranks, np.array(n_bytes), np.array(losses), make)


def _codes(
    layer: Layer, levels: Sequence[tuple[int, int]], n_bytes: float, loss: float
) -> LowRankCandidate:
    """Return the candidate of codes at the levels of the leading components."""
    bits = tuple(width for width, _ in levels)
    return LowRankCandidate(
        parameters=len(levels) * sum(layer.shape),
        squared_error=loss,
        storage=f"int{max(bits)}",
        bytes=int(n_bytes),
        rank=len(levels),
        bits=bits,
        groups=tuple(group for _, group in levels),
    )
