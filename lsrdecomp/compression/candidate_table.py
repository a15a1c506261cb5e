"""Rows of candidates, one a layer: gathered batch by batch, stored, the chosen ones polished.

A row holds prices and recipes. Factors of LSR products, which took long to find, wait on a shelf; all others are made
again from the layer when they are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lsrdecomp.compression.allocate import Choice
from lsrdecomp.compression.candidates import (
    Candidate,
    Configuration,
    direct_candidates,
    drop,
    keep,
    low_rank_candidates,
    lsr_candidate,
    lsr_candidates,
    refitted,
    solve_together,
    stored_as,
)
from lsrdecomp.compression.layers import Layer, batches
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.search import Search, choose_configurations
from lsrdecomp.compression.spill_cache import Shelf
from lsrdecomp.compression.water_filling import as_found_candidates, water_filled_candidates
from lsrdecomp.kronecker.shape import KroneckerShape

Row = list[Candidate]


def rows(
    layers: Sequence[Layer],
    limit: float | None,
    search: Search,
    storages: Sequence[str],
    shelf: Shelf,
    say: Callable[[str], Any],
) -> Iterator[tuple[list[int], list[Row]]]:
    """Places of layers that fit in memory together, and the candidates of each, of at most ``limit`` parameters."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(layer.kind, []).append(i)
    for places in kinds.values():
        group = [layers[i] for i in places]
        m, n = group[0].shape
        most = max(layer.parameters for layer in group)
        if limit is not None:
            most = min(most, int(limit))
        say(f"shapes for {len(group)} layers of {m}×{n}")
        configurations = choose_configurations(group, search, most)
        for part in batches(group):
            now = f"layers {part.start + 1} to {part.stop} of {len(group)}"
            say(f"solving {len(configurations)} shapes for {now} of {m}×{n}")
            found = lsr_candidates(group[part], configurations, search.solver, shelf=shelf)
            yield (
                places[part],
                [
                    _stored(layer, [*_plain(layer, limit, search), *products], storages)
                    for layer, products in zip(group[part], found, strict=True)
                ],
            )


def _plain(layer: Layer, limit: float | None, search: Search) -> Row:
    row = [drop(layer), keep(layer)]
    if search.low_rank:
        row += low_rank_candidates(layer, math.inf if limit is None else limit)
    if search.direct:
        shape = KroneckerShape.balanced(layer.shape)
        most = max(1, layer.parameters // shape.parameters(1))
        row += direct_candidates(layer, shape, {2**k for k in range(12) if 2**k <= most})
    return row


def _stored(layer: Layer, candidates: Sequence[Candidate], storages: Sequence[str]) -> list[Candidate]:
    """Every candidate that nothing cheaper beats, in every storage that suits it."""
    found = []
    for candidate in candidates:
        if candidate.structure == "LSR" and _beaten(candidate, candidates):
            continue
        for storage in storages:
            if storage not in INTEGER_BITS or candidate.structure in ("LSR", "drop"):
                found.append(stored_as(layer, candidate, storage))
    if any(storage in INTEGER_BITS for storage in storages):
        found += [*water_filled_candidates(layer), *as_found_candidates(layer)]
    return found


def _beaten(candidate: Candidate, others: Sequence[Candidate]) -> bool:
    return any(
        other.structure == "LSR"
        and other.parameters <= candidate.parameters
        and other.squared_error < candidate.squared_error
        for other in others
    )


def polish(layers: Sequence[Layer], table: list[list[Candidate]], choice: Choice, search: Search, shelf: Shelf) -> bool:
    """More sweeps for the chosen LSR products, in place; whether there were any left to polish."""
    groups: dict[Any, list[int]] = {}
    for i, picked in enumerate(choice):
        candidate = table[i][picked]
        if candidate.structure == "LSR" and not candidate.polished:
            groups.setdefault((layers[i].kind, candidate.configuration), []).append(i)
    for (_, configuration), places in groups.items():
        for part in batches([layers[i] for i in places]):
            _polish_together(layers, table, choice, places[part], configuration, search, shelf)
    return bool(groups)


def _polish_together(
    layers: Sequence[Layer],
    table: list[list[Candidate]],
    choice: Choice,
    places: Sequence[int],
    configuration: Configuration,
    search: Search,
    shelf: Shelf,
) -> None:
    starts = [exact() for i in places if (exact := table[i][choice[i]].exact) is not None]
    solved = solve_together([layers[i] for i in places], *configuration, search.polish, starts)
    for i, solution in zip(places, solved, strict=True):
        better = replace(lsr_candidate(solution, shelf), polished=True)
        for k, old in enumerate(table[i]):
            if old.structure == "LSR" and old.configuration == configuration and not old.polished:
                if old.storage in INTEGER_BITS:
                    new = refitted(layers[i], better, old.storage, shelf)
                else:
                    new = stored_as(layers[i], better, old.storage)
                table[i][k] = new if new.squared_error <= old.squared_error else replace(old, polished=True)
