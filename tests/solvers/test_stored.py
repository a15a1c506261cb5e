"""The fewest terms whose stored error keeps a tolerance, where rounding takes much of it."""

from __future__ import annotations

import numpy as np
import pytest

from lsrdecomp import ErrorBudget, decompose
from lsrdecomp.arrays import as_double
from lsrdecomp.errors import ConvergenceWarning
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.solvers import Status
from lsrdecomp.targets.residual import rows_of
from lsrdecomp.targets.target import Dense

SHAPE = "8x8, 8x8"


@pytest.fixture(scope="module")
def halving() -> np.ndarray:
    """A matrix whose terms halve from one to the next."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((64, 24)))[0] for _ in range(2))
    return sum(
        0.5**k * np.kron(left[:, k].reshape(8, 8), right[:, k].reshape(8, 8)) for k in range(24)
    )


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.parametrize("above_rounding", [1.008, 1.03, 1.1, 1.4])
def test_as_many_terms_are_taken_as_the_tolerance_needs_after_rounding(
    halving: np.ndarray, storage: str, above_rounding: float
) -> None:
    """One term more than truncation needs was tried, and no other."""
    ranks = range(1, 25)
    records = {k: decompose(halving, SHAPE, rank=k, storage=storage) for k in ranks}
    errors = {k: record.relative_error for k, record in records.items()}
    fewest = next(k for k in ranks if errors[k] <= above_rounding * errors[24])
    result = decompose(halving, SHAPE, rtol=1.0005 * errors[fewest], storage=storage)
    assert result.status is Status.converged
    assert result.separation_rank == fewest
    assert result.relative_error <= 1.0005 * errors[fewest]


@pytest.mark.parametrize("rank", [1, 3])
def test_each_term_in_four_bits_has_no_more_values_than_codes(
    halving: np.ndarray, rank: int
) -> None:
    result = decompose(halving, SHAPE, rank=rank, storage="int4")
    for stack in result.approximation.factors:
        assert all(len(np.unique(np.round(factor, 12))) <= 15 for factor in stack)
    error = np.linalg.norm(halving - result.approximation.to_matrix()) / np.linalg.norm(halving)
    assert result.relative_error == pytest.approx(error)


class Unformed:
    """A sum of Kronecker products that is too large to be formed."""

    def __init__(self, matrix: SeparatedMatrix) -> None:
        self.factors, self.weights, self.shape = matrix.factors, matrix.weights, matrix.shape

    def to_matrix(self) -> np.ndarray:
        raise MemoryError


def test_a_residual_forms_no_sum_of_two_factors_in_full(halving: np.ndarray) -> None:
    approximation = decompose(halving, SHAPE, rank=3).approximation
    rows = rows_of(Unformed(approximation))
    formed = as_double(approximation.to_matrix())
    for part in (slice(0, 5), slice(3, 30), slice(60, 64)):
        assert np.allclose(rows(part), formed[part], rtol=0.0, atol=1e-14)
    error = np.linalg.norm(halving - formed)
    assert Dense(halving).residual_norm(Unformed(approximation)) == pytest.approx(error, rel=1e-6)


def test_a_budget_is_missed_rather_than_kept_by_more_terms_than_are_allowed(rng):
    factors = [rng.standard_normal((3, 2, 2)) for _ in range(3)]
    matrix = SeparatedMatrix.from_factors(factors).to_matrix()
    with pytest.warns(ConvergenceWarning, match="Every allowed term was used"):
        result = decompose(matrix, "2x2, 2x2, 2x2", rank=2, budget=ErrorBudget(rtol=1e-2))
    assert result.separation_rank == 2
