"""Which candidate each layer takes: under one budget over all layers, or within a tolerance of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lsrdecomp.compression.budget import Budget
from lsrdecomp.compression.candidates import Candidate, Structure
from lsrdecomp.compression.layers import Layer
from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.allocation import Choice, Options, total_loss, within_cost, within_loss

PLAIN = (Structure.DROP, Structure.LOW_RANK, Structure.KEEP)
"""What truncated SVD alone can do."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a candidate costs in the terms of a budget: parameters, or bytes and what they need in a file."""

    budget: Budget
    overhead: Callable[[Candidate], float] | None = None

    def __call__(self, candidate: Candidate) -> float:
        if not self.budget.counts_bytes:
            return candidate.parameters
        return candidate.bytes + (0.0 if self.overhead is None else self.overhead(candidate))


def allocate(
    layers: Sequence[Layer],
    table: Sequence[Sequence[Candidate]],
    budget: Budget,
    cost: Cost,
    known: Choice | None = None,
) -> tuple[Choice, float | None]:
    """The choice for all candidates, at least as good as for truncated SVD alone, and the error of the latter."""
    if budget.layer_rtol is not None:
        return [within_tolerance(layer, row, budget.layer_rtol) for layer, row in zip(layers, table, strict=True)], None

    options = [Options.of([cost(c) for c in row], [c.squared_error for c in row]) for row in table]
    plain = [[k for k, c in enumerate(row) if c.structure in PLAIN] for row in table]
    narrow = [Options(o.costs[k], o.losses[k]) for o, k in zip(options, plain, strict=True)]
    spend, lose = budget.cost_limit(layers), budget.loss_limit(layers)
    starts = [] if known is None else [known]
    baseline = None
    try:
        picked = within_cost(narrow, spend) if spend is not None else within_loss(narrow, lose or 0.0)
        start = [row[k] for row, k in zip(plain, picked, strict=True)]
        starts.append(start)
        size = math.fsum(layer.squared_norm for layer in layers)
        baseline = math.sqrt(total_loss(options, start) / size) if size > 0.0 else 0.0
    except BudgetError:
        pass  # plain low rank cannot meet it; the whole family may
    if spend is not None:
        return within_cost(options, spend, starts), baseline
    return within_loss(options, lose or 0.0, starts), baseline


def within_tolerance(layer: Layer, candidates: Sequence[Candidate], rtol: float) -> int:
    """The fewest parameters within a relative error; where none is, the least error."""
    allowed = rtol**2 * layer.squared_norm
    good = [k for k, candidate in enumerate(candidates) if candidate.squared_error <= allowed]
    if good:
        return min(good, key=lambda k: (candidates[k].parameters, candidates[k].squared_error))
    return min(range(len(candidates)), key=lambda k: candidates[k].squared_error)


def exchange_rate(rows: Sequence[Sequence[tuple[Any, Candidate]]], choice: Choice) -> float:
    """Loss that one more parameter removes at the margin of an allocation: of the steps not taken, nearly the best."""
    slopes = []
    for row, k in zip(rows, choice, strict=True):
        picked = row[k][1]
        steps = [
            (picked.squared_error - other.squared_error) / (other.parameters - picked.parameters)
            for _, other in row
            if other.parameters > picked.parameters and other.squared_error < picked.squared_error
        ]
        if steps:
            slopes.append(max(steps))
    return float(np.quantile(slopes, 0.75)) if slopes else 0.0
