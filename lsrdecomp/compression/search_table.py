"""The table of a search: candidates of every layer so far, and which of them a budget takes.

References
----------
.. [1] Y. Shoham and A. Gersho, Efficient bit allocation for an arbitrary set of quantizers, IEEE
       Trans. ASSP 36 (1988).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from lsrdecomp.compression.candidates import (
    Candidate,
    DropCandidate,
    LowRankCandidate,
    LsrCandidate,
    Materialized,
    equal_bits_candidates,
    materialize,
    priced_as,
    unrotated_candidates,
    water_filled_candidates,
)
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.solve import Factors, SolvedShape, SolveTask, TaskRunner, product_of
from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.allocation import Choice, PartOptions, total_loss, within_cost, within_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lsrdecomp.compression.caches import SpillCache
    from lsrdecomp.compression.layers import Layer
    from lsrdecomp.compression.settings import Budget, Resources, Search
    from lsrdecomp.kronecker.product import SeparatedProduct

NO_NEARER = 1.0 - 1e-6
"""A product at this factor of truncated SVD's loss is no nearer: it may be a truncated SVD itself,
but for rounding."""

Losses = Literal["solved", "expected", "measured"]
"""The losses by which products are chosen.

``"solved"``: as they are. ``"expected"``: where they were not refined yet, what refining usually
leaves of them. ``"measured"``: only products that were measured in the whole norm. A budget that
bounds errors expects nothing.
"""


@dataclass(eq=False)
class TableEntry:
    """A candidate before rounding, and its versions in the storages.

    Of those that were chosen, the factors are there too.
    """

    exact: Candidate
    priced: dict[bool, list[Candidate]] = field(
        default_factory=dict
    )  # by whether errors are measured as rounded
    materialized: dict[str, Materialized] = field(default_factory=dict)  # by storage

    @property
    def product(self) -> LsrCandidate:
        """The candidate, an LSR product."""
        assert isinstance(self.exact, LsrCandidate)
        return self.exact

    @property
    def is_lsr(self) -> bool:
        """True if the candidate is an LSR product."""
        return isinstance(self.exact, LsrCandidate)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The candidates that a budget takes.

    Attributes
    ----------
    rows : list of list of (TableEntry, Candidate)
        By layer, the candidates in their storages that it chose from.
    chosen : list of (TableEntry, Candidate)
        One a layer.
    low_rank_error : float or None
        Relative error of truncated SVD alone; None if it cannot meet the budget.
    """

    rows: list[list[tuple[TableEntry, Candidate]]]
    chosen: list[tuple[TableEntry, Candidate]]
    low_rank_error: float | None

    @property
    def entries(self) -> list[TableEntry]:
        """The entries that are taken, one a layer."""
        return [entry for entry, _ in self.chosen]

    @property
    def exchange_rate(self) -> float:
        """Loss that one more parameter removes at the margin.

        It is nearly the best of the steps not taken.
        """
        slopes = []
        for row, (_, picked) in zip(self.rows, self.chosen, strict=True):
            steepest = _steepest_step(picked, [candidate for _, candidate in row])
            if steepest is not None:
                slopes.append(steepest)
        # Not the largest: a single layer whose next step happens to be steep says little of the
        # others.
        return float(np.quantile(slopes, 0.75)) if slopes else 0.0


def _steepest_step(picked: Candidate, others: Sequence[Candidate]) -> float | None:
    """Return the most loss that a larger candidate removes a parameter; None if none does."""
    slopes = []
    for other in others:
        is_larger = other.parameters > picked.parameters
        if is_larger and other.squared_error < picked.squared_error:
            removed = picked.squared_error - other.squared_error
            slopes.append(removed / (other.parameters - picked.parameters))
    return max(slopes, default=None)


