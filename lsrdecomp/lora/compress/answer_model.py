"""How many whole answers stay where a share of the effect is lost, learned from versions measured.

A greedy answer changes where a token's runner-up overtakes it, and how far logits move grows as the
root of the divergence. So where a share l of the effect is lost about exp(−c·l^p) of the answers
stay, p near ½. Both numbers are those that are likeliest given what was counted and a guess: a
linear regression of the logarithm of −log(share of answers) on log l, with normal priors [1]_. All
of the answers, or none, then say little, and so does one count: answers of a task begin alike, so
one near tie changes many of them.

.. [1] C. M. Bishop, Pattern Recognition and Machine Learning, 2006, section 3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

EXPONENT = 0.5, 0.25
"""Expected p, and how far it may be off: 0.3 to 1.1 between sizes of three LoRAs of SmolLM2."""
COEFFICIENT_SPREAD = 1.5
"""How far the logarithm of c may be off at the loss looked for; 0.6 to 9 were found for c."""
COUNT_SPREAD = 0.5
"""How far the logarithm of −log(share of answers) of one version may be off, beside what counting
few of them does. Two versions of E2E that lost 0.0023 gave 35 and 53 of 64."""


@dataclass(frozen=True)
class Counted:
    """The answers of a version that are the LoRA's, and the share of the effect that it loses."""

    n_matching: float
    answered: int
    loss: float

    @property
    def share(self) -> float:
        """The share of answers, with half an answer more and less, so that it is never 0 or 1."""
        return (self.n_matching + 0.5) / (self.answered + 1.0)

    @property
    def fall(self) -> float:
        """How far the logarithm of the share has fallen."""
        return -math.log(self.share)

    @property
    def variance(self) -> float:
        """The squared error of the logarithm of `fall`."""
        of_counting = (1.0 - self.share) / (self.answered * self.share * self.fall**2)
        return COUNT_SPREAD**2 + of_counting


def loss_for_answers(answers: float, coefficient: float, counted: Sequence[Counted] = ()) -> float:
    """Return the lost share of the effect at which a share of the answers stays, 1 at most.

    Parameters
    ----------
    answers : float
        Share of the answers, between 0 and 1.
    coefficient : float
        The c that is assumed until versions are counted, with p = ½.
    counted : sequence of Counted

    Examples
    --------
    >>> round(loss_for_answers(0.9, 8.0), 6)
    0.000173
    >>> counted = [Counted(48, 64, 0.012), Counted(61, 64, 0.0023)]
    >>> round(loss_for_answers(0.9, 8.0, counted), 4)
    0.0022
    """
    log_fall = math.log(-math.log(answers))
    expected = 2.0 * (log_fall - math.log(coefficient))
    exponent, exponent_spread = EXPONENT
    # 1. The normal equations of log fall = level + p (log loss − expected), priors first.
    precision = np.diag([COEFFICIENT_SPREAD**-2, exponent_spread**-2])
    weighted = precision @ np.array([log_fall, exponent])
    for each in counted:
        row = np.array([1.0, math.log(each.loss) - expected])
        precision += np.outer(row, row) / each.variance
        weighted += row * math.log(each.fall) / each.variance
    level, slope = np.linalg.solve(precision, weighted)
    # 2. Where that line has the fall asked for. It rises, whatever was counted.
    slope = max(float(slope), exponent - exponent_spread)
    return min(1.0, math.exp(expected + (log_fall - float(level)) / slope))
