"""What a search knows: the candidates of every layer so far, which of them a budget takes, how more are solved for.

References
----------
.. [1] Y. Shoham and A. Gersho, Efficient bit allocation for an arbitrary set of quantizers, IEEE
       Trans. ASSP 36 (1988).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

import numpy as np

from lsrdecomp.compression.candidates import (
    Candidate,
    Drop,
    LowRank,
    Lsr,
    Materialized,
    equal_bits_candidates,
    materialize,
    priced_as,
    unrotated_candidates,
    water_filled_candidates,
)
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.solve import Answer, Factors, Task, TaskRunner, product_of
from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.allocation import Options, total_loss, within_cost, within_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lsrdecomp.compression.layers import Layer, SpillCache
    from lsrdecomp.compression.settings import Budget, Resources, Search
    from lsrdecomp.kronecker.product import SeparatedProduct

SHARE = 8.0
"""Most that a layer is given, in units of what the budget gives a layer on average."""

NEAR = 1.15
"""Candidates this factor above the convex hull of a layer's errors are still tried in integers."""

EXPECTED_REFINEMENT = 0.7
"""Share of its loss that refining usually leaves of a product: what is chosen is chosen for what it
may become, against truncated SVD, which is as good as it can be from the start. On a language
model's layers it leaves .4 to .9."""

Losses = Literal["solved", "expected", "measured"]
"""By which losses products are chosen: as they are; where they were not refined yet, what refining
usually leaves of them; only those that were measured in the whole norm. A budget that bounds errors
expects nothing."""