class SearchTable:
    """The candidates of all layers, in rows that only grow.

    Attributes
    ----------
    layers : sequence of Layer
    search : Search
    rows : list of list of TableEntry
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
        self.layers = layers
        self.search = search
        self.storages = tuple(storages)
        self.cache = cache
        self.runner = TaskRunner(layers, resources)
        self.parameters = sum(layer.parameters for layer in layers)
        self.has_integers = any(storage in INTEGER_BITS for storage in storages)
        self.rows: list[list[TableEntry]] = [[] for _ in layers]
        self.whole_norm = [True] * len(layers)
        self.tried: set[tuple[object, ...]] = set()
        self.refines_grid = False
        # Low rank in few bits, where integers are asked for, by layer and limit.
        self._coded: dict[tuple[int, float], list[TableEntry]] = {}

    def layer_limit(self, layer: Layer, limit: float) -> float:
        """Return the most that a layer could want of so much for all layers."""
        max_share = self.search.effort.max_layer_share
        return min(limit, max_share * limit * layer.parameters / self.parameters)

    def products(self, i: int) -> list[LsrCandidate]:
        """Return the LSR products in the row of a layer."""
        return [entry.exact for entry in self.rows[i] if isinstance(entry.exact, LsrCandidate)]

    def low_rank_wins(self, i: int) -> bool:
        """Return whether a layer's LSR products all lie above the line of its truncated SVDs."""
        low_rank = [
            (entry.exact.parameters, entry.exact.squared_error)
            for entry in self.rows[i]
            if isinstance(entry.exact, DropCandidate | LowRankCandidate)
        ]
        sizes, losses = zip(*sorted(low_rank), strict=True)
        products = self.products(i)
        line = np.interp([product.parameters for product in products], sizes, losses)
        product_losses = np.asarray([product.squared_error for product in products])
        return bool(np.all(product_losses >= NO_NEARER * line))

    # -- what a budget can take --------------------------------------------------------------------

    def candidates(
        self, i: int, budget: Budget, losses: Losses
    ) -> Iterator[tuple[TableEntry, Candidate]]:
        """Yield the candidates of a layer in their storages that a budget may take.

        Those that a cheaper one beats are left out.
        """
        measured = budget.bounds_error
        for entry in self._worth_trying(i, budget, losses):
            if measured not in entry.priced:
                entry.priced[measured] = [
                    priced_as(self.layers[i], entry.exact, storage, measured=measured)
                    for storage in self.storages
                    if entry.exact.exists_in(storage)
                ]
            for candidate in entry.priced[measured]:
                if budget.allows(candidate):
                    yield entry, self._at_loss(candidate, budget, losses)
        if self.has_integers:
            for entry in self._coded_low_rank(i, budget):
                if budget.allows(entry.exact):
                    yield entry, entry.exact

    def _worth_trying(self, i: int, budget: Budget, losses: Losses) -> list[TableEntry]:
        """Return a row without products that a cheaper one beats.

        For integers only those near the hull stay.
        """
        others = [entry for entry in self.rows[i] if not entry.is_lsr]
        falling = self._falling_products(i, budget, losses)
        if self.has_integers and falling:
            # Codes are made for each candidate, so only for those that a budget could take.
            falling = self._near_hull(falling)
            limit = self.layer_limit(self.layers[i], budget.max_parameters)
            falling = [entry for entry in falling if entry.exact.parameters <= limit]
        if losses == "measured" and not self.whole_norm[i]:
            falling = [entry for entry in falling if entry.product.refined]
        return [*others, *falling]

    def _falling_products(self, i: int, budget: Budget, losses: Losses) -> list[TableEntry]:
        """Return the products of a row by size, each of less loss than all smaller ones."""
        products = []
        for entry in self.rows[i]:
            if entry.is_lsr:
                loss = self._at_loss(entry.exact, budget, losses).squared_error
                products.append((entry.exact.parameters, loss, entry))
        falling: list[TableEntry] = []
        smallest_loss = math.inf
        for _, loss, entry in sorted(products, key=lambda product: product[:2]):
            if loss < smallest_loss:
                falling.append(entry)
                smallest_loss = loss
        return falling

    def _near_hull(self, entries: Sequence[TableEntry]) -> list[TableEntry]:
        """Return the entries whose loss is near the lower convex hull of all of them."""
        sizes = [entry.exact.parameters for entry in entries]
        losses = [entry.exact.squared_error for entry in entries]
        corners = PartOptions.of(sizes, losses).hull()
        hull = np.interp(sizes, [sizes[k] for k in corners], [losses[k] for k in corners])
        limits = self.search.effort.hull_margin * hull
        return [
            entry
            for entry, limit in zip(entries, limits, strict=True)
            if entry.exact.squared_error <= limit
        ]

    def _coded_low_rank(self, i: int, budget: Budget) -> list[TableEntry]:
        """Return low rank in integers.

        Bits are spread over the components where bytes count, else as fine as allowed.
        """
        layer = self.layers[i]
        max_width = max(INTEGER_BITS.get(storage, 0) for storage in self.storages)
        # Limits in powers of two, so that budgets near each other share what was coded.
        limit = math.inf
        if budget.bytes is not None:
            limit = 2.0 ** math.ceil(math.log2(self.layer_limit(layer, budget.bytes + 1.0)))
        if (i, limit) not in self._coded:
            effort = self.search.effort
            if budget.counts_bytes:
                coded = water_filled_candidates(layer, limit, effort)
            else:
                coded = equal_bits_candidates(layer, max_width, effort)
            coded = [*coded, *unrotated_candidates(layer)]
            self._coded[i, limit] = [
                TableEntry(candidate) for candidate in coded if max(candidate.bits) <= max_width
            ]
        return self._coded[i, limit]

    def _at_loss(self, candidate: Candidate, budget: Budget, losses: Losses) -> Candidate:
        """Return the candidate at the loss by which it is chosen; see `Losses`."""
        if losses != "expected" or budget.bounds_error:
            return candidate
        if not isinstance(candidate, LsrCandidate) or candidate.refined:
            return candidate
        expected = self.search.effort.expected_refinement * candidate.squared_error
        return replace(candidate, squared_error=expected)

    def allocated(self, budget: Budget, losses: Losses = "solved") -> Allocation:
        """Return the candidate that each layer takes under a budget.

        Truncated SVD alone, in that norm, is never better. By the steepest steps along the lower
        convex hulls of all layers [1]_, then single changes and exchanges with what is left. Raises
        `BudgetError` if no choice meets the budget; says what is reachable.
        """
        rows = [list(self.candidates(i, budget, losses)) for i in range(len(self.layers))]
        candidates = [[candidate for _, candidate in row] for row in rows]
        low_rank_error = None
        if budget.layer_rtol is not None:
            choice = [
                _within_tolerance(layer, row, budget.layer_rtol)
                for layer, row in zip(self.layers, candidates, strict=True)
            ]
        else:
            choice, low_rank_error = self._allocate(candidates, budget)
        chosen = [row[k] for row, k in zip(rows, choice, strict=True)]
        return Allocation(rows, chosen, low_rank_error)

    def _allocate(
        self, candidates: Sequence[Sequence[Candidate]], budget: Budget
    ) -> tuple[Choice, float | None]:
        """Return one candidate a layer under a budget, and the error of truncated SVD alone."""
        # Allocation 1: points of cost and loss, in parameters or bytes and in squared error.
        options = [_cost_and_loss(row, budget) for row in candidates]
        # Allocation 2: what truncated SVD alone can do. Where it cannot meet the budget, all
        # candidates together may.
        low_rank = [[k for k, c in enumerate(row) if c.is_truncated_svd] for row in candidates]
        narrow = [row.select(kept) for row, kept in zip(options, low_rank, strict=True)]
        starts: list[Choice] = []
        low_rank_error = None
        try:
            picked = _allocate_within(narrow, budget)
        except BudgetError:
            pass
        else:
            starts.append([kept[k] for kept, k in zip(low_rank, picked, strict=True)])
            size = math.fsum(layer.squared_norm for layer in self.layers)
            loss = total_loss(options, starts[0])
            low_rank_error = math.sqrt(loss / size) if size > 0.0 else 0.0
        # Allocation 3: all candidates, with the answer of 2 among the starts.
        return _allocate_within(options, budget, starts), low_rank_error

    def expected_error(self, budget: Budget) -> float:
        """Return the squared relative error of what a budget takes, as priced.

        Nothing is made or refined. Raises `BudgetError` as `allocated`, and if it takes no layer at
        all.
        """
        chosen = [candidate for _, candidate in self.allocated(budget).chosen]
        if not any(candidate.parameters for candidate in chosen):
            raise BudgetError("nothing of the adapter fits into this budget; allow more")
        lost = math.fsum(candidate.squared_error for candidate in chosen)
        return lost / math.fsum(layer.squared_norm for layer in self.layers)

    def materialized(self, allocation: Allocation) -> tuple[Materialized, ...]:
        """Return the factors of what every layer takes; each is made and measured once."""
        results = []
        for layer, (entry, candidate) in zip(self.layers, allocation.chosen, strict=True):
            if candidate.storage not in entry.materialized:
                entry.materialized[candidate.storage] = materialize(layer, candidate, self.cache)
            results.append(entry.materialized[candidate.storage])
        return tuple(results)

    # -- solving -----------------------------------------------------------------------------------

    def solve(self, tasks: Sequence[SolveTask], stage: str) -> None:
        """Put the candidates of all tasks into the table, counted as a stage of the run."""
        for task, shapes in self.runner.results(tasks, self.runner.counter(tasks, stage)):
            self.add(task, shapes)

    def add(self, task: SolveTask, shapes: Sequence[SolvedShape]) -> None:
        """Put the solved shapes of a task into the rows of its layers.

        Those that one of no more parameters beats are left out.
        """
        for solved in shapes:
            for position, i in enumerate(task.indices):
                ranks = solved.ranks_of(position)
                size = solved.shape.parameters(*ranks)
                loss = float(solved.errors[position]) ** 2
                if not self._is_beaten(i, size, loss):
                    factors = self.cache.put(solved.factors_of(position))
                    candidate = LsrCandidate(
                        parameters=size,
                        squared_error=loss,
                        rank=solved.shape.inner_rank,
                        shape=solved.shape,
                        ranks=ranks,
                        product=partial(_product_later, factors),
                    )
                    self.rows[i].append(TableEntry(candidate))

    def _is_beaten(self, i: int, size: int, loss: float) -> bool:
        """Return whether a product in the row of a layer is no larger and loses no more."""
        return any(p.parameters <= size and p.squared_error <= loss for p in self.products(i))

    def refined(self, i: int, entry: TableEntry, product: SeparatedProduct) -> None:
        """Put a refined product in the place of the old one, with its error in the whole norm.

        In one floating type that is the error of its factors as they will be written, so that they
        are measured once.
        """
        layer = self.layers[i]
        refined = replace(
            entry.product,
            parameters=product.parameters,
            ranks=product.separation_ranks,
            product=self.cache.put(product),
            refined=True,
        )
        entry.priced = {}
        entry.materialized = {}
        only_storage = self.storages[0] if len(self.storages) == 1 else None
        if only_storage is None or only_storage in INTEGER_BITS:
            loss = layer.squared_error(product)
        else:
            written = materialize(layer, replace(refined, storage=only_storage), self.cache)
            entry.materialized[only_storage] = written
            loss = written.candidate.squared_error
        entry.exact = replace(refined, squared_error=loss)


