"""What a search knows: the candidates of every layer so far, and how more of them are solved for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from lsrdecomp.compression.budget import Budget
from lsrdecomp.compression.candidates import Candidate, Lsr, Price, Structure
from lsrdecomp.compression.choice import Cost
from lsrdecomp.compression.layers import Layer, batches
from lsrdecomp.compression.materialize import Materialized, materialize, priced_as
from lsrdecomp.compression.progress import Counter
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.settings import Resources, Search
from lsrdecomp.compression.shapes import parameters
from lsrdecomp.compression.solve import Answer, Effort, Factors, Request, Task, product_of, run, worker_pool
from lsrdecomp.compression.spill_cache import SpillCache
from lsrdecomp.compression.water_filling import finest_candidates, unrotated_candidates, water_filled_candidates
from lsrdecomp.formats.allocation import Options
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.targets.base import LowRank
from lsrdecomp.targets.weights import NormWeights

NEAR = 1.15
"""Candidates this factor above the convex hull of a layer's errors are still tried in integers."""


@dataclass(eq=False)
class Entry:
    """A candidate before rounding, its versions in the storages, and those of them whose factors were made."""

    exact: Candidate
    priced: dict[bool, list[Candidate]] = field(default_factory=dict)
    made: dict[str, Materialized] = field(default_factory=dict)

    @property
    def product(self) -> Lsr:
        """The candidate, an LSR product."""
        assert isinstance(self.exact, Lsr)
        return self.exact

    def replaced(self, exact: Candidate, **made: Materialized) -> None:
        """Another candidate stands here now."""
        self.exact, self.priced, self.made = exact, {}, made


@dataclass(frozen=True, slots=True)
class Draw:
    """A budget, and which candidates may be taken under it."""

    budget: Budget
    cost: Cost
    measured: bool  # whether errors count as rounded, which matters where they are bounded
    allowed: Callable[[Candidate], bool] | None
    trusted: bool = False  # whether only errors in the whole norm count
    expected_refinement: float = 1.0  # share of its loss that refining leaves of a product

    def allows(self, candidate: Candidate) -> bool:
        return candidate.structure == Structure.DROP or self.allowed is None or self.allowed(candidate)

    def expected(self, candidate: Candidate) -> float:
        """The loss of a candidate once it is refined."""
        refined = not isinstance(candidate, Lsr) or candidate.refined
        return candidate.squared_error * (1.0 if refined else self.expected_refinement)

    def as_refined(self, candidate: Candidate) -> Candidate:
        """The candidate at that loss."""
        loss = self.expected(candidate)
        if loss == candidate.squared_error:
            return candidate
        return replace(candidate, price=replace(candidate.price, squared_error=loss))


