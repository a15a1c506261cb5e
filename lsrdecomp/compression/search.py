"""The search over the shapes of all layers under one budget, from top to bottom: Search 1 to 7.

1. Plain candidates of every layer: nothing, the layer as it is, truncated SVD of every rank.
2. The coarse grid: even splits without an inner rank, for all layers of a kind at once; for several
   budgets all of it.
3. A budget takes one candidate a layer, by what one more parameter removes of the loss.
4. The fine grid, up to about the size that the budget gave each layer, unless low rank wins there;
   it chooses again.
5. Neighbours of the shapes chosen most often, tried on a few layers and adopted where they pay; it
   chooses again.
6. Shapes that layers of one size chose, for the others of that size.
7. More sweeps for what is chosen, measured in the whole norm, until the choice stays.

What was solved stays in the table (`search_table`), from which the next budget starts. Cost: the
solves of steps 2 to 7, each O((m + n)(R r + s r)) a sweep and layer (`JointALS`); choosing is
milliseconds a layer (docs/scale.md).
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lsrdecomp.checkpoints.progress import Counter
from lsrdecomp.compression.candidates import Materialized, plain_candidates
from lsrdecomp.compression.layers import Layer, SpillCache
from lsrdecomp.compression.search_table import Entry, SearchTable
from lsrdecomp.compression.settings import Budget, Resources, Search
from lsrdecomp.compression.shapes import (
    Configuration,
    Ranks,
    Request,
    coarse_grid,
    fine_grid,
    more_terms,
    neighbours,
    shape_grid,
    shapes_like,
    terms_around,
)
from lsrdecomp.compression.solve import Effort, Task, product_of
from lsrdecomp.kronecker.shape import ProductShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDENINGS = 2
"""Most times that the fine grid is solved for a budget: with it some layers are given more, others
less."""

ROUNDS = 3
"""Most times that a budget is drawn anew because refining changed what is best."""


PAYS = 0.02
"""A neighbour is solved for all layers of its group if on a few of them it lowers loss and cost,
weighed against each other as the budget does, by this share."""

ADOPTED = 2
"""Most neighbours of one chosen shape that are solved for all layers of its group."""

GROUPS = 3
"""Most groups of layers of one chosen shape whose neighbours are tried in a round."""

SMALLEST = 0.04
"""Smallest group of layers of one chosen shape whose neighbours are tried, as a share of all
layers."""

TRIAL_LAYERS = 4
"""Layers of a group, from all depths of the network, on which a neighbour is tried."""

STRIDE = 1.7
"""The fine grid is solved up to this factor above the size that a layer was given; from the fewest
terms, since what grew from fewer terms comes nearer than what starts from singular vectors."""

REFINED = 3e-4
"""A sweep that lowers no error by more ends refining."""

NOTHING = 3e-3
"""So does one that lowers no loss by this share of what a layer loses on average."""

PORTION = 8
"""Sweeps at a time, after which only the layers go on whose losses they lowered by as much as ends
refining each."""

Group = tuple[tuple[object, ...], ProductShape]
"""Layers of one kind that took one shape."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """All layers under one budget."""

    chosen: tuple[Materialized, ...]
    low_rank_error: (
        float | None
    )  # the best truncated SVD found for the same budget and norm; None: none fits


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
    >>> layer = Layer.of("square", LowRank(np.eye(16)[:, :4], np.eye(16)[:4]))
    >>> budget = Budget(parameters=layer.parameters / 4)
    >>> fitted = fit_budget(search_layers([layer], [budget], search=Search(orders=(2,), rounds=0)), budget)
    >>> fitted.chosen[0].candidate.parameters <= layer.parameters / 4
    True
    """
    table = SearchTable(
        layers, search or Search(), storages, cache or SpillCache(), resources or Resources()
    )
    limit = max(budget.most_parameters for budget in budgets)
    table.refines_grid = limit < math.inf and len(budgets) == 1 and not table.search.shapes
    # Search 1: what needs no solve. All that is wanted of a layer is read at once.
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, layer in enumerate(layers):
        table.rows[i] = [Entry(candidate) for candidate in plain_candidates(layer, limit)]
        if layer.squared_norm > 0.0 and min(layer.shape) > 1:
            groups.setdefault(layer.kind, []).append(i)
            table.whole_norm[i] = layer.leading_entries == layer.norm_entries
    # Search 2: the grid, layers of one kind together; or the shapes that another adapter took.
    if table.search.shapes:
        tasks = _shapes_of_another(table, groups)
    else:
        tasks = [
            task
            for indices in groups.values()
            for task in table.runner.tasks(indices, _grid(table, indices, limit))
        ]
    table.solve(tasks, "solving shapes")
    return table


