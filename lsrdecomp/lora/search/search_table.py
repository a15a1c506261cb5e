"""The table of a search: candidates of every layer so far, and the allocation of a budget to them.

Shapes are solved with reduced weights of the norm (`Layer.leading`), so the error of a new product
is that in the reduced norm. Refining lowers it, and measures it in the whole norm. Rounding to a
storage may add to it. `Losses` says which of these errors an allocation goes by.

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

from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.allocation import Choice, PartOptions, total_loss, within_cost, within_loss
from lsrdecomp.lora.search.candidates import (
    MAX_CODE_SIZES,
    Candidate,
    DropCandidate,
    LowRankCandidate,
    LsrCandidate,
    Materialized,
    equal_bits_candidates,
    materialize,
    predicted_as,
    priced_as,
    unrotated_candidates,
    water_filled_candidates,
)
from lsrdecomp.lora.search.quantize import INTEGER_BITS
from lsrdecomp.lora.search.solve import Factors, SolvedShape, SolveTask, TaskRunner, product_of
from lsrdecomp.lora.search.spectral_codes import MAX_BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lsrdecomp.kronecker.product import SeparatedProduct
    from lsrdecomp.lora.search.caches import SpillCache
    from lsrdecomp.lora.search.layers import Layer
    from lsrdecomp.lora.search.plan import Budget, Resources, Search

NO_NEARER = 1.0 - 1e-6
"""A product is nearer than truncated SVD if its loss is below this factor of it: up to rounding it
may be a truncated SVD itself."""

MAX_LAYER_SHARE = 8.0
"""Maximum parameters of a layer, in units of what the budget gives a layer on average."""
MIN_CODE_SIZES = 288
"""Sizes of truncated SVD in integers that all layers offer together, where each has enough: with
few layers each offers more than `MAX_CODE_SIZES`, so that a number of bytes can be filled."""
HULL_MARGIN = 1.15
"""Candidates are tried in integers if their error is at most this many times that of the convex
hull of their layer."""
WIDTH_MARGIN = 1.1
"""The same for candidates in other widths of codes than int4, by the error that is predicted from
that in int4. By hand."""
EXPECTED_REFINEMENT = 0.7
"""Share of its squared error that a product is expected to have after refining. Products are chosen
by it against truncated SVDs, which cannot be refined. On a language model's layers 0.4 to 0.9 are
left."""

REFERENCE_WIDTH = "int4"
"""The width of codes from whose losses those in other widths are predicted."""

Losses = Literal["solved", "expected", "measured"]
"""The losses (squared errors) of products by which an allocation goes.

``"solved"``: those in the table. ``"expected"``: of products that were not refined yet, the share
that refining usually leaves; a budget that bounds errors must not count on it. ``"measured"``: only
products whose error was measured in the whole norm may be chosen.
"""


@dataclass(eq=False)
class TableEntry:
    """A candidate before rounding, with its versions in each storage."""

    exact: Candidate
    priced: dict[tuple[str, bool], Candidate] = field(default_factory=dict)
    """Versions by storage and by whether their errors are those of rounded factors."""
    materialized: dict[str, Materialized] = field(default_factory=dict)
    """Factors of the versions that were chosen, by storage."""

    @property
    def product(self) -> LsrCandidate:
        """The candidate, which must be an LSR product."""
        assert isinstance(self.exact, LsrCandidate)
        return self.exact

    @property
    def is_lsr(self) -> bool:
        """True if the candidate is an LSR product."""
        return isinstance(self.exact, LsrCandidate)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The candidates that were chosen for a budget.

    Attributes
    ----------
    rows : list of list of (TableEntry, Candidate)
        The candidates of each layer that it was chosen from, in their storages.
    chosen : list of (TableEntry, Candidate)
        The candidate of each layer.
    low_rank_error : float or None
        Relative error of truncated SVDs within the same budget; None if they cannot meet it.
    """

    rows: list[list[tuple[TableEntry, Candidate]]]
    chosen: list[tuple[TableEntry, Candidate]]
    low_rank_error: float | None

    @property
    def entries(self) -> list[TableEntry]:
        """The entry of each layer's candidate."""
        return [entry for entry, _ in self.chosen]

    @property
    def is_nearest(self) -> bool:
        """True if no layer has a candidate that is nearer than the chosen one."""
        return all(
            picked.squared_error <= min(candidate.squared_error for _, candidate in row)
            for row, (_, picked) in zip(self.rows, self.chosen, strict=True)
        )

    @property
    def exchange_rate(self) -> float:
        """Loss that one more parameter in the budget would remove.

        It is estimated from the best step of each layer to a larger candidate: as the upper
        quartile of these, since a single steep step says little of the others.
        """
        slopes = []
        for row, (_, picked) in zip(self.rows, self.chosen, strict=True):
            steepest = _steepest_step(picked, [candidate for _, candidate in row])
            if steepest is not None:
                slopes.append(steepest)
        return float(np.quantile(slopes, 0.75)) if slopes else 0.0


