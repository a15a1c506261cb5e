"""One budget over many parts, layers of a network or terms of a sum: which of its options each part takes.

Every part offers options with a cost (parameters, bytes) and a loss (absolute squared error in one
norm, so that parts can be compared and losses add). On the lower convex hull of each part's options
"most loss removed per unit of cost" is the right order [1]_; what the hull leaves of the budget
goes to single changes and exchanges, which never make it worse. Numbers only: nothing here knows a
matrix.

References
----------
.. [1] Y. Shoham and A. Gersho, Efficient bit allocation for an arbitrary set of quantizers, IEEE
   Trans. ASSP 36 (1988). doi:10.1109/29.90373
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXCHANGES = 200
"""Most exchanges between two layers after the greedy pass; each lowers the loss, and few are ever
needed."""

Doubles: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Options:
    """What one layer can become: costs and losses, index by index."""

    costs: Doubles
    losses: Doubles

    @classmethod
    def of(cls, costs: Sequence[float], losses: Sequence[float]) -> Options:
        """Raises `BudgetError` unless there is an option and all numbers are finite and not negative."""
        cost, loss = np.asarray(costs, dtype=np.float64), np.asarray(losses, dtype=np.float64)
        if cost.shape != loss.shape or cost.ndim != 1 or cost.size == 0:
            raise BudgetError(
                f"a layer needs as many costs as losses, and at least one: {cost.shape}, {loss.shape}"
            )
        if not (
            np.all(np.isfinite(cost))
            and np.all(np.isfinite(loss))
            and cost.min() >= 0
            and loss.min() >= 0
        ):
            raise BudgetError("costs and losses must be finite and not negative")
        return cls(cost, loss)

    @property
    def cheapest(self) -> int:
        """The option of least cost; of several, that of least loss."""
        return int(np.lexsort((self.losses, self.costs))[0])

    @property
    def best(self) -> int:
        """The option of least loss; of several, the cheapest."""
        return int(np.lexsort((self.costs, self.losses))[0])

    def hull(self) -> list[int]:
        """Indices on the lower convex hull, from the cheapest option to the best: costs rise and slopes flatten."""
        chain: list[int] = []
        for i in np.lexsort((self.losses, self.costs)):
            if chain and self.losses[i] >= self.losses[chain[-1]]:
                continue
            while len(chain) > 1 and self._slope(chain[-2], chain[-1]) <= self._slope(chain[-1], i):
                chain.pop()
            chain.append(int(i))
        return chain

    def _slope(self, a: int, b: int) -> float:
        """Loss removed per unit of cost from option ``a`` to option ``b``."""
        return float((self.losses[a] - self.losses[b]) / (self.costs[b] - self.costs[a]))


Choice: TypeAlias = list[int]
"""One option a part."""


def total_cost(layers: Sequence[Options], choice: Sequence[int]) -> float:
    return math.fsum(layer.costs[i] for layer, i in zip(layers, choice, strict=True))


def total_loss(layers: Sequence[Options], choice: Sequence[int]) -> float:
    return math.fsum(layer.losses[i] for layer, i in zip(layers, choice, strict=True))


def within_cost(layers: Sequence[Options], budget: float, starts: Sequence[Choice] = ()) -> Choice:
    """The option of each layer that makes the total loss small at a total cost of at most ``budget``.

    Parameters
    ----------
    layers : sequence of Options
    budget : float
    starts : sequence of choices
        Known solutions, such as the best truncated SVD: the answer is at least as good as each that
        keeps the budget.

    Returns
    -------
    list of int
        One index per layer.

    Raises
    ------
    BudgetError
        If even the cheapest options cost more; says what is reachable.
    """
    cheapest = [layer.cheapest for layer in layers]
    least = total_cost(layers, cheapest)
    if least > budget:
        raise BudgetError(
            f"a budget of {budget:,.0f} is out of reach: the cheapest options cost {least:,.0f} together"
        )
    choices = []
    for start in (cheapest, *starts):
        choice, spent = list(start), total_cost(layers, start)
        if spent > budget:
            continue
        if start is cheapest:
            for i, option, cost, _ in _greedy(layers):
                step = cost - layers[i].costs[choice[i]]
                if spent + step <= budget:
                    choice[i], spent = option, spent + step
        choices.append(_exchanged(layers, _filled(layers, choice, budget), budget))
    return min(choices, key=lambda choice: (total_loss(layers, choice), total_cost(layers, choice)))


def within_loss(layers: Sequence[Options], allowed: float, starts: Sequence[Choice] = ()) -> Choice:
    """The option of each layer that makes the total cost small at a total loss of at most ``allowed``.

    ``starts`` as in `within_cost`. Raises `BudgetError` if even the best options lose more.
    """
    mirrored = [Options(layer.losses, layer.costs) for layer in layers]
    best = total_loss(layers, [layer.best for layer in layers])
    if best > allowed:
        raise BudgetError(
            f"a loss of {allowed:.4g} is out of reach: the best options lose {best:.4g} together"
        )
    choice, lost = (
        [layer.cheapest for layer in layers],
        total_loss(layers, [layer.cheapest for layer in layers]),
    )
    for i, option, _, loss in _greedy(layers):
        if lost <= allowed:
            break
        lost -= layers[i].losses[choice[i]] - loss
        choice[i] = option
    while total_loss(layers, choice) > allowed:  # sums of many rounded steps
        choice = [layer.best for layer in layers]
    choices = [
        _exchanged(mirrored, _filled(mirrored, list(start), allowed), allowed)
        for start in (choice, *starts)
        if total_loss(layers, start) <= allowed
    ]
    return min(choices, key=lambda choice: (total_cost(layers, choice), total_loss(layers, choice)))


def _greedy(layers: Sequence[Options]) -> Iterator[tuple[int, int, float, float]]:
    """Steps along all hulls, steepest first: (layer, option, its cost, its loss)."""
    heap: list[tuple[float, int, int]] = []
    hulls = [layer.hull() for layer in layers]

    def push(i: int, corner: int) -> None:
        if corner < len(hulls[i]):
            heapq.heappush(
                heap, (-layers[i]._slope(hulls[i][corner - 1], hulls[i][corner]), i, corner)
            )

    for i in range(len(layers)):
        push(i, 1)
    while heap:
        _, i, corner = heapq.heappop(heap)
        option = hulls[i][corner]
        yield i, option, float(layers[i].costs[option]), float(layers[i].losses[option])
        push(i, corner + 1)


@dataclass(frozen=True, slots=True)
class _Moves:
    """All changes of one layer's option from a choice: layer, option, extra cost, loss removed."""

    layer: NDArray[np.int64]
    option: NDArray[np.int64]
    cost: Doubles
    gain: Doubles

    @classmethod
    def of(cls, layers: Sequence[Options], choice: Choice) -> _Moves:
        sizes = [layer.costs.size for layer in layers]
        now = list(zip(layers, choice, strict=True))
        return cls(
            np.repeat(np.arange(len(layers)), sizes),
            np.concatenate([np.arange(size) for size in sizes]),
            np.concatenate([layer.costs - layer.costs[i] for layer, i in now]),
            np.concatenate([layer.losses[i] - layer.losses for layer, i in now]),
        )


