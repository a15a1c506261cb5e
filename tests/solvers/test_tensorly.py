"""TensorLy's constrained factors and missing entries, measured like every result."""

import numpy as np
import pytest

from lsrdecomp import decompose
from lsrdecomp.errors import BudgetError, ConvergenceWarning, LsrError
from lsrdecomp.solvers import SVD, TensorLyCP
from lsrdecomp.targets import KnownEntries

SHAPES = ["6x5, 4x7", "3x5, 2x1, 4x7"]


@pytest.fixture
def positive():
    """Two non-negative terms and a little noise."""
    rng = np.random.default_rng(0)
    terms = [np.kron(rng.random((6, 5)), rng.random((4, 7))) for _ in range(2)]
    return sum(terms) + 0.01 * rng.random((24, 35))


def test_monotone_factors_increase_row_by_row():
    line = np.cumsum(np.random.default_rng(0).random(12))
    matrix = np.kron(line[:, None], np.ones((1, 3)))
    result = decompose(matrix, "12x1, 1x3", rank=1, solver=TensorLyCP(monotonicity={0: True}))
    assert np.all(np.diff(result.factors[0][0, :, 0]) >= 0.0)
    assert result.relative_error < 1e-6


def test_smooth_factors_have_smaller_steps():
    noisy = np.sin(np.arange(40) / 6.0) + 0.3 * np.random.default_rng(0).standard_normal(40)
    matrix = np.kron(noisy[:, None], np.ones((1, 4)))
    steps = []
    for solver in (SVD(), TensorLyCP(smoothness={0: 2.0})):
        column = decompose(matrix, "40x1, 1x4", rank=1, solver=solver).factors[0][0, :, 0]
        steps.append(np.linalg.norm(np.diff(column)))
    assert steps[1] < 0.7 * steps[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"monotonicity": True, "l1_reg": 0.1}, "factor 0 has l1_reg and monotonicity"),
        ({"monotonicity": {2: True}}, "monotonicity: no factor 2; there are 0 to 1"),
        ({"smoothness": 0.1, "l2_reg": 0.1}, "no l2_reg together with smoothness"),
    ],
)
def test_constraints_that_tensorly_cannot_keep_are_refused(positive, settings, message):
    with pytest.raises(BudgetError, match=message):
        decompose(positive, SHAPES[0], rank=2, solver=TensorLyCP(**settings))


def test_constraints_of_complex_matrices_are_refused(positive):
    with pytest.raises(BudgetError, match="constraints are for real matrices"):
        decompose(1j * positive, SHAPES[0], rank=2, solver=TensorLyCP(smoothness=0.1))


def test_missing_entries_are_for_another_solver(positive):
    with pytest.raises(LsrError, match=r"missing entries is fitted by solver=WeightedALS\(\)"):
        decompose(KnownEntries(positive), SHAPES[1], rank=2, solver=TensorLyCP())


def test_a_stop_while_the_error_still_falls_is_told(positive):
    with pytest.warns(ConvergenceWarning, match="while its error still fell by"):
        decompose(positive, SHAPES[0], rank=2, solver=TensorLyCP(smoothness={0: 1e-3}))