def _product_later(factors: Callable[[], Factors]) -> SeparatedProduct:
    """Return the product of factors that wait.

    Most of what is solved is never chosen, and no product is made of it.
    """
    return product_of(factors())


def _cost_and_loss(candidates: Sequence[Candidate], budget: Budget) -> PartOptions:
    """Return costs of the candidates of a layer, in the units of the budget, and losses."""
    if budget.counts_bytes:
        costs = [candidate.bytes for candidate in candidates]
    else:
        costs = [candidate.parameters for candidate in candidates]
    return PartOptions.of(costs, [candidate.squared_error for candidate in candidates])


def _allocate_within(
    options: Sequence[PartOptions], budget: Budget, starts: Sequence[Choice] = ()
) -> Choice:
    """Return the best choice within the cost of a budget, or within its error."""
    if budget.cost is None:
        return within_loss(options, budget.squared_error or 0.0, starts)
    return within_cost(options, budget.cost, starts)


def _within_tolerance(layer: Layer, candidates: Sequence[Candidate], rtol: float) -> int:
    """Return the index of fewest parameters within a relative error, else of the least error."""
    allowed = rtol**2 * layer.squared_norm
    good = [k for k, candidate in enumerate(candidates) if candidate.squared_error <= allowed]
    if good:
        return min(good, key=lambda k: (candidates[k].parameters, candidates[k].squared_error))
    return min(range(len(candidates)), key=lambda k: candidates[k].squared_error)
