"""What is solved once a budget has chosen: upper rungs of the ladder at those sizes, neighbours of those shapes."""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lsrdecomp.compression.candidates import Lsr
from lsrdecomp.compression.ladder import (
    Configuration,
    Ranks,
    more_terms,
    neighbours,
    parameters,
    shapes_like,
    upper_rungs,
)
from lsrdecomp.compression.progress import Counter
from lsrdecomp.compression.search_state import Entry, SearchState
from lsrdecomp.compression.solve import Request, Task
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
"""Upper rungs are solved up to this factor above the size that a layer was given; from the fewest terms, since what
grew from fewer terms comes nearer than what starts from singular vectors."""


def widen(state: SearchState, sizes: Sequence[int]) -> bool:
    """Solve every layer at the upper rungs of the ladder up to about so many parameters; whether there were any.

    Sizes are taken by powers of `STRIDE`, so that layers share a task.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (layer, size) in enumerate(zip(state.layers, sizes, strict=True)):
        if size > 0 and layer.squared_norm > 0.0 and min(layer.shape) > 1:
            step = round(math.log(size, STRIDE))
            if ("rung", i, step) not in state.tried:
                state.tried.add(("rung", i, step))
                groups.setdefault((layer.kind, layer.rank, step), []).append(i)
    tasks: list[Task] = []
    for (_, rank, step), places in groups.items():
        first, search = state.layers[places[0]], state.search
        most = min(STRIDE ** (step + 1), first.parameters / 2)
        chains = upper_rungs(first.shape, rank, search.orders, search.inner_rank, most)
        requests = [Request(chain.shape, chain.terms) for chain in chains]
        tasks += [state.task(part, requests) for part in state.parts(places) if requests]
    count = sum(len(task.places) * len(task.requests) for task in tasks)
    state.solve(iter(tasks), Counter(state.resources.on_step, "solving more shapes", count, "layers × shapes"))
    return bool(tasks)


def explore(state: SearchState, chosen: Sequence[Entry], rate: float) -> bool:
    """Solve for neighbours of the chosen shapes where they pay; whether anything new was solved.

    ``rate`` is the loss that one parameter removes at the margin of the budget.
    """
    if rate <= 0.0:
        return False
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, entry in enumerate(chosen):
        if isinstance(entry.exact, Lsr):
            groups.setdefault((state.layers[i].kind, entry.exact.shape), []).append(i)
    least = len(state.layers) * SMALLEST
    worthwhile = (item for item in groups.items() if len(item[1]) >= least)
    largest = sorted(worthwhile, key=lambda item: -len(item[1]))[:GROUPS]
    terms = _more_terms(state, chosen, [places for _, places in largest])
    trials = [task for key, places in largest for task in _trials(state, key, chosen, places)]
    count = sum(len(task.places) * len(task.requests) for task in (*terms, *trials))
    counter = Counter(state.resources.on_step, "trying neighbours", count, "layers × shapes")
    state.solve(iter(terms), counter)
    before: dict[tuple[Any, ...], float] = defaultdict(float)  # by group
    gains: dict[tuple[Any, ...], dict[Configuration, float]] = defaultdict(lambda: defaultdict(float))
    for task, answers in state.answers(iter(trials), counter):
        now = [chosen[i].product for i in task.places]
        key = state.layers[task.places[0]].kind, now[0].shape
        before[key] += sum(one.squared_error + rate * one.parameters for one in now)
        for answer in answers:
            after = answer.errors**2 + rate * parameters((answer.shape, answer.ranks))
            pairs = zip(now, after.tolist(), strict=True)
            gain = sum(max(0.0, one.squared_error + rate * one.parameters - value) for one, value in pairs)
            gains[key][answer.shape, answer.ranks] += gain
        state.add(task, answers)
    adopted: list[Task] = []
    for key, found in gains.items():
        for (shape, ranks), gain in sorted(found.items(), key=lambda pair: -pair[1])[:ADOPTED]:
            if gain > PAYS * before[key]:
                requests = [Request(shape, _around(ranks))]
                adopted += [state.task(part, requests) for part in state.parts(groups[key])]
    counter = Counter(state.resources.on_step, "solving neighbours", sum(len(t.places) for t in adopted), "layers")
    state.solve(iter(adopted), counter)
    return bool(terms or adopted)


def exchange(state: SearchState, chosen: Sequence[Entry]) -> None:
    """What was chosen most often for a size of layer, solved for all layers of that size of which it was not asked yet.

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
    for (_, shape, terms), places in lacking.items():
        tasks += [state.task(part, [Request(shape, terms)]) for part in state.parts(places)]
    count = sum(len(task.places) for task in tasks)
    state.solve(iter(tasks), Counter(state.resources.on_step, "exchanging shapes", count, "layers × shapes"))


def _is_lsr(entry: Entry) -> bool:
    return isinstance(entry.exact, Lsr)


def _more_terms(state: SearchState, chosen: Sequence[Entry], groups: Sequence[Sequence[int]]) -> list[Task]:
    """One term more for the layers of each group, from where they stand."""
    same: dict[tuple[Any, ...], list[int]] = {}
    for places in groups:
        for i in places:
            held = chosen[i].product
            entries = (entry.exact for entry in state.table[i])
            known = [one.ranks for one in entries if isinstance(one, Lsr) and one.shape == held.shape]
            fresh = tuple(ranks for ranks in more_terms(held.ranks) if ranks not in known)
            if fresh:
                same.setdefault((state.layers[i].kind, held.shape, held.ranks, fresh), []).append(i)
    tasks = []
    for (_, shape, _, fresh), places in same.items():
        for part in state.parts(places):
            starts = [chosen[i].product.product() for i in part]
            tasks.append(state.task(part, [Request(shape, fresh, starts)]))
    return tasks


def _trials(state: SearchState, key: tuple[Any, ...], chosen: Sequence[Entry], places: Sequence[int]) -> list[Task]:
    """Neighbouring shapes of a group, on a few of its layers from all depths of the network."""
    kind, shape = key
    ranks, _ = Tally(chosen[i].product.ranks for i in places).most_common(1)[0]
    some = list(places)[:: max(1, len(places) // TRIAL_LAYERS)][:TRIAL_LAYERS]
    rank = min(max(state.layers[i].rank for i in places), state.search.inner_rank)
    requests = []
    for other, terms in neighbours((shape, ranks), rank):
        if (kind, other, terms) not in state.tried and other not in _shapes(state, some):
            state.tried.add((kind, other, terms))
            requests.append(Request(other, (terms,)))
    return [state.task(part, requests) for part in state.parts(some) if requests]


def _shapes(state: SearchState, places: Sequence[int]) -> set[ProductShape]:
    """Shapes that the first of these layers was solved for."""
    return {entry.exact.shape for entry in state.table[places[0]] if isinstance(entry.exact, Lsr)}


def _around(ranks: Ranks) -> tuple[Ranks, ...]:
    s, t = ranks
    return tuple(dict.fromkeys([(max(1, s - 1), max(1, t - 1)), (s, t), (s + 1, t + 1)]))
