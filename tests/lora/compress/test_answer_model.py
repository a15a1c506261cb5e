"""How many answers stay, expected by margins: as many as simulated, corrected by counts."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit

from lsrdecomp.lora.compress.answer_model import AnswerModel, Counted
from lsrdecomp.lora.compress.size_search import MIN_LOSS


def model_of(seed=0, n_answers=400, effect=2.0, least_margin=0.0):
    """Answers of tokens of two classes, at margins with a mean of 3 above the least."""
    draws = np.random.default_rng(seed)
    lengths = draws.integers(1, 30, size=n_answers)
    margins = [least_margin + draws.exponential(3.0, size=length) for length in lengths]
    p = expit(np.concatenate(margins))
    return AnswerModel(margins, 2.0 * p * (1.0 - p), effect)


@pytest.mark.parametrize(("least_margin", "scale"), [(0.0, 0.02), (0.0, 0.2), (4.0, 1.5)])
def test_as_many_answers_stay_as_in_a_simulation_of_the_logits(least_margin, scale):
    """The logits of a token's two classes are moved by draws of Laplace's distribution."""
    model = model_of(least_margin=least_margin)
    draws = np.random.default_rng(1)
    moves = [draws.laplace(0.0, scale, (100, len(margins))) for margins in model.margins]
    stay = [np.all(m < margins, axis=1) for m, margins in zip(moves, model.margins, strict=True)]
    margins = np.concatenate(model.margins)
    moved = margins - np.concatenate(moves, axis=1)
    p = expit(margins)
    divergence = p * np.log(p / expit(moved)) + (1.0 - p) * np.log((1.0 - p) / expit(-moved))
    found = np.exp(-model.fall(divergence.mean() / model.effect))
    assert found == pytest.approx(np.mean(stay), abs=0.015)


def test_small_moves_follow_from_the_mean_uncertainty_also_of_many_classes():
    uncertainties = np.array([0.0, 0.01, 0.3, 0.5, 0.9])
    margins = [np.array([0.002])]
    model = AnswerModel(margins, uncertainties, effect=1.0)
    for scale in (1e-5, 1e-3, 2e-2):
        loss = 0.5 * scale**2 * uncertainties.mean()
        changed = -np.expm1(-model.fall(loss))
        assert changed == pytest.approx(0.5 * np.exp(-0.002 / scale), rel=1e-3)


@pytest.mark.parametrize("answers", [0.5, 0.9, 0.99])
def test_the_loss_for_a_share_of_the_answers_keeps_it(answers):
    model = model_of()
    assert np.exp(-model.fall(model.loss_for(answers))) == pytest.approx(answers, rel=1e-6)


def test_where_nothing_can_change_everything_may_be_lost_and_of_ties_nothing():
    even, sure = np.array([0.5]), np.array([0.0])
    assert AnswerModel([np.array([1e3]), np.array([2e3, 1e4])], even, 1.0).loss_for(0.9) == 1.0
    assert AnswerModel([np.array([1e3])], sure, 1.0).loss_for(0.9) == 1.0
    assert AnswerModel([np.zeros(2)], even, 1.0).loss_for(0.9) == MIN_LOSS
    assert AnswerModel([np.zeros(5000)], even, 1.0).fall(0.1) == pytest.approx(5000 * np.log(2))


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
