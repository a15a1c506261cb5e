"""The search over the shapes of all layers under one budget, in seven steps.

`search_layers` solves candidates beforehand:

1. Plain candidates of every layer: nothing, the layer as it is, truncated SVD of every rank.
2. The coarse grid: even splits without an inner rank, for all layers of a group at once. For
   several budgets, the fine grid as well. In floats only layers are solved in which a product may
   win (`screening`); the others stay with step 1.

`fit_budget` chooses among them, and solves more where a budget needs it:

3. The budget is allocated: each layer gets one candidate, by the loss that a parameter removes.
4. The fine grid is solved up to about the size that each layer got, unless low rank wins there. The
   budget is allocated again.
5. Neighbours of the shapes chosen most often are tried on a few layers, and solved for all layers
   of a group where they pay. The budget is allocated again.
6. Shapes that layers of one size were given are solved for the others of that size.
7. The chosen products are refined by more sweeps and measured in the whole norm. The budget is
   allocated again, until the choice stays.

Steps 4 to 7 are in `search_steps`. Everything that was solved stays in the table (`search_table`),
from which the next budget starts. The cost is that of the solves in steps 2 to 7, each
O((m + n)(R r + s r)) a sweep and layer (`JointALS`); an allocation takes milliseconds a layer
(docs/evidence/scale.md). The numbers that steer a step stand beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lsrdecomp.lora.search.caches import SpillCache
from lsrdecomp.lora.search.candidates import Materialized, plain_candidates
from lsrdecomp.lora.search.plan import Budget, Resources, Search
from lsrdecomp.lora.search.screening import worth_solving
from lsrdecomp.lora.search.search_steps import (
    can_be_solved,
    exchange_shapes,
    refine,
    solve_fine_grid,
    try_neighbours,
)
from lsrdecomp.lora.search.search_table import Allocation, SearchTable, TableEntry
from lsrdecomp.lora.search.shapes import ShapeRequest, coarse_grid, shape_grid, shapes_like

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lsrdecomp.lora.search.layers import Layer
    from lsrdecomp.lora.search.solve import SolveTask


MAX_GRID_PASSES = 2
"""Maximum times that the fine grid is solved for a budget. After each, some layers get more
parameters and others fewer."""
MAX_REFINEMENTS = 3
"""Maximum times that the budget is allocated again because refined errors changed what is best."""


@dataclass(frozen=True, slots=True)
class FittedLayers:
    """The factors of all layers under one budget.

    Attributes
    ----------
    chosen : tuple of Materialized
        The chosen candidate of each layer.
    low_rank_error : float or None
        Relative error of the best truncated SVDs for the same budget and norm; None if none fit.
    is_nearest : bool
        Whether no layer has a candidate that is nearer, however much the budget allows.
    solved_layers : int
        Number of layers for which LSR products were solved.
    """

    chosen: tuple[Materialized, ...]
    low_rank_error: float | None
    is_nearest: bool = False
    solved_layers: int = 0

    @property
    def squared_error(self) -> float:
        """Sum over all layers, measured on the factors."""
        return math.fsum(chosen.candidate.squared_error for chosen in self.chosen)


def search_layers(
    layers: Sequence[Layer],
    budgets: Sequence[Budget],
    *,
    search: Search | None = None,
    storages: Sequence[str] = ("float32",),
    cache: SpillCache | None = None,
    resources: Resources | None = None,
) -> SearchTable:
    """Solve the grid of shapes for all layers, for one budget or more.

    Parameters
    ----------
    layers : sequence of Layer
    budgets : sequence of Budget
        The budgets to prepare for, from `CompressionPlan.budget`. Shapes too large for any of them
        are not solved.
    search : Search, optional
    storages : sequence of str
        Element types that each layer may choose from; more than one is of use if bytes are counted.
        With int8 or int4 among them, truncated SVDs in integer codes are candidates too.
    cache : SpillCache, optional
        Keeps factors.
    resources : Resources, optional

    Returns
    -------
    SearchTable
        The candidates, for `fit_budget`.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.targets.target import LowRank
    >>> from lsrdecomp.lora.search.layers import Layer
    >>> layer = Layer.of("square", LowRank(np.eye(16)[:, :4], np.eye(16)[:4]))
    >>> budget = Budget(parameters=layer.parameters / 4)
    >>> table = search_layers([layer], [budget], search=Search(orders=(2,), rounds=0))
    >>> fitted = fit_budget(table, budget)
    >>> fitted.chosen[0].candidate.parameters <= layer.parameters / 4
    True
    """
    search = search or Search()
    table = SearchTable(layers, search, storages, cache or SpillCache(), resources or Resources())
    limit = max(budget.max_parameters for budget in budgets)
    table.refines_grid = limit < math.inf and len(budgets) == 1 and not search.shapes
    table.limit = limit
    # Search 1: candidates that need no solve, with all that must be read of a layer.
    for i, layer in enumerate(layers):
        table.rows[i] = [TableEntry(candidate) for candidate in plain_candidates(layer, limit)]
        if can_be_solved(layer):
            table.groups.setdefault(layer.group_key, []).append(i)
            table.whole_norm[i] = layer.leading_entries == layer.norm_entries
    # Search 2: the grid for the layers of each group, or the shapes of another adapter.
    worth: set[int] = set()
    for budget in budgets:
        worth |= _worth_solving(table, budget)
    _solve_layers(table, worth)
    return table


def _worth_solving(table: SearchTable, budget: Budget) -> set[int]:
    """Return the layers for which LSR products are to be solved for a budget."""
    solvable = sorted(i for indices in table.groups.values() for i in indices)
    if not table.is_screened or budget.only_lsr:
        return set(solvable)
    layers = [table.layers[i] for i in solvable]
    places = worth_solving(layers, budget, table.search.inner_rank, table.storages)
    return {solvable[place] for place in places}


def _solve_layers(table: SearchTable, worth: set[int]) -> None:
    """Solve the grid, or the shapes of another adapter, for layers that were not solved before."""
    search = table.search
    groups = {}
    for key, indices in table.groups.items():
        unsolved = [i for i in indices if i in worth and i not in table.solved]
        if unsolved:
            groups[key] = unsolved
    table.solved |= worth
    if search.shapes:
        tasks = _tasks_for_given_shapes(table, groups)
    else:
        tasks = []
        for indices in groups.values():
            requests = _grid(table, indices, table.limit)
            tasks += table.runner.tasks(indices, requests)
    table.solve(tasks, "solving shapes")


def _grid(table: SearchTable, indices: Sequence[int], limit: float) -> list[ShapeRequest]:
    """Return the grid for a group of layers, up to the largest shape that a budget could choose.

    Only the coarse grid, if the table refines it for each budget.
    """
    search = table.search
    first = table.layers[indices[0]]
    max_rank = max(table.layers[i].rank for i in indices)
    half_a_layer = max_rank * sum(first.shape) / 2
    max_parameters = min(half_a_layer, table.layer_limit(first, limit))
    if table.refines_grid:
        return coarse_grid(first.shape, search.orders, max_parameters)
    return shape_grid(first.shape, max_rank, search.orders, search.inner_rank, max_parameters)


def _tasks_for_given_shapes(
    table: SearchTable, groups: Mapping[tuple[object, ...], Sequence[int]]
) -> list[SolveTask]:
    """Return tasks for the shapes of another adapter, `Search.shapes`.

    Layers of one group are solved together at the shapes that they share.
    """
    search = table.search
    sizes = {layer.name: layer.shape for layer in table.layers}
    requests = shapes_like(search.shapes, sizes)
    sharing: dict[tuple[object, ShapeRequest], list[int]] = {}
    for key, indices in groups.items():
        for i in indices:
            for request in requests[table.layers[i].name]:
                if request.shape.inner_rank <= table.layers[i].rank:
                    sharing.setdefault((key, request), []).append(i)
    tasks = []
    for (_, request), indices in sharing.items():
        tasks += table.runner.tasks(indices, [request])
    return tasks


def fit_budget(table: SearchTable, budget: Budget) -> FittedLayers:
    """Choose the candidates of all layers for one budget, refine them and make their factors.

    If layers may have `ODD_WIDTHS`, shapes are solved for a choice without and for one with these:
    each finds some that the other misses.

    The error is never above that of the best truncated SVDs for the same budget and norm, which are
    among the starts of every allocation.

    Parameters
    ----------
    table : SearchTable
        From `search_layers`. It grows by layers solved for the budget, and serves any number of
        budgets.
    budget : Budget

    Raises
    ------
    BudgetError
        If the budget cannot be met; the message has what can be reached.
    """
    usual = budget.without_odd_widths(table.storages)
    if budget.storages is None and usual.storages != table.storages:
        _explore(table, usual)
    allocation = _explore(table, budget)
    if table.has_products:
        allocation = _refined(table, budget)
    return FittedLayers(
        table.materialized(allocation),
        allocation.low_rank_error,
        allocation.is_nearest,
        len(table.solved),
    )


def _explore(table: SearchTable, budget: Budget) -> Allocation:
    """Take steps 3 to 6 for one budget."""
    search = table.search
    # Search 3: the first allocation. A budget that the search did not prepare for may be worth
    # solving more layers.
    _solve_layers(table, _worth_solving(table, budget))
    allocation = table.allocated(budget)
    if not table.has_products:
        return allocation
    # Search 4: the fine grid.
    for _ in range(MAX_GRID_PASSES if table.refines_grid else 0):
        sizes = [candidate.parameters for _, candidate in allocation.chosen]
        if not solve_fine_grid(table, sizes, every_layer=budget.only_lsr):
            break
        allocation = table.allocated(budget)
    # Search 5 and 6: neighbours of the chosen shapes, and shapes of other layers of the same size.
    # Not where each layer has a tolerance of its own: no parameter can be exchanged between layers.
    if not (search.shapes or budget.layer_rtol):
        for _ in range(search.rounds):
            if not try_neighbours(table, allocation.entries, allocation.exchange_rate):
                break
            allocation = table.allocated(budget)
        if search.rounds:
            exchange_shapes(table, allocation.entries)
    return allocation


def _refined(table: SearchTable, budget: Budget) -> Allocation:
    """Take step 7: refine the products that are best at their expected errors, until all are.

    The allocation that is returned goes by measured errors only.
    """
    for _ in range(MAX_REFINEMENTS):
        allocation = table.allocated(budget, "expected")
        if not refine(table, allocation.entries, together=budget.layer_rtol is None):
            break
    return table.allocated(budget, "measured")