def _grid(table: SearchTable, indices: Sequence[int], limit: float) -> list[Request]:
    """The grid for layers of one size, whole or coarse, as far as a budget of so many parameters could want it."""
    first, ranks, search = (
        table.layers[indices[0]],
        [table.layers[i].rank for i in indices],
        table.search,
    )
    most = min(max(ranks) * sum(first.shape) / 2, table.most_for(first, limit))
    if table.refines_grid:
        return coarse_grid(first.shape, search.orders, most)
    return shape_grid(first.shape, max(ranks), search.orders, search.inner_rank, most)


def _shapes_of_another(
    table: SearchTable, groups: Mapping[tuple[object, ...], Sequence[int]]
) -> list[Task]:
    """The shapes that were passed for each layer; layers of one kind side by side where they share one."""
    sharing: dict[tuple[object, Request], list[int]] = {}
    requests = shapes_like(table.search.shapes, {layer.name: layer.shape for layer in table.layers})
    for kind, indices in groups.items():
        for i in indices:
            for request in requests[table.layers[i].name]:
                if request.shape.inner_rank <= table.layers[i].rank:
                    sharing.setdefault((kind, request), []).append(i)
    return [
        task
        for (_, request), indices in sharing.items()
        for task in table.runner.tasks(indices, [request])
    ]


