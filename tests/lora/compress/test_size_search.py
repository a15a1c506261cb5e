"""The search for the smallest variant: few measurements, never one that keeps too little."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from lsrdecomp.errors import BudgetError  # noqa: E402
from lsrdecomp.lora.base.behaviour import Behaviour  # noqa: E402
from lsrdecomp.lora.compress import goals  # noqa: E402
from lsrdecomp.lora.compress.goals import ShareGoal  # noqa: E402
from lsrdecomp.lora.compress.size_search import BRACKET_RATIO, MAX_MEASURED, MeasuredSizes  # noqa: E402
from lsrdecomp.lora.compress.variants import CompressedVariant, DistilledVariant  # noqa: E402
from lsrdecomp.lora.train.distillation import Distillation  # noqa: E402

WHOLE = 1e6
ERROR = 0.01
"""Standard error of the share that a variant keeps."""


def curve(factor, power):
    """Return the squared error of a size, and what a variant of it keeps.

    The factor is not the one that the search begins with.
    """

    def expected(size):
        return (WHOLE / SMALL / size) ** 0.5 if size < WHOLE else 0.0

    def measure(size):
        return losing(min(1.0, factor * expected(size) ** power))

    return expected, measure


SMALL = 4096.0


@given(factor=st.floats(0.2, 3.0), power=st.floats(0.75, 1.4), keep=st.floats(0.5, 0.95))
def test_the_variant_found_keeps_enough_and_little_smaller_ones_do_not(factor, power, keep):
    expected, measure = curve(factor, power)
    # A variant within a standard error of the target is taken.
    least = (WHOLE / SMALL) * ((1 - keep - ERROR) / factor) ** (-2 / power)
    assume(least < WHOLE / 1.2)
    seen = {}
    variant = MeasuredSizes(WHOLE, expected, measure, seen).smallest(keep)
    size = min(each for each, variant in seen.items() if variant.behaviour.kept >= keep)
    assert len(seen) <= MAX_MEASURED
    assert variant is seen[size]
    assert size <= BRACKET_RATIO**2 * max(least, WHOLE / SMALL)


def test_a_known_factor_needs_few_measurements():
    expected, measure = curve(1.0, 1.0)
    seen = {}
    variant = MeasuredSizes(WHOLE, expected, measure, seen).smallest(0.9)
    least = (WHOLE / SMALL) * 0.1**-2
    assert len(seen) <= 4
    assert size_of(seen, variant) <= BRACKET_RATIO**2 * least


def test_what_was_measured_before_is_where_the_search_goes_on():
    expected, measure = curve(0.9, 1.0)
    seen = {size: measure(size) for size in (1e4, 1e5)}  # too little, and enough
    assert 1e4 < size_of(seen, MeasuredSizes(WHOLE, expected, measure, seen).smallest(0.9)) < 1e5
    assert all(1e4 <= size <= 1e5 for size in seen)
    assert len(seen) <= 4


@pytest.mark.parametrize(("error", "count"), [(0.01, 1), (0.0001, 2)])
def test_a_variant_that_keeps_little_more_than_asked_is_taken(error, count):
    """Little is a standard error, within which a smaller variant could not be told apart."""
    expected, _ = curve(1.0, 1.0)
    shares = iter((0.905, 0.9))

    def measure(size):
        return losing(1.0 - next(shares), error)

    seen = {}
    MeasuredSizes(WHOLE, expected, measure, seen).smallest(0.9)
    assert len(seen) == count


def test_what_a_size_loses_is_read_between_the_variants_that_were_measured():
    expected, measure = curve(0.5, 1.2)
    seen = {size: measure(size) for size in (2e5, 1e3, 2e4)}  # in any order
    sizes = MeasuredSizes(WHOLE, expected, measure, seen)
    for size in (1e3, 5e3, 2e4, 1e5):
        assert sizes.loss_at(size) == pytest.approx(1.0 - measure(size).behaviour.kept, rel=1e-6)
    beyond = sizes.loss_at(2e5) * expected(4e5) / expected(2e5)
    assert sizes.loss_at(4e5) == pytest.approx(beyond)


@pytest.mark.parametrize(("factor", "count"), [(0.8, 2), (0.92, 1), (1.04, 1), (1.1, 2)])
def test_no_variant_is_trained_that_loses_more_than_training_makes_good(factor, count):
    """One that loses about so much will do; of what the first lost the second is known."""
    expected, measure = curve(factor, 1.0)
    seen = {}
    variant = MeasuredSizes(WHOLE, expected, measure, seen).variant_near_loss(0.2)
    assert len(seen) == count
    assert 0.18 < 1.0 - variant.behaviour.kept <= 0.21


def test_of_two_variants_near_what_training_makes_good_the_one_that_loses_less_is_trained():
    sizes = MeasuredSizes(
        WHOLE, lambda size: 3115.0 / size, lambda _: losing(0.191), {3115.0: losing(0.2447)}
    )
    assert sizes.variant_near_loss(0.2177).behaviour.kept == pytest.approx(1.0 - 0.191)


def test_a_size_that_was_nearly_measured_is_not_measured_again():
    """It lost less where more shapes had been solved: so would all others near it."""
    seen = {3115.0: losing(0.2447), 3130.0: losing(0.1)}
    sizes = MeasuredSizes(WHOLE, lambda size: 3115.0 / size, pytest.fail, seen)
    assert sizes.variant_near_loss(0.15) is seen[3130.0]


def losing(share, error=ERROR):
    """A variant that loses a share."""
    return CompressedVariant(None, None, Behaviour(100, 100, "example", share, 0.9, 1.0, error))


def size_of(measured, variant):
    return next(size for size, other in measured.items() if other is variant)


class Variants:
    """A cache of variants that each keep .75, and what is given here after training."""

    evaluator = SimpleNamespace(source=SimpleNamespace(head=None), announce=lambda *_: None)
    statistics = None

    def __init__(self, weights, kept_by_steps, kept_of_checks):
        self.source = SimpleNamespace(weights=weights, extra_bytes=0, adapter_parameters=WHOLE)
        self.kept, self.checks, self.trained = kept_by_steps, kept_of_checks, []

    def measure(self, compression):
        return replace(losing(0.25), compression=compression, path=compression.path)

    def train(self, variant, stage_prefix="", target_share=math.inf, *, rate=None):
        steps = next(
            (steps for steps, share in self.checks if share >= target_share), self.checks[-1][0]
        )
        checks = tuple(check for check in self.checks if check[0] <= steps)
        self.trained.append((variant.path.name, steps))
        after = losing(1.0 - self.kept[steps]).behaviour
        training = Distillation(steps, 0.1, 0.75, checks[-1][1], 1.0, checks)
        return CompressedVariant(
            variant.compression,
            variant.path,
            after,
            DistilledVariant(variant.path, variant.path, variant.behaviour, after, training),
        )


def searched_sizes(folder):
    def compress(plan, fill):
        path = folder / f"{plan.parameters:.0f}"
        return SimpleNamespace(
            path=path, totals=SimpleNamespace(parameters=plan.parameters, ratio=1.0)
        )

    return SimpleNamespace(
        expected_error=lambda plan: min(1.0, 1e3 / plan.parameters), compress=compress
    )


@pytest.mark.parametrize(
    ("kept", "steps"),
    [
        ({30: 0.946, 60: 0.953}, [30, 60]),
        ({30: 0.951, 60: 0.953}, [30, 60]),  # 0.951 ± 0.01 may be chance
        ({30: 0.962, 60: 0.97}, [30]),
        ({30: 0.946, 60: 0.94}, [30, 60, 30, 60, 30, 60]),  # one more where all miss
    ],
)
def test_a_training_that_ended_too_early_goes_on_before_another_variant_is_trained(
    kept, steps, tmp_path, monkeypatch
):
    (tmp_path / "lora").write_bytes(bytes(100))
    monkeypatch.setattr(goals, "bytes_to_open", lambda _: 4 * WHOLE)
    variants = Variants(tmp_path / "lora", kept, [(0, 0.75), (30, 0.956), (60, 0.957)])
    smallest = ShareGoal(
        variants, lambda _, statistics: searched_sizes(tmp_path), 0.95, {"storage": "float32"}
    )
    monkeypatch.setattr(smallest, "untrained", lambda: "untrained")
    for pruning in ("_pruned_and_trained", "_pruned"):
        monkeypatch.setattr(smallest, pruning, lambda variant: variant)
    best = smallest.trained()
    assert [number for _, number in variants.trained] == steps
    assert (best == "untrained") == (len(steps) == 6)


def refused_below(least, asked):
    """Shapes of a search in which smaller files have no room for a layer's header."""

    def compress(plan, fill):
        asked.append(plan.bytes if plan.bytes is not None else plan.parameters)
        if asked[-1] < least:
            raise BudgetError("a layer has no room")
        return SimpleNamespace(path=None, totals=SimpleNamespace(parameters=asked[-1]))

    return SimpleNamespace(expected_error=lambda plan: 0.1, compress=compress)


