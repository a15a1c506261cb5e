"""The trainer of a distillation: steps on the factors of a student, and evaluations.

The numbers θ of a factor move in units of its initial root mean square, θ = θ₀ + rms(θ₀) · u, and
the optimizer sees the relative changes u. So one learning rate means the same relative change in
every layer, whatever its scale and however the scale is divided among its factors.

Where factors are stored as integers, the student has them rounded, and θ moves by the gradients at
the rounded numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn

from lsrdecomp.errors import CalibrationError
from lsrdecomp.lora.base.batch_rows import examples_in
from lsrdecomp.lora.base.heads import Head
from lsrdecomp.lora.files.progress import OnStep, ProgressUpdate
from lsrdecomp.lora.measure.features import forward_with_features
from lsrdecomp.lora.measure.teacher import feature_distance
from lsrdecomp.lora.peft.kernels import without_autocast
from lsrdecomp.lora.train.distill_schedule import n_evaluations, next_trial
from lsrdecomp.lora.train.distill_state import TrainingState, make_optimizer
from lsrdecomp.lora.train.rate_trials import TRIAL_WARMUP_STEPS, RateTrial, best_trial, trial_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.measure.teacher import DistillationData, TeacherBatch

FEATURE_WEIGHT = 4.0
"""Weight of the squared distance to the teacher's features, beside the divergence; both are in
units of the adapter's effect. Two logits per example are little to learn thousands of numbers from:
with features 0.81 were kept on SST-2's dev split, without 0.76 (MiniLM, 1/48 of the parameters, 200
steps, one seed)."""


class Trainer:
    """Trains the LSR factors of a student on the outputs of its teacher.

    Parameters
    ----------
    student : Base
        The teacher's base with a compressed adapter. From here on its factors require gradients,
        and no other parameter does.
    data : DistillationData
        Batches of the teacher, and validation texts.
    steps : int
        Optimizer steps of the whole run.
    seed : int
        Seed of the order of the batches.
    on_step : callable, optional
        Called with a `ProgressUpdate` after each step of training.
    round_factors : callable, optional
        As for `distill_factors`.

    Attributes
    ----------
    factors : list of nn.Parameter
        The factors θ in the student.
    initial : list of Tensor
        Copies of their initial numbers θ₀.
    scales : list of Tensor
        rms(θ₀) of each factor.
    feature_weight : float
        Factor of the squared distance of features in the loss; 0 where they do not count.
    evaluation_cost : float
        Cost of an evaluation, in forward passes over a step's batch.
    n_evaluations : int
        Evaluations during training.

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
        seed: int,
        on_step: OnStep | None,
        round_factors: Callable[[], None] | None = None,
    ) -> None:
        validation = data.validation
        if not validation.effect > 0.0:
            raise CalibrationError(
                "the adapter has no effect on the validation texts: there is nothing to keep"
            )
        self.student = student
        self.data = data
        self.steps = steps
        self.seed = seed
        self.on_step = on_step
        self.round_factors = round_factors
        self.processes = PartialState()
        # 1. Keep the initial factors and their scales.
        self.factors = trainable_factors(student.model)
        self.initial = [factor.detach().clone() for factor in self.factors]
        # At least so much that a factor of zeros can move.
        self.scales = [value.square().mean().sqrt().clamp_min(1e-8) for value in self.initial]
        # 2. Bring the distance of features to units of the divergence.
        distance = feature_distance(data.teacher, data.teacher_batches(0))
        self.feature_weight = 0.0
        if distance is not None:
            self.feature_weight = FEATURE_WEIGHT * validation.effect / distance
        # 3. Plan as many evaluations as their cost allows.
        step_examples = sum(examples_in(micro) for micro in data.batches[0])
        self.evaluation_cost = validation.examples / max(1, step_examples)
        self.n_evaluations = n_evaluations(steps, self.evaluation_cost)

    @property
    def device(self) -> torch.device:
        """Device of the factors."""
        return self.initial[0].device

    def initial_state(self, share: float | None = None) -> TrainingState:
        """Return the state before the first step, with the share that is kept there.

        Absent, the share is measured.
        """
        size = sum(value.numel() for value in self.initial)
        no_changes = torch.zeros(size, device=self.device)
        # The teacher ran on the first batch, and where features count, also without its adapter.
        passes = 1.0 if self.feature_weight == 0.0 else 2.0
        optimizer = make_optimizer(no_changes)
        state = TrainingState(optimizer, no_changes.clone(), passes=passes)
        if share is None:
            self.evaluate(state)
        else:
            state.evaluations.append((0, share))
        return state

    def set_parameters(self, changes: Tensor) -> None:
        """Set the student's factors to θ₀ + rms(θ₀) · u for relative changes u, and round them."""
        parts = torch.split(changes, [value.numel() for value in self.initial])
        with torch.no_grad():
            for factor, initial, scale, change in zip(
                self.factors, self.initial, self.scales, parts, strict=True
            ):
                factor.copy_(initial + scale * change.view_as(initial))
        if self.round_factors is not None:
            self.round_factors()

    def select_learning_rate(self, state: TrainingState) -> TrainingState:
        """Try rates for a few steps each; return the state after the trial with the smallest loss.

        The schedule says which rates, until the best one is bracketed. All trials count as steps,
        and their cost as passes. Where no trial ends with a finite loss, or there are too few steps
        for one, it is the state before the trials with the smallest rate that is known.
        """
        n_trial_steps = trial_steps(self.steps, at_least=3)
        trials: list[RateTrial[TrainingState]] = []
        passes = state.passes
        share = state.shares[0]
        rate = next_trial(trials, share)
        while rate is not None and (len(trials) + 1) * n_trial_steps < self.steps:
            trials.append(self._run_trial(state, rate, n_trial_steps, passes))
            passes = trials[-1].state.passes
            rate = next_trial(trials, share)
        best = best_trial(trials)
        if best is None:
            known = [*(trial.rate for trial in trials), next_trial([], share)]
            selected = replace(state, rate=min(filter(None, known)))
        else:
            selected = best.state
            # AdamW's correction of its moments counts the steps of all trials too, since every
            # published record was made so.
            selected.step = len(trials) * n_trial_steps
            selected.optimizer.state[selected.changes]["step"].fill_(selected.step)
        selected.passes = passes
        selected.rate_trials = tuple(trial.record for trial in trials)
        return selected

    def _run_trial(
        self, state: TrainingState, rate: float, n_steps: int, passes: float
    ) -> RateTrial[TrainingState]:
        """Make a few steps with a rate; ``passes`` is the cost before the trial.

        ``state`` stays as it is.
        """
        trial = replace(
            state,
            optimizer=make_optimizer(state.changes.data),
            rate=rate,
            passes=passes,
            evaluations=list(state.evaluations),
        )
        losses = [
            self.train_step(trial, rate * min(1.0, (step + 1) / TRIAL_WARMUP_STEPS))
            for step in range(n_steps)
        ]
        return RateTrial(rate, losses, trial)

    def train_step(self, state: TrainingState, rate: float) -> float:
        """Make one step on the relative changes; return the loss before it, nats per prediction."""
        self.set_parameters(state.changes)
        # 1. The gradient at the factors θ, from this process's share of the micro-batches.
        micro_batches = self._next_batch(state)
        n_predictions = sum(micro.n_predictions for micro in micro_batches)
        total_loss = torch.zeros((), device=self.device)
        for index, micro in enumerate(micro_batches):
            if index % self.processes.num_processes == self.processes.process_index:
                loss = self.loss(micro) / n_predictions
                with without_autocast(self.device.type):
                    loss.backward()  # type: ignore[no-untyped-call]
                total_loss += loss.detach()
        # 2. The gradient at the relative changes u, summed over processes.
        gradient = self._take_gradient()
        if self.processes.num_processes > 1:
            gradient = reduce(gradient)
            total_loss = reduce(total_loss)
        # 3. A step of AdamW.
        state.changes.grad = gradient
        state.optimizer.param_groups[0]["lr"] = rate
        state.optimizer.step()
        state.step += 1
        state.passes += 2.0
        if self.on_step is not None:
            self.on_step(ProgressUpdate("distilling", state.step, self.steps, "steps"))
        return float(total_loss)

    def _take_gradient(self) -> Tensor:
        """Return the gradient at the relative changes, and clear the gradients at the factors.

        By the chain rule, ∂/∂u = rms(θ₀) ∂/∂θ.
        """
        parts: list[Tensor] = []
        for factor, scale in zip(self.factors, self.scales, strict=True):
            gradient = torch.zeros_like(factor) if factor.grad is None else factor.grad
            parts.append((gradient * scale).flatten())
            factor.grad = None
        return torch.cat(parts)

    def loss(self, micro: TeacherBatch) -> Tensor:
        """Return the loss summed over the predictions of a micro-batch."""
        output, features = forward_with_features(self.student, micro.batch)
        loss = kl_loss(micro.form_logits(), output.logits, self.student.head)
        if features is not None and micro.features is not None:
            loss = loss + self.feature_weight * (features - micro.features).square().sum()
        return loss

    def _next_batch(self, state: TrainingState) -> list[TeacherBatch]:
        """Return the micro-batches of the next step; each epoch has an order of its own.

        Where the teacher has yet to run on the batch, its pass is added to those of the state.
        """
        n_batches = len(self.data.batches)
        epoch, position = divmod(state.step, n_batches)
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
        order = torch.randperm(n_batches, generator=generator)
        index = int(order[position])
        if not self.data.has_run(index):
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


def kl_loss(teacher_logits: Tensor, logits: Tensor, head: Head) -> Tensor:
    """Return Σ KL(teacher ‖ student) over predictions, with gradients.

    Parameters
    ----------
    teacher_logits, logits : Tensor, shape (predictions, classes)
        Logits of the teacher and of the student.
    head : Head
        Meaning of the logits. For numbers, half the squared difference is returned.
    """
    if head is Head.numbers:
        return (teacher_logits - logits).square().sum() / 2
    log_p = teacher_logits.log_softmax(-1)
    log_q = logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


def trainable_factors(model: nn.Module) -> list[nn.Parameter]:
    """Return the LSR factors of a model, in float32; freeze all other parameters.

    Raises
    ------
    CalibrationError
        If there are no LSR factors.
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
            "the adapter has no LSR factors to train; distill what `compress` wrote"
        )
    return factors
