"""Distillation without labels: a compressed adapter is trained to answer as the LoRA it was made from.

The loss is KL(LoRA ‖ compressed) per answer on unlabelled texts [1]_ and, of a classifier, the
squared distance to what the last layer of the source reads [2]_. What is trained are the numbers of
the factors; each factor moves in units of its own root mean square, θ = θ₀ + rms(θ₀) · u, so that
one learning rate means the same relative change in every layer, whatever its scale and however a
layer shares its size out among its factors.

.. [1] G. Hinton, O. Vinyals and J. Dean, Distilling the knowledge in a neural network, 2015.
       arXiv:1503.02531
.. [2] A. Romero et al., FitNets: hints for thin deep nets, ICLR 2015. arXiv:1412.6550
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn

from lsrdecomp.calibration.features import Lesson, ask_with_features, distance_without, lesson
from lsrdecomp.calibration.fisher import Batch, CalibrationError, Head
from lsrdecomp.checkpoints.progress import OnStep, ProgressUpdate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.calibration.base_model import Base
    from lsrdecomp.calibration.divergence import Reference
    from lsrdecomp.checkpoints import Journal

RATES = (0.01, 0.03, 0.1)
"""Learning rates that are tried, in relative change of a factor's numbers per step."""
TRIAL = 0.05
"""Steps of the trial of each rate, of all steps; they count as steps."""
WARMUP = 0.05
CHECKS = 8
"""Times that the held-out share is looked at, if that costs no more than `CHECK_SHARE`."""
CHECK_SHARE = 0.2
"""Forward passes of all looks, of all steps."""
FEATURES = 4.0
"""Weight, beside the divergence, of the distance to the features of the source's classifier; both as shares of what the
adapter does. Two logits an example are few to learn thousands of numbers from."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW, beside its number of updates."""
PATIENCE = 3
"""Looks without a rise after which distillation ends."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """What a distillation did."""

    steps: int  # done, trials of rates among them
    rate: float
    before: float  # share kept on the check texts, before the first step
    after: float  # of what was kept: never less than before
    passes: float  # forward and backward passes of the base, each for a batch of a step, checks and teacher included
    checks: tuple[tuple[int, float], ...] = ()  # step, share


@dataclass(frozen=True)
class Lessons:
    """What adapters of one source are trained on; it answers each lesson once, however many there are."""

    source: Base
    batches: Sequence[
        Sequence[Batch]
    ]  # for a step each, in micro-batches: the gradient is that of all together
    check: Reference  # the source's answers to other batches: the share kept there says when to stop, and what is best
    answered: dict[int, list[Lesson]] = field(default_factory=dict)  # by index

    def answers(self, index: int) -> list[Lesson]:
        """One lesson with the source's answers."""
        if index not in self.answered:
            self.answered[index] = [lesson(self.source, batch) for batch in self.batches[index]]
        return self.answered[index]


def distil_factors(
    student: Base,
    lessons: Lessons,
    *,
    steps: int,
    rate: float | None = None,
    seed: int = 0,
    journal: Journal | None = None,
    key: str = "",
    enough: float = math.inf,
    on_step: OnStep | None = None,
) -> Distillation:
    """Train the factors of ``student`` on the source's answers; the best factors seen are left in it.

    Parameters
    ----------
    student : Base
        The source's base with another adapter, as `load_pair` opens the two. Only LSR factors are
        trained, in float32.
    lessons : Lessons
        Steps go through them again and again, in an order drawn from ``seed``.
    steps : int
        At most so many optimizer steps, the trials of learning rates among them.
    rate : float, optional
        Relative change of a factor's numbers per step; absent, the best of `RATES` in a short trial
        on the lessons.
    journal : Journal, optional
        Where the state of a run is kept at every check, and gone on from: after a kill, or where
        more is ``enough``.
    key : str
        Under which: a digest of all that the run depends on.
    enough : float
        Share kept on the check texts at which training ends.
    on_step : callable, optional
        Called with a `ProgressUpdate` after each step of training.

    Returns
    -------
    Distillation

    Raises
    ------
    CalibrationError
        If there is nothing to learn from or nothing to train, or if the source has no effect on the
        check texts.

    Notes
    -----
    AdamW without decay, the rate rising linearly for a twentieth of the steps and then falling
    linearly to zero. Costs one forward and one backward pass a step, and one forward pass a lesson
    and a check. On several processes started by accelerate each takes its share of a lesson's
    micro-batches, and gradients are summed.
    """
    if steps < 1 or not lessons.batches:
        raise CalibrationError(
            f"{steps} steps on {len(lessons.batches)} batches: there is nothing to distil with"
        )
    work = _Work(student, lessons, steps, seed, on_step)
    # 1. Where the run is: what an interrupted one saved, or the start with the best learning rate.
    now = None if journal is None else _load(journal, key, work.zero.device)
    if now is None:
        now = _State(
            _adamw(work.zero), work.zero.clone(), passes=1.0 if work.nearness == 0.0 else 2.0
        )
        work.look(now)
        now = work.best_of_trials(now) if rate is None else replace(now, rate=rate)
    # 2. Steps, with a look at the held-out share now and then, until they are done or no longer
    # help.
    every = max(1, math.ceil(steps / work.looks))
    while now.step < steps and not _stalled(now.checks) and now.checks[-1][1] < enough:
        work.step(now, work.scheduled(now))
        if now.step % every == 0 or now.step == steps:
            work.look(now)
            if journal is not None:
                _save(journal, key, now)
    # 3. The best factors that were looked at.
    work.put(now.best)
    shares = [share for _, share in now.checks]
    return Distillation(
        now.step, now.rate, shares[0], max(shares), round(now.passes, 2), tuple(now.checks)
    )


