"""A search over all layers of an adapter, and what any budget takes from it.

Every layer is solved at the first rungs of a ladder of shapes; a budget chooses one candidate a layer. The upper rungs
are solved up to about the sizes it chose, for several budgets at once at all sizes; then, while they pay, neighbours of
what it chose are tried. What is chosen is refined and measured in the whole norm. All that was solved stays in the
table, so that the next budget starts from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lsrdecomp.compression.budget import Budget
from lsrdecomp.compression.candidates import (
    Candidate,
    drop,
    keep,
    low_rank_candidates,
)
from lsrdecomp.compression.choice import Cost, allocate, exchange_rate
from lsrdecomp.compression.ladder import Chain, first_rungs, ladder, shapes_like
from lsrdecomp.compression.layers import Layer
from lsrdecomp.compression.materialize import Materialized
from lsrdecomp.compression.progress import Counter
from lsrdecomp.compression.search import Search
from lsrdecomp.compression.search_neighbours import exchange, explore, widen
from lsrdecomp.compression.search_refining import refine
from lsrdecomp.compression.search_state import Draw, Entry, SearchState
from lsrdecomp.compression.search_state import Resources as Resources
from lsrdecomp.compression.solve import Request
from lsrdecomp.compression.spill_cache import SpillCache
from lsrdecomp.formats.allocation import Choice

SHARE = 8.0
"""Most parameters of a layer on the ladder, in units of what the budget gives a layer on average."""

HOPE = 0.7
"""Share of its loss that refining usually leaves of a product: what is chosen is chosen for what it may become, against
truncated SVD, which is as good as it can be from the start. On a language model's layers it leaves .4 to .9."""

WIDENINGS = 2
"""Most times that upper rungs are solved for a budget: with them some layers are given more, others less."""

