"""The schedule of a distillation: learning rates, evaluations and when to stop; all set by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lsrdecomp.lora.train.rate_trials import best_trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.lora.train.rate_trials import RateTrial

TRIAL_RATES = (0.03, 0.1)
"""Peak learning rates that are tried first, ascending, in relative change of a factor's numbers per
step."""
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


def next_trial(trials: Sequence[RateTrial[Any]]) -> float | None:
    """Return the next rate to try, until the best one has a worse one on either side.

    None where it has, or where enough rates were tried. The next is three times the largest rate
    that was tried, or a third of the smallest.
    """
    if len(trials) >= MAX_TRIALS:
        return None
    tried = [trial.rate for trial in trials]
    for rate in TRIAL_RATES:
        if rate not in tried:
            return rate
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
