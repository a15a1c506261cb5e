"""More sweeps for what a budget chose, then measured in the whole norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lsrdecomp.compression.candidates import Lsr, Price
from lsrdecomp.compression.materialize import materialize
from lsrdecomp.compression.progress import Counter
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.search_state import Entry, SearchState
from lsrdecomp.compression.solve import Answer, Effort, Request, Task, product_of
from lsrdecomp.kronecker.product import SeparatedProduct

REFINED = 3e-4
"""A sweep that lowers no error by more ends refining."""

NOTHING = 3e-3
"""So does one that lowers no loss by this share of what a layer loses on average."""


PORTION = 8
"""Sweeps at a time, after which only the layers go on whose losses they lowered by as much as ends refining each."""


def refine(state: SearchState, chosen: Sequence[Entry], *, together: bool = True) -> bool:
    """More sweeps for the chosen LSR products, then measured in the whole norm; whether there were any.

    With ``together`` it is the loss of all layers that counts, and sweeps stop where they lower that by little.
    """
    places = [i for i, entry in enumerate(chosen) if isinstance(entry.exact, Lsr) and not entry.exact.refined]
    counter = Counter(state.resources.on_step, "refining", len(places), "layers")
    count = sum(isinstance(entry.exact, Lsr) for entry in chosen)
    least = NOTHING * sum(entry.exact.squared_error for entry in chosen) / max(1, count) if together else 0.0
    products = {i: chosen[i].product.product() for i in places}
    losses = {i: chosen[i].exact.squared_error for i in places}
    for swept in range(0, state.search.sweeps, PORTION):
        # The layers that still gain go on among themselves, so that no batch waits for its slowest.
        left, going = state.search.sweeps - swept, []
        effort = Effort(left, left, REFINED, 1, least, state.resources.device)
        for task, answers in _portion(state, chosen, products, effort):
            for place, i in enumerate(task.places):
                product, loss = product_of(answers[0].factors_of(place)), float(answers[0].errors[place]) ** 2
                if task.effort.sweeps < left and losses[i] - loss > PORTION * max(least, 2.0 * REFINED * loss):
                    going.append((i, product, loss))
                    continue
                _measure(state, i, chosen[i], product)
                counter.add()
        products = {i: product for i, product, _ in going}
        losses = {i: loss for i, _, loss in going}
    return bool(places)


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


def _groups(state: SearchState, chosen: Sequence[Entry], places: Sequence[int]) -> dict[tuple[Any, ...], list[int]]:
    """Layers of one kind, shape and number of terms."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i in places:
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
