"""The search over the shapes of all layers under one budget, from top to bottom: Search 1 to 7.

1. Plain candidates of every layer: nothing, the layer as it is, truncated SVD of every rank.
2. The coarse grid: even splits without an inner rank, for all layers of a group at once; for
   several budgets all of it.
3. A budget takes one candidate a layer, by what one more parameter removes of the loss.
4. The fine grid, up to about the size that the budget gave each layer, unless low rank wins there;
   it chooses again.
5. Neighbours of the shapes chosen most often, tried on a few layers and adopted where they pay; it
   chooses again.
6. Shapes that layers of one size chose, for the others of that size.
7. More sweeps for what is chosen, measured in the whole norm, until the choice stays.

Steps 4 to 7 are in `search_steps`. What was solved stays in the table (`search_table`), from which
the next budget starts. Cost: the solves of steps 2 to 7, each O((m + n)(R r + s r)) a sweep and
layer (`JointALS`); choosing is milliseconds a layer (docs/scale.md). The numbers that steer it are
in `lsrdecomp.compression.effort.SearchEffort`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lsrdecomp.compression.caches import SpillCache
from lsrdecomp.compression.candidates import Materialized, plain_candidates
from lsrdecomp.compression.search_steps import (
    can_be_solved,
    exchange_shapes,
    refine,
    solve_fine_grid,
    try_neighbours,
)
from lsrdecomp.compression.search_table import SearchTable, TableEntry
from lsrdecomp.compression.settings import Budget, Resources, Search
from lsrdecomp.compression.shapes import ShapeRequest, coarse_grid, shape_grid, shapes_like

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lsrdecomp.compression.layers import Layer
    from lsrdecomp.compression.solve import SolveTask


@dataclass(frozen=True, slots=True)
class FittedLayers:
    """All layers under one budget.

    Attributes
    ----------
    chosen : tuple of Materialized
    low_rank_error : float or None
        Of the best truncated SVD found for the same budget and norm; None: none fits.
    """

    chosen: tuple[Materialized, ...]
    low_rank_error: float | None


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
        What will be drawn, from `CompressionPlan.budget`; larger shapes than they could want are
        not solved.
    search : Search, optional
    storages : sequence of str
        Types the factors may be stored in; more than one is of use when bytes are counted. With
        int8 or int4 among them, truncated SVD in water-filled bits takes part.
    cache : SpillCache, optional
        Where factors wait.
    resources : Resources, optional

    Returns
    -------
    SearchTable
        Of which `fit_budget` draws any budget. The error is never above that of the best truncated
        SVD for the same budget and norm (``low_rank_error``), which is among the starting points of
        every allocation.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.targets.base import LowRank
    >>> from lsrdecomp.compression.layers import Layer
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
    # Search 1: what needs no solve. All that is wanted of a layer is read at once.
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, layer in enumerate(layers):
        table.rows[i] = [TableEntry(candidate) for candidate in plain_candidates(layer, limit)]
        if can_be_solved(layer):
            groups.setdefault(layer.group_key, []).append(i)
            table.whole_norm[i] = layer.leading_entries == layer.norm_entries
    # Search 2: the grid, layers of one group together; or the shapes that another adapter took.
    if search.shapes:
        tasks = _shapes_of_another(table, groups)
    else:
        tasks = []
        for indices in groups.values():
            tasks += table.runner.tasks(
                indices, _grid(table, indices, limit), effort=search.effort.solve
            )
    table.solve(tasks, "solving shapes")
    return table


def _grid(table: SearchTable, indices: Sequence[int], limit: float) -> list[ShapeRequest]:
    """Return the grid for layers of one size, whole or coarse, as far as a budget could want it."""
    search = table.search
    grid = search.effort.grid
    first = table.layers[indices[0]]
    max_rank = max(table.layers[i].rank for i in indices)
    half_a_layer = max_rank * sum(first.shape) / 2
    max_parameters = min(half_a_layer, table.layer_limit(first, limit))
    if table.refines_grid:
        return coarse_grid(first.shape, search.orders, max_parameters, grid)
    return shape_grid(first.shape, max_rank, search.orders, search.inner_rank, max_parameters, grid)


def _shapes_of_another(
    table: SearchTable, groups: Mapping[tuple[object, ...], Sequence[int]]
) -> list[SolveTask]:
    """Return tasks for the shapes that were passed for each layer.

    Layers of one group are solved together where they share one.
    """
    search = table.search
    sizes = {layer.name: layer.shape for layer in table.layers}
    requests = shapes_like(search.shapes, sizes, search.effort.common_shapes)
    sharing: dict[tuple[object, ShapeRequest], list[int]] = {}
    for key, indices in groups.items():
        for i in indices:
            for request in requests[table.layers[i].name]:
                if request.shape.inner_rank <= table.layers[i].rank:
                    sharing.setdefault((key, request), []).append(i)
    tasks = []
    for (_, request), indices in sharing.items():
        tasks += table.runner.tasks(indices, [request], effort=search.effort.solve)
    return tasks


def fit_budget(table: SearchTable, budget: Budget) -> FittedLayers:
    """Return the candidate of every layer under one budget over all of them, its factors made.

    Any number of budgets can be drawn from one table, which grows by what is solved for each.

    Parameters
    ----------
    table : SearchTable
        What `search_layers` returned.
    budget : Budget

    Raises
    ------
    BudgetError
        If the budget cannot be met; says what is reachable.
    """
    search = table.search
    effort = search.effort
    # Search 3: the first choice, of what is in the table.
    allocation = table.allocated(budget)
    # Search 4: the fine grid where the choice wants it.
    for _ in range(effort.max_grid_passes if table.refines_grid else 0):
        sizes = [candidate.parameters for _, candidate in allocation.chosen]
        if not solve_fine_grid(table, sizes):
            break
        allocation = table.allocated(budget)
    # Search 5 and 6: neighbours of the shapes that were chosen, and shapes of other layers of that
    # size. A tolerance for each layer has no rate of exchange between layers.
    if not (search.shapes or budget.layer_rtol):
        for _ in range(search.rounds):
            if not try_neighbours(table, allocation.entries, allocation.exchange_rate):
                break
            allocation = table.allocated(budget)
        if search.rounds:
            exchange_shapes(table, allocation.entries)
    # Search 7: refine what is chosen for what it may become, until refining changes no choice; then
    # only errors in the whole norm count.
    for _ in range(effort.max_refinements):
        allocation = table.allocated(budget, "expected")
        if not refine(table, allocation.entries, together=budget.layer_rtol is None):
            break
    allocation = table.allocated(budget, "measured")
    return FittedLayers(table.materialized(allocation), allocation.low_rank_error)
