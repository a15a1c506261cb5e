"""One distillation: its schedule, its state, and the steps that train a student's factors.

What is trained are the numbers θ of the factors. Each factor moves in units of its own root mean
square, θ = θ₀ + rms(θ₀) · u, so that one learning rate means the same relative change in every
layer, whatever its scale and however a layer shares its size out among its factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn

from lsrdecomp.calibration.errors import CalibrationError
from lsrdecomp.calibration.features import forward_with_features
from lsrdecomp.calibration.heads import Head
from lsrdecomp.calibration.teacher import feature_distance
from lsrdecomp.checkpoints.progress import OnStep, ProgressUpdate

if TYPE_CHECKING:
    from lsrdecomp.calibration.base_model import Base
    from lsrdecomp.calibration.teacher import DistillationData, TeacherBatch
    from lsrdecomp.checkpoints import Journal

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
"""What torch's AdamW calls its running means."""


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

    evaluation_cost: float = 0.2
    """Cost of all evaluations at most, in forward passes per step of training."""

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
        affordable = int(self.evaluation_cost * steps / cost) - 1  # the first is before any step
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


@dataclass(slots=True)
class TrainingState:
    """Where a training is, and all that it goes on from after a kill."""

    optimizer: torch.optim.AdamW  # of one vector, the relative changes u of all numbers
    best: Tensor  # relative changes at the evaluation with the largest share
    step: int = 0
    rate: float = 0.0  # peak learning rate
    passes: float = 0.0  # forward and backward passes of the base so far
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # step and share kept

    @property
    def changes(self) -> nn.Parameter:
        """Relative changes u of all numbers, as one vector."""
        parameter: nn.Parameter = self.optimizer.param_groups[0]["params"][0]
        return parameter

    @property
    def shares(self) -> list[float]:
        """Shares kept at the evaluations so far."""
        return [share for _, share in self.evaluations]

    def save(self, journal: Journal, key: str) -> None:
        """Keep the state of an unfinished run in its journal."""
        moments = self.optimizer.state[self.changes]
        tensors = {"changes": self.changes.data, "best": self.best}
        tensors |= {name: moments[name] for name in ADAM_MOMENTS}
        arrays = {name: value.cpu().numpy() for name, value in tensors.items()}
        numbers = {
            "step": self.step,
            "rate": self.rate,
            "passes": self.passes,
            "evaluations": self.evaluations,
            "adam_steps": float(moments["step"]),
        }
        journal.put(key, arrays, values=numbers)

    @classmethod
    def load(
        cls, journal: Journal, key: str, schedule: DistillationSchedule, device: torch.device
    ) -> TrainingState | None:
        """Return the state that a journal keeps under a key, if there is one."""
        result = journal.get(key)
        if result is None:
            return None
        numbers = result.values
        tensors = {
            name: torch.tensor(stored.read(), device=device)
            for name, stored in result.arrays.items()
        }
        optimizer = make_optimizer(tensors["changes"], schedule)
        state = cls(
            optimizer,
            tensors["best"],
            step=numbers["step"],
            rate=numbers["rate"],
            passes=numbers["passes"],
            evaluations=[(step, share) for step, share in numbers["evaluations"]],
        )
        moments = {name: tensors[name] for name in ADAM_MOMENTS}
        moments["step"] = torch.tensor(numbers["adam_steps"])
        optimizer.state[state.changes] = moments
        return state