def _steepest_step(picked: Candidate, others: Sequence[Candidate]) -> float | None:
    """Return the most loss per parameter that a larger candidate removes; None if none does."""
    slopes = []
    for other in others:
        is_larger = other.parameters > picked.parameters
        if is_larger and other.squared_error < picked.squared_error:
            removed = picked.squared_error - other.squared_error
            slopes.append(removed / (other.parameters - picked.parameters))
    return max(slopes, default=None)


class SearchTable:
    """The candidates of all layers, to which a search only adds.

    Attributes
    ----------
    layers : sequence of Layer
    search : Search
    storages : tuple of str
        Element types that each layer may choose from.
    rows : list of list of TableEntry
        The candidates of each layer.
    whole_norm : list of bool
        For each layer, whether shapes are solved in its whole norm: its reduced weights are no
        smaller.
    runner : TaskRunner
        Solves shapes of these layers.
    tried : set
        Keys of what the steps of the search have tried, so that nothing is tried twice.
    refines_grid : bool
        Whether the fine grid is solved for each budget, where it is of use, and not beforehand.
    limit : float
        Maximum parameters of all layers together, in any of the budgets prepared for.
    groups : dict of tuple to list of int
        Layers that can be solved together, under their `Layer.group_key`.
    solved : set of int
        Layers that LSR products were solved for.
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
        self.limit = math.inf
        self.groups: dict[tuple[object, ...], list[int]] = {}
        self.solved: set[int] = set()
        # Truncated SVDs in integer codes, by layer and limit of bytes.
        self._coded: dict[tuple[int, float], list[TableEntry]] = {}

    @property
    def has_products(self) -> bool:
        """True if any layer has an LSR product."""
        return any(entry.is_lsr for row in self.rows for entry in row)

    @property
    def is_screened(self) -> bool:
        """True if only layers are solved in which a product may win.

        Not where numbers are stored in integers: products lose less by these than singular vectors.
        """
        return not self.search.shapes and not self.has_integers

    def layer_limit(self, layer: Layer, limit: float) -> float:
        """Return the largest part that a layer can have of a limit for all layers."""
        return min(limit, MAX_LAYER_SHARE * limit * layer.parameters / self.parameters)

    def products(self, i: int) -> list[LsrCandidate]:
        """Return the LSR products in the row of a layer."""
        return [entry.exact for entry in self.rows[i] if isinstance(entry.exact, LsrCandidate)]

    @property
    def _code_sizes(self) -> int:
        """Number of sizes at which a layer offers truncated SVD in integer codes."""
        return max(MAX_CODE_SIZES, math.ceil(MIN_CODE_SIZES / len(self.layers)))

    def low_rank_wins(self, i: int) -> bool:
        """Return whether no LSR product of a layer is nearer than its truncated SVDs.

        They are compared with the line through the truncated SVDs, over parameters.
        """
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
        """Yield the candidates of a layer, in each storage, that a budget may choose."""
        entries = self._worth_trying(i, budget, losses)
        storages = self.storages if budget.storages is None else budget.storages
        predicted = _predicted_widths(storages) if budget.counts_bytes else ()
        row = []
        for entry in entries:
            for storage in storages:
                if entry.exact.exists_in(storage) and not (entry.is_lsr and storage in predicted):
                    candidate = self._in_storage(i, entry, storage, budget)
                    row.append((entry, self._at_loss(candidate, budget, losses)))
        if self.has_integers:
            row += [(entry, entry.exact) for entry in self._coded_low_rank(i, budget)]
        if predicted:
            row += self._in_predicted_widths(i, row, predicted, budget, losses)
        for entry, candidate in row:
            if budget.allows(candidate, self.layers[i].rank):
                yield entry, candidate

    def _in_storage(self, i: int, entry: TableEntry, storage: str, budget: Budget) -> Candidate:
        """Return the version of an entry in a storage, with its error."""
        key = storage, budget.bounds_error
        if key not in entry.priced:
            entry.priced[key] = priced_as(
                self.layers[i], entry.exact, storage, measured=budget.bounds_error
            )
        return entry.priced[key]

    def _in_predicted_widths(
        self,
        i: int,
        row: Sequence[tuple[TableEntry, Candidate]],
        widths: Sequence[str],
        budget: Budget,
        losses: Losses,
    ) -> list[tuple[TableEntry, Candidate]]:
        """Return products of a layer in further widths of codes, where they are near the hull.

        The loss of a product in a width is predicted from that in the width next to it, towards
        int4. Codes are made only where it is near the lower convex hull of all candidates.

        Parameters
        ----------
        i : int
            Index of the layer.
        row : sequence of (TableEntry, Candidate)
            Its other candidates, those in int4 among them.
        widths : sequence of str
            The widths that are offered, but int4.
        budget : Budget
        losses : Losses
        """
        options = list(row)
        unmade: set[int] = set()

        def predict(entry: TableEntry, storage: str) -> None:
            made = self._in_storage(i, entry, storage, budget)
            for further in _further_widths(storage, widths):
                predicted = predicted_as(entry.product, made, further)
                unmade.add(len(options))
                options.append((entry, self._at_loss(predicted, budget, losses)))

        for entry, candidate in row:
            if entry.is_lsr and candidate.storage == REFERENCE_WIDTH:
                predict(entry, REFERENCE_WIDTH)
        while unmade:
            # 1. The corners of the hull, and if they are made, what is near it.
            part = _cost_and_loss([candidate for _, candidate in options], budget)
            corners = part.hull()
            chosen = unmade.intersection(corners)
            if not chosen:
                hull = np.interp(part.costs, part.costs[corners], part.losses[corners])
                is_near = part.losses <= WIDTH_MARGIN * hull
                chosen = {k for k in unmade if is_near[k]}
            if not chosen:
                break
            # 2. Make them, and predict the widths beyond.
            for k in sorted(chosen):
                entry, predicted = options[k]
                candidate = self._in_storage(i, entry, predicted.storage, budget)
                options[k] = entry, self._at_loss(candidate, budget, losses)
                predict(entry, predicted.storage)
            unmade -= chosen
        return [options[k] for k in range(len(row), len(options)) if k not in unmade]

    def _worth_trying(self, i: int, budget: Budget, losses: Losses) -> list[TableEntry]:
        """Return the entries of a layer that an allocation should consider.

        They are all that are not LSR products, and the products that are better than all smaller
        ones. With ``losses="measured"`` a product must have been measured in the whole norm.
        """
        others = [entry for entry in self.rows[i] if not entry.is_lsr]
        falling = self._falling_products(i, budget, losses)
        if self.has_integers and falling:
            # Codes are made of every candidate, which takes long: only of promising ones.
            falling = self._near_hull(falling)
            limit = self.layer_limit(self.layers[i], budget.max_parameters)
            falling = [entry for entry in falling if entry.exact.parameters <= limit]
        if losses == "measured" and not self.whole_norm[i]:
            falling = [entry for entry in falling if entry.product.refined]
        return [*others, *falling]

    def _falling_products(self, i: int, budget: Budget, losses: Losses) -> list[TableEntry]:
        """Return the products of a layer by size, without those that a smaller one beats."""
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
        limits = HULL_MARGIN * hull
        return [
            entry
            for entry, limit in zip(entries, limits, strict=True)
            if entry.exact.squared_error <= limit
        ]

    def _coded_low_rank(self, i: int, budget: Budget) -> list[TableEntry]:
        """Return truncated SVDs of a layer in integer codes.

        Where bytes are counted, bits are spread over the components; else each component has as
        many as the storage allows.
        """
        layer = self.layers[i]
        max_width = max(INTEGER_BITS.get(storage, 0) for storage in self.storages)
        # Limits are powers of two, so that budgets of similar sizes share codes.
        limit = math.inf
        if budget.bytes is not None:
            limit = 2.0 ** math.ceil(math.log2(self.layer_limit(layer, budget.bytes + 1.0)))
        if (i, limit) not in self._coded:
            if budget.counts_bytes:
                coded = water_filled_candidates(
                    layer, limit, max_bits=max_width, n_sizes=self._code_sizes
                )
            else:
                coded = equal_bits_candidates(layer, max_width)
            if max_width >= MAX_BITS:
                coded = [*coded, *unrotated_candidates(layer)]
            self._coded[i, limit] = [
                TableEntry(candidate) for candidate in coded if max(candidate.bits) <= max_width
            ]
        return self._coded[i, limit]

    def _at_loss(self, candidate: Candidate, budget: Budget, losses: Losses) -> Candidate:
        """Return the candidate with the loss that an allocation goes by; see `Losses`."""
        if losses != "expected" or budget.bounds_error:
            return candidate
        if not isinstance(candidate, LsrCandidate) or candidate.refined:
            return candidate
        expected = EXPECTED_REFINEMENT * candidate.squared_error
        return replace(candidate, squared_error=expected)

    def allocated(self, budget: Budget, losses: Losses = "solved") -> Allocation:
        """Choose the candidate of each layer for a budget.

        Layers take the steepest steps along the lower convex hulls of their losses [1]_, and the
        rest of the budget goes to single changes and exchanges. The result is never worse than
        the best choice of truncated SVDs in the same norm.

        Raises
        ------
        BudgetError
            If no choice meets the budget; the message has what can be reached.
        """
        rows = [list(self.candidates(i, budget, losses)) for i in range(len(self.layers))]
        low_rank_choice = None
        low_rank_error = None
        if budget.layer_rtol is None:
            low_rank_choice, low_rank_error = self._allocate_low_rank(rows, budget)
        if budget.only_lsr:
            rows = [_products_of(row) or row for row in rows]
            low_rank_choice = None
        candidates = [[candidate for _, candidate in row] for row in rows]
        if budget.layer_rtol is not None:
            choice = [
                _within_tolerance(layer, row, budget.layer_rtol)
                for layer, row in zip(self.layers, candidates, strict=True)
            ]
        else:
            options = [_cost_and_loss(row, budget) for row in candidates]
            starts = [] if low_rank_choice is None else [low_rank_choice]
            choice = _allocate_within(options, budget, starts)
        chosen = [row[k] for row, k in zip(rows, choice, strict=True)]
        return Allocation(rows, chosen, low_rank_error)

    def _allocate_low_rank(
        self, rows: Sequence[Sequence[tuple[TableEntry, Candidate]]], budget: Budget
    ) -> tuple[Choice | None, float | None]:
        """Return the index of each layer's best truncated SVD, and their relative error.

        None if they cannot meet the budget.
        """
        candidates = [[candidate for _, candidate in row] for row in rows]
        options = [_cost_and_loss(row, budget) for row in candidates]
        choice = _allocate_low_rank(candidates, options, budget)
        if choice is None:
            return None, None
        squared_norm = math.fsum(layer.squared_norm for layer in self.layers)
        loss = total_loss(options, choice)
        return choice, math.sqrt(loss / squared_norm) if squared_norm > 0.0 else 0.0

    def expected_error(self, budget: Budget) -> float:
        """Return the squared relative error of the choice for a budget, before refining.

        Raises `BudgetError` as `allocated`, and if the choice leaves all layers out.
        """
        chosen = [candidate for _, candidate in self.allocated(budget).chosen]
        if not any(candidate.parameters for candidate in chosen):
            raise BudgetError("nothing of the adapter fits into this budget; allow more")
        lost = math.fsum(candidate.squared_error for candidate in chosen)
        return lost / math.fsum(layer.squared_norm for layer in self.layers)

    def materialized(self, allocation: Allocation) -> tuple[Materialized, ...]:
        """Return the chosen candidates with their factors, each made and measured once."""
        results = []
        for layer, (entry, candidate) in zip(self.layers, allocation.chosen, strict=True):
            if candidate.storage not in entry.materialized:
                entry.materialized[candidate.storage] = materialize(layer, candidate, self.cache)
            results.append(entry.materialized[candidate.storage])
        return tuple(results)

    # -- solving -----------------------------------------------------------------------------------

    def solve(self, tasks: Sequence[SolveTask], stage: str) -> None:
        """Solve tasks and add their shapes to the table; report progress as a stage."""
        for task, shapes in self.runner.results(tasks, self.runner.counter(tasks, stage)):
            self.add(task, shapes)

    def add(self, task: SolveTask, shapes: Sequence[SolvedShape]) -> None:
        """Add the solved shapes of a task to the rows of its layers, unless they are beaten."""
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
        """Return whether the row of a layer has a product that is no larger and loses no more."""
        return any(p.parameters <= size and p.squared_error <= loss for p in self.products(i))

    def refined(self, i: int, entry: TableEntry, product: SeparatedProduct) -> None:
        """Replace the product of an entry by a refined one, with its error in the whole norm.

        If the storage is one floating type, its rounded factors are made now: their error is the
        one that counts, and is measured only once.
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