ROUNDS = 3
"""Most times that a budget is drawn anew because refining changed what is best."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """All layers under one budget."""

    chosen: tuple[Materialized, ...]
    low_rank_error: float | None  # the best truncated SVD found for the same budget and norm; None: none fits


class Searched:
    """Candidates of all layers; any number of budgets can be drawn from them.

    Made by `search_layers`. `fit` draws a budget: by default it still tries neighbours of what that budget chooses, and
    refines what it takes; with ``solve=False`` it only allocates, measures and rounds, a few milliseconds a layer.
    """

    def __init__(
        self, layers: Sequence[Layer], search: Search, storages: Sequence[str], cache: SpillCache, resources: Resources
    ) -> None:
        self.state = SearchState(layers, search, storages, cache, resources)
        self.layers, self.search = layers, search
        self._widens = False  # whether upper rungs of the ladder are solved where a budget could want them

    # -- the ladder ----------------------------------------------------------------------------------------------------

    def solve_ladder(self, limits: Sequence[float | None]) -> None:
        """Every layer at the shapes of the ladder, for budgets of these costs (None: any)."""
        limit = None if any(one is None for one in limits) else max(one for one in limits if one is not None)
        # Several budgets want most of the ladder.
        self._widens = limit is not None and len(limits) == 1 and not self.search.shapes
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, layer in enumerate(self.layers):
            self.state.table[i] = [Entry(candidate) for candidate in self._plain(layer, limit)]
            if layer.squared_norm > 0.0 and min(layer.shape) > 1:
                groups.setdefault(layer.kind, []).append(i)
                self.state.exact[i] = layer.is_leading
                _ = layer.leading_entries, layer.dense_entries  # all while the layer is open
        wanted = [(places, self._requests(places, limit)) for places in groups.values()]
        if self.search.shapes:
            wanted = self._given(groups)
        count = sum(len(places) * len(requests) for places, requests in wanted)
        counter = Counter(self.state.resources.on_step, "solving shapes", count, "layers × shapes")
        tasks = (
            self.state.task(part, requests)
            for places, requests in wanted
            if requests
            for part in self.state.parts(places)
        )
        self.state.solve(tasks, counter)

    def _requests(self, places: Sequence[int], limit: float | None) -> list[Request]:
        """The ladder of layers of one size, as far as a budget could want it."""
        group = [self.layers[i] for i in places]
        most = max(layer.parameters for layer in group) / 2
        if limit is not None:
            most = min(most, limit, SHARE * limit * group[0].parameters / self.state.parameters)
        rank = max(layer.rank for layer in group)
        search = self.search
        if self._widens:
            chains = first_rungs(group[0].shape, search.orders, most)
        else:
            chains = ladder(group[0].shape, rank, search.orders, search.inner_rank, most)
        return [Request(chain.shape, chain.terms) for chain in chains]

    def _given(self, groups: Mapping[tuple[object, ...], Sequence[int]]) -> list[tuple[list[int], list[Request]]]:
        """The shapes that were given for each layer; layers of one kind side by side where they share one."""
        shared: dict[tuple[object, Chain], list[int]] = {}
        chains = shapes_like(self.search.shapes, {layer.name: layer.shape for layer in self.layers})
        for kind, places in groups.items():
            for i in places:
                layer = self.layers[i]
                for chain in chains[layer.name]:
                    if chain.shape.inner_rank <= layer.rank:
                        shared.setdefault((kind, chain), []).append(i)
        return [(places, [Request(chain.shape, chain.terms)]) for (_, chain), places in shared.items()]

    def _plain(self, layer: Layer, limit: float | None) -> Iterator[Candidate]:
        yield drop(layer)
        yield keep(layer)
        if self.search.low_rank:
            yield from low_rank_candidates(layer, math.inf if limit is None else limit)

    # -- a budget ------------------------------------------------------------------------------------------------------

    def fit(
        self,
        budget: Budget,
        overhead: Callable[[Candidate], float] | None = None,
        *,
        solve: bool = True,
        allowed: Callable[[Candidate], bool] | None = None,
    ) -> Fitted:
        """What every layer becomes under one budget over all of them.

        Parameters
        ----------
        budget : Budget
        overhead : callable, optional
            Bytes of a candidate beyond its factors, such as header entries; counts where bytes are counted.
        solve : bool
            Whether to try neighbours and refine what was chosen; without, only what is in the table.
        allowed : callable, optional
            Which candidates may be taken, in their storages; absent, all. Dropping a layer always may.

        Raises
        ------
        BudgetError
            If the budget cannot be met; says what is reachable.
        """
        measured = budget.loss_limit(self.layers) is not None or budget.layer_rtol is not None
        draw = Draw(budget, Cost(budget, overhead), measured, allowed)
        rows, choice, baseline = self._allocated(draw)
        if solve:
            for _ in range(WIDENINGS if self._widens else 0):
                if not widen(self.state, [row[k][1].parameters for row, k in zip(rows, choice, strict=True)]):
                    break
                rows, choice, _ = self._allocated(draw)
            given = self.search.shapes or budget.layer_rtol
            for _ in range(0 if given else self.search.rounds):
                picked = [row[k][0] for row, k in zip(rows, choice, strict=True)]
                if not explore(self.state, picked, exchange_rate(rows, choice)):
                    break
                rows, choice, _ = self._allocated(draw)
            if not given and self.search.rounds:
                exchange(self.state, [row[k][0] for row, k in zip(rows, choice, strict=True)])
            hopeful = replace(draw, hope=1.0 if measured else HOPE)
            for _ in range(ROUNDS):
                rows, choice, _ = self._allocated(hopeful)
                picked = [row[k][0] for row, k in zip(rows, choice, strict=True)]
                if not refine(self.state, picked, together=budget.layer_rtol is None):
                    break
            rows, choice, _ = self._allocated(replace(draw, trusted=True))
        chosen = (self.state.made(i, *row[k]) for i, (row, k) in enumerate(zip(rows, choice, strict=True)))
        return Fitted(tuple(chosen), baseline)

    def _allocated(self, draw: Draw) -> tuple[list[list[tuple[Entry, Candidate]]], Choice, float | None]:
        """Rows of entries in their storages, the choice among them, and the error of truncated SVD alone."""
        rows = [list(self.state.row(i, draw)) for i in range(len(self.layers))]
        table = [[candidate for _, candidate in row] for row in rows]
        return rows, *allocate(self.layers, table, draw.budget, draw.cost)


def search_layers(
    layers: Sequence[Layer],
    budgets: Sequence[Budget] = (),
    *,
    search: Search | None = None,
    storages: Sequence[str] = ("float32",),
    cache: SpillCache | None = None,
    resources: Resources | None = None,
) -> Searched:
    """Solve the ladder of shapes for all layers, for any number of budgets.

    Parameters
    ----------
    layers : sequence of Layer
        See `lsrdecomp.compression.layers.make_layers`.
    budgets : sequence of Budget
        What will be asked; larger shapes than they could want are not solved. None: anything may be asked.
    search : Search, optional
    storages : sequence of str
        Types the factors may be stored in; more than one is of use when bytes are counted. With int8 or int4 among
        them, truncated SVD in water-filled bits takes part.
    cache : SpillCache, optional
        Where factors wait.
    resources : Resources, optional

    Returns
    -------
    Searched
        Its `Searched.fit` draws a budget. The error is never above that of the best truncated SVD for the same budget
        and norm (``low_rank_error``), which is among the starting points of every allocation.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.targets.base import LowRank
    >>> layer = Layer("square", LowRank(np.eye(16)[:, :4], np.eye(16)[:4]))
    >>> searched = search_layers([layer], [Budget(ratio=4.0)], search=Search(orders=(2,), rounds=0))
    >>> fitted = searched.fit(Budget(ratio=4.0))
    >>> [one.candidate.parameters <= layer.parameters / 4 for one in fitted.chosen]
    [True]
    """
    found = Searched(layers, search or Search(), storages, cache or SpillCache(), resources or Resources())
    found.solve_ladder([None if budget.counts_bytes else budget.cost_limit(layers) for budget in budgets] or [None])
    return found
