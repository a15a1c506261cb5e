"""How many answers stay, expected by margins: as many as simulated, corrected by counts."""

from __future__ import annotations

import numpy as np
import pytest

from lsrdecomp.lora.compress.answer_model import AnswerModel, Counted
from lsrdecomp.lora.compress.size_search import MIN_LOSS


def model_of(seed=0, n_answers=400, scale=2.0):
    draws = np.random.default_rng(seed)
    lengths = draws.integers(1, 30, size=n_answers)
    return AnswerModel([draws.exponential(3.0, size=length) for length in lengths], scale)


@pytest.mark.parametrize("loss", [0.0005, 0.005, 0.05])
def test_as_many_answers_stay_as_in_a_simulation_of_the_logits(loss):
    """The logits of a token's two first classes are moved by draws of Laplace's distribution."""
    model = model_of()
    draws = np.random.default_rng(1)
    scale = 2.0 * loss**0.5
    stay = [np.all(draws.laplace(0.0, scale, (50, len(m))) < m, axis=1) for m in model.margins]
    found = np.mean(stay)
    assert np.exp(-model.fall(loss)) == pytest.approx(found, abs=0.02)


@pytest.mark.parametrize("answers", [0.5, 0.9, 0.99])
def test_the_loss_for_a_share_of_the_answers_keeps_it(answers):
    model = model_of()
    assert np.exp(-model.fall(model.loss_for(answers))) == pytest.approx(answers, rel=1e-6)


def test_where_nothing_can_change_everything_may_be_lost_and_of_ties_nothing():
    assert AnswerModel([np.array([1e3]), np.array([2e3, 1e4])], 1.0).loss_for(0.9) == 1.0
    assert AnswerModel([np.zeros(2)], 1.0).loss_for(0.9) == MIN_LOSS
    assert AnswerModel([np.zeros(5000)], 1.0).fall(0.1) == pytest.approx(5000 * np.log(2))


def test_counts_correct_what_is_expected_as_far_as_they_say_anything():
    model = model_of()
    loss = model.loss_for(0.9)
    as_expected = [Counted(90 - 0.5, 100, loss)]
    assert model.loss_for(0.9, as_expected) == pytest.approx(loss, rel=0.05)
    fewer, many_fewer = (
        model.loss_for(0.9, [Counted(share * count, count, loss)])
        for share, count in ((0.8, 40), (0.8, 4000))
    )
    assert many_fewer < fewer < 0.9 * loss
    assert np.exp(-model.fall(many_fewer) * 2.12) == pytest.approx(0.9, abs=0.01)
    # All of a few answers say little, and the same count of many versions says it once
    all_of_few = [Counted(10, 10, loss)]
    assert loss < model.loss_for(0.9, all_of_few) < 1.5 * loss
    assert model.loss_for(0.9, 7 * all_of_few) == model.loss_for(0.9, all_of_few)
