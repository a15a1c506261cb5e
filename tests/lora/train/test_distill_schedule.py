"""The trials of learning rates go on until the best one has a worse one on either side."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from lsrdecomp.lora.train.distill_schedule import MAX_TRIALS, has_stalled, next_trial
from lsrdecomp.lora.train.rate_trials import RateTrial


def tried(loss_of_rate):
    """The rates that are tried where a rate has such a loss, of a student that keeps 91 %."""
    trials = []
    while (rate := next_trial(trials, 0.91)) is not None:
        trials.append(RateTrial(rate, [loss_of_rate(rate)], None))
    return {trial.rate: trial.loss for trial in trials}


def bowl(best):
    return lambda rate: abs(math.log(rate / best))


@pytest.mark.parametrize("best", [0.011, 0.03, 0.09, 0.3])
def test_the_best_rate_is_bracketed(best):
    losses = tried(bowl(best))
    winner = min(losses, key=losses.get)
    assert abs(math.log(winner / best)) <= 0.5 * math.log(3) + 1e-9
    assert min(losses) < winner < max(losses)
    assert len(losses) <= MAX_TRIALS


def test_one_rate_beyond_the_winner_is_tried_and_no_more():
    assert list(tried(bowl(0.09))) == pytest.approx([0.03, 0.09, 0.27])
    assert list(tried(bowl(0.03))) == pytest.approx([0.03, 0.09, 0.01])


@pytest.mark.parametrize("share", [-0.5, 0.0, 0.9, 0.9999, 1.0])
def test_a_student_that_lost_little_is_tried_with_small_rates(share):
    first = next_trial([], share)
    assert 0.0 < first <= next_trial([], share - 0.01) <= 0.1
    tried = [RateTrial(first, [1.0], None)]
    assert next_trial(tried, share) == pytest.approx(3.0 * first)


def test_trials_end_where_the_best_rate_runs_away():
    assert list(tried(lambda rate: -rate)) == pytest.approx([0.03, 0.09, 0.27, 0.81])


def test_where_all_diverge_smaller_rates_are_tried():
    assert list(tried(lambda _: math.nan)) == pytest.approx([0.03, 0.09, 0.01, 0.01 / 3])
    only_small = tried(lambda rate: rate if rate < 0.02 else math.inf)
    assert min(only_small, key=only_small.get) == pytest.approx(0.01 / 3)


def test_training_stalls_after_three_evaluations_without_a_new_best():
    assert not has_stalled([0.5, 0.4, 0.3])
    assert has_stalled([0.5, 0.4, 0.3, 0.5])
    assert not has_stalled([0.5, 0.4, 0.3, 0.6])
    assert not has_stalled([0.5, 0.6, 0.4, 0.3])
    assert has_stalled([0.5, 0.6, 0.4, 0.3, 0.2])


def test_a_step_of_two_processes_has_the_loss_and_the_gradient_of_both(monkeypatch):
    """All processes choose by the same losses, or each would go on with a rate of its own."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    from lsrdecomp.lora.train import distill_trainer
    from lsrdecomp.lora.train.distill_trainer import Trainer, TrainingState, make_optimizer

    class OfSquares(Trainer):
        """Learns factors that are small, from two micro-batches that are alike."""

        def __init__(self, n_processes):
            self.processes = SimpleNamespace(num_processes=n_processes, process_index=0)
            self.factors = [torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))]
            self.initial = [self.factors[0].detach().clone()]
            self.scales = [torch.tensor(2.0)]
            self.steps, self.on_step, self.round_factors = 2, None, None

        def _next_batch(self, _):
            return [SimpleNamespace(n_predictions=3)] * 2

        def loss(self, micro):
            return micro.n_predictions * self.factors[0].square().sum()

    monkeypatch.setattr(distill_trainer, "reduce", lambda part: 2.0 * part)  # both are alike
    losses, changes = [], []
    for n_processes in (1, 2):
        none = torch.zeros(3)
        state = TrainingState(make_optimizer(none), none)
        trainer = OfSquares(n_processes)
        losses.append([trainer.train_step(state, 0.1) for _ in range(2)])
        changes.append(state.changes.tolist())
    assert losses[0][0] == pytest.approx(14.0)
    assert losses[0][1] < 14.0
    assert losses[1] == pytest.approx(losses[0])
    assert changes[1] == pytest.approx(changes[0])


def test_an_evaluation_without_a_share_is_the_worst_and_the_best_is_kept():
    torch = pytest.importorskip("torch")
    from lsrdecomp.lora.train.distill_state import TrainingState
    from lsrdecomp.lora.train.distill_trainer import Trainer

    changes = torch.nn.Parameter(torch.zeros(1))
    state = TrainingState(torch.optim.AdamW([changes]), torch.zeros(1))
    shares = iter([None, 0.5, math.nan, 0.75, 0.25])
    validation = SimpleNamespace(compare=lambda _: SimpleNamespace(kept=next(shares)))
    trainer = SimpleNamespace(
        data=SimpleNamespace(validation=validation),
        student=None,
        set_parameters=lambda _: None,
        evaluation_cost=1.0,
    )
    best = []
    for step in range(5):
        changes.data.fill_(float(step))
        state.step = step
        Trainer.evaluate(trainer, state)
        best.append(int(state.best))
    assert state.shares == [-math.inf, 0.5, -math.inf, 0.75, 0.25]
    assert best == [0, 1, 1, 3, 3]
    assert state.passes == 5.0
