"""One budget over many parts, layers or terms: which of its options each takes.

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

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Doubles: TypeAlias = NDArray[np.float64]

Choice: TypeAlias = list[int]
"""One option a part, by its index."""


@dataclass(frozen=True, slots=True)
class PartOptions:
    """Costs and losses of the options of one part, index by index."""

    costs: Doubles
    losses: Doubles

    @classmethod
    def of(cls, costs: Sequence[float], losses: Sequence[float]) -> PartOptions:
        """Return checked options.

        Raises `BudgetError` unless there is one and all numbers are finite and not negative.
        """
        cost = np.asarray(costs, dtype=np.float64)
        loss = np.asarray(losses, dtype=np.float64)
        if cost.shape != loss.shape or cost.ndim != 1 or cost.size == 0:
            raise BudgetError(
                "a layer needs as many costs as losses, and at least one: "
                f"{cost.shape}, {loss.shape}"
            )
        for numbers in (cost, loss):
            if not np.all(np.isfinite(numbers)) or numbers.min() < 0:
                raise BudgetError("costs and losses must be finite and not negative")
        return cls(cost, loss)

    def select(self, indices: Sequence[int]) -> PartOptions:
        """Return some of the options, in this order."""
        return PartOptions(self.costs[indices], self.losses[indices])

    @property
    def cheapest(self) -> int:
        """The option of least cost; of several, that of least loss."""
        return int(np.lexsort((self.losses, self.costs))[0])

    @property
    def best(self) -> int:
        """The option of least loss; of several, the cheapest."""
        return int(np.lexsort((self.costs, self.losses))[0])

    def hull(self) -> list[int]:
        """Return indices on the lower convex hull, from the cheapest option to the best.

        Costs rise and slopes flatten.
        """
        order = np.lexsort((self.losses, self.costs))
        lowest = np.minimum.accumulate(self.losses[order])
        is_better = np.concatenate(([True], lowest[1:] < lowest[:-1]))
        chain: list[int] = []
        costs: list[float] = []
        losses: list[float] = []
        slopes: list[float] = []  # into each corner from the one before
        for i in order[is_better].tolist():
            cost = float(self.costs[i])
            loss = float(self.losses[i])
            slope = math.inf
            while chain:
                slope = (losses[-1] - loss) / (cost - costs[-1])
                if slope < slopes[-1]:
                    break
                for values in (chain, costs, losses, slopes):
                    values.pop()
            chain.append(i)
            costs.append(cost)
            losses.append(loss)
            slopes.append(slope if len(chain) > 1 else math.inf)
        return chain

    def slope(self, a: int, b: int) -> float:
        """Return the loss removed per unit of cost from option ``a`` to option ``b``."""
        return float((self.losses[a] - self.losses[b]) / (self.costs[b] - self.costs[a]))


def total_cost(parts: Sequence[PartOptions], choice: Sequence[int]) -> float:
    """Return what a choice costs, all parts together."""
    return math.fsum(part.costs[i] for part, i in zip(parts, choice, strict=True))


def total_loss(parts: Sequence[PartOptions], choice: Sequence[int]) -> float:
    """Return what a choice loses, all parts together."""
    return math.fsum(part.losses[i] for part, i in zip(parts, choice, strict=True))


def within_cost(
    parts: Sequence[PartOptions],
    budget: float,
    starts: Sequence[Choice] = (),
) -> Choice:
    """Return the option of each part that makes the total loss small within a total cost.

    Parameters
    ----------
    parts : sequence of PartOptions
    budget : float
    starts : sequence of choices
        Known solutions, such as the best truncated SVD: the answer is at least as good as each that
        keeps the budget.

    Returns
    -------
    list of int
        One index per part.

    Raises
    ------
    BudgetError
        If even the cheapest options cost more; names the least cost.
    """
    cheapest = [part.cheapest for part in parts]
    lowest_cost = total_cost(parts, cheapest)
    if lowest_cost > budget:
        raise BudgetError(
            f"a budget of {budget:,.0f} is out of reach: the cheapest options cost "
            f"{lowest_cost:,.0f} together"
        )
    choices = [_along_hulls(parts, cheapest, budget)]
    choices += [list(start) for start in starts if total_cost(parts, start) <= budget]
    improved = []
    for choice in choices:
        filled = _filled(parts, choice, budget)
        improved.append(_exchanged(parts, filled, budget))
    return min(improved, key=lambda choice: (total_loss(parts, choice), total_cost(parts, choice)))


def _along_hulls(parts: Sequence[PartOptions], cheapest: Choice, budget: float) -> Choice:
    """Return the choice after all steps along the hulls that a budget pays for."""
    choice = list(cheapest)
    spent = total_cost(parts, choice)
    for i, option, cost, _ in _greedy_steps(parts):
        step = cost - parts[i].costs[choice[i]]
        if spent + step <= budget:
            choice[i] = option
            spent += step
    return choice


def within_loss(
    parts: Sequence[PartOptions],
    max_loss: float,
    starts: Sequence[Choice] = (),
) -> Choice:
    """Return the option of each part that makes the total cost small within a total loss.

    ``starts`` as in `within_cost`. Raises `BudgetError` if even the best options lose more.
    """
    best = [part.best for part in parts]
    lowest_loss = total_loss(parts, best)
    if lowest_loss > max_loss:
        raise BudgetError(
            f"a loss of {max_loss:.4g} is out of reach: the best options lose {lowest_loss:.4g} "
            "together"
        )
    # Costs and losses change places: what is left of the loss pays for a lower cost.
    mirrored = [PartOptions(part.losses, part.costs) for part in parts]
    choices = [_down_hulls(parts, max_loss, best)]
    choices += [list(start) for start in starts if total_loss(parts, start) <= max_loss]
    improved = []
    for choice in choices:
        filled = _filled(mirrored, choice, max_loss)
        improved.append(_exchanged(mirrored, filled, max_loss))
    return min(improved, key=lambda choice: (total_cost(parts, choice), total_loss(parts, choice)))


def _down_hulls(parts: Sequence[PartOptions], max_loss: float, best: Choice) -> Choice:
    """Return the choice after as many steps along the hulls as bring the loss down far enough."""
    choice = [part.cheapest for part in parts]
    lost = total_loss(parts, choice)
    for i, option, _, loss in _greedy_steps(parts):
        if lost <= max_loss:
            break
        lost -= parts[i].losses[choice[i]] - loss
        choice[i] = option
    # Sums of many rounded steps may say too little.
    return choice if total_loss(parts, choice) <= max_loss else best


def _greedy_steps(parts: Sequence[PartOptions]) -> Iterator[tuple[int, int, float, float]]:
    """Yield the steps along all hulls, steepest first: (part, option, its cost, its loss)."""
    steps: list[tuple[float, int, int, float, float]] = []
    for i, part in enumerate(parts):
        hull = part.hull()
        costs = part.costs[hull]
        losses = part.losses[hull]
        slopes = -np.diff(losses) / np.diff(costs)
        # Slopes flatten along a hull, so sorted steps keep its order.
        steps += zip(
            (-slopes).tolist(),
            [i] * len(slopes),
            hull[1:],
            costs[1:].tolist(),
            losses[1:].tolist(),
            strict=True,
        )
    steps.sort(key=lambda step: step[0])
    for _, i, option, cost, loss in steps:
        yield i, option, cost, loss


@dataclass(frozen=True, slots=True)
class _Moves:
    """All changes of one part's option from a choice: part, option, extra cost, loss removed."""

    part: NDArray[np.int64]
    option: NDArray[np.int64]
    cost: Doubles
    gain: Doubles

    @classmethod
    def of(cls, parts: Sequence[PartOptions], choice: Choice) -> _Moves:
        sizes = [part.costs.size for part in parts]
        chosen = list(zip(parts, choice, strict=True))
        return cls(
            np.repeat(np.arange(len(parts)), sizes),
            np.concatenate([np.arange(size) for size in sizes]),
            np.concatenate([part.costs - part.costs[i] for part, i in chosen]),
            np.concatenate([part.losses[i] - part.losses for part, i in chosen]),
        )


