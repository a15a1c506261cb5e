"""The schedule of a distillation: learning rates, evaluations and when to stop; all set by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lsrdecomp.lora.train.rate_trials import best_trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.lora.train.rate_trials import RateTrial

TRIAL_RATES = (0.1, 0.3)
"""Peak learning rates that are tried first, ascending, for a student that has lost the whole
effect, in relative change of a factor's numbers per step. One that has lost less has less far to
go: they are times the root of what it has lost. The best rates for E2E, sums and extraction
(SmolLM2) are 0.1 to 0.7 times that root, where 0.04 to 0.33 was lost."""
MIN_LOST = 1e-6
"""Share of the effect that a student is taken to have lost at least; by hand."""
MAX_TRIALS = 4
"""Maximum rates tried: their steps count among all steps."""


def n_evaluations(steps: int, cost: float) -> int:
    """Return the number of evaluations during training: two to eight, as their cost allows.

    Parameters
    ----------
    steps : int
        Steps of training.
    cost : float
        Cost of an evaluation, in forward passes over a step's batch.
    """
    # All together may cost a fifth of a forward pass per step. One is paid for before the first.
    affordable = int(0.2 * steps / cost) - 1
    return max(2, min(8, affordable))


def next_trial(trials: Sequence[RateTrial[Any]], share: float) -> float | None:
    """Return the next rate to try, until the best one has a worse one on either side.

    None where it has, or where enough rates were tried. After the first ones the next is three
    times the largest rate that was tried, or a third of the smallest. ``share`` is what the student
    keeps of the effect before training.

    >>> [f"{next_trial([], share):.3f}" for share in (0.91, 0.9999)]
    ['0.030', '0.001']
    """
    if len(trials) >= MAX_TRIALS:
        return None
    if len(trials) < len(TRIAL_RATES):
        lost = min(1.0, max(MIN_LOST, 1.0 - share))
        return math.sqrt(lost) * TRIAL_RATES[len(trials)]
    tried = [trial.rate for trial in trials]
    best = best_trial(trials)
    if best is None or best.rate == min(tried):
        return min(tried) / 3.0
    if best.rate == max(tried):
        return max(tried) * 3.0
    return None


def learning_rate(peak: float, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0.

    It rises linearly over a twentieth of the steps, and falls linearly to zero.
    """
    warmup_steps = max(1.0, 0.05 * steps)
    rising = min(1.0, (step + 1) / warmup_steps)
    falling = 1.0 - step / steps
    return peak * rising * falling


def has_stalled(shares: list[float]) -> bool:
    """Return whether the last three evaluations brought no new best share."""
    patience = 3
    recent, earlier = shares[-patience:], shares[:-patience]
    return bool(earlier) and max(recent) <= max(earlier)
