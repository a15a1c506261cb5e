"""`decompose` with an error budget: the fewest bytes whose stored error is certified."""

import re
from functools import reduce

import numpy as np
import pytest
from oracles import exact_error
from problems import kronecker_sum

from lsrdecomp.decompose import decompose
from lsrdecomp.errors import BudgetError, ConvergenceError, ConvergenceWarning
from lsrdecomp.formats import smallest
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import ErrorBudget
from lsrdecomp.solvers.cp.als import ALS
from lsrdecomp.solvers.solver import ErrorKind, Status
from lsrdecomp.targets import Dense

TWO = KroneckerShape(((8, 8), (8, 8)))
THREE = KroneckerShape(((4, 4), (4, 4), (4, 4)))


@pytest.fixture(scope="module")
def kernel() -> np.ndarray:
    i = np.arange(64.0)
    return np.log(0.5 + np.abs(i[:, None] - i[None, :]))


@pytest.mark.parametrize(("shape", "rtol"), [(TWO, 3e-2), (TWO, 1e-3), (THREE, 3e-2)])
def test_the_stored_matrix_keeps_the_budget(kernel, shape, rtol):
    result = decompose(kernel, shape, budget=ErrorBudget(rtol=rtol))
    actual = np.linalg.norm(kernel - result.stored.approximation.to_matrix()) / np.linalg.norm(
        kernel
    )
    assert actual <= result.relative_error <= rtol
    assert result.relative_error <= 1.01 * actual
    assert result.error_kind is ErrorKind.bounded
    assert result.status is Status.converged
    plain = decompose(kernel, shape, rtol=rtol, storage="float32")
    assert result.stored.bytes < 4 * plain.parameters


def test_an_absolute_budget_means_the_same(kernel):
    relative = decompose(kernel, TWO, budget=ErrorBudget(rtol=1e-2))
    absolute = decompose(kernel, TWO, budget=ErrorBudget(atol=1e-2 * np.linalg.norm(kernel)))
    assert absolute.stored.bytes == relative.stored.bytes


def test_a_budget_that_the_rank_cannot_keep_says_so(kernel):
    with pytest.warns(ConvergenceWarning, match="Every allowed term was used"):
        result = decompose(kernel, TWO, rank=2, budget=ErrorBudget(rtol=1e-6))
    assert result.stored is None
    assert result.status is Status.rank_exhausted
    with pytest.raises(ConvergenceError, match="truncation alone"):
        decompose(kernel, TWO, rank=2, budget=ErrorBudget(rtol=1e-6), throw=True)


@pytest.mark.parametrize("storage", [None, "float64"])
@pytest.mark.parametrize("rtol", [3e-8, 1e-9, 1e-13])
def test_a_budget_finer_than_float32_is_kept(rtol, storage, rng):
    """Weights in float32 stood in the way of anything below 3e-8, float64 storage or not."""
    matrix = rng.standard_normal((16, 16))
    result = decompose(matrix, budget=ErrorBudget(rtol=rtol, storage=storage), throw=True)
    read = result.stored.approximation
    assert exact_error(matrix, read) <= result.stored.certified_error <= rtol * result.target_norm
    assert result.status is Status.converged


@pytest.mark.parametrize(
    ("storage", "rank", "rtol"),
    [(None, None, 1e-16), ("float64", None, 1e-16), ("float16", None, 1e-6), (None, 2, 1e-6)],
)
def test_the_advice_of_a_refused_budget_works_when_it_is_typed(kernel, storage, rank, rtol):
    def solve(rtol, storage):
        budget = ErrorBudget(rtol=rtol, storage=storage)
        return decompose(kernel, TWO, rank=rank, budget=budget, throw=True)

    with pytest.raises(ConvergenceError) as refused:
        solve(rtol, storage)
    message = str(refused.value)
    advised = float(re.search(r"rtol=([0-9.e+-]+)", message)[1])
    assert solve(advised, storage).relative_error <= advised
    for finer in re.findall(r"float\d+", message.partition("store in")[2]):
        assert solve(rtol, finer).relative_error <= rtol


def test_a_coarse_compute_type_is_reported(kernel):
    with pytest.warns(ConvergenceWarning, match="Terms cancel"):
        result = decompose(kernel, TWO, budget=ErrorBudget(rtol=1e-3, compute="bfloat16"))
    assert result.status is Status.ill_conditioned


def test_a_budget_and_a_tolerance_are_two_goals(kernel):
    with pytest.raises(BudgetError, match="leave out rtol"):
        decompose(kernel, TWO, rtol=1e-2, budget=ErrorBudget(rtol=1e-2))


def test_a_budget_for_the_zero_matrix_stores_nothing():
    result = decompose(np.zeros((64, 64)), TWO, budget=ErrorBudget(rtol=1e-2))
    assert result.stored.separation_rank == 0
    assert np.linalg.norm(rearrange(result.approximation.to_matrix(), TWO)) == 0.0


def test_a_budget_is_kept_and_costs_no_more_than_the_exact_terms_in_single_precision():
    """How near it comes is luck: the entries are small integers, exact in few bits."""
    order, rtol = 3, 1e-5
    exact = kronecker_sum(order)
    matrix = exact.to_matrix()
    ours = decompose(matrix, exact.kronecker_shape, budget=ErrorBudget(rtol=rtol)).stored
    assert np.linalg.norm(matrix - ours.approximation.to_matrix()) <= rtol * np.linalg.norm(matrix)
    assert ours.bytes <= 4 * exact.parameters + 4 * order
    stored_alone = smallest(Dense(matrix), exact, atol=rtol * np.linalg.norm(matrix))
    # Given the sum itself, its own terms compete.
    known = decompose(exact, exact.kronecker_shape, budget=ErrorBudget(rtol=rtol))
    assert known.stored.bytes <= stored_alone.bytes


def test_one_number_format_for_a_whole_budget(kernel):
    for storage in ("float16", "int8", "fp32"):
        stored = decompose(kernel, TWO, budget=ErrorBudget(rtol=0.1, storage=storage)).stored
        formats = {name for term in stored.formats for name in term}
        assert formats == {storage.replace("fp", "float")}
    assert ErrorBudget(rtol=0.1, storage="int8").unit_roundoff == pytest.approx(1 / 254)


def test_no_fit_goes_further_below_a_budget_than_rounding_can_use(monkeypatch, rng):
    """Fits of 18 to 21 terms went on to 1e-10 for 1e-6: eleven seconds for 384 numbers."""
    tolerances = []
    solve = ALS._solve

    def recorded(self, problem):
        tolerances.append(problem.relative_goal)
        return solve(self, problem)

    monkeypatch.setattr(ALS, "_solve", recorded)
    shape = ((3, 4), (2, 4), (2, 2))
    matrix = 1e-4 * rng.standard_normal((12, 32))
    for _ in range(2):
        matrix += reduce(np.kron, [rng.standard_normal(size) for size in shape])
    record = decompose(matrix, shape, budget=ErrorBudget(rtol=1e-5))
    assert record.status.met
    assert min(tolerance or 0.0 for tolerance in tolerances) > 0.5e-6
