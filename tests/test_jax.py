"""JAX by the array API: the same answers as NumPy's, compiled products, and one clear error without float64."""

import numpy as np
import pytest

import lsrdecomp as lsr
from lsrdecomp.errors import PrecisionError

jax = pytest.importorskip("jax")
SHAPE = "4x3, 5x6"


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def matrix(rng):
    return sum(0.3**k * np.kron(rng.standard_normal((4, 3)), rng.standard_normal((5, 6))) for k in range(6))


@pytest.mark.usefixtures("double")
def test_decompose_gives_terms_of_jax_and_the_error_of_numpy(matrix):
    ours, theirs = (lsr.decompose(each, SHAPE, rank=3) for each in (jax.numpy.asarray(matrix), matrix))
    assert isinstance(ours.approximation.factors[0], jax.Array)
    assert ours.relative_error == pytest.approx(theirs.relative_error, rel=1e-9)


@pytest.mark.usefixtures("double")
def test_the_error_curve_is_that_of_numpy(matrix):
    ours, theirs = (lsr.error_curve(each, SHAPE).relative_errors for each in (jax.numpy.asarray(matrix), matrix))
    np.testing.assert_allclose(ours, theirs, atol=1e-14)


@pytest.mark.usefixtures("double")
def test_the_search_finds_the_shape_that_numpy_finds(matrix):
    ours, theirs = (lsr.decompose(each, rtol=1e-2).approximation for each in (jax.numpy.asarray(matrix), matrix))
    assert (ours.kronecker_shape, ours.separation_rank) == (theirs.kronecker_shape, theirs.separation_rank)


def test_a_compiled_product_and_its_derivative(rng):
    factors = [jax.numpy.asarray(rng.standard_normal((2, n, n)), dtype="float32") for n in (4, 5)]
    operator, vector = lsr.SeparatedMatrix.from_factors(factors), jax.numpy.asarray(rng.random(20), dtype="float32")
    product = jax.jit(operator.matvec)
    formed = np.asarray(operator.to_matrix())
    np.testing.assert_allclose(product(vector), formed @ np.asarray(vector), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: product(x).sum())(vector), formed.sum(axis=0), rtol=1e-5, atol=1e-5)


def test_without_float64_the_error_says_how_to_have_it(matrix):
    with pytest.raises(PrecisionError, match="jax_enable_x64"):
        lsr.decompose(jax.numpy.asarray(matrix), SHAPE, rank=3)
