"""Search 4 to 7: what is solved once a budget has chosen; `lsrdecomp.compression.search` says when.

The fine grid of shapes at the sizes that were chosen; neighbours of the shapes; shapes of other layers of that size;
more sweeps for what is chosen at last.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lsrdecomp.compression.candidates import Lsr, Price
from lsrdecomp.compression.materialize import materialize
from lsrdecomp.compression.progress import Counter
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.search_state import Entry, SearchState
from lsrdecomp.compression.shapes import (
    Configuration,
    Ranks,
    fine_grid,
    more_terms,
    neighbours,
    parameters,
    shapes_like,
)
from lsrdecomp.compression.solve import Answer, Effort, Request, Task, product_of
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


def solve_fine_grid(state: SearchState, sizes: Sequence[int]) -> bool:
    """Search 4: solve every layer at the fine grid of shapes up to about so many parameters; whether there were any.

    Sizes are taken by powers of `STRIDE`, so that layers share a task.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (layer, size) in enumerate(zip(state.layers, sizes, strict=True)):
        if size > 0 and layer.squared_norm > 0.0 and min(layer.shape) > 1:
            step = round(math.log(size, STRIDE))
            if ("fine grid", i, step) not in state.tried:
                state.tried.add(("fine grid", i, step))
                groups.setdefault((layer.kind, layer.rank, step), []).append(i)
    tasks: list[Task] = []
    for (_, rank, step), indices in groups.items():
        first, search = state.layers[indices[0]], state.search
        most = min(STRIDE ** (step + 1), first.parameters / 2)
        chains = fine_grid(first.shape, rank, search.orders, search.inner_rank, most)
        requests = [Request(chain.shape, chain.terms) for chain in chains]
        tasks += [state.task(part, requests) for part in state.parts(indices) if requests]
    count = sum(len(task.places) * len(task.requests) for task in tasks)
    state.solve(iter(tasks), Counter(state.resources.on_step, "solving more shapes", count, "layers × shapes"))
    return bool(tasks)


def try_neighbours(state: SearchState, chosen: Sequence[Entry], rate: float) -> bool:
    """Search 5: solve for neighbours of the chosen shapes where they pay; whether anything new was solved.

    ``rate`` is the loss that one parameter removes at the margin of the budget.
    """
    if rate <= 0.0:
        return False
    # 5.1 The largest groups of layers of one kind that took one shape.
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, entry in enumerate(chosen):
        if isinstance(entry.exact, Lsr):
            groups.setdefault((state.layers[i].kind, entry.exact.shape), []).append(i)
    least = len(state.layers) * SMALLEST
    worthwhile = (item for item in groups.items() if len(item[1]) >= least)
    largest = sorted(worthwhile, key=lambda item: -len(item[1]))[:GROUPS]
    # 5.2 One term more for all of them; neighbouring shapes for a few of them.
    terms = _more_terms(state, chosen, [indices for _, indices in largest])
    trials = [task for key, indices in largest for task in _trials(state, key, chosen, indices)]
    count = sum(len(task.places) * len(task.requests) for task in (*terms, *trials))
    counter = Counter(state.resources.on_step, "trying neighbours", count, "layers × shapes")
    state.solve(iter(terms), counter)
    # The gain of a trial is in the loss plus what its parameters would have removed elsewhere.
    before: dict[tuple[Any, ...], float] = defaultdict(float)  # by group
    gains: dict[tuple[Any, ...], dict[Configuration, float]] = defaultdict(lambda: defaultdict(float))
    for task, answers in state.answers(iter(trials), counter):
        now = [chosen[i].product for i in task.places]
        key = state.layers[task.places[0]].kind, now[0].shape
        before[key] += sum(product.squared_error + rate * product.parameters for product in now)
        for answer in answers:
            after = answer.errors**2 + rate * parameters((answer.shape, answer.ranks))
            pairs = zip(now, after.tolist(), strict=True)
            gain = sum(max(0.0, product.squared_error + rate * product.parameters - value) for product, value in pairs)
            gains[key][answer.shape, answer.ranks] += gain
        state.add(task, answers)
    # 5.3 A neighbour that lowers loss and cost by enough on the few is solved for the whole group.
    adopted: list[Task] = []
    for key, trials_of_group in gains.items():
        for (shape, ranks), gain in sorted(trials_of_group.items(), key=lambda pair: -pair[1])[:ADOPTED]:
            if gain > PAYS * before[key]:
                requests = [Request(shape, _around(ranks))]
                adopted += [state.task(part, requests) for part in state.parts(groups[key])]
    counter = Counter(state.resources.on_step, "solving neighbours", sum(len(t.places) for t in adopted), "layers")
    state.solve(iter(adopted), counter)
    return bool(terms or adopted)


