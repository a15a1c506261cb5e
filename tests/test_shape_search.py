"""The search over shapes finds what trying every shape finds, and says what it compared."""

from functools import cache

import numpy as np
import pytest

from lsrdecomp import ErrorBudget, KroneckerShape, LowRank, decompose
from lsrdecomp.errors import BudgetError, ConvergenceError
from lsrdecomp.kronecker.shape import kronecker_shapes
from lsrdecomp.shape_search import best_shape
from lsrdecomp.targets.target import Dense


@cache
def relative_tails(name):
    """Of each shape the errors by number of terms, by the full spectrum of the rearrangement."""
    target, tails = Dense(PROBLEMS[name]), {}
    for shape in kronecker_shapes(target.shape):
        sigma = np.linalg.svd(target.rearranged(shape).formed(), compute_uv=False)
        tails[shape] = np.sqrt(np.append(np.cumsum(sigma[::-1] ** 2)[::-1], 0.0)) / target.norm
    return tails


def brute_force(name, *, rtol=None, parameters=None):
    """(parameters, error) of the best shape."""
    outcomes = []
    for shape, tails in relative_tails(name).items():
        if rtol is not None:
            rank = max(int(np.flatnonzero(tails <= rtol)[0]), 1)
            outcomes.append((shape.parameters(rank), tails[rank]))
        elif shape.parameters(1) <= parameters:
            rank = min(parameters // shape.parameters(1), len(tails) - 1)
            outcomes.append((shape.parameters(rank), tails[rank]))
    return min(outcomes, key=lambda o: o if rtol is not None else o[::-1])


def problems():
    rng = np.random.default_rng(7)
    i, j = np.arange(144.0)[:, None], np.arange(160.0)[None, :]
    blocks = sum(
        np.kron(rng.standard_normal((9, 20)), rng.standard_normal((16, 8))) * 0.5**k
        for k in range(8)
    )
    return {
        "kernel": 1.0 / (1.0 + np.abs(i - j)),
        "hidden shape": blocks + 1e-3 * rng.standard_normal((144, 160)),
        "low rank": rng.standard_normal((144, 5)) @ rng.standard_normal((5, 160)),
        "noise": rng.standard_normal((144, 160)),
        "banded": np.where(np.abs(i - j) <= 2, 1.0 + 0.1 * np.sin(i), 0.0),
    }


PROBLEMS = problems()


@pytest.mark.parametrize("rtol", [0.3, 1e-2, 1e-5])
@pytest.mark.parametrize("name", PROBLEMS)
def test_parameters_are_within_two_percent_of_the_best_shape(name, rtol):
    matrix = PROBLEMS[name]
    found = best_shape(matrix, rtol=rtol).best
    fewest, _ = brute_force(name, rtol=rtol)
    assert found.parameters <= 1.02 * min(fewest, matrix.size + 1)
    measured = decompose(matrix, found.shape, rank=found.rank)
    assert measured.relative_error <= rtol * (1 + 1e-6)
    assert measured.relative_error == pytest.approx(found.relative_error, rel=0.02, abs=1e-12)


@pytest.mark.parametrize("parameters", [400, 2500])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_error_at_a_parameter_budget_is_within_two_percent(name, parameters):
    matrix = PROBLEMS[name]
    found = best_shape(matrix, parameters=parameters).best
    _, least = brute_force(name, parameters=parameters)
    assert found.parameters <= parameters
    assert found.relative_error <= 1.02 * least + 1e-12


def test_low_rank_and_dense_are_named_and_never_lost():
    found = best_shape(PROBLEMS["low rank"], rtol=1e-10)
    assert found.best.structure == "low rank"
    assert found.best.parameters == 5 * (144 + 160) == found.low_rank.parameters
    noise = best_shape(PROBLEMS["noise"], rtol=1e-6)
    assert noise.best.structure == "dense"
    assert noise.best == noise.dense
    kernel = best_shape(PROBLEMS["kernel"], rtol=1e-2)
    assert kernel.best.structure == "kronecker"
    assert kernel.examined <= kernel.candidates == len(list(kronecker_shapes((144, 160))))


def test_prime_sides_are_padded_only_when_that_is_cheaper(rng):
    i = np.arange(127.0)
    kernel = 1.0 / (1.0 + np.abs(i[:, None] - i))
    plain, padded = best_shape(kernel, rtol=1e-2), best_shape(kernel, rtol=1e-2, pad=True)
    assert not plain.best.padded
    assert padded.best.parameters <= plain.best.parameters
    low_rank = rng.standard_normal((127, 2)) @ rng.standard_normal((2, 131))
    assert not best_shape(low_rank, rtol=1e-6, pad=True).best.padded


def test_padding_pays_for_a_prime_sized_kernel():
    i = np.arange(257.0)
    kernel = 1.0 / (1.0 + np.abs(i[:, None] - i))
    found, plain = (best_shape(kernel, rtol=1e-1, pad=pad) for pad in (True, False))
    assert found.best.padded
    assert found.best.shape.matrix_shape[0] > 257
    assert found.best.parameters < plain.best.parameters


def test_other_targets_and_absolute_errors(rng):
    pair = LowRank(rng.standard_normal((144, 3)), rng.standard_normal((3, 160)))
    found = best_shape(pair, atol=1e-9 * pair.norm)
    assert found.best.shape in (
        KroneckerShape(((144, 1), (1, 160))),
        KroneckerShape(((1, 160), (144, 1))),
    )
    assert found.best.rank == 3


def test_the_zero_matrix_needs_nothing():
    found = best_shape(np.zeros((6, 4)), rtol=1e-3)
    assert found.best.parameters == 0


@pytest.mark.parametrize("goal", [{}, {"rtol": 0.1, "parameters": 10}])
def test_one_goal_is_asked_for(goal):
    with pytest.raises(BudgetError, match="give one of rtol"):
        best_shape(np.ones((4, 4)), **goal)


def test_a_budget_below_one_term_says_what_one_costs():
    with pytest.raises(BudgetError, match="has fewer than 8 parameters a term"):
        best_shape(np.ones((4, 4)), parameters=7)


@pytest.mark.parametrize("parameters", [3000, 8000])
def test_a_shape_whose_noise_settles_slowly_is_offered_and_not_lost(parameters):
    rng = np.random.default_rng(3)
    terms = [
        np.kron(rng.standard_normal((16, 16)), rng.standard_normal((16, 16))) for _ in range(3)
    ]
    found = best_shape(sum(terms) + 1e-6 * rng.standard_normal((256, 256)), parameters=parameters)
    assert found.best.relative_error < 1e-6


def test_decompose_can_search_the_shape():
    matrix = PROBLEMS["hidden shape"]
    result = decompose(matrix, "search", rtol=2e-2)
    fewest, _ = brute_force("hidden shape", rtol=2e-2)
    assert result.parameters <= 1.02 * fewest
    assert result.relative_error <= 2e-2
    assert decompose(PROBLEMS["noise"], "search", rtol=1e-9).relative_error <= 1e-9
    assert decompose(np.zeros((6, 4)), "search", rtol=0.1).separation_rank == 0
    with pytest.raises(BudgetError, match="tolerance"):
        decompose(matrix, "search", rank=3)


@pytest.mark.parametrize("name", ["kernel", "hidden shape", "low rank"])
def test_a_budget_searches_for_the_fewest_bytes(name):
    matrix, budget = PROBLEMS[name], ErrorBudget(rtol=2e-2)
    found = decompose(matrix, "search", budget=budget)
    assert found.relative_error <= 2e-2
    shapes = sorted(best_shape(matrix, rtol=2e-2).choices, key=lambda choice: choice.parameters)
    others = [decompose(matrix, choice.shape, budget=budget) for choice in shapes[:3]]
    assert found.stored.bytes == min(other.stored.bytes for other in others)
    assert found.stored.bytes < decompose(matrix, budget=budget).stored.bytes or name == "kernel"
    assert found.bytes == found.stored.bytes


def test_a_budget_that_no_shape_keeps_is_missed_in_the_shape_of_fewest_parameters():
    matrix, budget = PROBLEMS["kernel"], ErrorBudget(rtol=1e-6, storage="int4")
    with pytest.raises(ConvergenceError) as missed:
        decompose(matrix, "search", budget=budget, throw=True)
    record = missed.value.record
    assert record.stored is None
    assert record.kronecker_shape == best_shape(matrix, rtol=1e-6).best.shape


def test_a_search_prints_its_choice_and_what_it_was_compared_with():
    i = np.arange(64.0)
    search = best_shape(1.0 / (1.0 + i[:, None] + i[None, :]), rtol=1e-3)
    text = repr(search)
    assert str(search.best) in text
    assert f"{search.best.parameters:,} parameters" in text
    assert f"{search.low_rank.parameters:,}, dense 4,096;" in text
    assert "\n" not in text
    assert len(text) < 200


def test_a_single_term_that_is_near_enough_ends_the_search_of_its_shape(rng):
    matrix = np.kron(rng.standard_normal((12, 12)), rng.standard_normal((12, 12)))
    # R(M) is 144 × 144, for a Krylov space
    found = best_shape(matrix + 1e-4 * rng.standard_normal((144, 144)), rtol=0.1)
    assert (str(found.best.shape), found.best.rank) == ("12×12 ⊗ 12×12", 1)
    assert found.unresolved <= 1  # another shape may need the whole space


def test_a_sum_of_few_terms_ends_the_search_of_its_shape(rng):
    left, right = rng.standard_normal((2, 3, 16, 16))
    found = best_shape(sum(map(np.kron, left, right)), parameters=2000)
    assert (str(found.best.shape), found.best.rank) == ("16×16 ⊗ 16×16", 3)
    assert found.best.relative_error < 1e-12
    assert found.unresolved == 0
