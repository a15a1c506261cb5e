"""Search 4 to 7: what is solved once a budget has chosen; `lsrdecomp.compression.search` says when.

The fine grid of shapes at the sizes that were chosen; neighbours of the shapes; shapes of other layers of that size;
more sweeps for what is chosen at last. Each step turns the entries that the layers take now into tasks, and puts what
they come to into the table.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from lsrdecomp.compression.candidates import Lsr, materialize
from lsrdecomp.compression.progress import Counter
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.search_table import Entry, SearchTable
from lsrdecomp.compression.shapes import (
    Configuration,
    Ranks,
    Request,
    fine_grid,
    more_terms,
    neighbours,
    parameters,
    shapes_like,
)
from lsrdecomp.compression.solve import Effort, Task, product_of
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.shape import ProductShape

PAYS = 0.02
"""A neighbour is solved for all layers of its group if on a few of them it lowers loss and cost, weighed against each
other as the budget does, by this share."""

ADOPTED = 2
"""Most neighbours of one chosen shape that are solved for all layers of its group."""

GROUPS = 3
"""Most groups of layers of one chosen shape whose neighbours are tried in a round."""

SMALLEST = 0.04
"""Smallest group of layers of one chosen shape whose neighbours are tried, as a share of all layers."""

TRIAL_LAYERS = 4
"""Layers of a group, from all depths of the network, on which a neighbour is tried."""

STRIDE = 1.7
"""The fine grid is solved up to this factor above the size that a layer was given; from the fewest terms, since what
grew from fewer terms comes nearer than what starts from singular vectors."""

REFINED = 3e-4
"""A sweep that lowers no error by more ends refining."""

NOTHING = 3e-3
"""So does one that lowers no loss by this share of what a layer loses on average."""

PORTION = 8
"""Sweeps at a time, after which only the layers go on whose losses they lowered by as much as ends refining each."""

Group: TypeAlias = "tuple[tuple[object, ...], ProductShape]"
"""Layers of one kind that took one shape."""


def solve_fine_grid(table: SearchTable, sizes: Sequence[int]) -> bool:
    """Search 4: solve every layer at the fine grid of shapes up to about so many parameters; whether there were any."""
    # 4.1 Sizes by powers of `STRIDE`, so that layers share a task; each layer and power once.
    groups: dict[tuple[tuple[object, ...], int, int], list[int]] = {}
    for i, (layer, size) in enumerate(zip(table.layers, sizes, strict=True)):
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
        tasks += table.tasks(indices, fine_grid(first.shape, rank, search.orders, search.inner_rank, most))
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
    least = len(table.layers) * SMALLEST
    worthwhile = (item for item in groups.items() if len(item[1]) >= least)
    largest = sorted(worthwhile, key=lambda item: -len(item[1]))[:GROUPS]
    # 5.2 One term more for all of their layers, neighbouring shapes for a few.
    terms = [task for _, indices in largest for task in _more_terms(table, chosen, indices)]
    trials = [task for group, indices in largest for task in _trials(table, group, chosen, indices)]
    counter = table.counter([*terms, *trials], "trying neighbours")
    for task, answers in table.answers(terms, counter):
        table.add(task, answers)
    # 5.3 What a trial gains: in the loss, plus what its parameters would have removed elsewhere.
    before: dict[Group, float] = defaultdict(float)
    gains: dict[Group, dict[Configuration, float]] = defaultdict(lambda: defaultdict(float))
    for task, answers in table.answers(trials, counter):
        now = [chosen[i].product for i in task.indices]
        group = table.layers[task.indices[0]].kind, now[0].shape
        worth = [product.squared_error + rate * product.parameters for product in now]
        before[group] += sum(worth)
        for answer in answers:
            after = answer.errors**2 + rate * parameters((answer.shape, answer.ranks))
            gain = sum(max(0.0, old - new) for old, new in zip(worth, after.tolist(), strict=True))
            gains[group][answer.shape, answer.ranks] += gain
        table.add(task, answers)
    # 5.4 A neighbour that gains enough on the few is solved for the whole group, at terms around those tried.
    adopted: list[Task] = []
    for group, gain_of in gains.items():
        for (shape, ranks), gain in sorted(gain_of.items(), key=lambda pair: -pair[1])[:ADOPTED]:
            if gain > PAYS * before[group]:
                adopted += table.tasks(groups[group], [Request(shape, _around(ranks))])
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
    tasks = []
    for (_, fresh), members in same.items():
        for part in table.parts(members):
            starts = [chosen[i].product.product() for i in part]
            tasks.append(table.task(part, [Request(chosen[part[0]].product.shape, fresh, starts)]))
    return tasks


def _trials(table: SearchTable, group: Group, chosen: Sequence[Entry], indices: Sequence[int]) -> list[Task]:
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
    return table.tasks(few, requests)


def _around(ranks: Ranks) -> tuple[Ranks, ...]:
    """A term fewer on both sides, these, a term more on both."""
    s, t = ranks
    return tuple(dict.fromkeys([(max(1, s - 1), max(1, t - 1)), (s, t), (s + 1, t + 1)]))


def exchange_shapes(table: SearchTable, chosen: Sequence[Entry]) -> None:
    """Search 6: what was chosen most often for a size of layer, solved for the layers of that size that lack it.

    At numbers of terms that some layer took, up to a factor `STRIDE` from the size that a layer was given.
    """
    # 6.1 The common shapes of every size of layer.
    configurations = {table.layers[i].name: e.product.configuration for i, e in enumerate(chosen) if e.is_lsr}
    common = shapes_like(configurations, {layer.name: layer.shape for layer in table.layers})
    # 6.2 Layers that lack one at terms near their size; each layer, shape and number of terms once.
    lacking: dict[tuple[tuple[object, ...], ProductShape, tuple[Ranks, ...]], list[int]] = {}
    for i, (layer, entry) in enumerate(zip(table.layers, chosen, strict=True)):
        solved = {product.configuration for product in table.products(i)}
        size = entry.exact.parameters
        for request in common[layer.name]:
            shape = request.shape
            if shape.inner_rank > layer.rank or layer.squared_norm == 0.0:
                continue
            terms = tuple(ranks for ranks in request.terms if parameters((shape, ranks)) <= STRIDE * size)
            near = {(shape, ranks) for ranks in terms if parameters((shape, ranks)) * STRIDE >= size}
            if any(pair not in solved and ("exchanged", i, *pair) not in table.tried for pair in near):
                lacking.setdefault((layer.kind, shape, terms), []).append(i)
            table.tried |= {("exchanged", i, *pair) for pair in near}
    tasks = [
        task for (_, shape, terms), indices in lacking.items() for task in table.tasks(indices, [Request(shape, terms)])
    ]
    table.solve(tasks, "exchanging shapes")


def refine(table: SearchTable, chosen: Sequence[Entry], *, together: bool = True) -> bool:
    """Search 7: more sweeps for the chosen LSR products, then measured in the whole norm; whether there were any.

    With ``together`` it is the loss of all layers that counts, and sweeps stop where they lower that by little.
    """
    # 7.1 The chosen products that were not refined yet, and the gain in loss below which no sweep is worth its time.
    products = [entry.product for entry in chosen if entry.is_lsr]
    indices = [i for i, entry in enumerate(chosen) if entry.is_lsr and not entry.product.refined]
    least = NOTHING * sum(entry.exact.squared_error for entry in chosen) / max(1, len(products)) if together else 0.0
    counter = Counter(table.resources.on_step, "refining", len(indices), "layers")
    standing = {i: (chosen[i].product.product(), chosen[i].exact.squared_error) for i in indices}
    for swept in range(0, table.search.sweeps, PORTION):
        # 7.2 Some sweeps for the layers of one kind, shape and number of terms together, each from where it stands.
        left = table.search.sweeps - swept
        tasks = _sweeps(table, chosen, {i: product for i, (product, _) in standing.items()}, left, least)
        before, standing = standing, {}
        for task, answers in table.answers(tasks, Counter(None, "", 0, "")):
            for position, i in enumerate(task.indices):
                product = product_of(answers[0].factors_of(position))
                loss = float(answers[0].errors[position]) ** 2
                # 7.3 Layers that still gain go on among themselves, so that no batch waits for its slowest.
                gain, enough = before[i][1] - loss, PORTION * max(least, 2.0 * REFINED * loss)
                if task.effort.sweeps < left and gain > enough:
                    standing[i] = product, loss
                # 7.4 The others are measured.
                else:
                    _measure(table, i, chosen[i], product)
                    counter.add()
    return bool(indices)


def _sweeps(
    table: SearchTable, chosen: Sequence[Entry], products: Mapping[int, SeparatedProduct], left: int, least: float
) -> list[Task]:
    """`PORTION` sweeps for these layers, each from its product; all that are left for a layer in a batch of its own."""
    same: dict[tuple[tuple[object, ...], Configuration], list[int]] = {}
    for i in products:
        same.setdefault((table.layers[i].kind, chosen[i].product.configuration), []).append(i)
    whole = Effort(left, left, REFINED, 1, least, table.resources.device)
    portion = replace(whole, sweeps=min(PORTION, left), cold_sweeps=min(PORTION, left))
    tasks = []
    for (_, (shape, ranks)), members in same.items():
        for part in table.parts(members):
            starts = [products[i] for i in part]
            tasks.append(table.task(part, [Request(shape, (ranks,), starts)], portion if len(part) > 1 else whole))
    return tasks


def _measure(table: SearchTable, i: int, entry: Entry, product: SeparatedProduct) -> None:
    """Put a refined product in the place of the old one, with its error in the whole norm.

    In one floating type that is the error of its factors as they will be written, so that they are measured once.
    """
    layer, storage = table.layers[i], table.storages[0]
    refined = Lsr(
        parameters=product.parameters,
        squared_error=0.0,
        shape=entry.product.shape,
        ranks=product.separation_ranks,
        product=table.cache.put(product),
        refined=True,
    )
    if len(table.storages) > 1 or storage in INTEGER_BITS:
        entry.replace(replace(refined, squared_error=layer.squared_error(product)))
        return
    made = materialize(layer, replace(refined, storage=storage), table.cache)
    entry.replace(replace(refined, squared_error=made.candidate.squared_error), **{storage: made})