@dataclass(slots=True)
class _State:
    """Where a run is, and goes on after a kill."""

    optimizer: torch.optim.AdamW  # of one vector, the relative changes u of all numbers
    best: Tensor
    step: int = 0
    rate: float = 0.0
    passes: float = 0.0
    checks: list[tuple[int, float]] = field(default_factory=list)

    @property
    def u(self) -> nn.Parameter:
        parameter: nn.Parameter = self.optimizer.param_groups[0]["params"][0]
        return parameter


def _adamw(u: Tensor) -> torch.optim.AdamW:
    return torch.optim.AdamW([nn.Parameter(u.clone())], eps=1e-12, weight_decay=0.0)


def _save(journal: Journal, key: str, now: _State) -> None:
    """Keep the state of an unfinished run."""
    moments = now.optimizer.state[now.u]
    tensors = {"u": now.u.data, "best": now.best, **{name: moments[name] for name in MOMENTS}}
    facts = {"step": now.step, "rate": now.rate, "passes": now.passes, "checks": now.checks}
    facts["updates"] = float(moments["step"])
    journal.put(key, {name: value.cpu().numpy() for name, value in tensors.items()}, facts=facts)


def _load(journal: Journal, key: str, device: torch.device) -> _State | None:
    """The state that was kept, if there is one."""
    result = journal.get(key)
    if result is None:
        return None
    tensors = {
        name: torch.tensor(tensor.read(), device=device) for name, tensor in result.arrays.items()
    }
    facts = dict(result.facts)
    now = _State(_adamw(tensors["u"]), tensors["best"])
    moments = {
        "step": torch.tensor(facts.pop("updates")),
        **{name: tensors[name] for name in MOMENTS},
    }
    now.optimizer.state[now.u] = moments
    return replace(now, **facts | {"checks": [(step, share) for step, share in facts["checks"]]})


