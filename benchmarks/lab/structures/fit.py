"""What every layer becomes under one budget over all; layers and LSR candidates in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.files.progress import OnStep
from lsrdecomp.lora.search.caches import SpillCache
from lsrdecomp.lora.search.candidates import Candidate, LsrCandidate, Materialized, lsr_candidate
from lsrdecomp.lora.search.layers import Layer, StatisticsByLayer, batches
from lsrdecomp.lora.search.plan import Budget, Resources, Search
from lsrdecomp.lora.search.search import FittedLayers, fit_budget, search_layers
from lsrdecomp.lora.search.shapes import Configuration
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.solvers.solver import PairSolution
from lsrdecomp.targets.target import LowRank


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
    def product(self) -> SeparatedProduct | None:
        """The factors as a reader gets them; None where the layer is dropped."""
        return self.materialized.product

    @property
    def relative_error(self) -> float:
        """‖G^½ (ΔW − ΔŴ) C^½‖ / ‖G^½ ΔW C^½‖."""
        size = self.layer.squared_norm
        return math.sqrt(self.candidate.squared_error / size) if size > 0.0 else 0.0

    def pair(self) -> tuple[Any, Any]:
        """(B, A) of ΔŴ = B A: one zero column where the layer is dropped."""
        product = self.product
        if product is None:
            left, right = self.layer.pair.left, self.layer.pair.right
            return 0.0 * left[:, :1], 0.0 * right[:1, :]
        return product.to_lora()


@dataclass(frozen=True, slots=True)
class Fit:
    """All layers under one budget."""

    layers: tuple[FittedLayer, ...]
    low_rank_error: float | None
    """Of the best truncated SVD found for the same budget and norm; None where none fits."""

    @classmethod
    def of(cls, layers: Sequence[Layer], fitted: FittedLayers) -> Fit:
        """What a budget took, beside the layers themselves."""
        pairs = zip(layers, fitted.chosen, strict=True)
        return cls(
            tuple(FittedLayer(layer, chosen) for layer, chosen in pairs), fitted.low_rank_error
        )

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
    on_step: OnStep | None = None,
) -> Fit:
    """Choose what every layer becomes under one budget; for several, call `search_layers` once.

    Parameters
    ----------
    layers : sequence of Layer
        See `make_layers`.
    budget : Budget
    search, storages
        As for `search_layers`.
    on_step : callable, optional
        Called with a `ProgressUpdate` as the parts of the work are done.

    Returns
    -------
    Fit
        Its error is never above that of the best truncated SVD found for the same budget and norm
        (``low_rank_error``): that one is among the starting points of the allocation, and no step
        makes it worse.

    Raises
    ------
    BudgetError
        If the budget cannot be met; says what is reachable.
    """
    searched = search_layers(
        layers, [budget], search=search, storages=storages, resources=Resources(on_step=on_step)
    )
    return Fit.of(layers, fit_budget(searched, budget))


def make_layers(
    pairs: Mapping[str, LowRank], statistics: StatisticsByLayer | None = None
) -> list[Layer]:
    """Make layers from ΔW by name, in the norm of their statistics, or in the Frobenius norm."""
    return [
        Layer.of(name, pair, None if statistics is None else statistics[name])
        for name, pair in pairs.items()
    ]


def solve_together(
    layers: Sequence[Layer],
    shape: ProductShape,
    ranks: tuple[int, int],
    solver: JointALS,
) -> list[PairSolution]:
    """Joint least squares for layers of one kind, in batches that fit in memory."""
    solutions: list[PairSolution] = []
    for part in batches(layers):
        weights = None if layers[0].norms.is_frobenius else [layer.norms for layer in layers[part]]
        pairs = [layer.pair for layer in layers[part]]
        solutions += solver.solve_batch(pairs, shape, ranks, weights=weights)
    return solutions


def lsr_candidates(
    layers: Sequence[Layer],
    configurations: Iterable[Configuration],
    solver: JointALS,
    cache: SpillCache | None = None,
) -> list[list[LsrCandidate]]:
    """Solve LSR products of the given shapes for layers of one kind; one list per layer."""
    candidates: list[list[LsrCandidate]] = [[] for _ in layers]
    cache = cache or SpillCache()
    for shape, ranks in configurations:
        for row, solution in zip(
            candidates, solve_together(layers, shape, ranks, solver), strict=True
        ):
            row.append(lsr_candidate(solution, cache))
    return candidates
