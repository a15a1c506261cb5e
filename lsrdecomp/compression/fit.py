"""fit_layers: candidates for every layer, one budget over all of them, the chosen ones polished, measured as stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lsrdecomp.compression.allocate import Choice, Options, total_loss, within_cost, within_loss
from lsrdecomp.compression.candidates import (
    Candidate,
    Form,
    Layer,
    direct_candidates,
    drop,
    keep,
    low_rank_candidates,
    lsr_candidate,
    lsr_candidates,
    solve_together,
    stored_as,
)
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.search import Search, choose_configurations
from lsrdecomp.compression.spectral import water_filled_candidates
from lsrdecomp.errors import BudgetError
from lsrdecomp.product import SeparatedProduct
from lsrdecomp.shape import KroneckerShape
from lsrdecomp.targets import LowRank
from lsrdecomp.weights import NormWeights


class HasWeights(Protocol):
    """Statistics of one layer, as calibration stores them."""

    def weights(self) -> NormWeights: ...


@dataclass(frozen=True, slots=True)
class Budget:
    """What all layers together may cost, or lose; exactly one of these.

    Parameters
    ----------
    parameters : float, optional
        Numbers in all factors.
    ratio : float, optional
        The same, as "this many times fewer than the LoRA".
    bytes : float, optional
        Bytes of all factors as stored, and of whatever ``overhead`` adds.
    rtol : float, optional
        (Σ‖ΔW − ΔŴ‖²)^½ / (Σ‖ΔW‖²)^½ over all layers, in the norm of the layers.
    kl : float, optional
        Nats: ½ Σ‖G^½ (ΔW − ΔŴ) C^½‖², the second-order estimate of the divergence; for K-FAC weights only.
    layer_rtol : float, optional
        ‖ΔW − ΔŴ‖ / ‖ΔW‖ of every layer on its own, in its norm.
    """

    parameters: float | None = None
    ratio: float | None = None
    bytes: float | None = None
    rtol: float | None = None
    kl: float | None = None
    layer_rtol: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            raise BudgetError(f"one budget is needed, got {given or 'none'}")
        name, value = next(iter(given.items()))
        if not (math.isfinite(value) and value >= 0.0) or (name == "ratio" and value == 0.0):
            raise BudgetError(f"a budget must be finite and not negative, got {name}={value}")

    @property
    def counts_bytes(self) -> bool:
        return self.bytes is not None

    def cost_limit(self, layers: Sequence[Layer]) -> float | None:
        """The most that may be spent; None if the error is bounded instead."""
        if self.ratio is not None:
            return math.fsum(layer.parameters for layer in layers) / self.ratio
        return self.bytes if self.bytes is not None else self.parameters

    def loss_limit(self, layers: Sequence[Layer]) -> float | None:
        """The largest sum of squared errors; None if the size is bounded instead."""
        if self.rtol is not None:
            return self.rtol**2 * math.fsum(layer.squared_norm for layer in layers)
        return None if self.kl is None else 2.0 * self.kl


@dataclass(frozen=True, slots=True)
class FittedLayer:
    """What one layer became."""

    layer: Layer
    candidate: Candidate  # as stored; its error is in the layer's norm

    @property
    def form(self) -> Form | None:
        """The factors as a reader gets them; None where the layer is dropped."""
        return None if self.candidate.build is None else self.candidate.build()

    @property
    def relative_error(self) -> float:
        """‖G^½ (ΔW − ΔŴ) C^½‖ / ‖G^½ ΔW C^½‖."""
        size = self.layer.squared_norm
        return math.sqrt(self.candidate.squared_error / size) if size > 0.0 else 0.0

    def pair(self) -> tuple[Any, Any]:
        """(B, A) of ΔŴ = B A: one zero column where the layer is dropped. Raises for a direct sum."""
        form = self.form
        if form is None:
            left, right = self.layer.pair.left, self.layer.pair.right
            return 0.0 * left[:, :1], 0.0 * right[:1, :]
        if not isinstance(form, SeparatedProduct):
            raise BudgetError(f"{self.layer.name}: a direct Kronecker sum is not a product of thin factors")
        return form.to_lora()


@dataclass(frozen=True, slots=True)
class Fit:
    """All layers under one budget."""

    layers: tuple[FittedLayer, ...]
    low_rank_error: float | None  # the best truncated SVD found for the same budget and norm; None: none fits

    @property
    def parameters(self) -> int:
        return sum(fitted.candidate.parameters for fitted in self.layers)

    @property
    def bytes(self) -> int:
        return sum(fitted.candidate.bytes for fitted in self.layers)

    @property
    def relative_error(self) -> float:
        """Over all layers, in their norm."""
        size = math.fsum(fitted.layer.squared_norm for fitted in self.layers)
        lost = math.fsum(fitted.candidate.squared_error for fitted in self.layers)
        return math.sqrt(lost / size) if size > 0.0 else 0.0


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
        if name not in statistics:
            raise BudgetError(f"{name}: no statistics for this layer; calibrate with this adapter's target modules")
        found = statistics[name]
        layers.append(Layer(name, pair, found if isinstance(found, NormWeights) else found.weights()))
    return layers


def fit_layers(
    layers: Sequence[Layer],
    budget: Budget,
    *,
    search: Search | None = None,
    storages: Sequence[str] = ("float32",),
    overhead: Callable[[Candidate], float] | None = None,
    on_step: Callable[[str], Any] | None = None,
) -> Fit:
    """Choose for every layer what it becomes, under one budget over all layers.

    Parameters
    ----------
    layers : sequence of Layer
        See `make_layers`.
    budget : Budget
    search : Search, optional
    storages : sequence of str
        Types the factors may be stored in; more than one is of use when bytes are counted. With int8 or int4 among
        them, truncated SVD in water-filled bits takes part.
    overhead : callable, optional
        Bytes of a candidate beyond its factors, such as header entries.
    on_step : callable, optional
        Called with a few words before each part of the work.

    Returns
    -------
    Fit
        Its error is never above that of the best truncated SVD found for the same budget and norm
        (``low_rank_error``): that one is among the starting points of the allocation, and no step makes it worse.

    Raises
    ------
    BudgetError
        If the budget cannot be met; says what is reachable.
    """
    return prepare(layers, budget, search=search, storages=storages, on_step=on_step).fit(budget, overhead)


def prepare(
    layers: Sequence[Layer],
    budget: Budget,
    *,
    search: Search | None = None,
    storages: Sequence[str] = ("float32",),
    on_step: Callable[[str], Any] | None = None,
) -> Prepared:
    """All candidates of all layers, stored, ready for budgets of the kind of ``budget``; arguments as `fit_layers`."""
    search = search or Search()
    say = on_step or (lambda words: None)
    table = _candidates(layers, budget, search, say)
    say("rounding to storage")
    stored = [_stored(layer, found, storages) for layer, found in zip(layers, table, strict=True)]
    return Prepared(layers, stored, search, storages, say)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Candidates of all layers; fits of several budgets share them."""

    layers: Sequence[Layer]
    table: list[list[Candidate]]
    search: Search
    storages: Sequence[str]
    say: Callable[[str], Any]

    def fit(self, budget: Budget, overhead: Callable[[Candidate], float] | None = None) -> Fit:
        """Allocate, polish what was chosen, allocate again; see `fit_layers`."""
        choice, baseline = _allocate(self.layers, self.table, budget, overhead)
        for _ in range(2):
            self.say("polishing")
            if not _polish(self.layers, self.table, choice, self.search, self.storages):
                break
            choice, again = _allocate(self.layers, self.table, budget, overhead, choice)
            baseline = again if baseline is None else baseline
        fitted = [FittedLayer(layer, self.table[i][choice[i]]) for i, layer in enumerate(self.layers)]
        return Fit(tuple(fitted), baseline)