def _filled(layers: Sequence[Options], choice: Choice, budget: float) -> Choice:
    """Spend what is left on the single change that removes most loss, again and again."""
    while True:
        moves, left = _Moves.of(layers, choice), budget - total_cost(layers, choice)
        gain = np.where(moves.cost <= left, moves.gain, 0.0)
        pick = int(np.argmax(gain))
        if gain[pick] <= 0.0 or not _improves(layers, choice, [(moves, pick)], budget):
            return choice
        choice[moves.layer[pick]] = int(moves.option[pick])


def _exchanged(layers: Sequence[Options], choice: Choice, budget: float) -> Choice:
    """Pay for a change in one layer with a change in another, while that removes loss."""
    for _ in range(EXCHANGES):
        moves, left = _Moves.of(layers, choice), budget - total_cost(layers, choice)
        order = np.argsort(moves.cost, kind="stable")
        cost, gain, layer = moves.cost[order], moves.gain[order], moves.layer[order]
        best = _running_argmax(gain)
        savers = np.flatnonzero(cost < 0.0)
        reach = np.searchsorted(cost, left - cost[savers], side="right") - 1
        partner = best[reach]
        total = np.where(layer[partner] != layer[savers], gain[savers] + gain[partner], -np.inf)
        if total.size == 0 or total.max() <= 0.0:
            return choice
        pair = [
            (moves, int(order[i]))
            for i in (savers[int(np.argmax(total))], partner[int(np.argmax(total))])
        ]
        if not _improves(layers, choice, pair, budget):
            return choice
        for _, pick in pair:
            choice[moves.layer[pick]] = int(moves.option[pick])
        choice = _filled(layers, choice, budget)
    return choice


