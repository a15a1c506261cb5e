"""Distillation without labels: a compressed adapter is trained on the outputs of its LoRA.

The LoRA is the teacher, the compressed adapter the student. The loss is KL(teacher ‖ student) per
prediction on unlabelled texts [1]_; of a classifier, the squared distance between their features is
added [2]_.

.. [1] G. Hinton, O. Vinyals and J. Dean, Distilling the knowledge in a neural network, 2015.
       arXiv:1503.02531
.. [2] A. Romero et al., FitNets: hints for thin deep nets, ICLR 2015. arXiv:1412.6550
.. [3] Y. Bengio, N. Léonard and A. Courville, Estimating or propagating gradients through
       stochastic neurons for conditional computation, 2013. arXiv:1308.3432
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CalibrationError
from lsrdecomp.lora.base.autocast import mixed_precision
from lsrdecomp.lora.files import content_key
from lsrdecomp.lora.train.distill_schedule import has_stalled, learning_rate
from lsrdecomp.lora.train.distill_state import TrainingState
from lsrdecomp.lora.train.distill_trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.files import Journal
    from lsrdecomp.lora.files.progress import OnStep
    from lsrdecomp.lora.measure.teacher import DistillationData


MIN_MIXED_LOSS = 0.02
"""Nats a prediction that a student must have lost for it to be trained in mixed precision. Of a
pass in bfloat16 the roundoff alone is a divergence of 6e-4 nats (SmolLM2): a student is not trained
to much less than that, nor its progress seen."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """Record of a distillation. Shares kept are measured on its validation texts."""

    steps: int
    """Optimizer steps that were made, including the trials of learning rates."""
    rate: float
    """Peak learning rate, in relative change of a factor's numbers per step."""
    before: float
    """Share kept before the first step."""
    after: float
    """Share kept by the factors that were left in the student; never less than before."""
    passes: float
    """Cost in forward or backward passes of the base over one step's batch: those of training, of
    the teacher and of evaluations."""
    checks: tuple[tuple[int, float], ...] = ()
    """Step and share kept at each evaluation."""
    rate_trials: tuple[tuple[float, float | None], ...] = ()
    """Peak learning rates that were tried, each with its mean loss in the second half of
    its trial, in nats per prediction, or None where that is not finite."""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Distillation:
        """Return the record that `dataclasses.asdict` turned into JSON values."""
        fields = dict(record)
        fields["checks"] = tuple((step, share) for step, share in record["checks"])
        fields["rate_trials"] = tuple((rate, loss) for rate, loss in record.get("rate_trials", ()))
        return cls(**fields)


def distill_factors(
    student: Base,
    data: DistillationData,
    *,
    steps: int,
    round_factors: Callable[[], None] | None = None,
    rate: float | None = None,
    share_before: float | None = None,
    seed: int = 0,
    target_share: float = math.inf,
    journal: Journal | None = None,
    key: str = "",
    on_step: OnStep | None = None,
) -> Distillation:
    """Train the factors of ``student`` on its teacher's outputs, and leave the best ones in it.

    Parameters
    ----------
    student : Base
        The teacher's base with another adapter, as `Base.with_adapter` returns it. Only LSR factors
        are trained, in float32.
    data : DistillationData
        Its batches are repeated in epochs, each in an order drawn from ``seed``.
    steps : int
        Maximum optimizer steps, including the trials of learning rates.
    round_factors : callable, optional
        Rounds the factors of the student in place, as they will be stored. It is called whenever
        they were set. The loss and the share kept are then those of rounded factors, and their
        gradient is used as that of the factors before (a straight-through estimator [3]_).
    rate : float, optional
        Peak learning rate, in relative change of a factor's numbers per step. Absent, it is the
        best one in short trials, which go on until it is bracketed.
    share_before : float, optional
        Share kept on the validation texts before the first step; absent, it is measured.
    seed : int
        Seed of the order of the batches.
    target_share : float
        Share kept on the validation texts at which training ends early.
    journal : Journal, optional
        The state is saved here at every evaluation. A run resumes from it after a kill, or when it
        is called again with a larger ``target_share``.
    key : str
        Digest of student, data and all other arguments, under which the journal has the state.
    on_step : callable, optional
        Called with a `ProgressUpdate` after each step of training.

    Returns
    -------
    Distillation

    Raises
    ------
    CalibrationError
        If there are no batches or no factors to train, or if the teacher has no effect on the
        validation texts.

    Notes
    -----
    The optimizer is AdamW without weight decay. The learning rate rises linearly for a share of the
    steps and falls linearly to zero. Costs one forward and one backward pass a step, and one
    forward pass for each batch of the teacher and for each evaluation. On several processes started
    by accelerate each takes its share of a step's micro-batches, and gradients are summed.
    """
    if steps < 1 or not data.batches:
        raise CalibrationError(
            f"{steps} steps on {len(data.batches)} batches: there is nothing to distill with"
        )
    state_key = content_key(key, "distillation")
    trainer = Trainer(student, data, steps, seed, on_step, round_factors)
    # 1. Resume an interrupted run, or begin with what the student keeps.
    saved = None if journal is None else TrainingState.load(journal, state_key, trainer.device)
    state = saved or trainer.initial_state(share_before)
    lost = (1.0 - state.shares[0]) * data.validation.effect
    precision = mixed_precision(student.model) if lost >= MIN_MIXED_LOSS else nullcontext()
    with precision:
        # 2. Find the learning rate.
        if saved is None and rate is None:
            state = trainer.select_learning_rate(state)
        elif rate is not None:
            state.rate = rate
        # 3. Train, with evaluations at regular intervals, until a stopping rule holds.
        interval = max(1, math.ceil(steps / trainer.n_evaluations))
        while state.step < steps:
            if has_stalled(state.shares) or state.shares[-1] >= target_share:
                break
            trainer.train_step(state, learning_rate(state.rate, state.step, steps))
            if state.step % interval == 0 or state.step == steps:
                trainer.evaluate(state)
                if journal is not None:
                    state.save(journal, state_key)
    # 4. Leave the best factors of all evaluations in the student.
    trainer.set_parameters(state.best)
    return Distillation(
        steps=state.step,
        rate=state.rate,
        before=state.shares[0],
        after=max(state.shares),
        passes=round(state.passes, 2),
        checks=tuple(state.evaluations),
        rate_trials=state.rate_trials,
    )