def exchange_shapes(state: SearchState, chosen: Sequence[Entry]) -> None:
    """Search 6: what was chosen most often for a size of layer, solved for the layers of that size that lack it.

    At numbers of terms that some layer took, up to a factor `STRIDE` above the size that a layer was given.
    """
    products = {state.layers[i].name: entry.product.configuration for i, entry in enumerate(chosen) if _is_lsr(entry)}
    chains = shapes_like(products, {layer.name: layer.shape for layer in state.layers})
    lacking: dict[tuple[Any, ...], list[int]] = {}
    for i, (layer, entry) in enumerate(zip(state.layers, chosen, strict=True)):
        known = {other.product.configuration for other in state.table[i] if _is_lsr(other)}
        size = entry.exact.parameters
        for shape, ranks in ((chain.shape, chain.terms) for chain in chains[layer.name]):
            if shape.inner_rank > layer.rank or layer.squared_norm == 0.0:
                continue
            near = tuple(one for one in ranks if parameters((shape, one)) <= STRIDE * size)
            fresh = {("exchanged", i, shape, one) for one in near if parameters((shape, one)) * STRIDE >= size}
            if any(one[2:] not in known and one not in state.tried for one in fresh):
                lacking.setdefault((layer.kind, shape, near), []).append(i)
            state.tried |= fresh
    tasks = []
    for (_, shape, terms), indices in lacking.items():
        tasks += [state.task(part, [Request(shape, terms)]) for part in state.parts(indices)]
    count = sum(len(task.places) for task in tasks)
    state.solve(iter(tasks), Counter(state.resources.on_step, "exchanging shapes", count, "layers × shapes"))


def _is_lsr(entry: Entry) -> bool:
    return isinstance(entry.exact, Lsr)


def _more_terms(state: SearchState, chosen: Sequence[Entry], groups: Sequence[Sequence[int]]) -> list[Task]:
    """One term more for the layers of each group, from where they stand."""
    same: dict[tuple[Any, ...], list[int]] = {}
    for indices in groups:
        for i in indices:
            product = chosen[i].product
            entries = (entry.exact for entry in state.table[i])
            known = [one.ranks for one in entries if isinstance(one, Lsr) and one.shape == product.shape]
            fresh = tuple(ranks for ranks in more_terms(product.ranks) if ranks not in known)
            if fresh:
                same.setdefault((state.layers[i].kind, product.shape, product.ranks, fresh), []).append(i)
    tasks = []
    for (_, shape, _, fresh), indices in same.items():
        for part in state.parts(indices):
            starts = [chosen[i].product.product() for i in part]
            tasks.append(state.task(part, [Request(shape, fresh, starts)]))
    return tasks


