"""The smallest form that keeps as much as was asked, by measuring few forms of many that one search offers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lsrdecomp.calibration.divergence import Behaviour
from lsrdecomp.errors import BudgetError

MOST_MEASURED = 7
CLOSE = 1.08
SMALLEST = 4096.0
"""Times smaller than the LoRA: no smaller form is looked for."""
ENOUGH = 0.5
"""Standard errors above the share that was asked within which a form is taken."""
SAFETY = 0.95
"""Of the loss that is allowed, what is aimed at while every form has lost too much."""
REACH = 4.0
"""Farthest that one step goes beyond the sizes that were measured."""
TINY = 1e-12


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
    close: float = CLOSE,
    enough: Measured | None = None,
    on_measured: Callable[[list[Measured]], object] | None = None,
) -> tuple[Measured, list[Measured]]:
    """Find the smallest size whose measured share is at least ``keep``.

    What a form loses is taken to be a power of its squared error in the norm of the layers, which is known for any size
    without asking the model. Each measurement corrects the factor, two the power; the sizes that kept enough and those
    that did not close in on the answer from both sides.

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
    close : float
        Sizes within this factor of each other, one that keeps enough and one that does not, end the search.
    enough : Measured, optional
        One known to keep as much, though it costs no measurement here: only smaller ones are looked for, and it is
        what is found if none of them will do.
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
    known = [] if enough is None else [enough]
    low, high = whole / SMALLEST, whole if enough is None else enough.size
    while len(seen) < most and high > close * low:
        failed = any(one.kept < keep for one in seen)
        passed = any(one.kept >= keep for one in [*known, *seen])
        too_small = bool(seen) and all(one.kept < keep for one in seen)
        aim = (1.0 - keep) * (SAFETY if too_small else 1.0)
        size = _size_for(_error_at(aim, seen, expected, prior), low, high, expected)
        if seen and passed and size > high / close:
            break  # the next smaller one is not worth its measurement
        if passed and failed:  # stay off the ends, where nothing is learnt
            size = min(max(size, low * (high / low) ** 0.15), low * (high / low) ** 0.85)
        elif seen:
            size = min(max(size, min(one.size for one in seen) / REACH), max(one.size for one in seen) * REACH)
        elif known:
            size = min(size, high / close)
        if too_small and len(seen) == most - 1:  # half of the way, or better the LoRA's own size than no answer
            size = math.sqrt(low * high) if passed else whole
        found = Measured(size, measure(size))
        seen.append(found)
        low, high = (low, size) if found.kept >= keep else (size, high)
        if on_measured is not None:
            on_measured(seen)
        if 0.0 <= found.kept - keep <= ENOUGH * (found.behaviour.standard_error or 0.0):
            break  # no smaller form could be told from one that keeps too little
    if not any(one.kept >= keep for one in [*known, *seen]) and len(seen) < most:
        seen.append(Measured(whole, measure(whole)))  # sizes closed in on the LoRA's own, which itself was not asked
        if on_measured is not None:
            on_measured(seen)
    keeping = [one for one in [*known, *seen] if one.kept >= keep]
    if not keeping:
        best = max(seen, key=lambda one: one.kept)
        raise BudgetError(
            f"no form that was measured keeps {keep:g} of what the adapter does: the best of {len(seen)} keeps "
            f"{best.kept:.3f}; ask for less, allow distillation, or store in a finer type"
        )
    return min(keeping, key=lambda one: one.size), seen


def loss_at(size: float, seen: Sequence[Measured], expected: Callable[[float], float]) -> float:
    """What a form of a size loses, by forms that were measured.

    Between them on the line through the logarithms of squared error and loss, beyond in proportion to the squared
    error. Raises `BudgetError` as ``expected`` does.
    """
    error = math.log(max(expected(size), TINY))
    known = sorted((math.log(max(expected(one.size), TINY)), max(1.0 - one.kept, TINY)) for one in seen)
    known = [(at, math.log(lost)) for at, lost in known if math.isfinite(lost)]
    if not known:
        return math.exp(error)
    errors, losses = zip(*known, strict=True)
    rising = np.maximum.accumulate(losses)  # a larger error that lost less was luck
    beyond = error - min(max(error, errors[0]), errors[-1])
    return math.exp(float(np.interp(error, errors, rising)) + beyond)


def _error_at(loss: float, seen: Sequence[Measured], expected: Callable[[float], float], prior: float) -> float:
    """The squared error at which so much is lost, by the last two measurements."""
    points = [(max(expected(one.size), TINY), max(1.0 - one.kept, TINY)) for one in seen[-2:]]
    if not points:
        return loss / prior
    (error, lost), power = points[-1], 1.0
    if len(points) == 2 and abs(math.log(points[0][0] / error)) > 0.02:
        before, lost_before = points[0]
        slope = math.log(lost_before / lost) / math.log(before / error)
        if slope > 0.0 and abs(lost_before - lost) > max(one.behaviour.standard_error or 0.0 for one in seen[-2:]):
            power = min(max(slope, 0.4), 2.5)
        else:  # no more than luck, which they share
            error, lost = math.sqrt(before * error), math.sqrt(lost_before * lost)
    return float(error * (loss / lost) ** (1.0 / power))


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
