"""The smallest form that keeps as much as was asked, by measuring few forms of many that one search offers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lsrdecomp.calibration.divergence import Behaviour
from lsrdecomp.errors import BudgetError

MOST_MEASURED = 7
CLOSE = 1.08
"""Sizes this near to each other, one that keeps enough and one that does not, end the search."""
SMALLEST = 4096.0
"""Times smaller than the LoRA: no smaller form is looked for."""
REACH = 3.0
"""Farthest that one step goes beyond the sizes that were measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A form of one size, as measured."""

    size: float  # parameters or bytes, as the budget counts
    behaviour: Behaviour

    @property
    def kept(self) -> float:
        found = self.behaviour.kept
        return -math.inf if found is None or not math.isfinite(found) else found


def smallest(
    keep: float,
    whole: float,
    expected: Callable[[float], float],
    measure: Callable[[float], Behaviour],
    *,
    most: int = MOST_MEASURED,
    prior: float = 1.0,
    on_measured: Callable[[list[Measured]], object] | None = None,
) -> tuple[Measured, list[Measured]]:
    """Find the smallest size whose measured share is at least ``keep``.

    What a form loses is taken to be a factor times its squared error in the norm of the layers, which is known for any
    size without asking the model. Each measurement corrects the factor; the sizes that kept enough and those that did
    not close in on the answer from both sides.

    Parameters
    ----------
    keep : float
        Between 0 and 1.
    whole : float
        Size of the LoRA itself.
    expected : callable
        Squared relative error of the form of a size; cheap, falling. Raises `BudgetError` where there is none.
    measure : callable
        Makes the form of a size and measures it; dear.
    most : int
        Measurements at most.
    prior : float
        The factor before the first measurement.
    on_measured : callable, optional
        Called with all measurements so far after each.

    Returns
    -------
    the one found, and all in the order in which they were measured

    Raises
    ------
    BudgetError
        If no form that was measured keeps as much; says what the best of them keeps.
    """
    if not 0.0 < keep < 1.0:
        raise BudgetError(f"the share to keep lies between 0 and 1, got {keep:g}")
    seen: list[Measured] = []
    low, high, factor = whole / SMALLEST, whole, prior
    while len(seen) < most and high > CLOSE * low:
        size = _size_for((1.0 - keep) / factor, low, high, expected)
        passed = [one.size for one in seen if one.kept >= keep]
        failed = [one.size for one in seen if one.kept < keep]
        if passed and failed:  # stay off the ends, where nothing is learnt
            size = min(max(size, low * (high / low) ** 0.15), low * (high / low) ** 0.85)
        elif seen:
            size = min(max(size, min(one.size for one in seen) / REACH), max(one.size for one in seen) * REACH)
        found = Measured(size, measure(size))
        seen.append(found)
        if found.kept >= keep:
            high = size
        else:
            low = size
        lost, error = max(1.0 - found.kept, 1e-6), expected(size)
        if error > 0.0:
            factor = min(max(lost / error, 1e-3), 1e3)
        if on_measured is not None:
            on_measured(seen)
        if found.kept >= keep and size <= whole / SMALLEST * CLOSE:
            break
    enough = [one for one in seen if one.kept >= keep]
    if not enough:
        best = max(seen, key=lambda one: one.kept)
        raise BudgetError(
            f"no form that was measured keeps {keep:g} of what the adapter does: the best of {len(seen)} keeps "
            f"{best.kept:.3f}; ask for less, allow distillation, or store in a finer type"
        )
    return min(enough, key=lambda one: one.size), seen


def _size_for(error: float, low: float, high: float, expected: Callable[[float], float]) -> float:
    """The size, between two, at which the squared error is as given: bisection on its logarithm."""
    a, b = math.log(low), math.log(high)
    for _ in range(12):
        middle = 0.5 * (a + b)
        try:
            enough = expected(math.exp(middle)) <= error
        except BudgetError:
            enough = False
        a, b = (a, middle) if enough else (middle, b)
    return math.exp(b)
