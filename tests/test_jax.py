"""JAX by the array API: NumPy's answers, compiled products, one error without float64.

JAX is loaded in one process apart: where it was loaded once, its threads forbid every later fork.
"""

import importlib.util
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

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
        for goal, words in (
            ({"rtol": 0.1}, "got no rank="),
            ({"rank": 2, "rtol": 0.1}, "got rtol="),
            ({"rank": 2, "storage": "int8"}, "got storage="),
            ({"rank": 2, "solver": "gram"}, "got solver="),
            ({"rank": 2, "shape": "2x3, 2x2, 5x3"}, "got 3 factors"),
        ):
            goal = {"shape": SHAPE} | goal
            with pytest.raises(LsrError, match=f"by rank= alone, in two factors.*{words}"):
                jax.jit(lambda m, goal=goal: lsr.decompose(m, **goal).factors)(matrix)
        for verb in (lambda m: lsr.error_curve(m, SHAPE), lambda m: lsr.best_shape(m, rtol=0.1)):
            with pytest.raises(LsrError, match=r"a decomposition depends on the values"):
                jax.jit(verb)(matrix)
        operator = lsr.decompose(matrix, SHAPE, rank=2).approximation
        with pytest.raises(LsrError, match=r"the order and number of terms depends on the values"):
            jax.jit(lambda m: (m + m).to_matrix())(operator)


def a_rank_is_decomposed_within_a_compiled_function(jax):
    with jax.enable_x64(True):
        matrix = jax.numpy.asarray(MATRIX)
        compiled = jax.jit(lambda m: lsr.decompose(m, SHAPE, rank=2))(matrix)
        outside = lsr.decompose(MATRIX, SHAPE, rank=2)
        assert type(compiled) is lsr.SeparatedMatrix
        np.testing.assert_allclose(compiled.to_matrix(), outside.to_matrix(), atol=1e-13)
        np.testing.assert_allclose(compiled.factors[0], outside.factors[0], atol=1e-13)
        assert compiled.factors[1].shape == (2, 5, 6)
        # Its derivative is that of NumPy's by differences.
        change = RNG.standard_normal(MATRIX.shape)
        _, slope = jax.jvp(
            lambda m: lsr.decompose(m, SHAPE, rank=2).to_matrix(), (matrix,), (change,)
        )
        ahead, behind = (
            lsr.decompose(MATRIX + step * change, SHAPE, rank=2).to_matrix()
            for step in (1e-6, -1e-6)
        )
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, atol=1e-6)
    single = jax.numpy.asarray(MATRIX, dtype="float32")
    assert jax.jit(lambda m: lsr.decompose(m, SHAPE, rank=3))(single).dtype == "float32"


def an_answer_under_jit_has_what_it_has_outside_or_says_why_not(jax):
    with jax.enable_x64(True):
        matrix = jax.numpy.asarray(MATRIX)
        outside = lsr.decompose(matrix, SHAPE, rank=2)
        formed = np.asarray(outside.to_matrix())

        def approximation(m):
            return lsr.decompose(m, SHAPE, rank=2).approximation

        inside = jax.jit(lambda m: approximation(m).to_matrix())(matrix)
        np.testing.assert_allclose(inside, formed, atol=1e-13)
        np.testing.assert_allclose(jax.jit(approximation)(matrix).to_matrix(), formed, atol=1e-13)
        reprs = []
        jax.jit(lambda m: reprs.append(repr(approximation(m))))(matrix)
        assert reprs == ["SeparatedMatrix(20×18 as 2 × [4×3 ⊗ 5×6], 84 parameters)"]
        # What a record has beside the matrix.
        names = {name for name in dir(outside) if not name.startswith("_")}
        names -= {name for name in dir(lsr.SeparatedMatrix) if not name.startswith("_")}
        names -= {"weights", "factors", "approximation"}
        assert len(names) == 15
        for name in names:
            with pytest.raises(AttributeError, match=f"has no '{name}': .*within jax.jit"):
                jax.jit(lambda m, name=name: getattr(approximation(m), name))(matrix)
        for verb in (
            lambda m: m.norm,
            lambda m: m.condition,
            lambda m: m.round_to("float16"),
            lambda m: m == m,
            np.asarray,
            lambda m: m.toarray(),
            lambda m: m.to_linear_operator(),
            lambda m: lsr.operators.svd(m.to_numpy()),
        ):
            with pytest.raises(LsrError, match=r"depends on the values .* do it outside"):
                jax.jit(lambda m, verb=verb: verb(approximation(m)))(matrix)


def a_record_is_an_argument_of_compiled_functions(jax):
    with jax.enable_x64(True):
        record = lsr.decompose(jax.numpy.asarray(MATRIX), SHAPE, rank=2)
        vector = jax.numpy.asarray(RNG.standard_normal(18))
        product = jax.jit(lambda result, x: result.approximation @ x)(record, vector)
        np.testing.assert_allclose(product, record @ vector, rtol=1e-12)
        with pytest.raises(AttributeError, match="has no 'relative_error'"):
            jax.jit(lambda result: result.relative_error)(record)


