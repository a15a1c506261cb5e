"""One budget over all layers: beside every combination on small cases, and known solutions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.allocation import (
    PartOptions,
    total_cost,
    total_loss,
    within_cost,
    within_loss,
)


@st.composite
def layers(draw: st.DrawFn) -> list[PartOptions]:
    count = draw(st.integers(1, 4))
    found = []
    for _ in range(count):
        pairs = draw(
            st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 10.0)), min_size=1, max_size=5)
        )
        found.append(
            PartOptions.of([0, *(cost for cost, _ in pairs)], [20.0, *(loss for _, loss in pairs)])
        )
    return found


def every_choice(options: list[PartOptions]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(layer.costs.size) for layer in options)))


def test_the_hull_is_convex_and_below_every_option() -> None:
    rng = np.random.default_rng(3)
    options = PartOptions.of(rng.integers(0, 100, 30), rng.random(30))
    hull = options.hull()
    costs, losses = options.costs[hull], options.losses[hull]
    slopes = np.diff(losses) / np.diff(costs)
    assert hull[0] == options.cheapest
    assert hull[-1] == options.best
    assert np.all(np.diff(slopes) > 0)
    inside = (options.costs >= costs[0]) & (options.costs <= costs[-1])
    assert np.all(options.losses[inside] >= np.interp(options.costs[inside], costs, losses) - 1e-12)


@given(layers(), st.integers(0, 120))
def test_the_budget_is_kept_and_the_loss_is_near_the_best_of_all_combinations(
    options: list[PartOptions], budget: int
) -> None:
    choice = within_cost(options, budget)
    assert total_cost(options, choice) <= budget
    allowed = [c for c in every_choice(options) if total_cost(options, c) <= budget]
    best = min(total_loss(options, c) for c in allowed)
    assert total_loss(options, choice) >= best - 1e-12
    # Greedy on the hull is within one option's gain of the bound; one unit more than the largest
    # option reaches it.
    roomier = within_cost(options, budget + max(float(layer.costs.max()) for layer in options))
    assert total_loss(options, roomier) <= best + 1e-9


@given(layers(), st.integers(0, 120), st.data())
def test_never_worse_than_any_start_within_the_budget(
    options: list[PartOptions], budget: int, data: st.DataObject
) -> None:
    allowed = [c for c in every_choice(options) if total_cost(options, c) <= budget]
    start = list(data.draw(st.sampled_from(allowed)))
    choice = within_cost(options, budget, [start])
    assert total_loss(options, choice) <= total_loss(options, start)
    assert total_cost(options, choice) <= budget


@given(layers(), st.floats(0.0, 60.0))
def test_the_loss_is_kept_at_little_cost(options: list[PartOptions], allowed: float) -> None:
    least = sum(float(layer.losses.min()) for layer in options)
    if allowed < least:
        with pytest.raises(BudgetError, match="out of reach"):
            within_loss(options, allowed * (1 - 1e-9))
        return
    choice = within_loss(options, allowed)
    assert total_loss(options, choice) <= allowed
    singles = [list(choice) for _ in options]
    for i, layer in enumerate(options):  # no single cheaper option would do
        for option in range(layer.costs.size):
            singles[i][i] = option
            if layer.costs[option] < layer.costs[choice[i]]:
                assert total_loss(options, singles[i]) > allowed


def test_an_exchange_between_layers_is_found() -> None:
    first = PartOptions.of([0, 6, 10], [10.0, 4.0, 3.9])
    second = PartOptions.of([0, 5], [10.0, 1.0])
    assert within_cost([first, second], 10, [[2, 0]]) == [0, 1]
    assert within_cost([first, second], 11) == [1, 1]


def test_a_start_that_costs_all_of_the_budget_is_taken() -> None:
    first = PartOptions.of([0, 1, 9], [10.0, 8.0, 0.0])
    second = PartOptions.of([0, 8], [10.0, 3.0])
    assert within_cost([first, second], 8) == [1, 0]
    assert within_cost([first, second], 8, [[0, 1]]) == [0, 1]


def test_what_is_reachable_is_said() -> None:
    options = [PartOptions.of([5, 9], [3.0, 1.0]), PartOptions.of([7], [2.0])]
    with pytest.raises(BudgetError, match="cost 12 together"):
        within_cost(options, 11)
    with pytest.raises(BudgetError, match="lose 3 together"):
        within_loss(options, 2.9)
    with pytest.raises(BudgetError, match="finite and not negative"):
        PartOptions.of([1.0], [float("nan")])
    with pytest.raises(BudgetError, match="at least one"):
        PartOptions.of([], [])


def test_hundreds_of_layers_with_many_options_are_quick_enough_to_use() -> None:
    rng = np.random.default_rng(0)
    options = []
    for _ in range(224):
        costs = np.sort(rng.integers(1, 5000, 40))
        losses = np.sort(rng.random(40))[::-1] * rng.lognormal()
        options.append(PartOptions.of([0, *costs], [losses[0] * 2, *losses]))
    choice = within_cost(options, 100_000)
    spent = total_cost(options, choice)
    assert 100_000 - 5 <= spent <= 100_000
    uniform = [max(i for i in range(41) if layer.costs[i] <= 100_000 / 224) for layer in options]
    assert total_loss(options, choice) < 0.9 * total_loss(options, uniform)