def _improves(
    layers: Sequence[Options], choice: Choice, picks: list[tuple[_Moves, int]], budget: float
) -> bool:
    """Whether a change keeps the budget and lowers the loss in exact sums, not only in differences."""
    changed = list(choice)
    for moves, pick in picks:
        changed[moves.layer[pick]] = int(moves.option[pick])
    return total_cost(layers, changed) <= budget and total_loss(layers, changed) < total_loss(
        layers, choice
    )


def _running_argmax(values: Doubles) -> NDArray[np.int64]:
    """For each place, where the largest value up to it stands."""
    highest = np.maximum.accumulate(values)
    fresh = np.concatenate(([True], values[1:] > highest[:-1]))
    return np.maximum.accumulate(np.where(fresh, np.arange(values.size), 0))


FormatChoice: TypeAlias = "tuple[int, ...] | None"
"""For one term: the index of the format of each factor, or None if the term is dropped."""


def cheapest_formats(
    weights: Doubles, squares: Doubles, sizes: NDArray[np.int64], budget: float, overhead: int
) -> tuple[FormatChoice, ...]:
    """A format for each factor of each term, or no term: few bytes at Σ_dropped λ_k² + Σ_kept λ_k² Σ_i ρ_{k,i}² ≤ ε².

    Parameters
    ----------
    weights : ndarray, shape (s,)
        λ.
    squares : ndarray, shape (s, d, formats)
        Measured relative square errors ρ².
    sizes : ndarray, shape (d, formats)
        Bytes of each factor in each format.
    budget : float
        ε, absolute.
    overhead : int
        Bytes a kept term costs beside its factors.

    Returns
    -------
    tuple of FormatChoice
        The most accurate choice of all if even that exceeds the budget.
    """
    energy = np.asarray(weights, dtype=np.float64) ** 2
    scale = float(energy.sum())
    if scale == 0.0 or budget**2 >= scale:
        return (None,) * len(energy)
    energy, allowed = energy / scale, budget**2 / scale
    order, formats = sizes.shape
    every = list(itertools.product(range(formats), repeat=order))
    each = np.arange(order), np.asarray(every)
    cost = overhead + sizes[each].sum(axis=1)
    terms, undominated = [], []
    for k in range(len(energy)):
        loss = energy[k] * squares[k][each].sum(axis=1)
        best = np.flatnonzero(_undominated(cost, loss))
        undominated.append(best)
        terms.append(Options.of([0.0, *cost[best]], [energy[k], *loss[best]]))
    try:
        choice = within_loss(terms, allowed)
    except BudgetError:
        choice = [term.best for term in terms]
    return tuple(every[undominated[k][i - 1]] if i else None for k, i in enumerate(choice))


def _undominated(cost: NDArray[np.int64], loss: Doubles) -> NDArray[np.bool_]:
    """Options that no other beats in both cost and loss; of equal ones the first."""
    order = np.lexsort((loss, cost))
    least = np.concatenate(([np.inf], np.minimum.accumulate(loss[order])[:-1]))
    good = np.zeros(cost.size, dtype=bool)
    good[order] = loss[order] < least
    return good
