"""The search over the shapes of all layers under one budget, from top to bottom: Search 1 to 7.

1. Plain candidates of every layer: nothing, the layer as it is, truncated SVD of every rank.
2. The coarse grid: even splits without an inner rank, for all layers of a kind at once; for several budgets all of it.
3. A budget takes one candidate a layer, by what one more parameter removes of the loss.
4. The fine grid, up to about the size that the budget gave each layer; it chooses again.
5. Neighbours of the shapes chosen most often, tried on a few layers and adopted where they pay; it chooses again.
6. Shapes that layers of one size chose, for the others of that size.
7. More sweeps for what is chosen, measured in the whole norm, until the choice stays.

Steps 4 to 7 are in `lsrdecomp.compression.search_steps`. What was solved stays in the table (`search_table`), from
which the next budget starts. Cost: the solves of steps 2 to 7, each O((m + n)(R r + s r)) a sweep and layer
(`JointALS`); choosing is a few milliseconds a layer. docs/scale.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lsrdecomp.compression.allocation import allocate, exchange_rate
from lsrdecomp.compression.candidates import Candidate, Materialized, drop, keep, low_rank_candidates
from lsrdecomp.compression.layers import Layer, SpillCache
from lsrdecomp.compression.plan import Budget
from lsrdecomp.compression.search_steps import exchange_shapes, refine, solve_fine_grid, try_neighbours
from lsrdecomp.compression.search_table import Draw, Entry, SearchTable
from lsrdecomp.compression.settings import Resources, Search
from lsrdecomp.compression.shapes import Request, coarse_grid, shape_grid, shapes_like
from lsrdecomp.compression.solve import Task
from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.allocation import Choice

SHARE = 8.0
"""Most parameters of a layer on the grid, in units of what the budget gives a layer on average."""

EXPECTED_REFINEMENT = 0.7
"""Share of its loss that refining usually leaves of a product: what is chosen is chosen for what it may become, against
truncated SVD, which is as good as it can be from the start. On a language model's layers it leaves .4 to .9."""

WIDENINGS = 2
"""Most times that the fine grid is solved for a budget: with it some layers are given more, others less."""