def _trials(state: SearchState, key: tuple[Any, ...], chosen: Sequence[Entry], indices: Sequence[int]) -> list[Task]:
    """Neighbouring shapes of a group, on a few of its layers from all depths of the network."""
    kind, shape = key
    ranks, _ = Tally(chosen[i].product.ranks for i in indices).most_common(1)[0]
    some = list(indices)[:: max(1, len(indices) // TRIAL_LAYERS)][:TRIAL_LAYERS]
    rank = min(max(state.layers[i].rank for i in indices), state.search.inner_rank)
    requests = []
    for other, terms in neighbours((shape, ranks), rank):
        if (kind, other, terms) not in state.tried and other not in _shapes(state, some):
            state.tried.add((kind, other, terms))
            requests.append(Request(other, (terms,)))
    return [state.task(part, requests) for part in state.parts(some) if requests]


def _shapes(state: SearchState, indices: Sequence[int]) -> set[ProductShape]:
    """Shapes that the first of these layers was solved for."""
    return {entry.exact.shape for entry in state.table[indices[0]] if isinstance(entry.exact, Lsr)}


def _around(ranks: Ranks) -> tuple[Ranks, ...]:
    s, t = ranks
    return tuple(dict.fromkeys([(max(1, s - 1), max(1, t - 1)), (s, t), (s + 1, t + 1)]))


def refine(state: SearchState, chosen: Sequence[Entry], *, together: bool = True) -> bool:
    """Search 7: more sweeps for the chosen LSR products, then measured in the whole norm; whether there were any.

    With ``together`` it is the loss of all layers that counts, and sweeps stop where they lower that by little.
    """
    indices = [i for i, entry in enumerate(chosen) if isinstance(entry.exact, Lsr) and not entry.exact.refined]
    counter = Counter(state.resources.on_step, "refining", len(indices), "layers")
    count = sum(isinstance(entry.exact, Lsr) for entry in chosen)
    least = NOTHING * sum(entry.exact.squared_error for entry in chosen) / max(1, count) if together else 0.0
    products = {i: chosen[i].product.product() for i in indices}
    losses = {i: chosen[i].exact.squared_error for i in indices}
    for swept in range(0, state.search.sweeps, PORTION):
        # The layers that still gain go on among themselves, so that no batch waits for its slowest.
        left, going = state.search.sweeps - swept, []
        effort = Effort(left, left, REFINED, 1, least, state.resources.device)
        for task, answers in _portion(state, chosen, products, effort):
            for index, i in enumerate(task.places):
                product, loss = product_of(answers[0].factors_of(index)), float(answers[0].errors[index]) ** 2
                if task.effort.sweeps < left and losses[i] - loss > PORTION * max(least, 2.0 * REFINED * loss):
                    going.append((i, product, loss))
                    continue
                _measure(state, i, chosen[i], product)
                counter.add()
        products = {i: product for i, product, _ in going}
        losses = {i: loss for i, _, loss in going}
    return bool(indices)


def _portion(
    state: SearchState, chosen: Sequence[Entry], products: Mapping[int, SeparatedProduct], effort: Effort
) -> Iterator[tuple[Task, list[Answer]]]:
    """Some more sweeps for these layers, each from its product; all that are left for a layer in a batch of its own."""
    tasks, few = [], min(PORTION, effort.sweeps)
    some = replace(effort, sweeps=few, cold_sweeps=few)
    for (_, shape, ranks), members in _groups(state, chosen, list(products)).items():
        for part in state.parts(members):
            starts = [products[i] for i in part]
            tasks.append(state.task(part, [Request(shape, (ranks,), starts)], some if len(part) > 1 else effort))
    yield from state.answers(iter(tasks), Counter(None, "", 0, ""))


def _groups(state: SearchState, chosen: Sequence[Entry], indices: Sequence[int]) -> dict[tuple[Any, ...], list[int]]:
    """Layers of one kind, shape and number of terms."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i in indices:
        groups.setdefault((state.layers[i].kind, *chosen[i].product.configuration), []).append(i)
    return groups


def _measure(state: SearchState, i: int, entry: Entry, product: SeparatedProduct) -> None:
    """Put a refined product in the place of the old one, with its error in the whole norm.

    In one floating type that is the error of its factors as they will be written, so that they are measured once.
    """
    layer, shape, storage = state.layers[i], entry.product.shape, state.storages[0]
    asked = Lsr(
        Price(product.parameters, 0.0, storage), shape, product.separation_ranks, state.cache.put(product), True
    )
    if len(state.storages) > 1 or storage in INTEGER_BITS:
        price = Price(product.parameters, layer.squared_error(product))
        entry.replaced(replace(asked, price=price))
        return
    made = materialize(layer, asked, state.cache)
    price = Price(product.parameters, made.candidate.squared_error)
    entry.replaced(replace(asked, price=price), **{storage: made})
