"""A search over all layers of an adapter, and what any budget takes from it.

Three stages. Every layer is solved at a short ladder of shapes; a budget chooses one candidate a layer; while they pay,
neighbours of what it chose are tried. What is chosen is then refined and measured in the whole norm. All that was
solved stays in the table, so that the next budget starts from it.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lsrdecomp.compression.budget import Budget
from lsrdecomp.compression.candidates import (
    Candidate,
    Configuration,
    Lsr,
    Price,
    Structure,
    direct_candidates,
    drop,
    keep,
    low_rank_candidates,
    lsr_candidate,
    lsr_candidates,
    solve_together,
)
from lsrdecomp.compression.choice import Cost, allocate, exchange_rate
from lsrdecomp.compression.ladder import Ranks, ladder, more_terms, neighbours, parameters
from lsrdecomp.compression.layers import Layer, batches
from lsrdecomp.compression.materialize import Materialized, materialize, priced_as
from lsrdecomp.compression.progress import Counter, OnStep
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.search import Search, choose_configurations
from lsrdecomp.compression.search_store import SearchStore
from lsrdecomp.compression.solve import Answer, Effort, Request, Task, run
from lsrdecomp.compression.spill_cache import SpillCache
from lsrdecomp.compression.water_filling import unrotated_candidates, water_filled_candidates
from lsrdecomp.formats.allocation import Choice, Options
from lsrdecomp.kronecker.shape import KroneckerShape, ProductShape
from lsrdecomp.targets.base import LowRank
from lsrdecomp.targets.weights import NormWeights

SHARE = 8.0
"""Most parameters of a layer on the ladder, in units of what the budget gives a layer on average."""

PAYS = 0.02
"""A neighbour is solved for all layers of its group if on a few of them it lowers loss and cost, weighed against each
other as the budget does, by this share."""

ADOPTED = 2
"""Most neighbours of one chosen shape that are solved for all layers of its group."""

GROUPS = 3
"""Most groups of layers of one chosen shape whose neighbours are tried in a round."""

SMALLEST = 0.04
"""Smallest group of layers of one chosen shape whose neighbours are tried, as a share of all layers."""

NEAR = 1.15
"""Candidates this factor above the convex hull of a layer's errors are still tried in integers."""


