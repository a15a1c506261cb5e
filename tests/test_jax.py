"""JAX by the array API: NumPy's answers, compiled products, one error without float64.

JAX is loaded in one process apart: where it was loaded once, its threads forbid every later fork.
"""

import importlib.util
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import lsrdecomp as lsr
from lsrdecomp.errors import LsrError, PrecisionError
from lsrdecomp.testing import check_kron

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed", allow_module_level=True)

SHAPE = "4x3, 5x6"
RNG = np.random.default_rng(20260101)
MATRIX = sum(
    0.3**k * np.kron(RNG.standard_normal((4, 3)), RNG.standard_normal((5, 6))) for k in range(6)
)


def the_error_curve_is_that_of_numpy(jax):
    with jax.enable_x64(True):
        ours, theirs = (
            lsr.error_curve(each, SHAPE).relative_errors
            for each in (jax.numpy.asarray(MATRIX), MATRIX)
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-14)


def decompose_finds_the_shape_and_the_error_that_numpy_finds_in_terms_of_jax(jax):
    with jax.enable_x64(True):
        small = MATRIX[:6, :6]  # each shape is compiled anew
        ours, theirs = (
            lsr.decompose(each, rtol=1e-2) for each in (jax.numpy.asarray(small), small)
        )
        assert ours.relative_error == pytest.approx(theirs.relative_error, rel=1e-9)
        ours, theirs = ours.approximation, theirs.approximation
        assert isinstance(ours.factors[0], jax.Array)
        assert (ours.kronecker_shape, ours.separation_rank) == (
            theirs.kronecker_shape,
            theirs.separation_rank,
        )


def a_compiled_product_and_its_derivative(jax):
    factors = [jax.numpy.asarray(RNG.standard_normal((2, n, n)), dtype="float32") for n in (4, 5)]
    operator, vector = (
        lsr.SeparatedMatrix.from_factors(factors),
        jax.numpy.asarray(RNG.random(20), dtype="float32"),
    )
    product = jax.jit(operator.matvec)
    formed = np.asarray(operator.to_matrix())
    np.testing.assert_allclose(product(vector), formed @ np.asarray(vector), rtol=1e-5)
    np.testing.assert_allclose(
        jax.grad(lambda x: product(x).sum())(vector), formed.sum(axis=0), rtol=1e-5, atol=1e-5
    )


def a_separated_matrix_is_an_argument_of_compiled_functions(jax):
    with jax.enable_x64(True):
        factors = [jax.numpy.asarray(RNG.standard_normal((2, n, n))) for n in (4, 5)]
        operator = lsr.SeparatedMatrix.from_factors(factors)
        vectors = jax.numpy.asarray(RNG.random((3, 20)))
        formed = np.asarray(operator.to_matrix())
        product = jax.jit(lambda matrix, x: matrix @ x)
        np.testing.assert_allclose(product(operator, vectors[0]), formed @ vectors[0], rtol=1e-12)
        np.testing.assert_allclose(jax.jit(lambda matrix: matrix.T.to_matrix())(operator), formed.T)
        rows = jax.vmap(lambda x: operator @ x)(vectors)
        np.testing.assert_allclose(rows, vectors @ formed.T, rtol=1e-12)


def the_derivative_by_a_separated_matrix_has_its_shape(jax):
    with jax.enable_x64(True):
        factors = [jax.numpy.asarray(RNG.standard_normal((1, n, n))) for n in (2, 3)]
        operator = lsr.SeparatedMatrix.from_factors(factors)
        derivative = jax.grad(lambda matrix: matrix.to_matrix().sum())(operator)
        # The sum of all entries of λ A ⊗ B is λ (Σ A)(Σ B).
        first, second = (factor.sum() for factor in operator.factors)
        np.testing.assert_allclose(derivative.weights, [first * second], rtol=1e-12)
        np.testing.assert_allclose(
            derivative.factors[0], np.full((1, 2, 2), operator.weights[0] * second), rtol=1e-12
        )


def what_depends_on_values_is_refused_in_words_under_jit(jax):
    with jax.enable_x64(True):
        matrix = jax.numpy.asarray(MATRIX)
        with pytest.raises(LsrError, match=r"a decomposition depends on the values of the matrix"):
            jax.jit(lambda m: lsr.decompose(m, SHAPE, rank=2).factors)(matrix)
        operator = lsr.decompose(matrix, SHAPE, rank=2).approximation
        with pytest.raises(LsrError, match=r"the order and number of terms depends on the values"):
            jax.jit(lambda m: (m + m).to_matrix())(operator)


def without_float64_the_error_says_how_to_have_it(jax):
    with pytest.raises(PrecisionError, match="jax_enable_x64"):
        lsr.decompose(jax.numpy.asarray(MATRIX), SHAPE, rank=3)


def its_kronecker_product_passes_the_laws(jax):
    check_kron(jax.numpy.kron, xp=jax.numpy, dtype="float32", complex_values=False, max_examples=1)


CHECKS = (
    decompose_finds_the_shape_and_the_error_that_numpy_finds_in_terms_of_jax,
    the_error_curve_is_that_of_numpy,
    a_compiled_product_and_its_derivative,
    a_separated_matrix_is_an_argument_of_compiled_functions,
    the_derivative_by_a_separated_matrix_has_its_shape,
    what_depends_on_values_is_refused_in_words_under_jit,
    without_float64_the_error_says_how_to_have_it,
    its_kronecker_product_passes_the_laws,
)


def run(check):
    check(importlib.import_module("jax"))


@pytest.fixture(scope="module")
def apart():
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        yield pool


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_with_jax(check, apart):
    apart.submit(run, check).result()
    assert "jax" not in sys.modules


def test_the_example_on_the_page_passes_and_finds_what_cannot_be_compiled(tmp_path):
    example = Path(__file__).parents[1] / "examples" / "test_kronecker_in_jax.py"
    sound = example.read_text(encoding="utf-8")
    branching = sound.replace(
        "    return xp.", "    if a.size and a.max() > 1e30:\n        return a\n    return xp."
    )
    assert branching != sound
    for text, words in ((sound, "1 passed"), (branching, "TracerBoolConversionError")):
        file = tmp_path / example.name
        file.write_text(text, encoding="utf-8")
        order = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
        done = subprocess.run(order, cwd=tmp_path, capture_output=True, text=True)
        assert words in done.stdout, done.stdout + done.stderr
