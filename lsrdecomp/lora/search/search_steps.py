"""Steps 4 to 7 of a search: finer shapes, neighbours, exchanges, refining.

`lsrdecomp.lora.search.search` says when each is taken.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.files.progress import Counter
from lsrdecomp.lora.search.shapes import (
    Configuration,
    ShapeRequest,
    fine_grid,
    more_terms,
    neighbours,
    shapes_like,
    terms_around,
)
from lsrdecomp.lora.search.solve import SolvedShape, SolveTask, Sweeps, product_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lsrdecomp.kronecker.product import SeparatedProduct
    from lsrdecomp.lora.search.effort import Ranks
    from lsrdecomp.lora.search.layers import Layer
    from lsrdecomp.lora.search.search_table import SearchTable, TableEntry

SIZE_STEP = 1.7
"""The fine grid is solved up to this factor above the parameters of a layer. It is solved from the
fewest terms on, since growing solutions come nearer than starts from singular vectors."""

MAX_GROUPS = 3
"""Maximum groups of layers with one chosen shape whose neighbours are tried in a round, the largest
groups first."""
MIN_GROUP_SHARE = 0.04
"""Least layers of such a group, as a share of all layers."""
TRIAL_LAYERS = 4
"""Layers of a group, from all depths of the network, on which a neighbour is tried."""
MIN_TRIAL_GAIN = 0.02
"""A neighbour is solved for the whole group if it lowers the Lagrangian of the trial layers
(squared error plus exchange rate times parameters) by more than this share."""
MAX_NEIGHBOURS = 2
"""Maximum neighbours of one chosen shape that are solved for the whole group."""

REFINE_TOLERANCE = 3e-4
"""Stop refining after a sweep that lowers no layer's error by a larger share than this."""
MIN_RELATIVE_GAIN = 3e-3
"""Stop refining after a sweep that lowers no layer's squared error by more than this share of the
average squared error of a layer."""
SWEEPS_PER_ROUND = 8
"""Sweeps between two decisions which layers are refined further: those whose squared errors fell on
average by more a sweep than the two stopping rules ask for."""

ShapeGroup = tuple[tuple[object, ...], ProductShape]
"""Key of a group of layers that can be solved together (`Layer.group_key`) and have one shape."""


def can_be_solved(layer: Layer) -> bool:
    """Return whether a layer is neither zero nor a single row or column."""
    return layer.squared_norm > 0.0 and min(layer.shape) > 1


# -- Search 4 --------------------------------------------------------------------------------------


def solve_fine_grid(table: SearchTable, sizes: Sequence[int], *, every_layer: bool = False) -> bool:
    """Solve the fine grid for every layer, up to about its size; return whether any was solved.

    Parameters
    ----------
    table : SearchTable
    sizes : sequence of int
        Parameters of each layer in the last allocation.
    every_layer : bool
        Also layers in which low rank wins over the coarse grid.
    """
    search = table.search
    # 4.1 Group layers whose sizes are near one power of `SIZE_STEP`, each layer and power once.
    groups: dict[tuple[tuple[object, ...], int, int], list[int]] = {}
    for i, (layer, size) in enumerate(zip(table.layers, sizes, strict=True)):
        is_worth = every_layer or not _coarse_grid_suffices(table, i)
        if size > 0 and i in table.solved and is_worth:
            power = round(math.log(size, SIZE_STEP))
            if ("fine grid", i, power) not in table.tried:
                table.tried.add(("fine grid", i, power))
                groups.setdefault((layer.group_key, layer.rank, power), []).append(i)
    # 4.2 Solve the grid of each group up to the next power, and to half of a layer.
    tasks: list[SolveTask] = []
    for (_, rank, power), indices in groups.items():
        first = table.layers[indices[0]]
        max_parameters = min(SIZE_STEP ** (power + 1), first.parameters / 2)
        requests = fine_grid(
            first.shape,
            rank,
            search.orders,
            search.inner_rank,
            max_parameters,
        )
        tasks += table.runner.tasks(indices, requests)
    table.solve(tasks, "solving more shapes")
    return bool(tasks)


