"""The search for the smallest form: few measurements, never one that keeps too little, and words when there is none."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from lsrdecomp.calibration.divergence import Behaviour  # noqa: E402
from lsrdecomp.errors import BudgetError  # noqa: E402
from lsrdecomp.promise.keep import CLOSE, MOST_MEASURED, Measured, loss_at, smallest  # noqa: E402

WHOLE = 1e6


def curve(factor, power):
    """Squared error of a size, and what a form of it keeps: not the factor that the search begins with."""

    def expected(size):
        return (WHOLE / SMALL / size) ** 0.5 if size < WHOLE else 0.0

    def measure(size):
        lost = min(1.0, factor * expected(size) ** power)
        return Behaviour(100, 100, "example", lost, 0.9, 1.0, 0.01)

    return expected, measure


SMALL = 4096.0


@example(factor=3.0, power=0.75, keep=0.875, prior=0.4)  # all but the LoRA's own size keep too little
@given(
    factor=st.floats(0.2, 3.0), power=st.floats(0.75, 1.4), keep=st.floats(0.5, 0.95), prior=st.sampled_from([0.4, 1.0])
)
def test_the_form_found_keeps_enough_and_little_smaller_ones_do_not(factor, power, keep, prior):
    expected, measure = curve(factor, power)
    found, seen = smallest(keep, WHOLE, expected, measure, prior=prior)
    assert found.kept >= keep
    assert len(seen) <= MOST_MEASURED
    assert found.size == min(one.size for one in seen if one.kept >= keep)
    least = min(WHOLE, (WHOLE / SMALL) * ((1 - keep) / factor) ** (-2 / power))
    assert found.size <= 1.8 * max(least, WHOLE / SMALL)


def test_a_known_factor_needs_few_measurements():
    expected, measure = curve(1.0, 1.0)
    found, seen = smallest(0.9, WHOLE, expected, measure)
    least = (WHOLE / SMALL) * 0.1**-2
    assert len(seen) <= 4
    assert found.size <= CLOSE**2 * least


@given(
    factor=st.floats(0.3, 2.0),
    power=st.floats(0.75, 1.4),
    left=st.floats(0.1, 1.1),
    keep=st.floats(0.6, 0.95),
    steep=st.floats(0.7, 1.3),
)
def test_three_trainings_find_a_smaller_form_or_leave_the_untrained_one(factor, power, left, keep, steep):
    expected, measure = curve(factor, power)
    plain, seen = smallest(keep, WHOLE, expected, measure)

    def trained(size):  # leaves a share of the loss that the search does not know, and which depends on the size
        return Behaviour(100, 100, "example", min(1.0, left * (1.0 - measure(size).kept) ** steep), 0.9, 1.0, 0.01)

    found, tried = smallest(
        keep, WHOLE, lambda size: loss_at(size, seen, expected), trained, most=3, prior=0.4, enough=plain
    )
    assert len(tried) <= 3
    assert all(one.size < plain.size for one in tried)
    assert found.kept >= keep
    assert found.size <= plain.size
    keeping = [one.size for one in tried if one.kept >= keep]
    assert found.size == min([plain.size, *keeping])
    if 0.25 < left < 0.6 and abs(steep - 1.0) < 0.1 and 4 * WHOLE / SMALL < plain.size < WHOLE:
        assert keeping  # what a guess of .4 is near to is found


def trainings(kept, error):
    """The sizes of three trainings that keep what is said, with .8 asked and a standard error."""
    expected, _ = curve(1.0, 1.0)
    plain = Measured(40_000.0, Behaviour(128, 128, "example", 0.19, 0.9, 1.0, error))
    shares = iter(kept)

    def trained(size):
        return Behaviour(128, 128, "example", 1.0 - next(shares), 0.9, 1.0, error)

    found, tried = smallest(0.8, WHOLE, expected, trained, most=3, prior=0.4, close=1.2, enough=plain)
    assert found is tried[2]
    return [one.size for one in tried]


@pytest.mark.parametrize("kept", [(0.794, 0.763, 0.82), (0.77, 0.79, 0.82)])
def test_two_trainings_within_a_standard_error_are_luck_and_the_third_is_near_them(kept):
    _, second, third = trainings(kept, 0.031)
    assert second < third < 1.8 * second


def test_the_last_training_is_of_a_form_that_keeps_enough_with_bad_luck_too():
    sizes = {error: trainings((0.70, 0.75, 0.82), error) for error in (0.0, 0.02, 0.04)}
    assert sizes[0.0][:2] == sizes[0.02][:2] == sizes[0.04][:2]
    assert sizes[0.0][2] < sizes[0.02][2] < sizes[0.04][2]


def test_what_a_size_loses_is_read_between_the_forms_that_were_measured():
    expected, measure = curve(0.5, 1.2)
    seen = [Measured(size, measure(size)) for size in (2e5, 1e3, 2e4)]  # in any order
    for size in (1e3, 5e3, 2e4, 1e5):
        assert loss_at(size, seen, expected) == pytest.approx(1.0 - measure(size).kept, rel=1e-6)
    beyond = loss_at(2e5, seen, expected) * expected(4e5) / expected(2e5)
    assert loss_at(4e5, seen, expected) == pytest.approx(beyond)


def test_what_cannot_be_kept_says_what_can():
    def measure(size):
        return Behaviour(100, 100, "example", 0.2, 0.9, 1.0, 0.01)

    with pytest.raises(BudgetError, match=r"keeps 0.95 .* the best of \d keeps 0.800"):
        smallest(0.95, WHOLE, curve(1.0, 1.0)[0], measure)


@pytest.mark.parametrize("keep", [0.0, 1.0, 95.0, math.nan])
def test_a_share_lies_between_nothing_and_all(keep):
    with pytest.raises(BudgetError, match="between 0 and 1"):
        smallest(keep, WHOLE, *curve(1.0, 1.0))