@pytest.mark.parametrize("storage", ["auto", "float32"])
def test_a_file_too_small_for_a_layer_is_made_a_little_larger_and_parameters_are_not(
    storage, tmp_path, monkeypatch
):
    """Bytes have a header that depends on the layers; so many parameters are what was asked."""
    (tmp_path / "lora").write_bytes(bytes(100))
    monkeypatch.setattr(goals, "bytes_to_open", lambda _: WHOLE)
    variants = Variants(tmp_path / "lora", {}, [])
    variants.measure = lambda compression: replace(losing(0.1), compression=compression)
    asked = []
    goal = ShareGoal(
        variants, lambda _, statistics: refused_below(1200, asked), 0.5, {"storage": storage}
    )
    if storage == "float32":
        with pytest.raises(BudgetError, match="no room"):
            goal._measure(1000.0)
        assert asked == [1000.0]
        return
    found = goal._measure(1000.0)
    assert found.compression.totals.parameters == asked[-1]
    assert 1200 <= asked[-1] < 1200 * 1.1
    assert asked == sorted(asked)
    assert asked[0] == 1000
    # One that is refused in the size of the LoRA itself is refused
    goal.searched = refused_below(2 * WHOLE, asked)
    with pytest.raises(BudgetError, match="no room"):
        goal._measure(0.9 * WHOLE)
    assert asked[-1] <= 1.1 * WHOLE


def test_what_cannot_be_kept_says_what_can():
    with pytest.raises(BudgetError, match=r"keeps 0.95 .* the best of \d keeps 0.800"):
        MeasuredSizes(WHOLE, curve(1.0, 1.0)[0], lambda _: losing(0.2)).smallest(0.95)
