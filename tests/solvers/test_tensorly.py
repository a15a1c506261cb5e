"""TensorLy's constrained factors and missing entries, measured like every result."""

import numpy as np
import pytest

from lsrdecomp import decompose
from lsrdecomp.errors import BudgetError, LsrError, ShapeError
from lsrdecomp.solvers import SVD, TensorLyCP
from lsrdecomp.targets import KnownEntries

SHAPES = ["6x5, 4x7", "3x5, 2x1, 4x7"]


@pytest.fixture
def positive():
    """Two non-negative terms and a little noise."""
    rng = np.random.default_rng(0)
    terms = [np.kron(rng.random((6, 5)), rng.random((4, 7))) for _ in range(2)]
    return sum(terms) + 0.01 * rng.random((24, 35))


@pytest.mark.parametrize("shape", SHAPES)
def test_non_negative_factors_have_no_negative_entry_and_a_measured_error(positive, shape):
    result = decompose(positive, shape, rank=3, solver=TensorLyCP(non_negative=True))
    residual = np.linalg.norm(positive - result.to_matrix()) / np.linalg.norm(positive)
    assert min(factor.min() for factor in result.factors) >= 0.0
    assert result.relative_error == pytest.approx(residual, rel=1e-12)


def test_a_non_negative_sum_of_two_factors_comes_near_the_nearest_sum(positive):
    nearest = decompose(positive, SHAPES[0], rank=2, solver=SVD())
    parts = decompose(positive, SHAPES[0], rank=2, solver=TensorLyCP(non_negative=True))
    assert nearest.relative_error <= parts.relative_error <= 1.5 * nearest.relative_error


def test_a_constraint_of_one_factor_leaves_the_other_free(positive):
    solver = TensorLyCP(non_negative={0: True})
    result = decompose(positive - 0.5, SHAPES[0], rank=2, solver=solver)
    layouts, tiles = result.factors
    assert layouts.min() >= 0.0
    assert tiles.min() < 0.0


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


@pytest.mark.parametrize("shape", SHAPES)
def test_terms_are_added_till_the_error_of_a_constrained_sum_meets_the_tolerance(positive, shape):
    result = decompose(positive, shape, rtol=0.05, solver=TensorLyCP(non_negative=True))
    assert result.status.met
    assert result.relative_error <= 0.05


@pytest.mark.parametrize("non_negative", [None, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_missing_entries_are_predicted_and_the_error_is_that_of_known_ones(shape, non_negative):
    rng = np.random.default_rng(1)
    whole = np.kron(np.kron(rng.random((3, 5)), rng.random((2, 1))), rng.random((4, 7)))
    damaged = np.where(rng.random(whole.shape) < 0.3, np.nan, whole)
    solver = TensorLyCP(non_negative=non_negative)
    result = decompose(KnownEntries(damaged), shape, rank=1, solver=solver)
    known = ~np.isnan(damaged)
    difference = (whole - result.to_matrix())[known]
    assert result.relative_error == pytest.approx(
        np.linalg.norm(difference) / np.linalg.norm(whole[known]), rel=1e-9, abs=1e-15
    )
    np.testing.assert_allclose(result.to_matrix(), whole, atol=1e-4)


def test_a_mask_says_what_is_known_and_the_rest_is_not_read(positive):
    known = np.random.default_rng(2).random(positive.shape) < 0.7
    results = []
    for filling in (0.0, 1e6):
        target = KnownEntries(np.where(known, positive, filling), known)
        results.append(decompose(target, SHAPES[0], rank=2))
    np.testing.assert_array_equal(results[0].to_matrix(), results[1].to_matrix())


@pytest.mark.parametrize("solver", ["svd", "krylov", "als"])
def test_solvers_that_would_take_missing_entries_for_zeros_are_refused(positive, solver):
    shape = SHAPES[1] if solver == "als" else SHAPES[0]
    with pytest.raises(LsrError, match=r"missing entries is fitted by solver=TensorLyCP\(\)"):
        decompose(KnownEntries(positive), shape, rank=2, solver=solver)


@pytest.mark.parametrize(
    ("matrix", "known", "message"),
    [
        (np.ones((2, 3)), np.ones((3, 2)), r"known has the shape \(3, 2\), the matrix \(2, 3\)"),
        (np.full((2, 2), np.nan), None, "none of the 4 entries is known"),
    ],
)
def test_a_mask_that_fits_no_matrix_is_refused(matrix, known, message):
    with pytest.raises(ShapeError, match=message):
        KnownEntries(matrix, known)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"non_negative": True, "l1_reg": 0.1}, "factor 0 has non_negative and l1_reg"),
        ({"non_negative": {2: True}}, "non_negative: no factor 2; there are 0 to 1"),
        ({"smoothness": 0.1, "l2_reg": 0.1}, "no l2_reg together with smoothness"),
    ],
)
def test_constraints_that_tensorly_cannot_keep_are_refused(positive, settings, message):
    with pytest.raises(BudgetError, match=message):
        decompose(positive, SHAPES[0], rank=2, solver=TensorLyCP(**settings))


def test_constraints_of_complex_matrices_and_beside_missing_entries_are_refused(positive):
    solver = TensorLyCP(smoothness=0.1)
    with pytest.raises(BudgetError, match="constraints are for real matrices"):
        decompose(1j * positive, SHAPES[0], rank=2, solver=solver)
    with pytest.raises(BudgetError, match="with missing entries TensorLy has non_negative=True"):
        decompose(KnownEntries(positive), SHAPES[0], rank=2, solver=solver)