def _predicted_widths(storages: Sequence[str]) -> tuple[str, ...]:
    """Return the widths of codes that are made only where they are near the hull."""
    if REFERENCE_WIDTH not in storages:
        return ()
    return tuple(name for name in storages if name in INTEGER_BITS and name != REFERENCE_WIDTH)


def _further_widths(storage: str, widths: Sequence[str]) -> list[str]:
    """Return the widths next to one, away from the width that predictions start from."""
    bits = INTEGER_BITS[storage]
    reference = INTEGER_BITS[REFERENCE_WIDTH]
    narrower = [name for name in widths if INTEGER_BITS[name] < bits <= reference]
    wider = [name for name in widths if INTEGER_BITS[name] > bits >= reference]
    further = []
    if narrower:
        further.append(max(narrower, key=INTEGER_BITS.__getitem__))
    if wider:
        further.append(min(wider, key=INTEGER_BITS.__getitem__))
    return further


def _product_later(factors: Callable[[], Factors]) -> SeparatedProduct:
    """Return the product of factors that are read now: most of them are never chosen."""
    return product_of(factors())


def _products_of(
    row: Sequence[tuple[TableEntry, Candidate]],
) -> list[tuple[TableEntry, Candidate]]:
    """Return the LSR products of a row."""
    return [pair for pair in row if isinstance(pair[1], LsrCandidate)]


