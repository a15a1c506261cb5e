"""Which candidate each layer takes: under one budget over all layers, or within a tolerance of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lsrdecomp.compression.allocate import Choice, Options, total_loss, within_cost, within_loss
from lsrdecomp.compression.budget import Budget
from lsrdecomp.compression.candidates import Candidate
from lsrdecomp.compression.layers import Layer
from lsrdecomp.errors import BudgetError


def allocate(
    layers: Sequence[Layer],
    table: Sequence[Sequence[Candidate]],
    budget: Budget,
    overhead: Callable[[Candidate], float] | None,
    known: Choice | None = None,
) -> tuple[Choice, float | None]:
    """The choice for all candidates, at least as good as for truncated SVD alone, and the error of the latter."""

    if budget.layer_rtol is not None:
        return [within_tolerance(layer, row, budget.layer_rtol) for layer, row in zip(layers, table, strict=True)], None

    def cost(candidate: Candidate) -> float:
        if not budget.counts_bytes:
            return candidate.parameters
        return candidate.bytes + (0.0 if overhead is None else overhead(candidate))

    options = [Options.of([cost(c) for c in row], [c.squared_error for c in row]) for row in table]
    plain = [[k for k, c in enumerate(row) if c.structure in ("drop", "low rank", "keep")] for row in table]
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