class SearchState:
    """The candidates of all layers, in a table that only grows.

    Attributes
    ----------
    table : list of list of Entry
        By layer.
    exact : list of bool
        By layer, whether errors in the table are those of the whole norm.
    tried : set
        Shapes that were tried on a few layers of a size.
    """

    def __init__(
        self, layers: Sequence[Layer], search: Search, storages: Sequence[str], cache: SpillCache, resources: Resources
    ) -> None:
        self.layers, self.search, self.storages, self.cache = layers, search, tuple(storages), cache
        self.resources = resources
        self.table: list[list[Entry]] = [[] for _ in layers]
        self.exact = [True] * len(layers)
        self.tried: set[tuple[object, ...]] = set()
        self._coded: dict[tuple[int, bool], list[Entry]] = {}  # low rank in few bits, where integers are asked for

    @property
    def effort(self) -> Effort:
        """Of a solve that is not yet a choice."""
        return Effort(device=self.resources.device)

    @property
    def parameters(self) -> int:
        """Numbers in the LoRA."""
        return sum(layer.parameters for layer in self.layers)

    # -- what a budget can take ----------------------------------------------------------------------------------------

    def row(self, i: int, draw: Draw) -> Iterator[tuple[Entry, Candidate]]:
        """Candidates of a layer in their storages, those that a draw may take and no cheaper one beats."""
        integers = any(storage in INTEGER_BITS for storage in self.storages)
        for entry in _worth_trying(self.table[i], draw, near_hull=integers):
            if draw.trusted and isinstance(entry.exact, Lsr) and not (entry.exact.refined or self.exact[i]):
                continue
            if draw.measured not in entry.priced:
                entry.priced[draw.measured] = [
                    priced_as(self.layers[i], entry.exact, storage, measured=draw.measured)
                    for storage in self.storages
                    if storage not in INTEGER_BITS or entry.exact.structure in (Structure.LSR, Structure.DROP)
                ]
            found = (candidate for candidate in entry.priced[draw.measured] if draw.allows(candidate))
            yield from ((entry, draw.as_refined(candidate)) for candidate in found)
        if integers:
            coded = self._coded_low_rank(i, draw.budget.counts_bytes)
            yield from ((entry, entry.exact) for entry in coded if draw.allows(entry.exact))

    def _coded_low_rank(self, i: int, counts_bytes: bool) -> list[Entry]:
        """Low rank in integers: bits spread over the components where they cost something, else as fine as allowed."""
        found = self._coded.get((i, counts_bytes))
        if found is None:
            layer, most = self.layers[i], max(INTEGER_BITS.get(storage, 0) for storage in self.storages)
            spread = water_filled_candidates(layer) if counts_bytes else finest_candidates(layer, most)
            coded = [*spread, *unrotated_candidates(layer)]
            found = self._coded[i, counts_bytes] = [Entry(one) for one in coded if max(one.bits) <= most]
        return found

    def made(self, i: int, entry: Entry, candidate: Candidate) -> Materialized:
        """The factors of a candidate of a layer in its storage, made and measured once."""
        found = entry.made.get(candidate.storage)
        if found is None:
            found = entry.made[candidate.storage] = materialize(self.layers[i], candidate, self.cache)
        return found

    # -- solving -------------------------------------------------------------------------------------------------------

    def parts(self, places: Sequence[int]) -> list[list[int]]:
        """Layers of one kind in runs that fit in memory together, those that need as many coordinates side by side."""
        ordered = sorted(places, key=lambda i: self.layers[i].leading_entries)
        return [ordered[part] for part in batches([self.layers[i] for i in ordered], leading=True)]

    def task(self, places: Sequence[int], requests: Sequence[Request], effort: Effort | None = None) -> Task:
        """Targets and norms are read when the task is run."""
        return Task(tuple(places), (), None, requests, effort or self.effort)

    def answers(self, tasks: Iterator[Task], counter: Counter) -> Iterator[tuple[Task, list[Answer]]]:
        """Answers to tasks as they come, counted."""

        def done(task: Task) -> None:
            counter.add(len(task.places) * len(task.requests))

        loaded = (self._loaded(task) for task in tasks)
        workers, store = self.resources.workers, self.resources.store
        yield from run(loaded, workers=workers, pool=self._pool, store=store, on_done=done)

    @cached_property
    def _pool(self) -> Any:
        return worker_pool(self.resources.workers)

    def solve(self, tasks: Iterator[Task], counter: Counter) -> None:
        """Candidates of all tasks into the table."""
        for task, answers in self.answers(tasks, counter):
            self.add(task, answers)

    def add(self, task: Task, answers: Sequence[Answer]) -> None:
        """Candidates of the layers of a task, but those that one of no more parameters beats."""
        for answer in answers:
            for place, (i, error) in enumerate(zip(task.places, answer.errors.tolist(), strict=True)):
                ranks = answer.ranks_of(place)
                price = Price(parameters((answer.shape, ranks)), error**2)
                known = (entry.exact for entry in self.table[i] if isinstance(entry.exact, Lsr))
                if not any(_beats(one.price, price) for one in known):
                    waiting = partial(_made, self.cache.put(answer.factors_of(place)))
                    self.table[i].append(Entry(Lsr(price, answer.shape, ranks, waiting)))

    def _loaded(self, task: Task) -> Task:
        targets: list[LowRank] = []
        norms: list[NormWeights] = []
        for i in task.places:
            layer = self.layers[i]
            targets.append(layer.pair)
            if not layer.is_frobenius:
                norms.append(layer.leading)
        return replace(task, targets=targets, weights=norms or None)


def _worth_trying(entries: Sequence[Entry], draw: Draw, near_hull: bool) -> list[Entry]:
    """Without products that a cheaper one beats; for integers only those near the hull."""
    products = sorted(
        (e for e in entries if isinstance(e.exact, Lsr)), key=lambda e: (e.exact.parameters, draw.expected(e.exact))
    )
    kept: list[Entry] = []
    least = math.inf
    for entry in products:
        if draw.expected(entry.exact) < least:
            kept.append(entry)
            least = draw.expected(entry.exact)
    if near_hull and kept:
        sizes, errors = [e.exact.parameters for e in kept], [e.exact.squared_error for e in kept]
        corners = Options.of(sizes, errors).hull()
        limits = NEAR * np.interp(sizes, [sizes[k] for k in corners], [errors[k] for k in corners])
        kept = [e for e, limit in zip(kept, limits, strict=True) if e.exact.squared_error <= limit]
    return [*(e for e in entries if not isinstance(e.exact, Lsr)), *kept]


def _made(factors: Callable[[], Factors]) -> SeparatedProduct:
    """Most of what is solved is never chosen: products are made of those that are."""
    return product_of(factors())


def _beats(one: Price, other: Price) -> bool:
    return one.parameters <= other.parameters and one.squared_error <= other.squared_error