def _filled(parts: Sequence[PartOptions], choice: Choice, budget: float) -> Choice:
    """Spend what is left on the single change that removes most loss, again and again."""
    while True:
        moves = _Moves.of(parts, choice)
        remaining = budget - total_cost(parts, choice)
        gain = np.where(moves.cost <= remaining, moves.gain, 0.0)
        pick = int(np.argmax(gain))
        if gain[pick] <= 0.0 or not _improves(parts, choice, moves, [pick], budget):
            return choice
        choice[moves.part[pick]] = int(moves.option[pick])


def _exchanged(parts: Sequence[PartOptions], choice: Choice, budget: float) -> Choice:
    """Pay for a change in one part with a change in another, while that removes loss."""
    # Each exchange lowers the loss, and few are ever needed: the limit is by hand.
    for _ in range(200):
        moves = _Moves.of(parts, choice)
        remaining = budget - total_cost(parts, choice)
        # Exchange 1: moves by cost, and for each place the move of most gain up to it.
        order = np.argsort(moves.cost, kind="stable")
        cost = moves.cost[order]
        gain = moves.gain[order]
        part = moves.part[order]
        best = _running_argmax(gain)
        # Exchange 2: for each move that saves, the best move that the saving and the rest pay for.
        savers = np.flatnonzero(cost < 0.0)
        affordable = np.searchsorted(cost, remaining - cost[savers], side="right") - 1
        partners = best[affordable]
        are_two_parts = part[partners] != part[savers]
        total = np.where(are_two_parts, gain[savers] + gain[partners], -np.inf)
        if total.size == 0 or total.max() <= 0.0:
            return choice
        # Exchange 3: the best pair, and single changes with what it leaves.
        pair = int(np.argmax(total))
        picks = [int(order[savers[pair]]), int(order[partners[pair]])]
        if not _improves(parts, choice, moves, picks, budget):
            return choice
        for pick in picks:
            choice[moves.part[pick]] = int(moves.option[pick])
        choice = _filled(parts, choice, budget)
    return choice