@dataclass(eq=False)
class _Entry:
    """A candidate before rounding, and its versions in the storages."""

    exact: Candidate
    priced: dict[bool, list[Candidate]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resources:
    """Where a search solves, what it keeps, whom it tells."""

    workers: int = 1
    device: str | None = None
    store: SearchStore | None = None
    on_step: OnStep | None = None


@dataclass(frozen=True, slots=True)
class _Draw:
    """A budget, and which candidates may be taken under it."""

    budget: Budget
    cost: Cost
    measured: bool  # whether errors count as rounded, which matters where they are bounded
    allowed: Callable[[Candidate], bool] | None
    trusted: bool = False  # whether only errors in the whole norm count

    def allows(self, candidate: Candidate) -> bool:
        return candidate.structure == Structure.DROP or self.allowed is None or self.allowed(candidate)


@dataclass(frozen=True, slots=True)
class Fitted:
    """All layers under one budget."""

    chosen: tuple[Materialized, ...]
    low_rank_error: float | None  # the best truncated SVD found for the same budget and norm; None: none fits


class Searched:
    """Candidates of all layers; any number of budgets can be drawn from them.

    Made by `search_layers`. `fit` draws a budget: by default it still tries neighbours of what that budget chooses, and
    refines what it takes; with ``solve=False`` it only allocates, measures and rounds, a few milliseconds a layer.
    """

    def __init__(
        self, layers: Sequence[Layer], search: Search, storages: Sequence[str], cache: SpillCache, resources: Resources
    ) -> None:
        self.layers, self.search, self.storages, self.cache = layers, search, tuple(storages), cache
        self.resources = resources
        self._table: list[list[_Entry]] = [[] for _ in layers]
        self._coded: list[list[_Entry]] = [[] for _ in layers]  # low rank in few bits, where integers are asked for
        self._exact = [True] * len(layers)  # whether errors in the table are those of the whole norm
        self._tried: set[tuple[Any, ...]] = set()

    # -- the ladder ----------------------------------------------------------------------------------------------------

    def solve_ladder(self, limits: Sequence[float | None]) -> None:
        """Every layer at the shapes of the ladder, or of a full search, for budgets of these costs (None: any)."""
        limit = None if any(one is None for one in limits) else max(one for one in limits if one is not None)
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, layer in enumerate(self.layers):
            self._table[i] = [_Entry(candidate) for candidate in self._plain(layer, limit)]
            if layer.squared_norm > 0.0 and min(layer.shape) > 1:
                groups.setdefault(layer.kind, []).append(i)
                self._exact[i] = self.search.probes > 0 or layer.is_leading
                _ = layer.leading_entries, layer.dense_entries  # all while the layer is open
        if self.search.probes > 0:
            self._solve_probed(groups, limit)
            return
        requests = {kind: self._requests(places, limit) for kind, places in groups.items()}
        count = sum(len(groups[kind]) * len(found) for kind, found in requests.items())
        counter = Counter(self.resources.on_step, "solving shapes", count, "layers × shapes")
        tasks = (
            self._task(part, requests[kind])
            for kind, places in groups.items()
            if requests[kind]
            for part in self._parts(places)
        )
        self._run(tasks, counter, self._effort)

    def _requests(self, places: Sequence[int], limit: float | None) -> list[Request]:
        """The ladder of layers of one size, as far as a budget could want it."""
        group = [self.layers[i] for i in places]
        most = max(layer.parameters for layer in group) / 2
        if limit is not None:
            most = min(most, limit, SHARE * limit * group[0].parameters / self._all_parameters)
        rank = max(layer.rank for layer in group)
        chains = ladder(group[0].shape, rank, self.search.orders, self.search.inner_rank, most)
        return [Request(chain.shape, chain.terms) for chain in chains]

    def _solve_probed(self, groups: dict[tuple[object, ...], list[int]], limit: float | None) -> None:
        """The full search: shapes probed on a few layers, the best of each size solved for all."""
        counter = Counter(
            self.resources.on_step, "probing and solving shapes", sum(map(len, groups.values())), "layers"
        )
        for places in groups.values():
            group = [self.layers[i] for i in places]
            most = max(layer.parameters for layer in group)
            configurations = choose_configurations(group, self.search, most if limit is None else min(most, int(limit)))
            for part in batches(group):
                solved = lsr_candidates(group[part], configurations, self.search.solver, self.cache)
                for i, products in zip(places[part], solved, strict=True):
                    self._table[i] += [_Entry(product) for product in products]
                counter.add(len(group[part]))

    def _plain(self, layer: Layer, limit: float | None) -> Iterator[Candidate]:
        yield drop(layer)
        yield keep(layer)
        if self.search.low_rank:
            yield from low_rank_candidates(layer, math.inf if limit is None else limit)
        if self.search.direct:
            shape = KroneckerShape.balanced(layer.shape)
            most = max(1, layer.parameters // shape.parameters(1))
            yield from direct_candidates(layer, shape, {2**k for k in range(12) if 2**k <= most}, self.cache)

    # -- a budget ------------------------------------------------------------------------------------------------------

    def fit(
        self,
        budget: Budget,
        overhead: Callable[[Candidate], float] | None = None,
        *,
        solve: bool = True,
        allowed: Callable[[Candidate], bool] | None = None,
    ) -> Fitted:
        """What every layer becomes under one budget over all of them.

        Parameters
        ----------
        budget : Budget
        overhead : callable, optional
            Bytes of a candidate beyond its factors, such as header entries; counts where bytes are counted.
        solve : bool
            Whether to try neighbours and refine what was chosen; without, only what is in the table.
        allowed : callable, optional
            Which candidates may be taken, in their storages; absent, all. Dropping a layer always may.

        Raises
        ------
        BudgetError
            If the budget cannot be met; says what is reachable.
        """
        measured = budget.loss_limit(self.layers) is not None or budget.layer_rtol is not None
        draw = _Draw(budget, Cost(budget, overhead), measured, allowed)
        rows, choice, baseline = self._allocated(draw)
        if solve:
            for _ in range(self.search.rounds if self.search.probes == 0 and not budget.layer_rtol else 0):
                picked = [row[k][0] for row, k in zip(rows, choice, strict=True)]
                if not self._explore(picked, exchange_rate(rows, choice)):
                    break
                rows, choice, _ = self._allocated(draw)
            for _ in range(3):
                if not self._refine([row[k][0] for row, k in zip(rows, choice, strict=True)]):
                    break
                rows, choice, _ = self._allocated(draw)
            rows, choice, _ = self._allocated(replace(draw, trusted=True))
        chosen = [row[k][1] for row, k in zip(rows, choice, strict=True)]
        pairs = zip(self.layers, chosen, strict=True)
        return Fitted(tuple(materialize(layer, candidate, self.cache) for layer, candidate in pairs), baseline)

    def _allocated(self, draw: _Draw) -> tuple[list[list[tuple[_Entry, Candidate]]], Choice, float | None]:
        """Rows of entries in their storages, the choice among them, and the error of truncated SVD alone."""
        rows = [list(self._row(i, draw)) for i in range(len(self.layers))]
        table = [[candidate for _, candidate in row] for row in rows]
        return rows, *allocate(self.layers, table, draw.budget, draw.cost)

    def _row(self, i: int, draw: _Draw) -> Iterator[tuple[_Entry, Candidate]]:
        integers = any(storage in INTEGER_BITS for storage in self.storages)
        for entry in _worth_trying(self._table[i], integers):
            if draw.trusted and isinstance(entry.exact, Lsr) and not (entry.exact.refined or self._exact[i]):
                continue
            if draw.measured not in entry.priced:
                entry.priced[draw.measured] = [
                    priced_as(self.layers[i], entry.exact, storage, measured=draw.measured)
                    for storage in self.storages
                    if storage not in INTEGER_BITS or entry.exact.structure in (Structure.LSR, Structure.DROP)
                ]
            yield from ((entry, candidate) for candidate in entry.priced[draw.measured] if draw.allows(candidate))
        if integers and not self._coded[i]:
            found = [*water_filled_candidates(self.layers[i]), *unrotated_candidates(self.layers[i])]
            most = max(INTEGER_BITS[storage] for storage in self.storages if storage in INTEGER_BITS)
            self._coded[i] = [_Entry(one) for one in found if max(one.bits) <= most]
        yield from ((entry, entry.exact) for entry in self._coded[i] if draw.allows(entry.exact))

    # -- neighbours ----------------------------------------------------------------------------------------------------

    def _explore(self, chosen: Sequence[_Entry], rate: float) -> bool:
        """Solve for neighbours of the chosen shapes where they pay; whether anything new was solved.

        ``rate`` is the loss that one parameter removes at the margin of the budget.
        """
        if rate <= 0.0:
            return False
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, entry in enumerate(chosen):
            if isinstance(entry.exact, Lsr):
                groups.setdefault((self.layers[i].kind, entry.exact.shape), []).append(i)
        least = len(self.layers) * SMALLEST
        worthwhile = (item for item in groups.items() if len(item[1]) >= least)
        largest = sorted(worthwhile, key=lambda item: -len(item[1]))[:GROUPS]
        terms = self._more_terms(chosen, [places for _, places in largest])
        trials = [task for key, places in largest for task in self._trials(key, chosen, places)]
        count = sum(len(task.places) * len(task.requests) for task in (*terms, *trials))
        counter = Counter(self.resources.on_step, "trying neighbours", count, "layers × shapes")
        self._run(iter(terms), counter, self._effort)
        adopted: list[Task] = []
        for task, answers in self._answers(iter(trials), counter):
            now = [_product_of(chosen[i]) for i in task.places]
            before = sum(one.squared_error + rate * one.parameters for one in now)
            gains = []
            for answer in answers:
                after = answer.errors**2 + rate * parameters((answer.shape, answer.ranks))
                pairs = zip(now, after.tolist(), strict=True)
                gain = sum(max(0.0, one.squared_error + rate * one.parameters - value) for one, value in pairs)
                gains.append((gain / before, answer))
            self._add(task, answers)
            members = groups[self.layers[task.places[0]].kind, now[0].shape]
            for gain, answer in sorted(gains, key=lambda pair: -pair[0])[:ADOPTED]:
                if gain > PAYS:
                    requests = [Request(answer.shape, _around(answer.ranks))]
                    adopted += [self._task(part, requests) for part in self._parts(members)]
        counter = Counter(self.resources.on_step, "solving neighbours", sum(len(t.places) for t in adopted), "layers")
        self._run(iter(adopted), counter, self._effort)
        return bool(terms or adopted)

    def _more_terms(self, chosen: Sequence[_Entry], groups: Sequence[Sequence[int]]) -> list[Task]:
        """One term more for the layers of each group, from where they stand."""
        same: dict[tuple[Any, ...], list[int]] = {}
        for places in groups:
            for i in places:
                held = _product_of(chosen[i])
                known = [
                    e.exact.ranks for e in self._table[i] if isinstance(e.exact, Lsr) and e.exact.shape == held.shape
                ]
                fresh = tuple(r for r in more_terms(held.ranks) if r not in known)
                if fresh:
                    same.setdefault((self.layers[i].kind, held.shape, held.ranks, fresh), []).append(i)
        tasks = []
        for (_, shape, _, fresh), places in same.items():
            for part in self._parts(places):
                starts = [_product_of(chosen[i]).product() for i in part]
                tasks.append(self._task(part, [Request(shape, fresh, starts)]))
        return tasks

    def _trials(self, key: tuple[Any, ...], chosen: Sequence[_Entry], places: Sequence[int]) -> list[Task]:
        """Neighbouring shapes of a group, on a few of its layers from all depths of the network."""
        kind, shape = key
        ranks, _ = Tally(_product_of(chosen[i]).ranks for i in places).most_common(1)[0]
        some = list(places)[:: max(1, len(places) // self.search.probe_layers)][: self.search.probe_layers]
        rank = min(max(self.layers[i].rank for i in places), self.search.inner_rank)
        requests = []
        for other, terms in neighbours((shape, ranks), rank):
            if (kind, other, terms) not in self._tried and other not in self._shapes(some):
                self._tried.add((kind, other, terms))
                requests.append(Request(other, (terms,)))
        return [self._task(some, requests)] if requests else []

    def _shapes(self, places: Sequence[int]) -> set[ProductShape]:
        """Shapes that the first of these layers was solved for."""
        return {entry.exact.shape for entry in self._table[places[0]] if isinstance(entry.exact, Lsr)}

    # -- refining ------------------------------------------------------------------------------------------------------

    def _refine(self, chosen: Sequence[_Entry]) -> bool:
        """More sweeps for the chosen LSR products, then measured in the whole norm; whether there were any."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, entry in enumerate(chosen):
            if isinstance(entry.exact, Lsr) and not entry.exact.refined:
                groups.setdefault((self.layers[i].kind, *entry.exact.configuration), []).append(i)
        counter = Counter(self.resources.on_step, "refining", sum(map(len, groups.values())), "layers")
        if self.search.probes > 0:
            for (_, *configuration), places in groups.items():
                for part in batches([self.layers[i] for i in places]):
                    self._refine_fully(places[part], chosen, (configuration[0], configuration[1]))
                    counter.add(len(places[part]))
            return bool(groups)
        solver = self.search.refine
        effort = Effort(solver.sweeps, solver.sweeps, solver.cg_steps, REFINED, 1, self.resources.device)
        tasks = []
        for (_, shape, ranks), members in groups.items():
            for run_of_layers in self._parts(members):
                starts = [_product_of(chosen[i]).product() for i in run_of_layers]
                tasks.append(self._task(run_of_layers, [Request(shape, (ranks,), starts)], effort))
        for task, answers in self._answers(iter(tasks), counter):
            for i, product in zip(task.places, answers[0].products, strict=True):
                entry, error = chosen[i], self.layers[i].squared_error(product)
                held = _product_of(entry)
                price = Price(product.parameters, error)
                handle = self.cache.put(product)
                entry.exact = Lsr(price, held.shape, product.separation_ranks, handle, refined=True)
                entry.priced.clear()
        return bool(groups)

    def _refine_fully(self, places: Sequence[int], chosen: Sequence[_Entry], configuration: Configuration) -> None:
        starts = [_product_of(chosen[i]).product() for i in places]
        solved = solve_together([self.layers[i] for i in places], *configuration, self.search.refine, starts)
        for i, solution in zip(places, solved, strict=True):
            better, held = lsr_candidate(solution, self.cache), _product_of(chosen[i])
            best = better if better.squared_error <= held.squared_error else held
            chosen[i].exact = replace(best, refined=True)
            chosen[i].priced.clear()

    # -- tasks ---------------------------------------------------------------------------------------------------------

    @property
    def _effort(self) -> Effort:
        return Effort(device=self.resources.device)

    @property
    def _all_parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def _parts(self, places: Sequence[int]) -> list[list[int]]:
        """Layers of one kind in runs that fit in memory together, those that need as many coordinates side by side."""
        ordered = sorted(places, key=lambda i: self.layers[i].leading_entries)
        return [ordered[part] for part in batches([self.layers[i] for i in ordered], leading=True)]

    def _task(self, places: Sequence[int], requests: Sequence[Request], effort: Effort | None = None) -> Task:
        """Targets and norms are read when the task is run."""
        return Task(tuple(places), (), None, requests, effort or self._effort)

    def _loaded(self, task: Task) -> Task:
        targets: list[LowRank] = []
        norms: list[NormWeights] = []
        for i in task.places:
            layer = self.layers[i]
            targets.append(layer.pair)
            if not layer.norms.is_frobenius:
                norms.append(layer.leading)
        return replace(task, targets=targets, weights=norms or None)

    def _answers(self, tasks: Iterator[Task], counter: Counter) -> Iterator[tuple[Task, list[Answer]]]:
        def done(task: Task) -> None:
            counter.add(len(task.places) * len(task.requests))

        loaded = (self._loaded(task) for task in tasks)
        yield from run(loaded, workers=self.resources.workers, store=self.resources.store, on_done=done)

    def _run(self, tasks: Iterator[Task], counter: Counter, effort: Effort) -> None:
        for task, answers in self._answers(tasks, counter):
            self._add(task, answers)

    def _add(self, task: Task, answers: Sequence[Answer]) -> None:
        """Candidates of the layers of a task, but those that one of no more parameters beats."""
        for answer in answers:
            for i, error, product in zip(task.places, answer.errors, answer.products, strict=True):
                price = Price(product.parameters, float(error) ** 2)
                known = (entry.exact for entry in self._table[i] if isinstance(entry.exact, Lsr))
                if not any(_beats(one.price, price) for one in known):
                    shape, ranks = answer.shape, product.separation_ranks
                    self._table[i].append(_Entry(Lsr(price, shape, ranks, self.cache.put(product))))


REFINED = 3e-4
"""A sweep that lowers no error by more ends refining."""


def search_layers(
    layers: Sequence[Layer],
    budgets: Sequence[Budget] = (),
    *,
    search: Search | None = None,
    storages: Sequence[str] = ("float32",),
    cache: SpillCache | None = None,
    resources: Resources | None = None,
) -> Searched:
    """Solve the ladder of shapes for all layers, for any number of budgets.

    Parameters
    ----------
    layers : sequence of Layer
        See `lsrdecomp.compression.layers.make_layers`.
    budgets : sequence of Budget
        What will be asked; larger shapes than they could want are not solved. None: anything may be asked.
    search : Search, optional
    storages : sequence of str
        Types the factors may be stored in; more than one is of use when bytes are counted. With int8 or int4 among
        them, truncated SVD in water-filled bits takes part.
    cache : SpillCache, optional
        Where factors wait.
    resources : Resources, optional

    Returns
    -------
    Searched
        Its `Searched.fit` draws a budget. The error is never above that of the best truncated SVD for the same budget
        and norm (``low_rank_error``), which is among the starting points of every allocation.
    """
    found = Searched(layers, search or Search(), storages, cache or SpillCache(), resources or Resources())
    found.solve_ladder([None if budget.counts_bytes else budget.cost_limit(layers) for budget in budgets] or [None])
    return found


def _worth_trying(entries: Sequence[_Entry], near_hull: bool) -> list[_Entry]:
    """Without products that a cheaper one beats; for integers only those near the hull."""
    products = sorted(
        (e for e in entries if isinstance(e.exact, Lsr)), key=lambda e: (e.exact.parameters, e.exact.squared_error)
    )
    kept: list[_Entry] = []
    least = math.inf
    for entry in products:
        if entry.exact.squared_error < least:
            kept.append(entry)
            least = entry.exact.squared_error
    if near_hull and kept:
        sizes, errors = [e.exact.parameters for e in kept], [e.exact.squared_error for e in kept]
        corners = Options.of(sizes, errors).hull()
        limits = NEAR * np.interp(sizes, [sizes[k] for k in corners], [errors[k] for k in corners])
        kept = [e for e, limit in zip(kept, limits, strict=True) if e.exact.squared_error <= limit]
    return [*(e for e in entries if not isinstance(e.exact, Lsr)), *kept]


def _around(ranks: Ranks) -> tuple[Ranks, ...]:
    s, t = ranks
    return tuple(dict.fromkeys([(max(1, s - 1), max(1, t - 1)), (s, t), (s + 1, t + 1)]))


def _product_of(entry: _Entry) -> Lsr:
    assert isinstance(entry.exact, Lsr)
    return entry.exact


def _beats(one: Price, other: Price) -> bool:
    return one.parameters <= other.parameters and one.squared_error <= other.squared_error
