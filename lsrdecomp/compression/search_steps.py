"""Steps of a search that refine its first choice: finer shapes, neighbours, exchanges, sweeps.

They are Search 4 to 7 of `lsrdecomp.compression.search`, which says when each is taken.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lsrdecomp.checkpoints.progress import Counter
from lsrdecomp.compression.shapes import (
    Configuration,
    ShapeRequest,
    fine_grid,
    more_terms,
    neighbours,
    shapes_like,
    terms_around,
)
from lsrdecomp.compression.solve import SolvedShape, SolveTask, product_of
from lsrdecomp.kronecker.shape import ProductShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lsrdecomp.compression.effort import Ranks, SolveEffort
    from lsrdecomp.compression.layers import Layer
    from lsrdecomp.compression.search_table import SearchTable, TableEntry
    from lsrdecomp.kronecker.product import SeparatedProduct

ShapeGroup = tuple[tuple[object, ...], ProductShape]
"""Layers that can be solved together and took one shape, by their key and the shape."""


def can_be_solved(layer: Layer) -> bool:
    """Return whether a layer has numbers, and sizes to split."""
    return layer.squared_norm > 0.0 and min(layer.shape) > 1


# -- Search 4 --------------------------------------------------------------------------------------


def solve_fine_grid(table: SearchTable, sizes: Sequence[int]) -> bool:
    """Solve every layer at the fine grid up to about its size; return whether there was any.

    Parameters
    ----------
    table : SearchTable
    sizes : sequence of int
        Parameters that a budget gave each layer.
    """
    search = table.search
    size_step = search.effort.size_step
    # 4.1 Sizes by powers of `size_step`, so that layers share a task; each layer and power once.
    groups: dict[tuple[tuple[object, ...], int, int], list[int]] = {}
    for i, (layer, size) in enumerate(zip(table.layers, sizes, strict=True)):
        if size > 0 and can_be_solved(layer) and not _coarse_grid_suffices(table, i):
            power = round(math.log(size, size_step))
            if ("fine grid", i, power) not in table.tried:
                table.tried.add(("fine grid", i, power))
                groups.setdefault((layer.group_key, layer.rank, power), []).append(i)
    # 4.2 The grid of each group up to one power above, at most half of a layer.
    tasks: list[SolveTask] = []
    for (_, rank, power), indices in groups.items():
        first = table.layers[indices[0]]
        max_parameters = min(size_step ** (power + 1), first.parameters / 2)
        requests = fine_grid(
            first.shape,
            rank,
            search.orders,
            search.inner_rank,
            max_parameters,
            search.effort.grid,
        )
        tasks += table.runner.tasks(indices, requests, effort=search.effort.solve)
    table.solve(tasks, "solving more shapes")
    return bool(tasks)


def _coarse_grid_suffices(table: SearchTable, i: int) -> bool:
    """Return whether no finer shape of a layer is worth a solve.

    Where the coarse grid has nothing nearer than low rank in the Frobenius norm: of the LoRAs that
    were tried no finer shape was, and where ΔW is near an LSR product of any shape, the coarse grid
    is nearer too.
    """
    is_frobenius = table.layers[i].is_frobenius
    return is_frobenius and bool(table.products(i)) and table.low_rank_wins(i)


# -- Search 5 --------------------------------------------------------------------------------------


def try_neighbours(table: SearchTable, chosen: Sequence[TableEntry], rate: float) -> bool:
    """Solve for neighbours of the chosen shapes where they pay; return whether there was any.

    Parameters
    ----------
    table : SearchTable
    chosen : sequence of TableEntry
        One a layer.
    rate : float
        Loss that one parameter removes at the margin of the budget.
    """
    if rate <= 0.0:
        return False
    effort = table.search.effort
    # 5.1 The largest groups of layers of one group that took one shape.
    groups = _largest_groups(table, chosen)
    # 5.2 One term more for all of their layers, neighbouring shapes for a few.
    terms = [task for indices in groups.values() for task in _more_terms(table, chosen, indices)]
    trials = []
    for group, indices in groups.items():
        trials += _trials(table, group, chosen, indices)
    counter = table.runner.counter([*terms, *trials], "trying neighbours")
    for task, shapes in table.runner.results(terms, counter):
        table.add(task, shapes)
    # 5.3 What a trial gains: in the loss, plus what its parameters would have removed elsewhere.
    worth_before: dict[ShapeGroup, float] = defaultdict(float)
    gains: dict[ShapeGroup, dict[Configuration, float]] = defaultdict(lambda: defaultdict(float))
    for task, shapes in table.runner.results(trials, counter):
        products = [chosen[i].product for i in task.indices]
        group = table.layers[task.indices[0]].group_key, products[0].shape
        worths = [product.squared_error + rate * product.parameters for product in products]
        worth_before[group] += sum(worths)
        for solved in shapes:
            gains[group][solved.shape, solved.ranks] += _gain(worths, solved, rate)
        table.add(task, shapes)
    # 5.4 A neighbour that gains enough on the few is solved for the whole group, at terms around
    # those tried.
    adopted: list[SolveTask] = []
    for group, gain_of in gains.items():
        best_first = sorted(gain_of.items(), key=lambda item: -item[1])
        for (shape, ranks), gain in best_first[: effort.max_neighbours]:
            if gain > effort.min_gain * worth_before[group]:
                request = ShapeRequest(shape, terms_around(ranks))
                adopted += table.runner.tasks(groups[group], [request], effort=effort.solve)
    table.solve(adopted, "solving neighbours")
    return bool(terms or adopted)


def _largest_groups(
    table: SearchTable, chosen: Sequence[TableEntry]
) -> dict[ShapeGroup, list[int]]:
    """Return the layers of the groups whose neighbours are tried, the largest group first."""
    effort = table.search.effort
    groups: dict[ShapeGroup, list[int]] = {}
    for i, entry in enumerate(chosen):
        if entry.is_lsr:
            groups.setdefault((table.layers[i].group_key, entry.product.shape), []).append(i)
    min_layers = len(table.layers) * effort.min_group_share
    large = [group for group, indices in groups.items() if len(indices) >= min_layers]
    largest = sorted(large, key=lambda group: -len(groups[group]))[: effort.max_groups]
    return {group: groups[group] for group in largest}


def _gain(worths: Sequence[float], solved: SolvedShape, rate: float) -> float:
    """Return by how much a solved shape is worth more, over the layers where it is."""
    new_worths: list[float] = (
        solved.errors**2 + rate * solved.shape.parameters(*solved.ranks)
    ).tolist()
    return sum(max(0.0, old - new) for old, new in zip(worths, new_worths, strict=True))


def _more_terms(
    table: SearchTable, chosen: Sequence[TableEntry], indices: Sequence[int]
) -> list[SolveTask]:
    """Return tasks for one term more of each of these layers, from where they stand."""
    alike: dict[tuple[Ranks, tuple[Ranks, ...]], list[int]] = {}
    for i in indices:
        product = chosen[i].product
        solved = [other.ranks for other in table.products(i) if other.shape == product.shape]
        fresh = tuple(ranks for ranks in more_terms(product.ranks) if ranks not in solved)
        if fresh:
            alike.setdefault((product.ranks, fresh), []).append(i)
    tasks: list[SolveTask] = []
    for (_, fresh), members in alike.items():
        starts = {i: chosen[i].product.product() for i in members}
        request = ShapeRequest(chosen[members[0]].product.shape, fresh)
        tasks += table.runner.tasks(
            members, [request], starts=starts, effort=table.search.effort.solve
        )
    return tasks


def _trials(
    table: SearchTable, group: ShapeGroup, chosen: Sequence[TableEntry], indices: Sequence[int]
) -> list[SolveTask]:
    """Return tasks for neighbouring shapes of a group, on a few of its layers."""
    key, shape = group
    search = table.search
    trial_layers = search.effort.trial_layers
    every = max(1, len(indices) // trial_layers)
    few = list(indices)[::every][:trial_layers]
    ((ranks, _),) = Tally(chosen[i].product.ranks for i in indices).most_common(1)
    max_rank = min(max(table.layers[i].rank for i in indices), search.inner_rank)
    solved = {product.shape for product in table.products(few[0])}
    requests = []
    for neighbour, terms in neighbours((shape, ranks), max_rank):
        if (key, neighbour, terms) not in table.tried and neighbour not in solved:
            table.tried.add((key, neighbour, terms))
            requests.append(ShapeRequest(neighbour, (terms,)))
    return table.runner.tasks(few, requests, effort=search.effort.solve)


# -- Search 6 --------------------------------------------------------------------------------------


def exchange_shapes(table: SearchTable, chosen: Sequence[TableEntry]) -> None:
    """Solve what was chosen most often for a size of layer for those that lack it.

    At numbers of terms that some layer took, up to a factor `SearchEffort.size_step` from the size
    that a layer was given.
    """
    effort = table.search.effort
    # 6.1 The common shapes of every size of layer.
    configurations = {}
    for layer, entry in zip(table.layers, chosen, strict=True):
        if entry.is_lsr:
            configurations[layer.name] = entry.product.configuration
    sizes = {layer.name: layer.shape for layer in table.layers}
    common = shapes_like(configurations, sizes, effort.common_shapes)
    # 6.2 Layers that lack one at terms near their size; each layer, shape and number of terms once.
    lacking: dict[tuple[ShapeGroup, tuple[Ranks, ...]], list[int]] = {}
    for i, layer in enumerate(table.layers):
        if layer.squared_norm == 0.0:
            continue
        solved = {product.configuration for product in table.products(i)}
        size = chosen[i].exact.parameters
        for request in common[layer.name]:
            shape = request.shape
            if shape.inner_rank > layer.rank:
                continue
            terms = []
            is_lacking = False
            for ranks in request.terms:
                parameters = shape.parameters(*ranks)
                if parameters > effort.size_step * size:
                    continue
                terms.append(ranks)
                if parameters * effort.size_step >= size:
                    tried = ("exchanged", i, shape, ranks)
                    is_new = (shape, ranks) not in solved and tried not in table.tried
                    is_lacking = is_lacking or is_new
                    table.tried.add(tried)
            if is_lacking:
                lacking.setdefault(((layer.group_key, shape), tuple(terms)), []).append(i)
    tasks: list[SolveTask] = []
    for ((_, shape), terms_to_solve), indices in lacking.items():
        request = ShapeRequest(shape, terms_to_solve)
        tasks += table.runner.tasks(indices, [request], effort=effort.solve)
    table.solve(tasks, "exchanging shapes")


# -- Search 7 --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Refining:
    """A product that is refined, and its loss after the last sweeps."""

    product: SeparatedProduct
    loss: float


def refine(table: SearchTable, chosen: Sequence[TableEntry], *, together: bool = True) -> bool:
    """Refine the chosen LSR products by more sweeps; return whether there were any.

    They are measured in the whole norm. With ``together`` it is the loss of all layers that counts,
    and sweeps stop where they lower that by little.
    """
    search = table.search
    effort = search.effort
    # 7.1 The chosen products that were not refined yet, and the gain in loss below which no sweep
    # is worth its time.
    waiting: dict[int, _Refining] = {}
    for i, entry in enumerate(chosen):
        if entry.is_lsr and not entry.product.refined:
            waiting[i] = _Refining(entry.product.product(), entry.exact.squared_error)
    any_waiting = bool(waiting)
    min_gain = 0.0
    if together:
        loss = sum(entry.exact.squared_error for entry in chosen)
        products = sum(entry.is_lsr for entry in chosen)
        min_gain = effort.min_relative_gain * loss / max(1, products)
    counter = Counter(table.runner.resources.on_step, "refining", len(waiting), "layers")
    for sweeps_done in range(0, search.sweeps, effort.sweeps_per_round):
        # 7.2 Some sweeps for the layers of one group, shape and number of terms together, each from
        #     where it stands; all that are left for one that is alone in its task, since no other
        #     waits for it.
        sweeps_left = search.sweeps - sweeps_done
        to_the_end = replace(
            effort.solve,
            sweeps=sweeps_left,
            tolerance=effort.refine_tolerance,
            min_gain=min_gain,
        )
        before = waiting
        waiting = {}
        for task, shapes in table.runner.results(
            _refining_tasks(table, chosen, before, to_the_end)
        ):
            for position, i in enumerate(task.indices):
                product = product_of(shapes[0].factors_of(position))
                loss = float(shapes[0].errors[position]) ** 2
                # 7.3 Layers that still gain go on among themselves, so that no batch waits for its
                # slowest.
                gain = before[i].loss - loss
                ends_refining = max(min_gain, 2.0 * effort.refine_tolerance * loss)
                still_gains = gain > effort.sweeps_per_round * ends_refining
                if task.effort.sweeps < sweeps_left and still_gains:
                    waiting[i] = _Refining(product, loss)
                # 7.4 The others are measured.
                else:
                    table.refined(i, chosen[i], product)
                    counter.add()
    return any_waiting


def _refining_tasks(
    table: SearchTable,
    chosen: Sequence[TableEntry],
    refining: Mapping[int, _Refining],
    to_the_end: SolveEffort,
) -> list[SolveTask]:
    """Return tasks of one round for layers that are alike, and of all rounds for one alone."""
    sweeps = min(table.search.effort.sweeps_per_round, to_the_end.sweeps)
    one_round = replace(to_the_end, sweeps=sweeps)
    alike: dict[tuple[tuple[object, ...], Configuration], list[int]] = defaultdict(list)
    for i in refining:
        alike[table.layers[i].group_key, chosen[i].product.configuration].append(i)
    starts = {i: refined.product for i, refined in refining.items()}
    tasks = []
    for (_, (shape, ranks)), members in alike.items():
        request = ShapeRequest(shape, (ranks,))
        for task in table.runner.tasks(members, [request], starts=starts, effort=one_round):
            is_alone = len(task.indices) == 1
            tasks.append(replace(task, effort=to_the_end) if is_alone else task)
    return tasks
