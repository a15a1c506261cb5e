"""The identities of Kronecker products and of the rearrangement."""

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, block_rearrange, kron_sum

from lsrdecomp import KroneckerShape
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.rearrange import (
    apply_sum_of_kroneckers,
    commutation_matrix,
    inverse_rearrange,
    khatri_rao,
    kron,
    rearrange,
    sum_of_kroneckers,
)
from lsrdecomp.testing import kronecker_shapes, matrices, separated_matrices

TWO = kronecker_shapes(order=2)


@given(kronecker_shapes(), st.data())
def test_rearranging_and_back_is_the_identity_and_keeps_the_norm(shape, data):
    matrix = data.draw(matrices(shape.matrix_shape))
    tensor = rearrange(matrix, shape)
    assert tensor.shape == shape.sizes
    assert np.array_equal(inverse_rearrange(tensor, shape), matrix)
    assert np.array_equal(np.sort(tensor, axis=None), np.sort(matrix, axis=None))


@given(TWO, st.data())
def test_rearrangement_follows_its_definition_by_blocks(shape, data):
    matrix = data.draw(matrices(shape.matrix_shape))
    assert np.array_equal(rearrange(matrix, shape), block_rearrange(matrix, *shape.factors))


@given(kronecker_shapes(), st.data())
def test_kron_is_numpys_and_associates(shape, data):
    factors = [data.draw(matrices(pair, scale=1.0)) for pair in shape.factors]
    expected = reduce(np.kron, factors)
    assert np.array_equal(kron(*factors), expected)
    if shape.order > 2:
        assert_close(kron(factors[0], kron(*factors[1:])), expected)


@given(kronecker_shapes(order=3), st.data())
def test_a_kronecker_product_rearranges_to_an_outer_product_of_vectors(shape, data):
    a, b, c = (data.draw(matrices(pair, scale=1.0)) for pair in shape.factors)
    assert_close(
        rearrange(kron(a, b, c), shape), np.einsum("i,j,k->ijk", a.ravel(), b.ravel(), c.ravel())
    )


@given(kronecker_shapes(order=3), st.data())
def test_three_factors_are_blocks_of_blocks(shape, data):
    a, b, c = (data.draw(matrices(pair, scale=1.0)) for pair in shape.factors)
    (_, _), (rows, columns), (m, n) = shape.factors
    i, j, p, q = (data.draw(st.integers(0, size - 1)) for size in (*a.shape, *b.shape))
    block = kron(a, b, c)[i * rows * m :, j * columns * n :]
    assert_close(block[p * m : (p + 1) * m, q * n : (q + 1) * n], a[i, j] * b[p, q] * c)


@given(TWO, TWO, st.data())
def test_mixed_product(left, right, data):
    a, b = (data.draw(matrices(pair, scale=1.0)) for pair in left.factors)
    c = data.draw(matrices((a.shape[1], right.factors[0][1]), scale=1.0))
    d = data.draw(matrices((b.shape[1], right.factors[1][1]), scale=1.0))
    assert_close(kron(a, b) @ kron(c, d), kron(a @ c, b @ d), size=a.shape[1] * b.shape[1])


@given(TWO, st.data())
def test_transpose_and_commutation(shape, data):
    a, b = (data.draw(matrices(pair, scale=1.0)) for pair in shape.factors)
    (m, n), (p, q) = shape.factors
    assert np.array_equal(kron(a, b).T, kron(a.T, b.T))
    assert np.array_equal(
        commutation_matrix(p, m) @ kron(a, b) @ commutation_matrix(n, q), kron(b, a)
    )


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_commutation_matrix_turns_vec_of_x_into_vec_of_its_transpose(m, n, data):
    x = data.draw(matrices((m, n), scale=1.0))
    assert np.array_equal(commutation_matrix(m, n) @ x.T.ravel(), x.ravel())


@given(TWO, st.data())
def test_vec_of_a_triple_product(shape, data):
    a, b = (data.draw(matrices(pair, scale=1.0)) for pair in shape.factors)
    x = data.draw(matrices((b.shape[1], a.shape[1]), scale=1.0))
    assert_close(kron(a, b) @ x.T.ravel(), (b @ x @ a.T).T.ravel(), size=x.size)


@given(separated_matrices(complex_values=False), st.integers(1, 3))
def test_sums_are_formed_and_applied_like_their_kron_sum(case, columns):
    expected = kron_sum(case.weights, case.factors)
    bound = float(np.sum(case.weights))
    x = np.linspace(-1, 1, expected.shape[1] * columns).reshape(expected.shape[1], columns)
    assert np.linalg.norm(sum_of_kroneckers(case.factors, case.weights) - expected) <= 1e-13 * bound
    image = apply_sum_of_kroneckers(case.factors, case.weights, x)
    assert np.linalg.norm(image - expected @ x) <= 1e-13 * bound * np.linalg.norm(x)
    assert np.array_equal(
        apply_sum_of_kroneckers(case.factors, case.weights, x[:, 0]).ravel().shape, (len(expected),)
    )


def test_khatri_rao_is_a_kronecker_product_of_columns(xp, rng):
    a, b = rng.standard_normal((3, 4)), rng.standard_normal((2, 4))
    expected = np.stack([np.kron(a[:, k], b[:, k]) for k in range(4)], axis=1)
    assert_close(khatri_rao(xp.asarray(a), xp.asarray(b)), expected)


def test_every_library_gives_numpys_answer(xp, rng):
    shape = KroneckerShape(((2, 3), (3, 1), (2, 2)))
    factors = [rng.standard_normal((3, m, n)) for m, n in shape.factors]
    weights, x = np.array([3.0, 2.0, 1.0]), rng.standard_normal((6, 2))
    formed = sum_of_kroneckers([xp.asarray(f) for f in factors], xp.asarray(weights))
    assert_close(formed, kron_sum(weights, factors))
    applied = apply_sum_of_kroneckers(
        [xp.asarray(f) for f in factors], xp.asarray(weights), xp.asarray(x)
    )
    assert_close(applied, kron_sum(weights, factors) @ x)
    assert_close(inverse_rearrange(rearrange(formed, shape), shape), formed)


def test_sizes_that_disagree_are_named():
    factors = [np.ones((2, 2, 3)), np.ones((2, 1, 2))]
    with pytest.raises(ShapeError, match=r"expected 6 rows to match 2×3 ⊗ 1×2, got shape \(5,\)"):
        apply_sum_of_kroneckers(factors, None, np.ones(5))
    with pytest.raises(ShapeError, match="factor 1 has 2 terms, but factor 2 has 3"):
        sum_of_kroneckers([np.ones((2, 2, 3)), np.ones((3, 1, 2))])
    with pytest.raises(ShapeError, match="expected a tensor of shape"):
        inverse_rearrange(np.ones((2, 2)), KroneckerShape(((2, 3), (1, 2))))


def test_a_rearrangement_takes_sizes_as_people_write_them(rng):
    matrix = rng.standard_normal((4, 6))
    for sizes in ("2x3, 2x2", ((2, 3), (2, 2))):
        rearranged = rearrange(matrix, sizes)
        assert_close(rearranged, block_rearrange(matrix, (2, 3), (2, 2)))
        assert_close(inverse_rearrange(rearranged, sizes), matrix)