class Trainer:
    """Trains the LSR factors of a student on the outputs of its teacher.

    Parameters
    ----------
    student : Base
        The teacher's base with a compressed adapter. Its factors require gradients from here on,
        and nothing else does.
    data : DistillationData
        What it learns from.
    steps : int
        Optimizer steps of the whole run.
    schedule : DistillationSchedule
        Learning rates and evaluations.
    seed : int
        Seed of the order of the batches.
    on_step : callable, optional
        Called with a `ProgressUpdate` after each step of training.

    Raises
    ------
    CalibrationError
        If the teacher has no effect on the validation texts, or the student has no LSR factors.
    """

    def __init__(
        self,
        student: Base,
        data: DistillationData,
        steps: int,
        schedule: DistillationSchedule,
        seed: int,
        on_step: OnStep | None,
    ) -> None:
        validation = data.validation
        if not validation.effect > 0.0:
            raise CalibrationError(
                "the adapter has no effect on the held-out texts: there is nothing to keep"
            )
        self.student = student
        self.data = data
        self.steps = steps
        self.schedule = schedule
        self.seed = seed
        self.on_step = on_step
        self.processes = PartialState()
        # 1. The factors at the start, θ₀, and their root mean squares.
        self.factors = trainable_factors(student.model)
        self.initial = [factor.detach().clone() for factor in self.factors]
        self.scales = [
            value.square().mean().sqrt().clamp_min(schedule.min_rms) for value in self.initial
        ]
        # 2. The weight of the distance of features, in units of the divergence.
        distance = feature_distance(data.teacher, data.teacher_batches(0))
        self.feature_weight = 0.0
        if distance is not None:
            self.feature_weight = schedule.feature_weight * validation.effect / distance
        # 3. The cost of an evaluation, in forward passes of a step.
        step_examples = sum(len(next(iter(micro.values()))) for micro in data.batches[0])
        self.evaluation_cost = validation.examples / max(1, step_examples)
        self.n_evaluations = schedule.n_evaluations(steps, self.evaluation_cost)

    @property
    def device(self) -> torch.device:
        """Where the factors are."""
        return self.initial[0].device

    def initial_state(self) -> TrainingState:
        """Return the state before the first step, with one evaluation."""
        size = sum(value.numel() for value in self.initial)
        no_changes = torch.zeros(size, device=self.device)
        # The first batch was run with the adapter and, where features count, without it too.
        passes = 1.0 if self.feature_weight == 0.0 else 2.0
        optimizer = make_optimizer(no_changes, self.schedule)
        state = TrainingState(optimizer, no_changes.clone(), passes=passes)
        self.evaluate(state)
        return state

    def set_parameters(self, changes: Tensor) -> None:
        """Set the student's factors to θ₀ + rms(θ₀) · u for relative changes u."""
        parts = torch.split(changes, [value.numel() for value in self.initial])
        with torch.no_grad():
            for factor, initial, scale, change in zip(
                self.factors, self.initial, self.scales, parts, strict=True
            ):
                factor.copy_(initial + scale * change.view_as(initial))

    def select_learning_rate(self, state: TrainingState) -> TrainingState:
        """Return the state after a short trial of each rate, that of the rate with the least loss.

        Where no trial ends with a finite loss, or there are too few steps for one, it is the state
        before with the middle rate.
        """
        rates = self.schedule.trial_rates
        n_trial_steps = self.schedule.trial_steps(self.steps)
        selected = replace(state, rate=rates[len(rates) // 2])
        min_loss = math.inf
        steps_spent = 0
        for rate in rates:
            if steps_spent + n_trial_steps >= self.steps:
                break
            trial = replace(
                state,
                optimizer=make_optimizer(state.changes.data, self.schedule),
                rate=rate,
                evaluations=list(state.evaluations),
            )
            losses = [
                self.train_step(trial, rate * self.schedule.trial_factor(step))
                for step in range(n_trial_steps)
            ]
            steps_spent += n_trial_steps
            state.passes = trial.passes
            loss = sum(losses[n_trial_steps // 2 :])
            if loss < min_loss:
                selected, min_loss = trial, loss
        selected.passes = state.passes
        if selected.step:
            # All trials count as steps, for AdamW's correction of its moments too: every record was
            # made so.
            selected.step = steps_spent
            selected.optimizer.state[selected.changes]["step"].fill_(steps_spent)
        return selected

    def train_step(self, state: TrainingState, rate: float) -> float:
        """Make one step on the relative changes; return the loss before it, nats per prediction."""
        self.set_parameters(state.changes)
        # 1. The gradient at the factors, of the micro-batches that are this process's.
        micro_batches = self.batch(state)
        n_predictions = sum(micro.n_predictions for micro in micro_batches)
        total_loss = torch.zeros((), device=self.device)
        for index, micro in enumerate(micro_batches):
            if index % self.processes.num_processes == self.processes.process_index:
                loss = self.loss(micro) / n_predictions
                loss.backward()  # type: ignore[no-untyped-call]
                total_loss += loss.detach()
        # 2. By the chain rule ∂/∂u = rms(θ₀) ∂/∂θ, summed over processes.
        gradient = self._take_gradient()
        if self.processes.num_processes > 1:
            gradient = reduce(gradient)
            total_loss = reduce(total_loss)
        # 3. AdamW.
        state.changes.grad = gradient
        state.optimizer.param_groups[0]["lr"] = rate
        state.optimizer.step()
        state.step += 1
        state.passes += 2.0
        if self.on_step is not None:
            self.on_step(ProgressUpdate("distilling", state.step, self.steps, "steps"))
        return float(total_loss)

    def _take_gradient(self) -> Tensor:
        """Return the gradient at the relative changes, and clear that of the factors."""
        parts: list[Tensor] = []
        for factor, scale in zip(self.factors, self.scales, strict=True):
            gradient = torch.zeros_like(factor) if factor.grad is None else factor.grad
            parts.append((gradient * scale).flatten())
            factor.grad = None
        return torch.cat(parts)

    def loss(self, micro: TeacherBatch) -> Tensor:
        """Return Σ over predictions of the divergence and of the weighted distance of features."""
        output, features = forward_with_features(self.student, micro.batch)
        loss = kl_loss(micro.logits(), output.logits, self.student.head)
        if features is not None and micro.features is not None:
            loss = loss + self.feature_weight * (features - micro.features).square().sum()
        return loss

    def batch(self, state: TrainingState) -> list[TeacherBatch]:
        """Return the micro-batches of the next step; each epoch has an order of its own."""
        n_batches = len(self.data.batches)
        epoch, place = divmod(state.step, n_batches)
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
        order = torch.randperm(n_batches, generator=generator)
        index = int(order[place])
        if index not in self.data.computed:
            state.passes += 1.0
        return self.data.teacher_batches(index)

    def evaluate(self, state: TrainingState) -> None:
        """Measure the share kept on the validation texts, and remember the best changes so far."""
        self.set_parameters(state.changes)
        share = self.data.validation.compare(self.student).kept
        if share is None or not math.isfinite(share):
            share = -math.inf
        if not state.evaluations or share > max(state.shares):
            state.best = state.changes.detach().clone()
        state.evaluations.append((state.step, share))
        state.passes += self.evaluation_cost


def make_optimizer(changes: Tensor, schedule: DistillationSchedule) -> torch.optim.AdamW:
    """Return AdamW without weight decay on a copy of the relative changes."""
    parameter = nn.Parameter(changes.clone())
    return torch.optim.AdamW([parameter], eps=schedule.adam_eps, weight_decay=0.0)


def kl_loss(teacher_logits: Tensor, logits: Tensor, head: Head) -> Tensor:
    """Return Σ KL(teacher ‖ student) over predictions, with gradients.

    Parameters
    ----------
    teacher_logits, logits : Tensor, shape (predictions, classes)
        Of the teacher and the student.
    head : Head
        Their meaning; of a regression, half the squared difference is returned.
    """
    if head is Head.regression:
        return (teacher_logits - logits).square().sum() / 2
    log_p = teacher_logits.log_softmax(-1)
    log_q = logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


def trainable_factors(model: nn.Module) -> list[nn.Parameter]:
    """Freeze all parameters of a model but its LSR factors; return these, in float32.

    Raises
    ------
    CalibrationError
        If there are none.
    """
    factors = []
    for name, parameter in model.named_parameters():
        is_factor = ".lsr_A." in name or ".lsr_B." in name
        parameter.requires_grad_(is_factor)
        if is_factor:
            parameter.data = parameter.data.float()
            factors.append(parameter)
    if not factors:
        raise CalibrationError(
            "the adapter has no LSR factors to train; distil what `compress` wrote"
        )
    return factors