def at_the_terms_of_an_exact_sum_what_keeps_them_passes(jax):
    with jax.enable_x64(True):
        left, right = RNG.standard_normal((12, 2)), RNG.standard_normal((2, 30))
        rearranged = left @ right
        matrix = lsr.kronecker.inverse_rearrange(rearranged, SHAPE)
        weights, change = RNG.standard_normal((2, *matrix.shape))

        def loss(m):
            return (lsr.decompose(m, SHAPE, rank=2).to_matrix() * weights).sum()

        gradient = jax.grad(loss)(jax.numpy.asarray(matrix))
        u, _, vh = np.linalg.svd(rearranged, full_matrices=False)
        u, vh = u[:, :2], vh[:2]
        moved = lsr.kronecker.rearrange(change, SHAPE)
        tangential = u @ u.T @ moved + (moved - u @ u.T @ moved) @ vh.T @ vh
        expected = np.sum(lsr.kronecker.rearrange(weights, SHAPE) * tangential)
        assert float((gradient * change).sum()) == pytest.approx(expected, rel=1e-8)


def equal_weights_that_are_kept_have_the_derivative_of_their_sum(jax):
    """And NaN where they are cut apart, since nothing can be refused under jit."""
    with jax.enable_x64(True):
        u, v = (np.linalg.qr(RNG.standard_normal((4, 4)))[0] for _ in range(2))
        matrix = lsr.kronecker.inverse_rearrange((u * [1.0, 1.0, 0.1, 0.01]) @ v, "2x2, 2x2")
        weights, change = RNG.standard_normal((2, 4, 4))

        def loss(m, rank):
            return (lsr.decompose(m, "2x2, 2x2", rank=rank).to_matrix() * weights).sum()

        for rank in (2, 3):
            gradient = jax.grad(loss)(jax.numpy.asarray(matrix), rank)
            ahead, behind = (loss(matrix + step * change, rank) for step in (1e-6, -1e-6))
            expected = (ahead - behind) / 2e-6
            assert float((gradient * change).sum()) == pytest.approx(expected, rel=1e-6)
        assert np.isnan(jax.grad(loss)(jax.numpy.asarray(matrix), 1)).all()


def second_derivatives_are_differences_of_the_first(jax):
    with jax.enable_x64(True):
        matrix, change = RNG.standard_normal((2, 4, 4))

        def loss(m):
            return (lsr.decompose(m, "2x2, 2x2", rank=2).to_matrix() ** 3).sum()

        gradient = jax.grad(loss)
        found = jax.hessian(loss)(jax.numpy.asarray(matrix))
        ahead, behind = (
            gradient(jax.numpy.asarray(matrix + step * change)) for step in (1e-6, -1e-6)
        )
        along = (found * change).sum(axis=(2, 3))
        np.testing.assert_allclose(along, (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-6)


def one_term_is_solved_within_a_compiled_function(jax):
    with jax.enable_x64(True):
        factors = [RNG.standard_normal((1, n, n)) + 3 * np.eye(n) for n in (3, 4)]
        operator = lsr.SeparatedMatrix.from_factors([jax.numpy.asarray(f) for f in factors])
        formed = np.asarray(operator.to_matrix())
        for b in (RNG.standard_normal(12), RNG.standard_normal((12, 2))):

            def solve(matrix, right_hand):
                solution = lsr.operators.solve(matrix, right_hand)
                return solution.x, solution.relative_residual, solution.converged

            x, residual, converged = jax.jit(solve)(operator, jax.numpy.asarray(b))
            np.testing.assert_allclose(x, np.linalg.solve(formed, b), rtol=1e-10)
            assert bool(converged)
            assert float(residual) < 1e-13
        by_b = jax.grad(lambda right_hand: lsr.operators.solve(operator, right_hand).x.sum())
        gradient = by_b(jax.numpy.asarray(RNG.standard_normal(12)))
        np.testing.assert_allclose(gradient, np.linalg.solve(formed.T, np.ones(12)), rtol=1e-10)
        both = lsr.operators.kronecker_sum(np.eye(3), np.diag([1.0, 2.0, 3.0, 4.0]))
        two = lsr.SeparatedMatrix(both.weights, both.factors)
        with pytest.raises(LsrError, match="within jax.jit one term is solved by its factors"):
            jax.jit(lambda right_hand: lsr.operators.solve(two, right_hand).x)(jax.numpy.ones(12))


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
    a_rank_is_decomposed_within_a_compiled_function,
    an_answer_under_jit_has_what_it_has_outside_or_says_why_not,
    a_record_is_an_argument_of_compiled_functions,
    at_the_terms_of_an_exact_sum_what_keeps_them_passes,
    equal_weights_that_are_kept_have_the_derivative_of_their_sum,
    second_derivatives_are_differences_of_the_first,
    one_term_is_solved_within_a_compiled_function,
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
