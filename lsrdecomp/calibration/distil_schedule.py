"""The schedule of a distillation: learning rates, evaluations and when to stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lsrdecomp.calibration.rate_trials import TrialSchedule, best_trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.calibration.rate_trials import RateTrial


@dataclass(frozen=True, slots=True)
class DistillationSchedule(TrialSchedule):
    """Learning rates, evaluations and the stopping rule of a distillation; all set by hand.

    Steps of trials count among all steps.
    """

    trial_rates: tuple[float, ...] = (0.03, 0.1)
    """Peak learning rates that are tried first, ascending, in relative change of a factor's numbers
    per step."""

    trial_ratio: float = 3.0
    """Factor from the best of the rates tried, where it is the largest or the smallest of them, to
    the next one beyond it."""

    max_trials: int = 4
    """Maximum rates tried."""

    warmup_share: float = 0.05
    """Steps in which the rate rises linearly, as a share of all steps."""

    max_evaluations: int = 8
    """Maximum evaluations of the share kept on the validation texts, at regular intervals."""

    min_evaluations: int = 2
    """Evaluations that are made whatever they cost."""

    max_evaluation_cost: float = 0.2
    """Maximum cost of all evaluations together, in forward passes per step of training."""

    patience: int = 3
    """Evaluations without a new best share after which training ends."""

    feature_weight: float = 4.0
    """Weight of the squared distance to the teacher's features, beside the divergence; both are in
    units of the adapter's effect. Two logits per example are little to learn thousands of numbers
    from: with features 0.81 were kept on SST-2's dev split, without 0.76 (MiniLM, 1/48 of the
    parameters, 200 steps, one seed)."""

    min_rms: float = 1e-8
    """Least root mean square that a factor is scaled by, so that one of zeros can move."""

    adam_eps: float = 1e-12
    """Epsilon of AdamW, small beside the gradients of relative changes."""

    min_mixed_parameters: int | None = 2**24
    """Number of parameters from which on a model is trained in mixed precision, as for
    `mixed_precision`; None: never."""

    def n_evaluations(self, steps: int, cost: float) -> int:
        """Return the number of evaluations during training.

        Parameters
        ----------
        steps : int
            Steps of training.
        cost : float
            Cost of an evaluation, in forward passes over a step's batch.
        """
        # One evaluation is paid for before the first step.
        affordable = int(self.max_evaluation_cost * steps / cost) - 1
        return max(self.min_evaluations, min(self.max_evaluations, affordable))

    def next_trial(self, trials: Sequence[RateTrial[Any]]) -> float | None:
        """Return the next rate to try, until the best one has a worse one on either side.

        None where it has, or where enough rates were tried.
        """
        if len(trials) >= self.max_trials:
            return None
        tried = [trial.rate for trial in trials]
        for rate in self.trial_rates:
            if rate not in tried:
                return rate
        best = best_trial(trials)
        if best is None or best.rate == min(tried):
            return min(tried) / self.trial_ratio
        if best.rate == max(tried):
            return max(tried) * self.trial_ratio
        return None

    def learning_rate(self, peak: float, step: int, steps: int) -> float:
        """Return the learning rate of a step, counted from 0: it rises and falls linearly."""
        warmup_steps = max(1.0, self.warmup_share * steps)
        rising = min(1.0, (step + 1) / warmup_steps)
        falling = 1.0 - step / steps
        return peak * rising * falling

    def has_stalled(self, shares: list[float]) -> bool:
        """Return whether the last ``patience`` evaluations brought no new best share."""
        recent, earlier = shares[-self.patience :], shares[: -self.patience]
        return len(shares) > self.patience and max(recent) <= max(earlier)