def _cost_and_loss(candidates: Sequence[Candidate], budget: Budget) -> PartOptions:
    """Return the cost of each candidate, in the units of the budget, and its loss."""
    if budget.counts_bytes:
        costs = [candidate.bytes for candidate in candidates]
    else:
        costs = [candidate.parameters for candidate in candidates]
    return PartOptions.of(costs, [candidate.squared_error for candidate in candidates])


def _allocate_low_rank(
    candidates: Sequence[Sequence[Candidate]], options: Sequence[PartOptions], budget: Budget
) -> Choice | None:
    """Return the best choice of truncated SVDs; None if they cannot meet the budget."""
    low_rank = [
        [k for k, candidate in enumerate(row) if candidate.is_truncated_svd] for row in candidates
    ]
    narrow = [row.select(indices) for row, indices in zip(options, low_rank, strict=True)]
    try:
        picked = _allocate_within(narrow, budget)
    except BudgetError:
        return None
    return [indices[k] for indices, k in zip(low_rank, picked, strict=True)]


def _allocate_within(
    options: Sequence[PartOptions], budget: Budget, starts: Sequence[Choice] = ()
) -> Choice:
    """Return a choice of small loss within the cost of a budget, or of small cost in its error."""
    if budget.cost is None:
        return within_loss(options, budget.squared_error or 0.0, starts)
    return within_cost(options, budget.cost, starts)


def _within_tolerance(layer: Layer, candidates: Sequence[Candidate], rtol: float) -> int:
    """Return the index of the smallest candidate within a relative error, or else the nearest."""
    max_loss = rtol**2 * layer.squared_norm
    within = [k for k, candidate in enumerate(candidates) if candidate.squared_error <= max_loss]
    if within:
        return min(within, key=lambda k: (candidates[k].parameters, candidates[k].squared_error))
    return min(range(len(candidates)), key=lambda k: candidates[k].squared_error)
