"""fit_layers: candidates for every layer, one budget over all of them, the chosen ones polished, measured as stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lsrdecomp.compression.budget import Budget as Budget
from lsrdecomp.compression.candidate_table import Row, polish, rows
from lsrdecomp.compression.candidates import Candidate, settled
from lsrdecomp.compression.choice import allocate
from lsrdecomp.compression.layers import Form, Layer
from lsrdecomp.compression.layers import HasWeights as HasWeights
from lsrdecomp.compression.layers import make_layers as make_layers
from lsrdecomp.compression.search import Search
from lsrdecomp.compression.spill_cache import Shelf
from lsrdecomp.errors import BudgetError
from lsrdecomp.kronecker.product import SeparatedProduct


@dataclass(frozen=True, slots=True)
class FittedLayer:
    """What one layer became."""

    layer: Layer
    candidate: Candidate  # as stored; its error is in the layer's norm

    @property
    def form(self) -> Form | None:
        """The factors as a reader gets them; None where the layer is dropped."""
        return None if self.candidate.build is None else self.candidate.build()

    @property
    def relative_error(self) -> float:
        """‖G^½ (ΔW − ΔŴ) C^½‖ / ‖G^½ ΔW C^½‖."""
        size = self.layer.squared_norm
        return math.sqrt(self.candidate.squared_error / size) if size > 0.0 else 0.0

    def pair(self) -> tuple[Any, Any]:
        """(B, A) of ΔŴ = B A: one zero column where the layer is dropped. Raises for a direct sum."""
        form = self.form
        if form is None:
            left, right = self.layer.pair.left, self.layer.pair.right
            return 0.0 * left[:, :1], 0.0 * right[:1, :]
        if not isinstance(form, SeparatedProduct):
            raise BudgetError(f"{self.layer.name}: a direct Kronecker sum is not a product of thin factors")
        return form.to_lora()


@dataclass(frozen=True, slots=True)
class Fit:
    """All layers under one budget."""

    layers: tuple[FittedLayer, ...]
    low_rank_error: float | None  # the best truncated SVD found for the same budget and norm; None: none fits

    @property
    def parameters(self) -> int:
        return sum(fitted.candidate.parameters for fitted in self.layers)

    @property
    def bytes(self) -> int:
        return sum(fitted.candidate.bytes for fitted in self.layers)

    @property
    def relative_error(self) -> float:
        """Over all layers, in their norm."""
        size = math.fsum(fitted.layer.squared_norm for fitted in self.layers)
        lost = math.fsum(fitted.candidate.squared_error for fitted in self.layers)
        return math.sqrt(lost / size) if size > 0.0 else 0.0


def fit_layers(
    layers: Sequence[Layer],
    budget: Budget,
    *,
    search: Search | None = None,
    storages: Sequence[str] = ("float32",),
    overhead: Callable[[Candidate], float] | None = None,
    on_step: Callable[[str], Any] | None = None,
) -> Fit:
    """Choose for every layer what it becomes, under one budget over all layers.

    Parameters
    ----------
    layers : sequence of Layer
        See `make_layers`.
    budget : Budget
    search : Search, optional
    storages : sequence of str
        Types the factors may be stored in; more than one is of use when bytes are counted. With int8 or int4 among
        them, truncated SVD in water-filled bits takes part.
    overhead : callable, optional
        Bytes of a candidate beyond its factors, such as header entries.
    on_step : callable, optional
        Called with a few words before each part of the work.

    Returns
    -------
    Fit
        Its error is never above that of the best truncated SVD found for the same budget and norm
        (``low_rank_error``): that one is among the starting points of the allocation, and no step makes it worse.

    Raises
    ------
    BudgetError
        If the budget cannot be met; says what is reachable.
    """
    return prepare(layers, budget, search=search, storages=storages, on_step=on_step).fit(budget, overhead)


def prepare(
    layers: Sequence[Layer],
    budget: Budget,
    *,
    search: Search | None = None,
    storages: Sequence[str] = ("float32",),
    shelf: Shelf | None = None,
    on_step: Callable[[str], Any] | None = None,
) -> Prepared:
    """All candidates of all layers, stored, ready for budgets of the kind of ``budget``; arguments as `fit_layers`.

    With a tolerance for each layer on its own, layers are fitted as they come by, and only what they became is kept.
    """
    search, shelf = search or Search(), shelf or Shelf()
    say = on_step or (lambda words: None)
    limit = None if budget.counts_bytes else budget.cost_limit(layers)
    table: list[Row] = [[] for _ in layers]
    for places, found in rows(layers, limit, search, storages, shelf, say):
        if budget.layer_rtol is not None:
            some = [layers[i] for i in places]
            fit = Prepared(some, found, search, storages, shelf, say).fit(budget)
            found = [[settled(fitted.candidate, shelf)] for fitted in fit.layers]
        for i, row in zip(places, found, strict=True):
            table[i] = row
    return Prepared(layers, table, search, storages, shelf, say)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Candidates of all layers; fits of several budgets share them."""

    layers: Sequence[Layer]
    table: list[Row]
    search: Search
    storages: Sequence[str]
    shelf: Shelf
    say: Callable[[str], Any]

    def fit(self, budget: Budget, overhead: Callable[[Candidate], float] | None = None) -> Fit:
        """Allocate, polish what was chosen, allocate again; see `fit_layers`."""
        choice, baseline = allocate(self.layers, self.table, budget, overhead)
        for _ in range(2):
            self.say("polishing")
            if not polish(self.layers, self.table, choice, self.search, self.shelf):
                break
            choice, again = allocate(self.layers, self.table, budget, overhead, choice)
            baseline = again if baseline is None else baseline
        fitted = [FittedLayer(layer, self.table[i][choice[i]]) for i, layer in enumerate(self.layers)]
        return Fit(tuple(fitted), baseline)