def fit_budget(table: SearchTable, budget: Budget) -> Fitted:
    """What every layer becomes under one budget over all of them.

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
    # Search 3: the first choice, of what is in the table.
    allocation = table.allocated(budget)
    # Search 4: the fine grid where the choice wants it.
    for _ in range(WIDENINGS if table.refines_grid else 0):
        if not solve_fine_grid(table, [candidate.parameters for _, candidate in allocation.chosen]):
            break
        allocation = table.allocated(budget)
    # Search 5 and 6: neighbours of the shapes that were chosen, and shapes of other layers of that
    # size. A tolerance for each layer has no rate of exchange between layers.
    if not (table.search.shapes or budget.layer_rtol):
        for _ in range(table.search.rounds):
            if not try_neighbours(table, allocation.entries, allocation.exchange_rate):
                break
            allocation = table.allocated(budget)
        if table.search.rounds:
            exchange_shapes(table, allocation.entries)
    # Search 7: refine what is chosen for what it may become, until refining changes no choice; then
    # only errors in the whole norm count.
    for _ in range(ROUNDS):
        allocation = table.allocated(budget, "expected")
        if not refine(table, allocation.entries, together=budget.layer_rtol is None):
            break
    allocation = table.allocated(budget, "measured")
    return Fitted(table.materialized(allocation), allocation.low_rank_error)


def solve_fine_grid(table: SearchTable, sizes: Sequence[int]) -> bool:
    """Search 4: solve every layer at the fine grid of shapes up to about so many parameters; whether there were any."""
    # 4.1 Sizes by powers of `STRIDE`, so that layers share a task; each layer and power once. Not
    #     where the coarse grid has nothing nearer than low rank in the Frobenius norm: of the LoRAs
    #     that were tried no finer shape was, and where ΔW is near an LSR product of any shape, the
    #     coarse grid is nearer too.
    groups: dict[tuple[tuple[object, ...], int, int], list[int]] = {}
    for i, (layer, size) in enumerate(zip(table.layers, sizes, strict=True)):
        if layer.is_frobenius and table.products(i) and table.low_rank_wins(i):
            continue
        if size > 0 and layer.squared_norm > 0.0 and min(layer.shape) > 1:
            power = round(math.log(size, STRIDE))
            if ("fine grid", i, power) not in table.tried:
                table.tried.add(("fine grid", i, power))
                groups.setdefault((layer.kind, layer.rank, power), []).append(i)
    # 4.2 The grid of each group up to one power above, at most half of a layer.
    tasks: list[Task] = []
    for (_, rank, power), indices in groups.items():
        first, search = table.layers[indices[0]], table.search
        most = min(STRIDE ** (power + 1), first.parameters / 2)
        tasks += table.runner.tasks(
            indices, fine_grid(first.shape, rank, search.orders, search.inner_rank, most)
        )
    table.solve(tasks, "solving more shapes")
    return bool(tasks)


def try_neighbours(table: SearchTable, chosen: Sequence[Entry], rate: float) -> bool:
    """Search 5: solve for neighbours of the chosen shapes where they pay; whether anything new was solved.

    ``rate`` is the loss that one parameter removes at the margin of the budget.
    """
    if rate <= 0.0:
        return False
    # 5.1 The largest groups of layers of one kind that took one shape.
    groups: dict[Group, list[int]] = {}
    for i, entry in enumerate(chosen):
        if entry.is_lsr:
            groups.setdefault((table.layers[i].kind, entry.product.shape), []).append(i)
    worthwhile = (item for item in groups.items() if len(item[1]) >= len(table.layers) * SMALLEST)
    largest = sorted(worthwhile, key=lambda item: -len(item[1]))[:GROUPS]
    # 5.2 One term more for all of their layers, neighbouring shapes for a few.
    terms = [task for _, indices in largest for task in _more_terms(table, chosen, indices)]
    trials = [task for group, indices in largest for task in _trials(table, group, chosen, indices)]
    counter = table.runner.counter([*terms, *trials], "trying neighbours")
    for task, answers in table.runner.answers(terms, counter):
        table.add(task, answers)
    # 5.3 What a trial gains: in the loss, plus what its parameters would have removed elsewhere.
    before: dict[Group, float] = defaultdict(float)
    gains: dict[Group, dict[Configuration, float]] = defaultdict(lambda: defaultdict(float))
    for task, answers in table.runner.answers(trials, counter):
        now = [chosen[i].product for i in task.indices]
        group = table.layers[task.indices[0]].kind, now[0].shape
        worth = [product.squared_error + rate * product.parameters for product in now]
        before[group] += sum(worth)
        for answer in answers:
            after = answer.errors**2 + rate * answer.shape.parameters(*answer.ranks)
            gain = sum(max(0.0, old - new) for old, new in zip(worth, after.tolist(), strict=True))
            gains[group][answer.shape, answer.ranks] += gain
        table.add(task, answers)
    # 5.4 A neighbour that gains enough on the few is solved for the whole group, at terms around
    # those tried.
    adopted: list[Task] = []
    for group, gain_of in gains.items():
        for (shape, ranks), gain in sorted(gain_of.items(), key=lambda pair: -pair[1])[:ADOPTED]:
            if gain > PAYS * before[group]:
                adopted += table.runner.tasks(groups[group], [Request(shape, terms_around(ranks))])
    table.solve(adopted, "solving neighbours")
    return bool(terms or adopted)


def _more_terms(table: SearchTable, chosen: Sequence[Entry], indices: Sequence[int]) -> list[Task]:
    """One term more for each of these layers, from where they stand."""
    same: dict[tuple[Ranks, tuple[Ranks, ...]], list[int]] = {}
    for i in indices:
        product = chosen[i].product
        solved = [other.ranks for other in table.products(i) if other.shape == product.shape]
        fresh = tuple(ranks for ranks in more_terms(product.ranks) if ranks not in solved)
        if fresh:
            same.setdefault((product.ranks, fresh), []).append(i)
    tasks: list[Task] = []
    for (_, fresh), members in same.items():
        starts = {i: chosen[i].product.product() for i in members}
        tasks += table.runner.tasks(
            members, [Request(chosen[members[0]].product.shape, fresh)], starts=starts
        )
    return tasks


def _trials(
    table: SearchTable, group: Group, chosen: Sequence[Entry], indices: Sequence[int]
) -> list[Task]:
    """Neighbouring shapes of a group, on a few of its layers from all depths of the network."""
    kind, shape = group
    ranks, _ = Tally(chosen[i].product.ranks for i in indices).most_common(1)[0]
    few = list(indices)[:: max(1, len(indices) // TRIAL_LAYERS)][:TRIAL_LAYERS]
    rank = min(max(table.layers[i].rank for i in indices), table.search.inner_rank)
    solved = {product.shape for product in table.products(few[0])}
    requests = []
    for other, terms in neighbours((shape, ranks), rank):
        if (kind, other, terms) not in table.tried and other not in solved:
            table.tried.add((kind, other, terms))
            requests.append(Request(other, (terms,)))
    return table.runner.tasks(few, requests)


def exchange_shapes(table: SearchTable, chosen: Sequence[Entry]) -> None:
    """Search 6: what was chosen most often for a size of layer, solved for the layers of that size that lack it.

    At numbers of terms that some layer took, up to a factor `STRIDE` from the size that a layer was
    given.
    """
    # 6.1 The common shapes of every size of layer.
    configurations = {
        table.layers[i].name: e.product.configuration for i, e in enumerate(chosen) if e.is_lsr
    }
    common = shapes_like(configurations, {layer.name: layer.shape for layer in table.layers})
    # 6.2 Layers that lack one at terms near their size; each layer, shape and number of terms once.
    lacking: dict[tuple[Group, tuple[Ranks, ...]], list[int]] = {}
    for i, (layer, entry) in enumerate(zip(table.layers, chosen, strict=True)):
        solved = {product.configuration for product in table.products(i)}
        size = entry.exact.parameters
        for request in common[layer.name]:
            shape = request.shape
            if shape.inner_rank > layer.rank or layer.squared_norm == 0.0:
                continue
            terms = tuple(
                ranks for ranks in request.terms if shape.parameters(*ranks) <= STRIDE * size
            )
            near = {(shape, ranks) for ranks in terms if shape.parameters(*ranks) * STRIDE >= size}
            if any(
                pair not in solved and ("exchanged", i, *pair) not in table.tried for pair in near
            ):
                lacking.setdefault(((layer.kind, shape), terms), []).append(i)
            table.tried |= {("exchanged", i, *pair) for pair in near}
    tasks = [
        task
        for ((_, shape), terms), indices in lacking.items()
        for task in table.runner.tasks(indices, [Request(shape, terms)])
    ]
    table.solve(tasks, "exchanging shapes")


def refine(table: SearchTable, chosen: Sequence[Entry], *, together: bool = True) -> bool:
    """Search 7: more sweeps for the chosen LSR products, then measured in the whole norm; whether there were any.

    With ``together`` it is the loss of all layers that counts, and sweeps stop where they lower
    that by little.
    """
    # 7.1 The chosen products that were not refined yet, and the gain in loss below which no sweep
    # is worth its time.
    products = [entry.product for entry in chosen if entry.is_lsr]
    indices = [i for i, entry in enumerate(chosen) if entry.is_lsr and not entry.product.refined]
    least = (
        NOTHING * sum(entry.exact.squared_error for entry in chosen) / max(1, len(products))
        if together
        else 0.0
    )
    counter = Counter(table.runner.resources.on_step, "refining", len(indices), "layers")
    going_on = {i: (chosen[i].product.product(), chosen[i].exact.squared_error) for i in indices}
    for swept in range(0, table.search.sweeps, PORTION):
        # 7.2 Some sweeps for the layers of one kind, shape and number of terms together, each from
        #     where it stands; all that are left for one that is alone in its task, since no other
        #     waits for it.
        left = table.search.sweeps - swept
        to_the_end = Effort(left, REFINED, least)
        portion = replace(to_the_end, sweeps=min(PORTION, left))
        alike: dict[tuple[tuple[object, ...], Configuration], list[int]] = defaultdict(list)
        for i in going_on:
            alike[table.layers[i].kind, chosen[i].product.configuration].append(i)
        starts, tasks = {i: product for i, (product, _) in going_on.items()}, []
        for (_, (shape, ranks)), members in alike.items():
            parts = table.runner.tasks(
                members, [Request(shape, (ranks,))], starts=starts, effort=portion
            )
            tasks += [
                part if len(part.indices) > 1 else replace(part, effort=to_the_end)
                for part in parts
            ]
        before, going_on = going_on, {}
        for task, answers in table.runner.answers(tasks):
            for position, i in enumerate(task.indices):
                product = product_of(answers[0].factors_of(position))
                loss = float(answers[0].errors[position]) ** 2
                # 7.3 Layers that still gain go on among themselves, so that no batch waits for its
                # slowest.
                gain, enough = before[i][1] - loss, PORTION * max(least, 2.0 * REFINED * loss)
                if task.effort.sweeps < left and gain > enough:
                    going_on[i] = product, loss
                # 7.4 The others are measured.
                else:
                    table.refined(i, chosen[i], product)
                    counter.add()
    return bool(indices)