class _Work:
    """The parameters as one vector of relative changes, and the answers to learn."""

    def __init__(
        self, student: Base, lessons: Lessons, steps: int, seed: int, on_step: OnStep | None
    ) -> None:
        self.student, self.lessons, self.steps, self.seed, self.on_step = (
            student,
            lessons,
            steps,
            seed,
            on_step,
        )
        check = lessons.check
        if not check.effect > 0.0:
            raise CalibrationError(
                "the adapter has no effect on the held-out texts: there is nothing to keep"
            )
        self.parameters = trained(student.model)
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        self.zero = torch.zeros(
            sum(value.numel() for value in self.start), device=self.start[0].device
        )
        self.scales = [value.square().mean().sqrt().clamp_min(1e-8) for value in self.start]
        self.team = PartialState()
        apart = distance_without(lessons.source, lessons.answers(0))
        self.nearness = 0.0 if apart is None else FEATURES * check.effect / apart
        self.look_cost = check.examples / max(
            1, sum(len(next(iter(part.values()))) for part in lessons.batches[0])
        )
        self.looks = max(2, min(CHECKS, int(CHECK_SHARE * steps / self.look_cost) - 1))

    def put(self, u: Tensor) -> None:
        """Factors from relative changes."""
        with torch.no_grad():
            changes = torch.split(u, [value.numel() for value in self.start])
            for parameter, start, scale, change in zip(
                self.parameters, self.start, self.scales, changes, strict=True
            ):
                parameter.copy_(start + scale * change.view_as(start))

    def best_of_trials(self, now: _State) -> _State:
        """The state after a short trial of each rate, the best one's; where none ends well, the middle rate's start."""
        length = max(3, round(TRIAL * self.steps))
        best, least, spent = replace(now, rate=RATES[len(RATES) // 2]), math.inf, 0
        for rate in RATES:
            if spent + length >= self.steps:
                break
            trial = replace(now, optimizer=_adamw(now.u.data), rate=rate, checks=list(now.checks))
            losses = [self.step(trial, rate * min(1.0, (i + 1) / 3)) for i in range(length)]
            spent, now.passes = spent + length, trial.passes
            loss = sum(losses[length // 2 :])
            if loss < least:
                best, least = trial, loss
        best.passes = now.passes
        if best.step:  # trials count as steps, for AdamW's correction of its moments too: all records were made so
            best.step = spent
            best.optimizer.state[best.u]["step"].fill_(spent)
        return best

    def scheduled(self, now: _State) -> float:
        """The rate of the next step."""
        warm = max(1.0, WARMUP * self.steps)
        return now.rate * min(1.0, (now.step + 1) / warm) * (1.0 - now.step / self.steps)

    def step(self, now: _State, rate: float) -> float:
        """One step on the relative changes; returns the loss before it, nats per answer."""
        self.put(now.u)
        # 1. The gradient of the factors, of the micro-batches that are this process's.
        parts = self.lesson(now)
        total = sum(part.answers for part in parts)
        loss = torch.zeros((), device=now.u.device)
        for index, part in enumerate(parts):
            if index % self.team.num_processes == self.team.process_index:
                lost = self.lost(part) / total
                lost.backward()  # type: ignore[no-untyped-call]
                loss += lost.detach()
        # 2. By the chain rule ∂/∂u = rms(θ₀) ∂/∂θ, summed over processes.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        gradient = torch.cat(
            [(g * scale).flatten() for g, scale in zip(gradients, self.scales, strict=True)]
        )
        for parameter in self.parameters:
            parameter.grad = None
        if self.team.num_processes > 1:
            gradient, loss = reduce(gradient), reduce(loss)
        # 3. AdamW.
        now.u.grad, now.optimizer.param_groups[0]["lr"] = gradient, rate
        now.optimizer.step()
        now.step, now.passes = now.step + 1, now.passes + 2.0
        if self.on_step is not None:
            self.on_step(ProgressUpdate("distilling", now.step, self.steps, "steps"))
        return float(loss)

    def lost(self, part: Lesson) -> Tensor:
        """Σ over answers of the divergence and, of a classifier, of how far its features are from the source's."""
        answers, features = ask_with_features(self.student, part.batch)
        loss = soft_divergence(part.logits(), answers.logits, self.student.head)
        if features is not None and part.features is not None:
            loss = loss + self.nearness * (features - part.features).square().sum()
        return loss

    def lesson(self, now: _State) -> list[Lesson]:
        """The lesson of the next step with the source's answers, which are asked for once."""
        count = len(self.lessons.batches)
        epoch, index = divmod(now.step, count)
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
        chosen = int(torch.randperm(count, generator=generator)[index])
        now.passes += float(chosen not in self.lessons.answered)
        return self.lessons.answers(chosen)

    def look(self, now: _State) -> None:
        """The share kept on the check texts; the best factors so far are remembered."""
        self.put(now.u)
        share = self.lessons.check.compare(self.student).kept
        share = -math.inf if share is None or not math.isfinite(share) else share
        if not now.checks or share > max(earlier for _, earlier in now.checks):
            now.best = now.u.detach().clone()
        now.checks.append((now.step, share))
        now.passes += self.look_cost


def soft_divergence(old: Tensor, new: Tensor, head: Head) -> Tensor:
    """Σ KL(old ‖ new) over answers (answers, classes), with gradients; of a regression, half the squared difference."""
    if head is Head.regression:
        return (old - new).square().sum() / 2
    target = old.log_softmax(-1)
    return (target.exp() * (target - new.log_softmax(-1))).sum()


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The factors of all LSR layers, and they alone require gradients from here on.

    Raises `CalibrationError` if there are none.
    """
    factors = []
    for name, parameter in model.named_parameters():
        in_factors = ".lsr_A." in name or ".lsr_B." in name
        parameter.requires_grad_(in_factors)
        if in_factors:
            parameter.data = parameter.data.float()
            factors.append(parameter)
    if not factors:
        raise CalibrationError(
            "the adapter has no LSR factors to train; distil what `compress` wrote"
        )
    return factors


def _stalled(checks: Sequence[tuple[int, float]]) -> bool:
    shares = [share for _, share in checks]
    return len(shares) > PATIENCE and max(shares[-PATIENCE:]) <= max(shares[:-PATIENCE])
