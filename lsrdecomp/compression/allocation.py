"""Which candidate each layer takes: under one budget over all layers, or within a tolerance of its own.

1. A layer's candidates are points (cost, loss), in parameters or bytes and in squared error.
2. Truncated SVD alone is allocated first, among the plain candidates.
3. All candidates are allocated (`lsrdecomp.formats.allocation`), with the answer of 2 among the starts: the steepest
   steps along all lower convex hulls [1]_, then single changes and exchanges with what is left.

References
----------
.. [1] Y. Shoham and A. Gersho, Efficient bit allocation for an arbitrary set of quantizers, IEEE Trans. ASSP 36 (1988).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lsrdecomp.compression.candidates import Candidate, Structure
from lsrdecomp.compression.layers import Layer
from lsrdecomp.compression.plan import Budget
from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.allocation import Choice, Options, total_loss, within_cost, within_loss

PLAIN = (Structure.DROP, Structure.LOW_RANK, Structure.KEEP)
"""What truncated SVD alone can do."""


def allocate(
    layers: Sequence[Layer], table: Sequence[Sequence[Candidate]], budget: Budget
) -> tuple[Choice, float | None]:
    """The choice among all candidates, at least as good as among those of truncated SVD alone.

    Parameters
    ----------
    layers : sequence of Layer
    table : sequence of sequence of Candidate
        The candidates of each layer, in the storages that they would have.
    budget : Budget

    Returns
    -------
    choice : list of int
        One index a layer.
    low_rank_error : float or None
        The relative error over all layers of truncated SVD alone; None if that cannot meet the budget.

    Raises
    ------
    BudgetError
        If no choice meets the budget; says what is reachable.
    """
    if budget.layer_rtol is not None:
        return [
            _within_tolerance(layer, row, budget.layer_rtol) for layer, row in zip(layers, table, strict=True)
        ], None

    # Allocation 1: points of cost and loss.
    options = [Options.of([_cost(c, budget) for c in row], [c.squared_error for c in row]) for row in table]

    # Allocation 2: truncated SVD alone.
    plain = [[k for k, c in enumerate(row) if c.structure in PLAIN] for row in table]
    narrow = [Options(o.costs[k], o.losses[k]) for o, k in zip(options, plain, strict=True)]
    starts, low_rank_error = [], None
    try:
        picked = _within(narrow, budget, [])
        starts = [[row[k] for row, k in zip(plain, picked, strict=True)]]
        size = math.fsum(layer.squared_norm for layer in layers)
        low_rank_error = math.sqrt(total_loss(options, starts[0]) / size) if size > 0.0 else 0.0
    except BudgetError:
        pass  # plain low rank cannot meet it; the whole family may

    # Allocation 3: all candidates, no worse than that.
    return _within(options, budget, starts), low_rank_error


def _within(options: Sequence[Options], budget: Budget, starts: Sequence[Choice]) -> Choice:
    if budget.cost is not None:
        return within_cost(options, budget.cost, starts)
    return within_loss(options, budget.squared_error or 0.0, starts)


def _cost(candidate: Candidate, budget: Budget) -> int:
    return candidate.bytes if budget.counts_bytes else candidate.parameters


def _within_tolerance(layer: Layer, candidates: Sequence[Candidate], rtol: float) -> int:
    """The fewest parameters within a relative error; where none is, the least error."""
    allowed = rtol**2 * layer.squared_norm
    good = [k for k, candidate in enumerate(candidates) if candidate.squared_error <= allowed]
    if good:
        return min(good, key=lambda k: (candidates[k].parameters, candidates[k].squared_error))
    return min(range(len(candidates)), key=lambda k: candidates[k].squared_error)


def exchange_rate(table: Sequence[Sequence[Candidate]], choice: Choice) -> float:
    """Loss that one more parameter removes at the margin of an allocation: of the steps not taken, nearly the best."""
    slopes = []
    for row, k in zip(table, choice, strict=True):
        picked = row[k]
        steps = [
            (picked.squared_error - other.squared_error) / (other.parameters - picked.parameters)
            for other in row
            if other.parameters > picked.parameters and other.squared_error < picked.squared_error
        ]
        if steps:
            slopes.append(max(steps))
    return float(np.quantile(slopes, 0.75)) if slopes else 0.0
