"""`decompose` with an error budget: the fewest bytes whose stored error is certified."""

import numpy as np
import pytest

from lsrdecomp.decompose import decompose
from lsrdecomp.errors import BudgetError, ConvergenceError
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import ErrorBudget
from lsrdecomp.solvers.base import ErrorKind, Status

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
    result = decompose(kernel, TWO, rank=2, budget=ErrorBudget(rtol=1e-6))
    assert result.stored is None
    assert result.status is Status.rank_exhausted
    with pytest.raises(ConvergenceError, match="truncation alone"):
        decompose(kernel, TWO, rank=2, budget=ErrorBudget(rtol=1e-6), throw=True)


def test_a_coarse_compute_type_is_reported(kernel):
    result = decompose(kernel, TWO, budget=ErrorBudget(rtol=1e-3, compute="bfloat16"))
    assert result.status is Status.ill_conditioned


def test_a_budget_and_a_tolerance_are_two_goals(kernel):
    with pytest.raises(BudgetError, match="leave out rtol"):
        decompose(kernel, TWO, rtol=1e-2, budget=ErrorBudget(rtol=1e-2))


def test_a_budget_for_the_zero_matrix_stores_nothing():
    result = decompose(np.zeros((64, 64)), TWO, budget=ErrorBudget(rtol=1e-2))
    assert result.stored.separation_rank == 0
    assert np.linalg.norm(rearrange(result.approximation.to_matrix(), TWO)) == 0.0