def _improves(
    parts: Sequence[PartOptions],
    choice: Choice,
    moves: _Moves,
    picks: Sequence[int],
    budget: float,
) -> bool:
    """Return whether moves keep the budget and lower the loss, in exact sums."""
    changed = list(choice)
    for pick in picks:
        changed[moves.part[pick]] = int(moves.option[pick])
    if total_cost(parts, changed) > budget:
        return False
    return total_loss(parts, changed) < total_loss(parts, choice)


def _running_argmax(values: Doubles) -> NDArray[np.int64]:
    """Return for each place where the largest value up to it stands."""
    highest = np.maximum.accumulate(values)
    is_new = np.concatenate(([True], values[1:] > highest[:-1]))
    return np.maximum.accumulate(np.where(is_new, np.arange(values.size), 0))


FormatChoice: TypeAlias = "tuple[int, ...] | None"
"""For one term: the index of the format of each factor, or None if the term is dropped."""


def cheapest_formats(
    weights: Doubles, squares: Doubles, sizes: NDArray[np.int64], budget: float, overhead: int
) -> tuple[FormatChoice, ...]:
    """Choose a format for each factor of each term, or no term: few bytes within an error.

    The error is Σ_dropped λ_k² + Σ_kept λ_k² Σ_i ρ_{k,i}² ≤ ε².

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
    energy = energy / scale
    max_loss = budget**2 / scale
    # Formats 1: every combination of formats of a term's factors, and its cost.
    order, formats = sizes.shape
    combinations = list(itertools.product(range(formats), repeat=order))
    of_factors = np.arange(order), np.asarray(combinations)
    cost = overhead + sizes[of_factors].sum(axis=1)
    # Formats 2: for each term the combinations that no other beats; first that the term is dropped.
    terms = []
    undominated = []
    for k in range(len(energy)):
        loss = energy[k] * squares[k][of_factors].sum(axis=1)
        kept = np.flatnonzero(_undominated(cost, loss))
        undominated.append(kept)
        terms.append(PartOptions.of([0.0, *cost[kept]], [energy[k], *loss[kept]]))
    # Formats 3: one budget over all terms.
    try:
        choice = within_loss(terms, max_loss)
    except BudgetError:
        choice = [term.best for term in terms]
    chosen: list[FormatChoice] = []
    for k, i in enumerate(choice):
        chosen.append(combinations[undominated[k][i - 1]] if i else None)
    return tuple(chosen)


def _undominated(cost: NDArray[np.int64], loss: Doubles) -> NDArray[np.bool_]:
    """Return which options no other beats in both cost and loss; of equal ones the first."""
    order = np.lexsort((loss, cost))
    lowest_before = np.concatenate(([np.inf], np.minimum.accumulate(loss[order])[:-1]))
    good = np.zeros(cost.size, dtype=bool)
    good[order] = loss[order] < lowest_before
    return good
