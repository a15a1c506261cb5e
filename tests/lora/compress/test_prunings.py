"""How much of a variant is pruned: the tries close in on a loss, and few are needed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from lsrdecomp.lora.base.behaviour import Behaviour
from lsrdecomp.lora.compress.prunings import (
    MAX_PRUNED_SAVING,
    MAX_PRUNINGS,
    PRUNED_CURVATURE,
    PRUNED_TOLERANCE,
    PruningSearch,
    share_at_loss,
)
from lsrdecomp.lora.compress.size_search import loss_of
from lsrdecomp.lora.compress.variants import CompressedVariant


def losing(loss):
    """A variant that loses such a share."""
    behaviour = Behaviour(48, 480, "token", loss, 0.9, effect=1.0)
    return CompressedVariant(SimpleNamespace(), None, behaviour)


def search_with(loss_of_share):
    """The search of a variant whose prunings lose what a formula says."""
    return PruningSearch(losing(loss_of_share(0.0)), lambda _, share: losing(loss_of_share(share)))


@pytest.mark.parametrize("power", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("curvature", [4.0, 8.0, 16.0])
def test_tries_end_just_below_the_loss_that_is_allowed(curvature, power):
    search = search_with(lambda share: 0.03 * np.exp(curvature * share**power))
    search.close_in(lambda _: 0.047)
    assert len(search.pruned) <= MAX_PRUNINGS
    nearest = max(loss_of(each) for each in search.pruned if loss_of(each) <= 0.047)
    assert nearest >= (1.0 - PRUNED_TOLERANCE) * 0.047


def test_where_the_law_holds_the_first_try_is_the_last():
    search = search_with(lambda share: 0.03 * np.exp(PRUNED_CURVATURE * share**2))
    search.close_in(lambda _: 0.047)
    assert [loss_of(each) for each in search.pruned] == [pytest.approx(0.95 * 0.047, rel=1e-3)]


def test_a_later_search_begins_with_the_tries_of_an_earlier_one():
    search = search_with(lambda share: 0.02 * np.exp(5.0 * share**2))
    search.close_in(lambda _: 0.06)
    before = len(search.pruned)
    search.close_in(lambda _: 0.047)
    assert len(search.pruned) == before + 1


def test_nothing_is_pruned_of_a_variant_that_has_nothing_to_spend():
    search = search_with(lambda share: 0.045 * np.exp(8.0 * share**2))
    search.close_in(lambda _: 0.047)
    assert search.pruned == []


def test_no_more_is_pruned_than_may_be_and_not_twice_the_same():
    search = search_with(lambda _: 0.001)
    search.close_in(lambda _: 0.047)
    limit = 1.0 - 1.0 / MAX_PRUNED_SAVING
    assert max(search.tried) <= limit
    assert len(search.tried) == len(set(search.tried)) <= 1 + MAX_PRUNINGS


def test_between_tries_the_logarithm_is_linear_in_the_square_of_the_share():
    losses = {0.0: 0.01, 0.1: 0.02, 0.3: 0.08}
    share = share_at_loss(losses, 0.04)
    assert share**2 == pytest.approx(0.5 * (0.1**2 + 0.3**2), rel=1e-4)
    # A pruning that lost less than a smaller one did so by chance.
    assert share_at_loss({0.0: 0.02, 0.1: 0.03, 0.2: 0.025}, 0.04) == 0.4
