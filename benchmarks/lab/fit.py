"""fit_layers: what every layer becomes under one budget over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lsrdecomp.compression.budget import Budget as Budget
from lsrdecomp.compression.candidates import Candidate
from lsrdecomp.compression.layers import Form, Layer
from lsrdecomp.compression.layers import HasWeights as HasWeights
from lsrdecomp.compression.layers import make_layers as make_layers
from lsrdecomp.compression.materialize import Materialized
from lsrdecomp.compression.progress import OnStep
from lsrdecomp.compression.search import Fitted, search_layers
from lsrdecomp.compression.settings import Resources, Search
from lsrdecomp.errors import BudgetError
from lsrdecomp.kronecker.product import SeparatedProduct


@dataclass(frozen=True, slots=True)
class FittedLayer:
    """What one layer became."""

    layer: Layer
    materialized: Materialized

    @property
    def candidate(self) -> Candidate:
        """As stored; its error is in the layer's norm."""
        return self.materialized.candidate

    @property
    def form(self) -> Form | None:
        """The factors as a reader gets them; None where the layer is dropped."""
        return self.materialized.form

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

    @classmethod
    def of(cls, layers: Sequence[Layer], fitted: Fitted) -> Fit:
        """What a budget took, beside the layers themselves."""
        pairs = zip(layers, fitted.chosen, strict=True)
        return cls(tuple(FittedLayer(layer, chosen) for layer, chosen in pairs), fitted.low_rank_error)

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
    on_step: OnStep | None = None,
) -> Fit:
    """Choose for every layer what it becomes, under one budget over all layers; for several, `search_layers` once.

    Parameters
    ----------
    layers : sequence of Layer
        See `make_layers`.
    budget : Budget
    search, storages
        As for `search_layers`.
    overhead : callable, optional
        Bytes of a candidate beyond its factors, such as header entries.
    on_step : callable, optional
        Called with a `Step` as the parts of the work are done.

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
    searched = search_layers(layers, [budget], search=search, storages=storages, resources=Resources(on_step=on_step))
    return Fit.of(layers, searched.fit(budget, overhead))