def _candidates(
    layers: Sequence[Layer], budget: Budget, search: Search, say: Callable[[str], Any]
) -> list[list[Candidate]]:
    limit = None if budget.counts_bytes else budget.cost_limit(layers)
    table = [[drop(layer), keep(layer)] for layer in layers]
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(layer.kind, []).append(i)
        if search.low_rank:
            table[i] += low_rank_candidates(layer, math.inf if limit is None else limit)
        if search.direct:
            shape = KroneckerShape.balanced(layer.pair.shape)
            most = max(1, layer.parameters // shape.parameters(1))
            table[i] += direct_candidates(layer, shape, {2**k for k in range(12) if 2**k <= most})
    for places in kinds.values():
        group = [layers[i] for i in places]
        m, n = group[0].pair.shape
        most = max(layer.parameters for layer in group)
        if limit is not None:
            most = min(most, int(limit))
        say(f"shapes for {len(group)} layers of {m}×{n}")
        configurations = choose_configurations(group, search, most)
        say(f"solving {len(configurations)} shapes for {len(group)} layers of {m}×{n}")
        for i, found in zip(places, lsr_candidates(group, configurations, search.solver), strict=True):
            table[i] += found
    return table


def _stored(layer: Layer, candidates: Sequence[Candidate], storages: Sequence[str]) -> list[Candidate]:
    """Every candidate that nothing cheaper beats, in every storage that suits it."""
    found = []
    for candidate in candidates:
        if candidate.structure == "LSR" and _beaten(candidate, candidates):
            continue
        for storage in storages:
            if storage not in INTEGER_BITS or candidate.structure in ("LSR", "drop"):
                found.append(stored_as(layer, candidate, storage))
    if any(storage in INTEGER_BITS for storage in storages):
        found += water_filled_candidates(layer)
    return found


def _beaten(candidate: Candidate, others: Sequence[Candidate]) -> bool:
    return any(
        other.structure == "LSR"
        and other.parameters <= candidate.parameters
        and other.squared_error < candidate.squared_error
        for other in others
    )


def _allocate(
    layers: Sequence[Layer],
    table: Sequence[Sequence[Candidate]],
    budget: Budget,
    overhead: Callable[[Candidate], float] | None,
    known: Choice | None = None,
) -> tuple[Choice, float | None]:
    """The choice for all candidates, at least as good as for truncated SVD alone, and the error of the latter."""

    if budget.layer_rtol is not None:
        return [_within(layer, row, budget.layer_rtol) for layer, row in zip(layers, table, strict=True)], None

    def cost(candidate: Candidate) -> float:
        if not budget.counts_bytes:
            return candidate.parameters
        return candidate.bytes + (0.0 if overhead is None else overhead(candidate))

    options = [Options.of([cost(c) for c in row], [c.squared_error for c in row]) for row in table]
    plain = [[k for k, c in enumerate(row) if c.structure in ("drop", "low rank", "keep")] for row in table]
    narrow = [Options(o.costs[k], o.losses[k]) for o, k in zip(options, plain, strict=True)]
    spend, lose = budget.cost_limit(layers), budget.loss_limit(layers)
    starts = [] if known is None else [known]
    baseline = None
    try:
        picked = within_cost(narrow, spend) if spend is not None else within_loss(narrow, lose or 0.0)
        start = [row[k] for row, k in zip(plain, picked, strict=True)]
        starts.append(start)
        size = math.fsum(layer.squared_norm for layer in layers)
        baseline = math.sqrt(total_loss(options, start) / size) if size > 0.0 else 0.0
    except BudgetError:
        pass  # plain low rank cannot meet it; the whole family may
    if spend is not None:
        return within_cost(options, spend, starts), baseline
    return within_loss(options, lose or 0.0, starts), baseline


def _within(layer: Layer, candidates: Sequence[Candidate], rtol: float) -> int:
    """The fewest parameters within a relative error; where none is, the least error."""
    allowed = rtol**2 * layer.squared_norm
    good = [k for k, candidate in enumerate(candidates) if candidate.squared_error <= allowed]
    if good:
        return min(good, key=lambda k: (candidates[k].parameters, candidates[k].squared_error))
    return min(range(len(candidates)), key=lambda k: candidates[k].squared_error)


def _polish(
    layers: Sequence[Layer], table: list[list[Candidate]], choice: Choice, search: Search, storages: Sequence[str]
) -> bool:
    """More sweeps for the chosen LSR products, in place; whether there were any left to polish."""
    groups: dict[Any, list[int]] = {}
    for i, picked in enumerate(choice):
        candidate = table[i][picked]
        if candidate.structure == "LSR" and not candidate.polished:
            groups.setdefault((layers[i].kind, candidate.configuration), []).append(i)
    for (_, (shape, ranks)), places in groups.items():
        starts = [exact for i in places if (exact := table[i][choice[i]].exact) is not None]
        solved = solve_together([layers[i] for i in places], shape, ranks, search.polish, starts)
        for i, solution in zip(places, solved, strict=True):
            better = replace(lsr_candidate(solution), polished=True)
            for k, old in enumerate(table[i]):
                if old.structure == "LSR" and old.configuration == (shape, ranks) and not old.polished:
                    new = stored_as(layers[i], better, old.storage)
                    table[i][k] = new if new.squared_error <= old.squared_error else replace(old, polished=True)
    return bool(groups)
