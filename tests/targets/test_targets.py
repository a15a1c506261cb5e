"""Targets: dense and low-rank pairs agree, and errors are measured to the last digits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close
from scipy.sparse import coo_array

from lsrdecomp import KroneckerShape, LowRank, SeparatedMatrix, decompose
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.product import low_rank_product
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.targets.target import Dense
from lsrdecomp.testing import kronecker_shapes, low_rank_pairs


@given(kronecker_shapes(order=2), st.data(), st.integers(1, 3))
def test_low_rank_and_dense_targets_agree(shape, data, columns):
    pair = data.draw(low_rank_pairs(shape=shape))
    dense = Dense(pair.to_matrix())
    ours, theirs = pair.rearranged(shape), dense.rearranged(shape)
    assert ours.shape == theirs.shape
    assert_close(ours.formed(), theirs.formed(), size=pair.rank)
    x = np.cos(np.arange(ours.shape[1] * columns)).reshape(-1, columns)
    y = np.sin(np.arange(ours.shape[0] * columns)).reshape(-1, columns)
    scale = max(dense.norm, 1e-300)
    assert np.linalg.norm((ours.matmat(x) - theirs.matmat(x)) / scale) <= 1e-12 * np.linalg.norm(x)
    assert np.linalg.norm((ours.rmatmat(y) - theirs.rmatmat(y)) / scale) <= 1e-12 * np.linalg.norm(
        y
    )
    assert pair.norm == pytest.approx(dense.norm, rel=1e-12)


@given(low_rank_pairs())
def test_balanced_gauge_is_the_same_matrix_with_equal_sides(pair):
    balanced = pair.balanced()
    assert_close(balanced.to_matrix(), pair.to_matrix(), size=pair.rank * 4)
    left, right = balanced.left, balanced.right
    assert_close(left.T @ left, right @ right.T, size=32)
    padded = pair.balanced(pair.rank + 2)
    assert padded.rank == pair.rank + 2
    assert_close(padded.to_matrix(), pair.to_matrix(), size=pair.rank * 4)


@given(low_rank_pairs(), low_rank_pairs())
def test_residual_of_a_product_equals_the_formed_residual(pair, other):
    if pair.shape != other.shape:
        with pytest.raises(ShapeError, match="the target is"):
            pair.residual_norm(low_rank_product(other.left, other.right))
        return
    product = low_rank_product(other.left, other.right)
    formed = np.linalg.norm(pair.to_matrix() - product.to_matrix())
    assert pair.residual_norm(product) == pytest.approx(
        formed, rel=1e-10, abs=1e-13 * (pair.norm + other.norm)
    )


@pytest.mark.parametrize("kind", [float, complex])
@pytest.mark.parametrize("near", [0.0, 0.9, 1.0])
def test_the_distance_of_a_pair_from_kronecker_terms_has_twelve_digits_either_way(
    kind, near, rng, monkeypatch
):
    """Far apart from inner products, without forming a row; near each other from residuals."""
    shape = KroneckerShape(((5, 4), (6, 7)))
    left, right = (
        rng.standard_normal((30, 3)).astype(kind),
        rng.standard_normal((3, 28)).astype(kind),
    )
    if kind is complex:
        left, right = (
            left * np.exp(1j * rng.random((30, 3))),
            right * np.exp(1j * rng.random((3, 28))),
        )
    pair = LowRank(left, right)
    terms = SVD().solve(pair, shape, rank=20 if near == 1.0 else 4).approximation * (near or 0.1)
    expected = np.linalg.norm(left @ right - terms.to_matrix())
    if near < 1.0:
        monkeypatch.setattr("lsrdecomp.targets.target.residual_norm", None)
    assert pair.residual_norm(terms) == pytest.approx(expected, rel=1e-12, abs=1e-14 * pair.norm)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_the_distance_of_a_pair_is_safe_against_overflow(scale, rng):
    shape = KroneckerShape(((5, 4), (6, 7)))
    pair = LowRank(rng.standard_normal((30, 3)) * scale, rng.standard_normal((3, 28)))
    terms = SVD().solve(pair, shape, rank=2).approximation
    expected = np.linalg.norm((pair.to_matrix() - terms.to_matrix()) / scale)
    assert pair.residual_norm(terms) / scale == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "factors", [((4, 3), (5, 6)), ((3, 4), (6, 5)), ((2, 6), (9, 3)), ((9, 3), (2, 6))]
)
def test_columns_of_a_pair_are_multiplied_a_few_at_a_time(factors, rng):
    shape = KroneckerShape(factors)
    rows, columns = shape.matrix_shape
    pair = LowRank(rng.standard_normal((rows, 3)), rng.standard_normal((3, columns))).rearranged(
        shape
    )
    for n_columns in (5, 30_000):  # all together, and in parts
        x, y = (rng.standard_normal((size, n_columns)) for size in shape.sizes[::-1])
        assert_close(pair.matmat(x), pair.formed() @ x, 64)
        assert_close(pair.rmatmat(y), pair.formed().T @ y, 64)


def test_a_residual_at_the_rounding_level_is_not_lost(rng):
    a, b = rng.standard_normal((30, 4)), rng.standard_normal((4, 20))
    pair, dense = LowRank(a, b), Dense(a @ b)
    nudged = low_rank_product(a * (1 + 1e-13), b)
    expected = 1e-13 * pair.norm  # ‖M‖² + ‖M̂‖² − 2⟨M, M̂⟩ reads 1e-8 here
    assert pair.residual_norm(nudged) == pytest.approx(expected, rel=0.05)
    assert dense.residual_norm(nudged) == pytest.approx(expected, rel=0.05)


def test_residuals_are_formed_in_double_for_single_precision_input(rng):
    matrix = rng.standard_normal((16, 16)).astype(np.float32)
    factors = (matrix[None].astype(np.float64), np.ones((1, 1, 1)))
    exact = SeparatedMatrix.from_factors(factors)
    assert Dense(matrix).residual_norm(exact) <= 1e-15 * Dense(matrix).norm


def test_row_blocks_cover_tall_matrices(rng):
    left, right = rng.standard_normal((1300, 2)), rng.standard_normal((2, 3))
    zero = SeparatedMatrix.from_factors((np.zeros((1, 1300, 1)), np.zeros((1, 1, 3))))
    for target in (LowRank(left, right), Dense(left @ right)):
        assert target.residual_norm(zero) == pytest.approx(np.linalg.norm(left @ right), rel=1e-13)


def test_every_library_agrees(xp, rng):
    left, right = rng.standard_normal((12, 3)), rng.standard_normal((3, 10))
    shape = KroneckerShape(((3, 2), (4, 5)))
    ours, theirs = LowRank(xp.asarray(left), xp.asarray(right)), LowRank(left, right)
    x = rng.standard_normal((20, 2))
    assert_close(ours.rearranged(shape).matmat(xp.asarray(x)), theirs.rearranged(shape).matmat(x))
    assert_close(
        ours.rearranged(shape).rmatmat(xp.asarray(x[:6])), theirs.rearranged(shape).rmatmat(x[:6])
    )
    product = low_rank_product(xp.asarray(left[:, :2]), xp.asarray(right[:2]))
    assert ours.residual_norm(product) == pytest.approx(
        theirs.residual_norm(low_rank_product(left[:, :2], right[:2]))
    )


def test_complex_pairs(rng):
    left = rng.standard_normal((6, 2)) + 1j * rng.standard_normal((6, 2))
    right = rng.standard_normal((2, 6)) + 1j * rng.standard_normal((2, 6))
    shape, pair, dense = KroneckerShape(((2, 3), (3, 2))), LowRank(left, right), Dense(left @ right)
    y = rng.standard_normal((6, 2)) + 1j * rng.standard_normal((6, 2))
    assert_close(pair.rearranged(shape).rmatmat(y), dense.rearranged(shape).rmatmat(y))
    assert_close(pair.balanced().to_matrix(), dense.matrix)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (
            np.array([[1.0, np.nan], [np.inf, 2.0]]),
            PrecisionError,
            r"2 of 4 entries are not finite \(the first at \(0, 1\)",
        ),
        (np.array([["a"]]), PrecisionError, "expected a numeric array, got dtype <U1"),
        (
            np.array([[object()]]),
            PrecisionError,
            r"got dtype object; pass numbers, as numpy.asarray\(matrix, float\)",
        ),
        (np.ones(3), ShapeError, "expected two dimensions"),
        (np.ones((0, 3)), ShapeError, "no entries"),
    ],
)
def test_what_cannot_be_approximated_is_refused_with_numbers(value, error, words):
    with pytest.raises(error, match=words):
        Dense(value)


def test_a_sparse_array_of_one_dimension_is_refused_as_any_other():
    pytest.importorskip("scipy", minversion="1.13")  # until then SciPy made a row of it
    with pytest.raises(ShapeError, match=r"expected two dimensions, got shape \(4,\)"):
        decompose(coo_array(np.ones(4)), "2x1, 2x1", rtol=0.1)


def test_integers_lists_and_half_precision_are_promoted():
    assert Dense([[1, 2], [3, 4]]).matrix.dtype == np.float64
    assert Dense(np.ones((2, 2), np.float16)).matrix.dtype == np.float32
    with pytest.raises(ShapeError, match="the left factor has 2 columns, the right one 3 rows"):
        LowRank(np.ones((4, 2)), np.ones((3, 4)))