@dataclass(eq=False)
class Entry:
    """A candidate before rounding, its versions in the storages, and those of them whose factors were made."""

    exact: Candidate
    priced: dict[bool, list[Candidate]] = field(
        default_factory=dict
    )  # by whether errors are measured as rounded
    made: dict[str, Materialized] = field(default_factory=dict)  # by storage

    @property
    def product(self) -> Lsr:
        """The candidate, an LSR product."""
        assert isinstance(self.exact, Lsr)
        return self.exact

    @property
    def is_lsr(self) -> bool:
        return isinstance(self.exact, Lsr)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Candidates of every layer in their storages, the one that it takes, and the error of truncated SVD alone."""

    rows: list[list[tuple[Entry, Candidate]]]
    chosen: list[tuple[Entry, Candidate]]
    low_rank_error: float | None

    @property
    def entries(self) -> list[Entry]:
        return [entry for entry, _ in self.chosen]

    @property
    def exchange_rate(self) -> float:
        """Loss that one more parameter removes at the margin: of the steps not taken, nearly the best."""
        slopes = []
        for row, (_, picked) in zip(self.rows, self.chosen, strict=True):
            steps = [
                (picked.squared_error - other.squared_error)
                / (other.parameters - picked.parameters)
                for _, other in row
                if other.parameters > picked.parameters
                and other.squared_error < picked.squared_error
            ]
            if steps:
                slopes.append(max(steps))
        # Not the largest: a single layer whose next step happens to be steep says little of the
        # others.
        return float(np.quantile(slopes, 0.75)) if slopes else 0.0


ABOVE = 1.0 - 1e-6
"""A product at this factor of truncated SVD's loss is no nearer: it may be a truncated SVD itself,
but for rounding."""


class SearchTable:
    """The candidates of all layers, in rows that only grow.

    Attributes
    ----------
    rows : list of list of Entry
        By layer.
    whole_norm : list of bool
        By layer, whether errors in the table are those of the whole norm, not of its leading
        coordinates.
    runner : TaskRunner
        Of these layers.
    tried : set
        Shapes that were tried on a few layers of a size.
    refines_grid : bool
        Whether the fine grid waits for a budget to say where it is wanted.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        search: Search,
        storages: Sequence[str],
        cache: SpillCache,
        resources: Resources,
    ) -> None:
        self.layers, self.search, self.storages, self.cache = layers, search, tuple(storages), cache
        self.runner = TaskRunner(layers, resources)
        self.parameters = sum(layer.parameters for layer in layers)
        self.has_integers = any(storage in INTEGER_BITS for storage in storages)
        self.rows: list[list[Entry]] = [[] for _ in layers]
        self.whole_norm = [True] * len(layers)
        self.tried: set[tuple[object, ...]] = set()
        self.refines_grid = False
        self._coded: dict[
            tuple[int, float], list[Entry]
        ] = {}  # low rank in few bits, where integers are asked for

    def most_for(self, layer: Layer, limit: float) -> float:
        """Of so much for all layers, the most that one could want."""
        return min(limit, SHARE * limit * layer.parameters / self.parameters)

    def products(self, i: int) -> list[Lsr]:
        """The LSR products in the row of a layer."""
        return [entry.exact for entry in self.rows[i] if isinstance(entry.exact, Lsr)]

    def low_rank_wins(self, i: int) -> bool:
        """Whether every LSR product of a layer lies above the line through its truncated SVDs."""
        plain = [entry.exact for entry in self.rows[i] if isinstance(entry.exact, Drop | LowRank)]
        sizes, losses = zip(*sorted((c.parameters, c.squared_error) for c in plain), strict=True)
        line = np.interp([product.parameters for product in self.products(i)], sizes, losses)
        return bool(np.all([p.squared_error for p in self.products(i)] >= ABOVE * line))

    # -- what a budget can take --------------------------------------------------------------------

    def candidates(
        self, i: int, budget: Budget, losses: Losses
    ) -> Iterator[tuple[Entry, Candidate]]:
        """Candidates of a layer in their storages, those that a budget may take and no cheaper one beats."""
        entries, measured = self._worth_trying(i, budget, losses), budget.bounds_error
        for entry in entries:
            if measured not in entry.priced:
                entry.priced[measured] = [
                    priced_as(self.layers[i], entry.exact, storage, measured=measured)
                    for storage in self.storages
                    if entry.exact.exists_in(storage)
                ]
            for candidate in entry.priced[measured]:
                if budget.allows(candidate):
                    yield entry, _at_loss(candidate, budget, losses)
        if self.has_integers:
            coded = self._coded_low_rank(i, budget)
            yield from ((entry, entry.exact) for entry in coded if budget.allows(entry.exact))

    def _worth_trying(self, i: int, budget: Budget, losses: Losses) -> list[Entry]:
        """A row without products that a cheaper one beats; for integers only those near the hull."""
        products = [
            (e.exact.parameters, _at_loss(e.exact, budget, losses).squared_error, e)
            for e in self.rows[i]
            if e.is_lsr
        ]
        falling: list[Entry] = []
        least = math.inf
        for _, loss, entry in sorted(products, key=lambda row: row[:2]):
            if loss < least:
                falling.append(entry)
                least = loss
        if (
            self.has_integers and falling
        ):  # codes are made for each candidate: only those that a budget could take
            sizes, errors = (
                [e.exact.parameters for e in falling],
                [e.exact.squared_error for e in falling],
            )
            corners = Options.of(sizes, errors).hull()
            limits = NEAR * np.interp(
                sizes, [sizes[k] for k in corners], [errors[k] for k in corners]
            )
            falling = [
                e
                for e, limit in zip(falling, limits, strict=True)
                if e.exact.squared_error <= limit
            ]
            most = self.most_for(self.layers[i], budget.most_parameters)
            falling = [e for e in falling if e.exact.parameters <= most]
        if losses == "measured" and not self.whole_norm[i]:
            falling = [entry for entry in falling if entry.product.refined]
        return [*(entry for entry in self.rows[i] if not entry.is_lsr), *falling]

    def _coded_low_rank(self, i: int, budget: Budget) -> list[Entry]:
        """Low rank in integers: bits spread over the components where they cost something, else as fine as allowed."""
        layer, width = (
            self.layers[i],
            max(INTEGER_BITS.get(storage, 0) for storage in self.storages),
        )
        # Limits in powers of two, so that budgets near each other share what was coded.
        most = (
            math.inf
            if budget.bytes is None
            else 2.0 ** math.ceil(math.log2(self.most_for(layer, budget.bytes + 1.0)))
        )
        if (i, most) not in self._coded:
            spread = (
                water_filled_candidates(layer, most)
                if budget.counts_bytes
                else equal_bits_candidates(layer, width)
            )
            coded = [*spread, *unrotated_candidates(layer)]
            self._coded[i, most] = [
                Entry(candidate) for candidate in coded if max(candidate.bits) <= width
            ]
        return self._coded[i, most]

    def allocated(self, budget: Budget, losses: Losses = "solved") -> Allocation:
        """The candidate that each layer takes under a budget; truncated SVD alone, in that norm, is never better.

        By the steepest steps along the lower convex hulls of all layers [1]_, then single changes
        and exchanges with what is left. Raises `BudgetError` if no choice meets the budget; says
        what is reachable.
        """
        rows = [list(self.candidates(i, budget, losses)) for i in range(len(self.layers))]
        candidates = [[candidate for _, candidate in row] for row in rows]
        if budget.layer_rtol is not None:
            each = zip(self.layers, candidates, strict=True)
            choice = [_within_tolerance(layer, row, budget.layer_rtol) for layer, row in each]
            return Allocation(rows, [row[k] for row, k in zip(rows, choice, strict=True)], None)
        # Allocation 1: points of cost and loss, in parameters or bytes and in squared error.
        cost = attrgetter("bytes" if budget.counts_bytes else "parameters")
        options = [
            Options.of([cost(c) for c in row], [c.squared_error for c in row]) for row in candidates
        ]
        # Allocation 2: what truncated SVD alone can do.
        plain = [[k for k, c in enumerate(row) if c.is_truncated_svd] for row in candidates]
        narrow = [Options(o.costs[k], o.losses[k]) for o, k in zip(options, plain, strict=True)]
        starts, low_rank_error = [], None
        within, most = (
            (within_loss, budget.squared_error or 0.0)
            if budget.cost is None
            else (within_cost, budget.cost)
        )
        try:
            starts = [[row[k] for row, k in zip(plain, within(narrow, most), strict=True)]]
            size = math.fsum(layer.squared_norm for layer in self.layers)
            low_rank_error = math.sqrt(total_loss(options, starts[0]) / size) if size > 0.0 else 0.0
        except BudgetError:
            pass  # plain low rank cannot meet it; the whole family may
        # Allocation 3: all candidates, with the answer of 2 among the starts.
        choice = within(options, most, starts)
        return Allocation(
            rows, [row[k] for row, k in zip(rows, choice, strict=True)], low_rank_error
        )

    def expected_error(self, budget: Budget) -> float:
        """Squared relative error of what a budget takes, as priced: nothing is made or refined.

        Raises `BudgetError` as `allocated`, and if it takes no layer at all.
        """
        chosen = [candidate for _, candidate in self.allocated(budget).chosen]
        if not any(candidate.parameters for candidate in chosen):
            raise BudgetError("nothing of the adapter fits into this budget; allow more")
        lost = math.fsum(candidate.squared_error for candidate in chosen)
        return lost / math.fsum(layer.squared_norm for layer in self.layers)

    def materialized(self, allocation: Allocation) -> tuple[Materialized, ...]:
        """The factors of what every layer takes, in its storage; each is made and measured once."""
        for layer, (entry, candidate) in zip(self.layers, allocation.chosen, strict=True):
            if candidate.storage not in entry.made:
                entry.made[candidate.storage] = materialize(layer, candidate, self.cache)
        return tuple(entry.made[candidate.storage] for entry, candidate in allocation.chosen)

    # -- solving -----------------------------------------------------------------------------------

    def solve(self, tasks: Sequence[Task], stage: str) -> None:
        """Candidates of all tasks into the table, counted as a stage of the run."""
        for task, answers in self.runner.answers(tasks, self.runner.counter(tasks, stage)):
            self.add(task, answers)

    def add(self, task: Task, answers: Sequence[Answer]) -> None:
        """Candidates of the layers of a task, but those that one of no more parameters beats."""
        for answer in answers:
            for position, (i, error) in enumerate(
                zip(task.indices, answer.errors.tolist(), strict=True)
            ):
                known, ranks = self.products(i), answer.ranks_of(position)
                size, loss = answer.shape.parameters(*ranks), error**2
                if not any(p.parameters <= size and p.squared_error <= loss for p in known):
                    lsr = Lsr(
                        parameters=size,
                        squared_error=loss,
                        rank=answer.shape.inner_rank,
                        shape=answer.shape,
                        ranks=ranks,
                        product=partial(_made, self.cache.put(answer.factors_of(position))),
                    )
                    self.rows[i].append(Entry(lsr))

    def refined(self, i: int, entry: Entry, product: SeparatedProduct) -> None:
        """Put a refined product in the place of the old one, with its error in the whole norm.

        In one floating type that is the error of its factors as they will be written, so that they
        are measured once.
        """
        layer, storage, made = self.layers[i], self.storages[0], {}
        refined = replace(
            entry.product,
            parameters=product.parameters,
            ranks=product.separation_ranks,
            product=self.cache.put(product),
            refined=True,
        )
        if len(self.storages) > 1 or storage in INTEGER_BITS:
            loss = layer.squared_error(product)
        else:
            made[storage] = materialize(layer, replace(refined, storage=storage), self.cache)
            loss = made[storage].candidate.squared_error
        entry.exact, entry.priced, entry.made = replace(refined, squared_error=loss), {}, made


def _at_loss(candidate: Candidate, budget: Budget, losses: Losses) -> Candidate:
    """The candidate at the loss by which it is chosen; see `Losses`."""
    if (
        losses != "expected"
        or budget.bounds_error
        or not isinstance(candidate, Lsr)
        or candidate.refined
    ):
        return candidate
    return replace(candidate, squared_error=EXPECTED_REFINEMENT * candidate.squared_error)


def _made(factors: Callable[[], Factors]) -> SeparatedProduct:
    """Most of what is solved is never chosen: products are made of those that are."""
    return product_of(factors())


def _within_tolerance(layer: Layer, candidates: Sequence[Candidate], rtol: float) -> int:
    """The fewest parameters within a relative error; where none is, the least error."""
    allowed = rtol**2 * layer.squared_norm
    good = [k for k, candidate in enumerate(candidates) if candidate.squared_error <= allowed]
    if good:
        return min(good, key=lambda k: (candidates[k].parameters, candidates[k].squared_error))
    return min(range(len(candidates)), key=lambda k: candidates[k].squared_error)