ROUNDS = 3
"""Most times that a budget is drawn anew because refining changed what is best."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """All layers under one budget."""

    chosen: tuple[Materialized, ...]
    low_rank_error: float | None  # the best truncated SVD found for the same budget and norm; None: none fits


@dataclass(frozen=True, slots=True)
class Allocation:
    """Candidates of every layer in their storages, which of them it takes, and the error of truncated SVD alone."""

    rows: list[list[tuple[Entry, Candidate]]]
    choice: Choice
    low_rank_error: float | None

    @property
    def chosen(self) -> list[tuple[Entry, Candidate]]:
        return [row[k] for row, k in zip(self.rows, self.choice, strict=True)]

    @property
    def entries(self) -> list[Entry]:
        return [entry for entry, _ in self.chosen]

    @property
    def exchange_rate(self) -> float:
        """Loss that one more parameter removes at the margin."""
        return exchange_rate([[candidate for _, candidate in row] for row in self.rows], self.choice)


class Searched:
    """Candidates of all layers; any number of budgets can be drawn from them.

    Made by `search_layers`. `fit` draws a budget: by default it still tries neighbours of what that budget chooses, and
    refines what it takes; with ``solve=False`` it only allocates, measures and rounds, a few milliseconds a layer.
    """

    def __init__(
        self, layers: Sequence[Layer], search: Search, storages: Sequence[str], cache: SpillCache, resources: Resources
    ) -> None:
        self.table = SearchTable(layers, search, storages, cache, resources)
        self.layers, self.search = layers, search
        self._refines_grid = False  # whether the fine grid waits for a budget to say where it is wanted

    # -- the grid ------------------------------------------------------------------------------------------------------

    def solve_grid(self, limits: Sequence[float | None]) -> None:
        """Every layer at the shapes of the grid, for budgets of so many parameters (None: any)."""
        finite = [limit for limit in limits if limit is not None]
        limit = max(finite) if len(finite) == len(limits) else None
        self._refines_grid = limit is not None and len(limits) == 1 and not self.search.shapes
        # Search 1: what needs no solve. All that is wanted of a layer is read at once.
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, layer in enumerate(self.layers):
            self.table.rows[i] = [Entry(candidate) for candidate in self._plain(layer, limit)]
            if layer.squared_norm > 0.0 and min(layer.shape) > 1:
                groups.setdefault(layer.kind, []).append(i)
                self.table.whole_norm[i] = layer.leading_entries == layer.dense_entries
        # Search 2: the grid, layers of one kind together; or the shapes that another adapter took.
        if self.search.shapes:
            tasks = self._shapes_of_another(groups)
        else:
            tasks = [
                task
                for indices in groups.values()
                for task in self.table.tasks(indices, self._grid(self.layers[indices[0]], indices, limit))
            ]
        self.table.solve(tasks, "solving shapes")

    def _plain(self, layer: Layer, limit: float | None) -> Iterator[Candidate]:
        yield drop(layer)
        yield keep(layer)
        if self.search.low_rank:
            yield from low_rank_candidates(layer, math.inf if limit is None else limit)

    def _grid(self, first: Layer, indices: Sequence[int], limit: float | None) -> list[Request]:
        """The grid for layers of one size, as far as a budget could want it."""
        ranks = [self.layers[i].rank for i in indices]
        most = max(ranks) * sum(first.shape) / 2
        if limit is not None:
            most = min(most, limit, SHARE * limit * first.parameters / self.table.parameters)
        if self._refines_grid:
            return coarse_grid(first.shape, self.search.orders, most)
        return shape_grid(first.shape, max(ranks), self.search.orders, self.search.inner_rank, most)

    def _shapes_of_another(self, groups: Mapping[tuple[object, ...], Sequence[int]]) -> list[Task]:
        """The shapes that were passed for each layer; layers of one kind side by side where they share one."""
        sharing: dict[tuple[object, Request], list[int]] = {}
        requests = shapes_like(self.search.shapes, {layer.name: layer.shape for layer in self.layers})
        for kind, indices in groups.items():
            for i in indices:
                for request in requests[self.layers[i].name]:
                    if request.shape.inner_rank <= self.layers[i].rank:
                        sharing.setdefault((kind, request), []).append(i)
        return [task for (_, request), indices in sharing.items() for task in self.table.tasks(indices, [request])]

    # -- a budget ------------------------------------------------------------------------------------------------------

    def fit(self, budget: Budget, *, solve: bool = True, allowed: Callable[[Candidate], bool] | None = None) -> Fitted:
        """What every layer becomes under one budget over all of them.

        Parameters
        ----------
        budget : Budget
        solve : bool
            Whether to try neighbours and refine what was chosen; without, only what is in the table.
        allowed : callable, optional
            Which candidates may be taken, in their storages; absent, all. Dropping a layer always may.

        Raises
        ------
        BudgetError
            If the budget cannot be met; says what is reachable.
        """
        draw = Draw(budget, allowed)
        # Search 3: the first choice, of what is in the table.
        allocation = self._allocated(draw)
        low_rank_error = allocation.low_rank_error
        if not solve:
            return Fitted(self._materialized(allocation), low_rank_error)
        # Search 4: the fine grid where the choice wants it.
        for _ in range(WIDENINGS if self._refines_grid else 0):
            if not solve_fine_grid(self.table, [candidate.parameters for _, candidate in allocation.chosen]):
                break
            allocation = self._allocated(draw)
        # Search 5 and 6: neighbours of the shapes that were chosen, and shapes of other layers of that size. A
        # tolerance for each layer has no rate of exchange between layers.
        if not (self.search.shapes or budget.layer_rtol):
            for _ in range(self.search.rounds):
                if not try_neighbours(self.table, allocation.entries, allocation.exchange_rate):
                    break
                allocation = self._allocated(draw)
            if self.search.rounds:
                exchange_shapes(self.table, allocation.entries)
        # Search 7: refine what is chosen for what it may become, until refining changes no choice; then only errors
        # in the whole norm count.
        expecting = replace(draw, expected_refinement=1.0 if budget.bounds_error else EXPECTED_REFINEMENT)
        for _ in range(ROUNDS):
            allocation = self._allocated(expecting)
            if not refine(self.table, allocation.entries, together=budget.layer_rtol is None):
                break
        return Fitted(self._materialized(self._allocated(replace(draw, trusted=True))), low_rank_error)

    def expected_error(self, budget: Budget, *, allowed: Callable[[Candidate], bool] | None = None) -> float:
        """Squared relative error of what a budget takes from the table, as priced there: nothing is made or refined.

        Raises
        ------
        BudgetError
            As `fit`; if the budget takes no layer at all.
        """
        chosen = [candidate for _, candidate in self._allocated(Draw(budget, allowed)).chosen]
        if not any(candidate.parameters for candidate in chosen):
            raise BudgetError("nothing of the adapter fits into this budget; allow more")
        lost = math.fsum(candidate.squared_error for candidate in chosen)
        return lost / math.fsum(layer.squared_norm for layer in self.layers)

    def _allocated(self, draw: Draw) -> Allocation:
        """The candidate that each layer takes under a draw."""
        rows = [list(self.table.candidates(i, draw)) for i in range(len(self.layers))]
        candidates = [[candidate for _, candidate in row] for row in rows]
        return Allocation(rows, *allocate(self.layers, candidates, draw.budget))

    def _materialized(self, allocation: Allocation) -> tuple[Materialized, ...]:
        chosen = enumerate(allocation.chosen)
        return tuple(self.table.materialized(i, entry, candidate) for i, (entry, candidate) in chosen)


def search_layers(
    layers: Sequence[Layer],
    budgets: Sequence[Budget] = (),
    *,
    search: Search | None = None,
    storages: Sequence[str] = ("float32",),
    cache: SpillCache | None = None,
    resources: Resources | None = None,
) -> Searched:
    """Solve the grid of shapes for all layers, for any number of budgets.

    Parameters
    ----------
    layers : sequence of Layer
    budgets : sequence of Budget
        What will be drawn, from `CompressionPlan.budget`; larger shapes than they could want are not solved. None:
        anything may be drawn.
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

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.targets.base import LowRank
    >>> layer = Layer("square", LowRank(np.eye(16)[:, :4], np.eye(16)[:4]))
    >>> budget = Budget(parameters=layer.parameters / 4)
    >>> fitted = search_layers([layer], [budget], search=Search(orders=(2,), rounds=0)).fit(budget)
    >>> fitted.chosen[0].candidate.parameters <= layer.parameters / 4
    True
    """
    searched = Searched(layers, search or Search(), storages, cache or SpillCache(), resources or Resources())
    searched.solve_grid([budget.parameters for budget in budgets] or [None])
    return searched