def _coarse_grid_suffices(table: SearchTable, i: int) -> bool:
    """Return whether no finer shape of a layer is worth a solve.

    In the Frobenius norm that is so if the coarse grid has nothing nearer than low rank: for none
    of the LoRAs that were tried was a finer shape nearer then, and where ΔW is near an LSR product
    of any shape, the coarse grid is nearer than low rank too.
    """
    is_frobenius = table.layers[i].is_frobenius
    return is_frobenius and bool(table.products(i)) and table.low_rank_wins(i)


# -- Search 5 --------------------------------------------------------------------------------------


def try_neighbours(table: SearchTable, chosen: Sequence[TableEntry], rate: float) -> bool:
    """Try neighbours of the chosen shapes, and solve the worthwhile ones; return whether any were.

    Shapes of different sizes are compared by the Lagrangian of the budget, the loss plus ``rate``
    times the parameters.

    Parameters
    ----------
    table : SearchTable
    chosen : sequence of TableEntry
        The entry of each layer.
    rate : float
        Loss that one more parameter in the budget would remove, `Allocation.exchange_rate`.
    """
    if rate <= 0.0:
        return False
    # 5.1 Take the largest groups of layers with one shape.
    groups = _largest_groups(table, chosen)
    # 5.2 Solve one more term for all of their layers, and neighbouring shapes for a few layers.
    more_terms_tasks: list[SolveTask] = []
    trials: list[SolveTask] = []
    for group, indices in groups.items():
        more_terms_tasks += _more_terms(table, chosen, indices)
        trials += _trials(table, group, chosen, indices)
    counter = table.runner.counter([*more_terms_tasks, *trials], "trying neighbours")
    for task, shapes in table.runner.results(more_terms_tasks, counter):
        table.add(task, shapes)
    # 5.3 Sum up by how much each neighbour lowers the Lagrangian of the trial layers.
    before: dict[ShapeGroup, float] = defaultdict(float)
    gains: dict[ShapeGroup, dict[Configuration, float]] = defaultdict(lambda: defaultdict(float))
    for task, shapes in table.runner.results(trials, counter):
        products = [chosen[i].product for i in task.indices]
        group = (table.layers[task.indices[0]].group_key, products[0].shape)
        lagrangians = [product.squared_error + rate * product.parameters for product in products]
        before[group] += sum(lagrangians)
        for solved in shapes:
            gains[group][solved.shape, solved.ranks] += _gain(lagrangians, solved, rate)
        table.add(task, shapes)
    # 5.4 Solve the best neighbours for the whole group, at terms around those tried.
    neighbour_tasks: list[SolveTask] = []
    for group, gain_of in gains.items():
        best_first = sorted(gain_of.items(), key=lambda item: -item[1])
        for (shape, ranks), gain in best_first[:MAX_NEIGHBOURS]:
            if gain > MIN_TRIAL_GAIN * before[group]:
                request = ShapeRequest(shape, terms_around(ranks))
                neighbour_tasks += table.runner.tasks(groups[group], [request])
    table.solve(neighbour_tasks, "solving neighbours")
    return bool(more_terms_tasks or neighbour_tasks)


def _largest_groups(
    table: SearchTable, chosen: Sequence[TableEntry]
) -> dict[ShapeGroup, list[int]]:
    """Return the groups whose neighbours are tried, each with its layers, the largest first."""
    groups: dict[ShapeGroup, list[int]] = {}
    for i, entry in enumerate(chosen):
        if entry.is_lsr:
            groups.setdefault((table.layers[i].group_key, entry.product.shape), []).append(i)
    min_layers = len(table.layers) * MIN_GROUP_SHARE
    large = [group for group, indices in groups.items() if len(indices) >= min_layers]
    largest = sorted(large, key=lambda group: -len(groups[group]))[:MAX_GROUPS]
    return {group: groups[group] for group in largest}


def _gain(before: Sequence[float], solved: SolvedShape, rate: float) -> float:
    """Return by how much a solved shape lowers the Lagrangian, over the layers where it does."""
    parameters = solved.shape.parameters(*solved.ranks)
    after: list[float] = (solved.errors**2 + rate * parameters).tolist()
    return sum(max(0.0, old - new) for old, new in zip(before, after, strict=True))


