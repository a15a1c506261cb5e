"""The schedule of a distillation: learning rates, evaluations and when to stop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DistillationSchedule:
    """Learning rates, evaluations and the stopping rule of a distillation; all set by hand."""

    trial_rates: tuple[float, ...] = (0.01, 0.03, 0.1)
    """Learning rates that are tried, in relative change of a factor's numbers per step."""

    trial_share: float = 0.05
    """Steps of the trial of one rate, as a share of all steps. They count as steps."""

    min_trial_steps: int = 3
    """Steps of the trial of one rate at least."""

    trial_warmup_steps: int = 3
    """Steps in which the rate of a trial rises linearly."""

    warmup_share: float = 0.05
    """Steps in which the rate rises linearly, as a share of all steps; then it falls to zero."""

    max_evaluations: int = 8
    """Evaluations of the share kept on the validation texts, at regular intervals."""

    min_evaluations: int = 2
    """Evaluations that are made whatever they cost."""

    max_evaluation_cost: float = 0.2
    """Largest cost of all evaluations together, in forward passes per step of training."""

    patience: int = 3
    """Evaluations without a new best share after which training ends."""

    feature_weight: float = 4.0
    """Weight of the squared distance to the features of the teacher's classifier, beside the
    divergence; both count in units of the adapter's effect. Two logits an example are few to learn
    thousands of numbers from: with it 0.81 were kept on SST-2's dev split in place of 0.76 (MiniLM,
    1/48 of the parameters, 200 steps, one seed)."""

    min_rms: float = 1e-8
    """Root mean square that a factor counts with at least: one that is zero can move."""

    adam_eps: float = 1e-12
    """Epsilon of AdamW, small beside the gradients of relative changes."""

    def n_evaluations(self, steps: int, cost: float) -> int:
        """Return how many evaluations are made, if one costs as much as ``cost`` forward passes."""
        affordable = (
            int(self.max_evaluation_cost * steps / cost) - 1
        )  # the first is before any step
        return max(self.min_evaluations, min(self.max_evaluations, affordable))

    def trial_steps(self, steps: int) -> int:
        """Return the steps of the trial of one rate."""
        return max(self.min_trial_steps, round(self.trial_share * steps))

    def trial_factor(self, step: int) -> float:
        """Return the factor of the learning rate in a step of a trial, counted from 0."""
        return min(1.0, (step + 1) / self.trial_warmup_steps)

    def learning_rate(self, peak: float, step: int, steps: int) -> float:
        """Return the learning rate of one of so many steps, counted from 0."""
        warmup_steps = max(1.0, self.warmup_share * steps)
        rising = min(1.0, (step + 1) / warmup_steps)
        falling = 1.0 - step / steps
        return peak * rising * falling

    def has_stalled(self, shares: list[float]) -> bool:
        """Return whether the last evaluations brought no share above those before them."""
        recent, earlier = shares[-self.patience :], shares[: -self.patience]
        return len(shares) > self.patience and max(recent) <= max(earlier)
