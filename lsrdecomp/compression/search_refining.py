"""More sweeps for what a budget chose, then measured in the whole norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lsrdecomp.compression.candidates import Configuration, Lsr, Price, lsr_candidate, solve_together
from lsrdecomp.compression.layers import batches
from lsrdecomp.compression.materialize import materialize
from lsrdecomp.compression.progress import Counter
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.search_state import Entry, SearchState
from lsrdecomp.compression.solve import Effort, Request
from lsrdecomp.kronecker.product import SeparatedProduct

REFINED = 3e-4
"""A sweep that lowers no error by more ends refining."""

NOTHING = 5e-4
"""So does one that lowers no loss by this share of what a layer loses on average."""


def refine(state: SearchState, chosen: Sequence[Entry], *, together: bool = True) -> bool:
    """More sweeps for the chosen LSR products, then measured in the whole norm; whether there were any.

    With ``together`` it is the loss of all layers that counts, and sweeps stop where they lower that by little.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, entry in enumerate(chosen):
        if isinstance(entry.exact, Lsr) and not entry.exact.refined:
            groups.setdefault((state.layers[i].kind, *entry.exact.configuration), []).append(i)
    counter = Counter(state.resources.on_step, "refining", sum(map(len, groups.values())), "layers")
    if state.search.probes > 0:
        for (_, *configuration), places in groups.items():
            for part in batches([state.layers[i] for i in places]):
                _refine_fully(state, places[part], chosen, (configuration[0], configuration[1]))
                counter.add(len(places[part]))
        return bool(groups)
    solver = state.search.refine
    count = sum(isinstance(entry.exact, Lsr) for entry in chosen)
    least = NOTHING * sum(entry.exact.squared_error for entry in chosen) / max(1, count) if together else 0.0
    effort = Effort(solver.sweeps, solver.sweeps, solver.cg_steps, REFINED, 1, least, state.resources.device)
    tasks = []
    for (_, shape, ranks), members in groups.items():
        for run_of_layers in state.parts(members):
            starts = [chosen[i].product.product() for i in run_of_layers]
            tasks.append(state.task(run_of_layers, [Request(shape, (ranks,), starts)], effort))
    for task, answers in state.answers(iter(tasks), counter):
        for i, product in zip(task.places, answers[0].products, strict=True):
            _measure(state, i, chosen[i], product)
    return bool(groups)


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


def _refine_fully(
    state: SearchState, places: Sequence[int], chosen: Sequence[Entry], configuration: Configuration
) -> None:
    """With the whole norm and the full solver, from where the search stands; kept where it is nearer."""
    starts = [chosen[i].product.product() for i in places]
    solved = solve_together([state.layers[i] for i in places], *configuration, state.search.refine, starts)
    for i, solution in zip(places, solved, strict=True):
        better, held = lsr_candidate(solution, state.cache), chosen[i].product
        best = better if better.squared_error <= held.squared_error else held
        chosen[i].replaced(replace(best, refined=True))