def _more_terms(
    table: SearchTable, chosen: Sequence[TableEntry], indices: Sequence[int]
) -> list[SolveTask]:
    """Return tasks for one more term of each of these layers, started from its product."""
    members_by_terms: dict[tuple[Ranks, tuple[Ranks, ...]], list[int]] = {}
    for i in indices:
        product = chosen[i].product
        solved = [other.ranks for other in table.products(i) if other.shape == product.shape]
        new_terms = tuple(ranks for ranks in more_terms(product.ranks) if ranks not in solved)
        if new_terms:
            members_by_terms.setdefault((product.ranks, new_terms), []).append(i)
    tasks: list[SolveTask] = []
    for (_, new_terms), members in members_by_terms.items():
        starts = {i: chosen[i].product.product() for i in members}
        request = ShapeRequest(chosen[members[0]].product.shape, new_terms)
        tasks += table.runner.tasks(members, [request], starts=starts)
    return tasks


def _trials(
    table: SearchTable, group: ShapeGroup, chosen: Sequence[TableEntry], indices: Sequence[int]
) -> list[SolveTask]:
    """Return tasks for neighbouring shapes of a group, on a few of its layers."""
    key, shape = group
    search = table.search
    # Evenly spaced layers, at the number of terms that most layers have.
    spacing = max(1, len(indices) // TRIAL_LAYERS)
    trial_layers = list(indices)[::spacing][:TRIAL_LAYERS]
    ((ranks, _),) = Tally(chosen[i].product.ranks for i in indices).most_common(1)
    max_rank = min(max(table.layers[i].rank for i in indices), search.inner_rank)
    solved = {product.shape for product in table.products(trial_layers[0])}
    requests = []
    for neighbour, terms in neighbours((shape, ranks), max_rank):
        if (key, neighbour, terms) not in table.tried and neighbour not in solved:
            table.tried.add((key, neighbour, terms))
            requests.append(ShapeRequest(neighbour, (terms,)))
    return table.runner.tasks(trial_layers, requests)


# -- Search 6 --------------------------------------------------------------------------------------


def exchange_shapes(table: SearchTable, chosen: Sequence[TableEntry]) -> None:
    """Solve the shapes chosen most often for layers of one size, for the others of that size.

    A layer is solved at the numbers of terms that any of them has, up to a factor
    `SIZE_STEP` from its own size.
    """
    # 6.1 Find the common shapes of every size of layer.
    configurations = {}
    for layer, entry in zip(table.layers, chosen, strict=True):
        if entry.is_lsr:
            configurations[layer.name] = entry.product.configuration
    sizes = {layer.name: layer.shape for layer in table.layers}
    common = shapes_like(configurations, sizes)
    # 6.2 Find the layers that have not been solved at one of them, at terms near their size.
    lacking: dict[tuple[ShapeGroup, tuple[Ranks, ...]], list[int]] = {}
    for i, layer in enumerate(table.layers):
        if i not in table.solved:
            continue
        max_parameters = SIZE_STEP * chosen[i].exact.parameters
        for request in common[layer.name]:
            shape = request.shape
            if shape.inner_rank > layer.rank:
                continue
            terms = tuple(
                ranks for ranks in request.terms if shape.parameters(*ranks) <= max_parameters
            )
            if _lacks_shape(table, i, shape, terms, chosen[i].exact.parameters):
                lacking.setdefault(((layer.group_key, shape), terms), []).append(i)
    # 6.3 Solve them.
    tasks: list[SolveTask] = []
    for ((_, shape), terms), indices in lacking.items():
        tasks += table.runner.tasks(indices, [ShapeRequest(shape, terms)])
    table.solve(tasks, "exchanging shapes")


def _lacks_shape(
    table: SearchTable, i: int, shape: ProductShape, terms: Sequence[Ranks], size: int
) -> bool:
    """Return whether a layer was not solved at a shape, at any of these terms near its size.

    It is marked as tried at all of them.
    """
    solved = {product.configuration for product in table.products(i)}
    is_lacking = False
    for ranks in terms:
        if shape.parameters(*ranks) * SIZE_STEP < size:
            continue
        tried = ("exchanged", i, shape, ranks)
        if (shape, ranks) not in solved and tried not in table.tried:
            is_lacking = True
        table.tried.add(tried)
    return is_lacking


# -- Search 7 --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Refining:
    """A product that is being refined, and its loss after the last round."""

    product: SeparatedProduct
    loss: float


def refine(table: SearchTable, chosen: Sequence[TableEntry], *, together: bool = True) -> bool:
    """Refine the chosen LSR products by more sweeps, and measure them in the whole norm.

    Products are swept in rounds. After each, products that gain little are finished, so that no
    batch waits for its slowest layer.

    Parameters
    ----------
    table : SearchTable
    chosen : sequence of TableEntry
        The entry of each layer.
    together : bool
        Whether the error over all layers counts: sweeps then stop where they lower it by little.

    Returns
    -------
    bool
        Whether there was any product that had not been refined.
    """
    max_sweeps = table.search.sweeps
    # 7.1 Take the products that have not been refined.
    unfinished: dict[int, _Refining] = {}
    for i, entry in enumerate(chosen):
        if entry.is_lsr and not entry.product.refined:
            unfinished[i] = _Refining(entry.product.product(), entry.exact.squared_error)
    any_to_refine = bool(unfinished)
    counter = Counter(table.runner.resources.on_step, "refining", len(unfinished), "layers")
    min_gain = _min_refining_gain(chosen) if together else 0.0
    for sweeps_done in range(0, max_sweeps, SWEEPS_PER_ROUND):
        # 7.2 Make a round of sweeps.
        sweeps_left = max_sweeps - sweeps_done
        last_round = Sweeps(sweeps_left, REFINE_TOLERANCE, min_gain)
        tasks = _refining_tasks(table, chosen, unfinished, last_round)
        before = unfinished
        unfinished = {}
        for task, (solved,) in table.runner.results(tasks):
            for position, i in enumerate(task.indices):
                product = product_of(solved.factors_of(position))
                loss = float(solved.errors[position]) ** 2
                # 7.3 Sweep it further if the average sweep gained more than the stopping rules ask
                #     for; else finish and measure it.
                gain = before[i].loss - loss
                min_sweep_gain = max(min_gain, 2.0 * REFINE_TOLERANCE * loss)
                still_gains = gain > SWEEPS_PER_ROUND * min_sweep_gain
                if task.sweeps.limit < sweeps_left and still_gains:
                    unfinished[i] = _Refining(product, loss)
                else:
                    table.refined(i, chosen[i], product)
                    counter.add()
    return any_to_refine


def _min_refining_gain(chosen: Sequence[TableEntry]) -> float:
    """Return the gain in loss below which a sweep of a layer is not worth its time."""
    loss = sum(entry.exact.squared_error for entry in chosen)
    n_products = sum(entry.is_lsr for entry in chosen)
    return MIN_RELATIVE_GAIN * loss / max(1, n_products)


def _refining_tasks(
    table: SearchTable,
    chosen: Sequence[TableEntry],
    unfinished: Mapping[int, _Refining],
    last_round: Sweeps,
) -> list[SolveTask]:
    """Return tasks for one round of sweeps, each from the product so far.

    Layers of one group, shape and number of terms are solved together. A layer that is alone in its
    task gets all sweeps that are left at once: no other layer waits for it.
    """
    one_round = replace(last_round, limit=min(SWEEPS_PER_ROUND, last_round.limit))
    groups: dict[tuple[tuple[object, ...], Configuration], list[int]] = defaultdict(list)
    for i in unfinished:
        groups[table.layers[i].group_key, chosen[i].product.configuration].append(i)
    starts = {i: refining.product for i, refining in unfinished.items()}
    tasks = []
    for (_, (shape, ranks)), members in groups.items():
        request = ShapeRequest(shape, (ranks,))
        for task in table.runner.tasks(members, [request], starts=starts, sweeps=one_round):
            is_alone = len(task.indices) == 1
            tasks.append(replace(task, sweeps=last_round) if is_alone else task)
    return tasks
