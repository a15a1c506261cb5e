"""Trials of learning rates: a few steps with each, and the one that lowered the loss most.

A distillation and a fine-tuning choose their rates so; a step is what the caller makes it.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

S = TypeVar("S")


TRIAL_WARMUP_STEPS = 3
"""Steps in which the rate of a trial rises linearly; by hand."""


def trial_steps(steps: int, at_least: int) -> int:
    """Return the steps of the trial of one rate: a twentieth of all steps, by hand, or more."""
    return max(at_least, round(0.05 * steps))


@dataclass(frozen=True, slots=True)
class RateTrial(Generic[S]):
    """A few steps with one learning rate."""

    rate: float
    """Peak learning rate."""

    losses: Sequence[float]
    """Loss before each step."""

    state: S
    """What the steps led to."""

    @property
    def loss(self) -> float:
        """The mean loss of the second half of the steps, by which trials are compared."""
        late = self.losses[len(self.losses) // 2 :]
        return sum(late) / len(late)

    @property
    def record(self) -> tuple[float, float | None]:
        """The rate and its loss, or None where that is not finite."""
        return self.rate, self.loss if math.isfinite(self.loss) else None


def best_trial(trials: Sequence[RateTrial[S]]) -> RateTrial[S] | None:
    """Return the trial with the smallest loss, the first of equals; None if no loss is finite."""
    finite = [trial for trial in trials if math.isfinite(trial.loss)]
    return min(finite, key=lambda trial: trial.loss, default=None)


def clear_winner(
    trials: Sequence[RateTrial[S]], preferred: RateTrial[S], *, min_std_errors: float
) -> RateTrial[S]:
    """Return the trial with the smallest loss if it is clearly ahead, else the preferred one.

    All trials saw the same examples step by step, so what counts is the difference of two losses of
    one step: its mean over the second half of the steps, and the standard error of that mean.

    Parameters
    ----------
    trials : sequence of RateTrial
        As many steps each.
    preferred : RateTrial
        One of them, which is returned too where no trial has a finite loss.
    min_std_errors : float
        How many standard errors the winner has to be ahead.

    Examples
    --------
    >>> one, three = RateTrial(0.1, [4, 4, 3, 2], None), RateTrial(0.3, [4, 4, 2, 2.9], None)
    >>> clear_winner([one, three], one, min_std_errors=1.0).rate
    0.1
    """
    best = best_trial(trials)
    if best is None or best is preferred or not math.isfinite(preferred.loss):
        return best or preferred
    half = len(best.losses) // 2
    pairs = zip(preferred.losses[half:], best.losses[half:], strict=True)
    leads = [theirs - ours for theirs, ours in pairs]
    if len(leads) < 2:
        return preferred
    std_error = statistics.stdev(leads) / math.sqrt(len(leads))
    return best if statistics.fmean(leads) > min_std_errors * std_error else preferred
