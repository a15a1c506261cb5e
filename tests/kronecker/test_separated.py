"""SeparatedMatrix: normalised terms, norm and condition that survive cancellation."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, kron_sum

from lsrdecomp import KroneckerShape, SeparatedMatrix, decompose
from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker import SeparatedProduct
from lsrdecomp.kronecker.product import low_rank_product
from lsrdecomp.kronecker.pytree import register_pytree
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.testing import kronecker_shapes, low_rank_pairs, separated_matrices

TWO = kronecker_shapes(order=2)


@given(separated_matrices())
def test_terms_are_normalised_and_descend(case):
    assert np.all(np.diff(case.weights) <= 0)
    for factor in case.factors:
        assert_close(np.linalg.norm(factor, axis=(1, 2)), np.ones(case.separation_rank))


@given(separated_matrices())
def test_norm_and_condition_are_those_of_the_formed_matrix(case):
    formed = kron_sum(case.weights, case.factors)
    rounding = 1e-14 * np.linalg.norm(case.weights)
    assert abs(case.norm - np.linalg.norm(formed)) <= rounding
    assert case.condition >= 1 / math.sqrt(case.separation_rank) - 1e-12
    assert abs(case.condition * case.norm - np.linalg.norm(case.weights)) <= rounding


def test_norm_resolves_cancellation_that_a_gram_matrix_cannot(rng):
    a, b, e = rng.standard_normal((4, 4)), rng.standard_normal((5, 5)), 1e-11
    bump = rng.standard_normal((4, 4))
    case = SeparatedMatrix.from_factors((np.stack((a + e * bump, -a)), np.stack((b, b))))
    expected = e * np.linalg.norm(bump) * np.linalg.norm(b)
    # Through the Gram matrix this reads zero or 1e-7.
    assert case.norm == pytest.approx(expected, rel=1e-3)
    assert case.condition > 1e10


@given(separated_matrices(shape=KroneckerShape(((3, 4), (5, 2)))))
def test_canonical_form_is_the_same_matrix_with_condition_one(case):
    canonical = case.canonical()
    assert np.linalg.norm(canonical.to_matrix() - case.to_matrix()) <= 1e-13 * np.linalg.norm(
        case.weights
    )
    assert canonical.condition == pytest.approx(1.0, abs=1e-10)


@given(separated_matrices())
def test_folding_and_normalising_again_changes_nothing(case):
    again = SeparatedMatrix.from_factors(case.folded())
    assert np.allclose(again.weights, case.weights, rtol=1e-13)
    assert np.linalg.norm(again.to_matrix() - case.to_matrix()) <= 1e-13 * np.linalg.norm(
        case.weights
    )


@given(separated_matrices(), st.sampled_from(("float32", "float16", "bfloat16")))
def test_rounding_costs_about_gamma_mu(case, storage):
    mu = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}[storage]
    gap = np.linalg.norm(case.round_to(storage).to_matrix() - case.to_matrix())
    smallest = 2.0**-24 if storage == "float16" else 0.0  # float16 underflows below this
    entries = sum(f.size for f in case.factors)
    allowed = case.order * mu * (1 + mu) ** case.order * np.sum(case.weights)
    assert gap <= 1.01 * allowed + smallest * entries * (1 + case.weights[0])


@given(separated_matrices(shape=KroneckerShape(((2, 3), (3, 1), (2, 2)))), st.data())
def test_sum_difference_negation_scaling_and_transpose(case, data):
    other = data.draw(separated_matrices(shape=case.kronecker_shape))
    a, b = case.to_matrix(), other.to_matrix()
    size = np.sum(case.weights) + np.sum(other.weights)
    for ours, theirs in (
        (case + other, a + b),
        (case - other, a - b),
        (-case, -a),
        (case * -2.5, -2.5 * a),
        (0.5 * case, 0.5 * a),
        (case.mT, a.T),
    ):
        assert np.linalg.norm(ours.to_matrix() - theirs) <= 1e-13 * size
    assert (case - case).norm <= 1e-13 * size


def test_complex_terms_and_signed_weights(rng):
    factors = [
        rng.standard_normal((2, 2, 3)) + 1j * rng.standard_normal((2, 2, 3)),
        rng.standard_normal((2, 3, 2)) + 0j,
    ]
    case = SeparatedMatrix.from_factors(factors, np.array([-1.0, 2.0j]))
    assert_close(case.to_matrix(), kron_sum(np.array([-1.0, 2.0j]), factors))
    assert case.norm == pytest.approx(np.linalg.norm(case.to_matrix()), rel=1e-13)
    assert_close(case @ np.arange(6.0), case.to_matrix() @ np.arange(6.0))


def test_every_library_agrees(xp, rng):
    factors = [rng.standard_normal((3, 2, 3)), rng.standard_normal((3, 3, 2))]
    case = SeparatedMatrix.from_factors(
        [xp.asarray(f) for f in factors], xp.asarray([1.0, -2.0, 0.5])
    )
    reference = SeparatedMatrix.from_factors(factors, np.array([1.0, -2.0, 0.5]))
    assert_close(case.weights, reference.weights)
    assert_close(case.canonical().to_matrix(), reference.to_matrix())
    assert case.norm == pytest.approx(reference.norm, rel=1e-13)
    for storage in ("float16", "bfloat16"):
        assert_close(case.round_to(storage).to_matrix(), reference.round_to(storage).to_matrix())


def test_zero_terms_vanish_and_the_zero_matrix_has_none():
    case = SeparatedMatrix.from_factors((np.zeros((2, 2, 2)), np.ones((2, 3, 1))))
    assert (case.separation_rank, case.norm, case.condition) == (0, 0.0, 1.0)
    assert np.array_equal(case.to_matrix(), np.zeros((6, 2)))
    assert np.array_equal(case @ np.ones(2), np.zeros(6))


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_extreme_scales_neither_overflow_nor_vanish(scale):
    case = SeparatedMatrix.from_factors((scale * np.ones((1, 2, 2)), np.ones((1, 2, 2))))
    assert case.norm == pytest.approx(4 * scale, rel=1e-14)
    assert case.condition == pytest.approx(1.0)


def test_factors_that_are_not_finite_or_do_not_fit_are_refused():
    with pytest.raises(PrecisionError, match="factor 2"):
        SeparatedMatrix.from_factors((np.ones((1, 2, 2)), np.full((1, 2, 2), np.nan)))
    with pytest.raises(ShapeError, match="factor 1 has 2 terms, but factor 2 has 3"):
        SeparatedMatrix.from_factors((np.ones((2, 2, 2)), np.ones((3, 2, 2))))
    with pytest.raises(ShapeError, match="weights"):
        SeparatedMatrix(np.ones(2), (np.ones((1, 2, 2)),))
    with pytest.raises(ShapeError, match="cannot add"):
        SeparatedMatrix.from_factors((np.ones((1, 2, 2)),)) + SeparatedMatrix.from_factors(
            (np.ones((1, 4, 1)),)
        )
    with pytest.raises(PrecisionError, match="float16: the entry"):
        SeparatedMatrix.from_factors((1e12 * np.ones((1, 2, 2)),)).round_to("float16")


@given(low_rank_pairs())
def test_low_rank_as_a_separated_product_is_exact(pair):
    product = low_rank_product(pair.left, pair.right)
    assert_close(product.to_matrix(), pair.to_matrix(), size=pair.rank)
    left, right = product.to_lora()
    assert_close(left @ right, product.to_matrix(), size=pair.rank)


@given(
    separated_matrices(shape=KroneckerShape(((3, 2), (2, 2)))),
    separated_matrices(shape=KroneckerShape(((2, 2), (2, 5)))),
)
def test_product_action_expansion_and_canonical_form(left, right):
    product = SeparatedProduct(left, right)
    formed = left.to_matrix() @ right.to_matrix()
    size = np.sum(left.weights) * np.sum(right.weights)
    x = np.ones((10, 2))
    assert product.parameters == left.parameters + right.parameters
    assert np.linalg.norm(product @ x - formed @ x) <= 1e-12 * size
    canonical = product.canonical()
    assert np.linalg.norm(canonical.to_matrix() - formed) <= 1e-12 * size
    assert canonical.left.norm == pytest.approx(canonical.right.norm, rel=1e-9)
    assert canonical.left.condition == pytest.approx(1.0, abs=1e-9)
    assert canonical.right.condition == pytest.approx(1.0, abs=1e-9)


@given(
    separated_matrices(shape=KroneckerShape(((3, 2), (2, 2)))),
    separated_matrices(shape=KroneckerShape(((2, 2), (2, 5)))),
    st.sampled_from(("float32", "bfloat16")),
)
def test_rounding_a_product_costs_no_more_than_the_bound_of_its_sides(left, right, storage):
    """The bound of docs/reference/error-budget.md; not float16, of which small numbers are lost."""
    mu = unit_roundoff(storage)
    product = SeparatedProduct(left, right)
    left_error, right_error = (
        ((1.0 + mu) ** 2 - 1.0) * np.sum(side.weights) for side in (left, right)
    )
    left_size, right_size = (np.linalg.norm(side.to_matrix(), 2) for side in (left, right))
    bound = left_error * right_size + left_size * right_error + left_error * right_error
    gap = np.linalg.norm(product.round_to(storage).to_matrix() - product.to_matrix())
    assert gap <= 1.01 * bound + 1e-12 * np.sum(left.weights) * np.sum(right.weights)


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_the_condition_of_a_product_says_what_rounding_costs(rng, storage):
    mu = unit_roundoff(storage)
    shares = []
    for _ in range(20):
        sides = (((16, 4), (12, 2)), ((4, 16), (2, 12)))
        left, right = (
            SeparatedMatrix.from_factors([rng.standard_normal((3, *factor)) for factor in side])
            for side in sides
        )
        product = SeparatedProduct(left, right)
        formed = product.to_matrix()
        gap = np.linalg.norm(product.round_to(storage).to_matrix() - formed)
        shares.append(gap / (product.condition * mu * np.linalg.norm(formed)))
    assert min(shares) > 0.1
    assert max(shares) < 1.0


def test_sides_of_condition_one_may_cancel_in_their_product(rng):
    columns = rng.standard_normal((1, 40, 1)) + 1e-2 * rng.standard_normal((1, 40, 2))
    rows = np.concatenate([[[1.0]], [[-1.0]]]) * rng.standard_normal((1, 1, 30))
    product = SeparatedProduct(
        SeparatedMatrix.from_factors([columns, np.ones((1, 1, 1))]),
        SeparatedMatrix.from_factors([rows, np.ones((1, 1, 1))]),
    )
    formed = product.to_matrix()
    gap = np.linalg.norm(product.round_to("float16").to_matrix() - formed)
    measured = gap / (2.0**-11 * np.linalg.norm(formed))
    assert product.left.condition == pytest.approx(1.0)
    assert product.right.condition == pytest.approx(1.0)
    assert 10.0 < measured < product.condition < 1000.0


def test_the_condition_of_a_product_of_zero():
    ones = SeparatedMatrix.from_factors([np.ones((1, 2, 2))])
    difference = SeparatedMatrix.from_factors([np.array([[[1.0, -1.0], [-1.0, 1.0]]])])
    nothing = SeparatedMatrix.from_factors([np.zeros((0, 2, 2))])
    assert SeparatedProduct(ones, difference).condition > 1e14
    assert SeparatedProduct(ones, nothing).condition == 1.0


def test_a_product_of_unequal_inner_splits_is_refused(rng):
    left = SeparatedMatrix.from_factors(
        (rng.standard_normal((1, 3, 4)), rng.standard_normal((1, 3, 1)))
    )
    right = SeparatedMatrix.from_factors(
        (rng.standard_normal((1, 2, 3)), rng.standard_normal((1, 2, 3)))
    )
    with pytest.raises(ShapeError, match="inner splits differ"):
        SeparatedProduct(left, right)


def test_norms_of_factors_multiply_without_over_or_underflow():
    def single(value: float) -> np.ndarray:
        return np.full((1, 1, 1), value)

    values = (1e-200, 1e-200, 1e300)
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1)):
        found = SeparatedMatrix.from_factors([single(values[i]) for i in order])
        assert found.weights[0] == pytest.approx(1e-100, rel=1e-14)
    weighted = SeparatedMatrix.from_factors([single(1e200), single(-1e200)], np.array([1e-300]))
    assert weighted.to_matrix()[0, 0] == pytest.approx(-1e100, rel=1e-14)
    with pytest.raises(PrecisionError, match="product of the norms"):
        SeparatedMatrix.from_factors([single(1e200), single(1e200)])
    narrow = [single(v).astype(np.float32) for v in (1e-30, 1e-30, 1e38)]
    assert SeparatedMatrix.from_factors(narrow).weights[0] == pytest.approx(1e-22, rel=1e-5)


@pytest.mark.parametrize("apart", [1e-2, 1e-9])
def test_the_condition_of_sides_that_nearly_cancel_keeps_its_digits(apart, rng):
    """Of their Gram matrices, whose terms are of size one, nothing would be left."""
    column, change = rng.standard_normal((2, 9, 1))
    row = rng.standard_normal((1, 7))
    left, right = np.hstack([column, column + apart * change]), np.vstack([row, -row])
    sizes = np.linalg.norm(left), np.linalg.norm(right)
    product_norm = apart * np.linalg.norm(change) * np.linalg.norm(row)
    rounding = np.hypot(sizes[0] * np.linalg.norm(right, 2), sizes[1] * np.linalg.norm(left, 2))
    condition = low_rank_product(left, right).condition
    assert condition == pytest.approx(rounding / product_norm, rel=1e-5)


@pytest.mark.parametrize("kinds", [("float32", "complex128"), ("complex64", "float64")])
def test_products_with_other_types_have_the_type_that_holds_both(kinds, xp, rng):
    factors = [
        xp.astype(xp.asarray(rng.standard_normal((2, 3, 3))), getattr(xp, kinds[0]))
        for _ in range(2)
    ]
    matrix = SeparatedMatrix.from_factors(factors)
    x = xp.astype(xp.asarray(rng.standard_normal((9, 2))), getattr(xp, kinds[1]))
    product = matrix @ x
    assert product.dtype == xp.complex128
    formed = to_numpy(matrix.to_matrix()).astype(complex)
    assert_close(to_numpy(product), formed @ to_numpy(x), dtype="float32")


def test_what_jax_takes_apart_it_builds_again(monkeypatch):
    ways = {}
    tree_util = SimpleNamespace(register_pytree_node=lambda cls, *both: ways.update({cls: both}))

    class Record(SeparatedMatrix):
        pass

    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "jax", SimpleNamespace(tree_util=tree_util))
        register_pytree(Record, SeparatedMatrix)
    ((flatten, unflatten),) = ways.values()
    matrix = SeparatedMatrix.from_factors([np.ones((2, 2, 3)), np.ones((2, 3, 2))], [3.0, 2.0])
    leaves, structure = flatten(matrix)
    assert len(leaves) == 3
    assert unflatten(structure, leaves) == matrix
    placeholders = unflatten(structure, ["weights", "first", "second"])
    assert (placeholders.weights, placeholders.factors) == ("weights", ("first", "second"))


def test_a_list_stands_on_the_left_as_well(rng):
    matrix = decompose(rng.standard_normal((4, 6)), "2x3, 2x2", rank=2).approximation
    row = [1.0, 2.0, 3.0, 4.0]
    np.testing.assert_allclose(row @ matrix, np.array(row) @ matrix.to_matrix(), rtol=1e-12)
