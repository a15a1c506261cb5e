"""Nearest Kronecker products, approximate inverses, structures, Gaussian processes."""

import math

import numpy as np
import pytest
import scipy.ndimage
import scipy.sparse
import scipy.sparse.linalg
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import lsrdecomp as lsr
from lsrdecomp import operators as ops
from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import BudgetError, ConvergenceError, MatrixError, PrecisionError, ShapeError
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.targets.row_stream import RowStream
from lsrdecomp.testing import kronecker_shapes


def positive(rng, size, rank=None):
    half = rng.standard_normal((size, size if rank is None else rank))
    return half @ half.T


@given(kronecker_shapes(order=2, max_entries=1024), st.booleans(), st.integers(0, 2**32 - 1))
def test_no_product_is_nearer(shape, complex_values, seed):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal(shape.matrix_shape) + 1j * complex_values * rng.standard_normal(
        shape.matrix_shape
    )
    matrix = matrix if complex_values else matrix.real
    found = ops.nearest_kronecker(matrix, shape)
    assert found.separation_rank == 1
    sigma = np.linalg.svd(rearrange(matrix, shape), compute_uv=False)
    assert (
        np.linalg.norm(matrix - found.to_matrix())
        <= (1 + 1e-12) * np.linalg.norm(sigma[1:]) + 1e-12 * sigma[0]
    )


@given(
    st.sampled_from((1, 2)).flatmap(lambda d: kronecker_shapes(d, max_entries=1024, square=True)),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
)
def test_a_positive_matrix_has_a_positive_nearest_product(shape, rank, seed):
    """Also where it is singular, or terms are not positive one by one."""
    rng = np.random.default_rng(seed)
    dense = positive(rng, shape.matrix_shape[0], rank)
    for given_matrix in (
        dense,
        lsr.decompose(dense, shape, rank=shape.max_separation_rank).approximation
        if shape.order == 2
        else dense,
    ):
        found = ops.nearest_kronecker(given_matrix, shape)
        for factor in found.factors:
            assert np.array_equal(factor[0], factor[0].T)
            assert np.linalg.eigvalsh(factor[0])[0] > 0
        ops.cholesky(found + found * 0.0)


@pytest.mark.parametrize("kind", ["complex64", "complex128"])
@pytest.mark.parametrize("seed", range(5))
def test_phases_of_factors_that_cancel_up_to_rounding_are_taken_off(kind, seed):
    rng = np.random.default_rng(seed)
    halves = [rng.standard_normal((m, m)) + 1j * rng.standard_normal((m, m)) for m in (3, 4)]
    angle = rng.uniform(0.0, 2.0 * np.pi)
    factors = [
        (np.exp(1j * sign * angle) * half @ half.conj().T).astype(kind)[None]
        for sign, half in zip((1, -1), halves, strict=True)
    ]
    nearest = ops.nearest_kronecker(lsr.SeparatedMatrix.from_factors(factors), "3x3, 4x4")
    for stack in nearest.factors:
        assert np.array_equal(stack[0], stack[0].conj().T)
        assert np.linalg.eigvalsh(stack[0])[0] > 0.0


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_complex_positive_matrix_has_hermitian_positive_factors(order, seed):
    """Terms of a solver carry phases, which cancel in their product."""
    rng = np.random.default_rng(seed)
    halves = [rng.standard_normal((3, 3)) + 1j * rng.standard_normal((3, 3)) for _ in range(order)]
    matrix = ops.kronecker_sum(*(half @ half.conj().T + 0.1 * np.eye(3) for half in halves))
    shape = matrix.kronecker_shape
    for given_matrix in (matrix, matrix.to_matrix()):
        nearest = ops.nearest_kronecker(given_matrix, shape)
        for stack in nearest.factors:
            assert np.array_equal(stack[0], stack[0].conj().T)
            assert np.linalg.eigvalsh(stack[0])[0] > 0.0
        lower = ops.cholesky(nearest)
        assert_allclose((lower @ lower.mH).to_matrix(), nearest.to_matrix(), atol=1e-12)


@pytest.mark.parametrize("complex_values", [False, True])
@pytest.mark.parametrize("seed", [18, 24, 36])
def test_no_other_product_of_many_factors_is_nearer(seed, complex_values):
    """From identities alone an iteration on an indefinite sum ends far off."""
    rng = np.random.default_rng(seed)
    stacks = [rng.standard_normal((4, m, n)) for m, n in ((2, 3), (3, 2), (2, 2), (3, 3))]
    if complex_values:
        stacks = [stack + 1j * rng.standard_normal(stack.shape) for stack in stacks]
    a = lsr.SeparatedMatrix.from_factors(stacks)
    dense, by_als = a.to_matrix(), lsr.decompose(a, a.kronecker_shape, rank=1)
    distance = np.linalg.norm(
        dense - ops.nearest_kronecker(a, a.kronecker_shape).to_matrix()
    ) / np.linalg.norm(dense)
    assert distance <= by_als.relative_error * (1.0 + 1e-9)


def test_no_gradient_of_a_sum_of_many_factors_is_lost():
    torch = pytest.importorskip("torch")
    a = lsr.SeparatedMatrix.from_factors(
        [torch.rand(3, 2, 2, requires_grad=True) for _ in range(3)]
    )
    with pytest.raises(MatrixError, match="detach the tensors"):
        ops.nearest_kronecker(a, a.kronecker_shape)


@given(st.integers(0, 2**32 - 1))
def test_many_factors_of_a_separated_matrix(seed):
    """Positive, and each of them the nearest beside the others."""
    rng = np.random.default_rng(seed)
    stacks = [np.stack([positive(rng, m) for _ in range(3)]) for m in (3, 2, 4)]
    a = lsr.SeparatedMatrix.from_factors(stacks)
    found = ops.nearest_kronecker(a, a.kronecker_shape)
    assert all(np.linalg.eigvalsh(f[0])[0] > 0 for f in found.factors)
    tensor = rearrange(a.to_matrix(), a.kronecker_shape)
    sides = [factor[0].ravel() for factor in found.factors]
    for side, rest in enumerate(("b,c->a", "a,c->b", "a,b->c")):
        others = [other for place, other in enumerate(sides) if place != side]
        best = np.einsum(f"abc,{rest}", tensor, *others)
        assert_allclose(best / np.linalg.norm(best), sides[side], atol=1e-6)


def test_inputs_of_every_kind_give_one_answer(rng):
    shape = lsr.KroneckerShape(((3, 3), (4, 4)))
    a = lsr.SeparatedMatrix.from_factors(
        [rng.standard_normal((3, 3, 3)), rng.standard_normal((3, 4, 4))]
    )
    dense = a.to_matrix()
    expected = ops.nearest_kronecker(a, shape).to_matrix()
    for kind in (dense, scipy.sparse.csr_array(dense), a.to_linear_operator()):
        assert_allclose(
            ops.nearest_kronecker(kind, shape).to_matrix(), expected, rtol=1e-10, atol=1e-12
        )
    with pytest.raises(MatrixError, match="zero"):
        ops.nearest_kronecker(np.zeros((12, 12)), shape)


def test_a_product_that_is_found_at_once_is_not_asked_for_again(rng):
    matrix = np.kron(rng.standard_normal((3, 2)), rng.standard_normal((4, 5)))
    passes = []

    def blocks():
        passes.append(len(passes))
        return [matrix]

    found = ops.nearest_kronecker(RowStream(blocks, matrix.shape), "3x2, 4x5")
    assert_allclose(found.to_matrix(), matrix, rtol=0.0, atol=1e-12)
    assert len(passes) < 20


def formed_samples(a, g, w):
    return sum(
        wj * np.kron(np.outer(x, x.conj()), np.outer(y, y.conj()))
        for wj, x, y in zip(w, a, g, strict=True)
    )


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_samples_give_the_nearest_product_of_their_sum(m, p, n, complex_values, seed):
    rng = np.random.default_rng(seed)
    a, g = (
        rng.standard_normal((n, q)) + 1j * complex_values * rng.standard_normal((n, q))
        for q in (m, p)
    )
    a, g = (a, g) if complex_values else (a.real, g.real)
    w = rng.uniform(0.1, 1.0, n)
    dense = formed_samples(a, g, w)
    sigma = np.linalg.svd(rearrange(dense, lsr.KroneckerShape(((m, m), (p, p)))), compute_uv=False)
    try:
        found = ops.nearest_kronecker_of_samples(a, g, weights=w, rtol=1e-9)
    except ConvergenceError:
        assert sigma[1] > 0.9 * sigma[0]
        return
    best = np.linalg.norm(sigma[1:])
    assert np.linalg.norm(dense - found.to_matrix()) <= (1 + 1e-9) * best + 1e-9 * sigma[0]
    assert all(np.linalg.eigvalsh(f[0])[0] > 0 for f in found.factors)


def test_samples_stay_in_their_library(xp, rng):
    a, g = rng.standard_normal((20, 4)), rng.standard_normal((20, 3))
    found = ops.nearest_kronecker_of_samples(xp.asarray(a), xp.asarray(g))
    expected = ops.nearest_kronecker(
        formed_samples(a, g, np.ones(20)), lsr.KroneckerShape(((4, 4), (3, 3)))
    )
    assert_allclose(to_numpy(found.to_matrix()), expected.to_matrix(), rtol=1e-6, atol=1e-6)
    assert type(found.factors[0]) is type(xp.asarray(a))


def test_samples_that_will_not_do_are_refused(rng):
    a = rng.standard_normal((5, 3))
    with pytest.raises(ShapeError, match="equal height"):
        ops.nearest_kronecker_of_samples(a, a[:4])
    with pytest.raises(MatrixError, match="negative"):
        ops.nearest_kronecker_of_samples(a, a, weights=-np.ones(5))
    with pytest.raises(MatrixError, match="zero"):
        ops.nearest_kronecker_of_samples(0 * a, a)


# Approximate inverses
# ------------------------------------------------------------------------------------------------


def sum_near_a_product(rng, rows, s, rest=0.3):
    stacks = []
    for m in rows:
        stack = rest * rng.standard_normal((s, m, m)) / m**0.5
        stack[0] = np.eye(m) + 0.3 * rng.standard_normal((m, m)) / m**0.5
        stacks.append(stack)
    return lsr.SeparatedMatrix.from_factors(stacks)


@given(
    st.sampled_from(((3, 4), (2, 3, 2), (5,), (2, 2, 2, 2))),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_the_residual_of_an_inverse_is_measured_and_never_rises(rows, s, rank, seed):
    rng = np.random.default_rng(seed)
    a = sum_near_a_product(rng, rows, s)
    if np.linalg.cond(a.to_matrix()) > 1e3:
        return
    found = ops.approximate_inverse(a, rank=rank, max_sweeps=8)
    dense = a.to_matrix() @ found.approximation.to_matrix()
    true = np.linalg.norm(np.eye(len(dense)) - dense) / math.sqrt(len(dense))
    assert abs(found.residual - true) <= 1e-12 * (1 + np.linalg.norm(dense))
    assert abs(found.residuals[-1] - true) <= 1e-6
    assert all(
        later <= earlier
        for earlier, later in zip(found.residuals, found.residuals[1:], strict=False)
    )
    assert found.residual <= 1.0
    if s == 1:
        assert found.residual <= 1e-6


def test_more_terms_make_a_better_inverse_and_fewer_iterations(rng):
    a = sum_near_a_product(rng, (12, 10), 3)
    b = rng.standard_normal(120)
    residuals, counts = [], []
    for rank in (1, 2, 4, 6):
        found = ops.approximate_inverse(a, rank=rank)
        residuals.append(found.residual)
        counts.append(ops.solve(a, b, preconditioner=found).iterations)
    assert all(np.diff(residuals) < 0)
    assert counts[-1] < counts[0]
    assert counts[0] < ops.solve(a, b, preconditioner=None).iterations
    x, info = scipy.sparse.linalg.gmres(a, b, M=found, rtol=1e-10)
    assert info == 0
    assert np.linalg.norm(a @ x - b) <= 1e-9 * np.linalg.norm(b)


def test_an_inverse_acts_as_its_matrix_does_on_either_side(rng):
    """Methods that need Xᴴ, least squares among them, take it as an operator."""
    stacks = [
        f + 0.3j * rng.standard_normal(f.shape) for f in sum_near_a_product(rng, (4, 3), 2).factors
    ]
    a = lsr.SeparatedMatrix.from_factors(stacks)
    inverse = ops.approximate_inverse(a, rank=2)
    dense = inverse.approximation.to_matrix()
    x = rng.standard_normal(12) + 1j * rng.standard_normal(12)
    assert_allclose(inverse @ x, dense @ x, atol=1e-12)
    assert_allclose(inverse.rmatvec(x), dense.conj().T @ x, atol=1e-12)
    operator = scipy.sparse.linalg.aslinearoperator(inverse)
    assert_allclose(operator.H @ x, dense.conj().T @ x, atol=1e-12)


def test_inverses_of_arrays_and_sparse_matrices(rng):
    a = sum_near_a_product(rng, (4, 3), 2)
    expected = ops.approximate_inverse(a, rank=2)
    for kind in (a.to_matrix(), scipy.sparse.csr_array(a.to_matrix())):
        found = ops.approximate_inverse(kind, a.kronecker_shape, rank=2)
        assert_allclose(found.residual, expected.residual, rtol=0.05)
    with pytest.raises(ShapeError, match="KroneckerShape"):
        ops.approximate_inverse(a.to_matrix())
    with pytest.raises(ShapeError, match="square factors"):
        ops.approximate_inverse(np.ones((6, 6)), lsr.KroneckerShape(((2, 3), (3, 2))))
    with pytest.raises(MatrixError, match="no inverse"):
        ops.approximate_inverse(a * 0.0)


# Structures
# ------------------------------------------------------------------------------------------------


def second_difference(n):
    return scipy.sparse.diags_array(
        [2.0 * np.ones(n), -np.ones(n - 1), -np.ones(n - 1)], offsets=(0, 1, -1)
    )


def test_a_sparse_sum_on_a_tensor_grid_is_found_again():
    """Variable coefficients a(x) b(y) and a(x) + b(y): what finite differences hand over."""
    n, m = 9, 7
    rng = np.random.default_rng(0)
    left, right = (scipy.sparse.diags_array(rng.uniform(1, 2, q)) for q in (n, m))
    parts = [
        (second_difference(n), right),
        (left, second_difference(m)),
        (scipy.sparse.eye_array(n), second_difference(m)),
    ]
    sparse = sum(scipy.sparse.kron(a, b) for a, b in parts).tocsr()
    found = lsr.decompose(sparse, lsr.KroneckerShape(((n, n), (m, m))), rtol=1e-12)
    assert found.separation_rank <= 3
    b = rng.standard_normal(n * m)
    expected = scipy.sparse.linalg.spsolve(sparse.tocsc(), b)
    solution = ops.solve(found.approximation, b)
    assert_allclose(solution.x, expected, rtol=1e-7, atol=1e-9)


@given(
    st.sampled_from(("zero", "periodic", "reflective")),
    st.integers(0, 2**32 - 1),
    st.sampled_from((1, 3, 5)),
    st.sampled_from((1, 3)),
    st.integers(5, 8),
    st.integers(5, 8),
)
def test_blurs_agree_with_scipy(boundary, seed, a, b, rows, columns):
    rng = np.random.default_rng(seed)
    kernel, image = rng.standard_normal((a, b)), rng.standard_normal((rows, columns))
    mode = {"zero": "constant", "periodic": "wrap", "reflective": "reflect"}[boundary]
    expected = scipy.ndimage.convolve(image, kernel, mode=mode)
    matrix = ops.blur(kernel, (rows, columns), boundary)
    assert matrix.separation_rank <= min(a, b)
    found = (matrix @ image.reshape(-1)).reshape(image.shape)
    assert np.linalg.norm(found - expected) <= 1e-12 * np.linalg.norm(kernel) * np.linalg.norm(
        image
    )


def test_blurs_that_cannot_be_are_refused():
    for kernel, sizes, words in (
        (np.ones((2, 3)), (9, 9), "odd sides"),
        (np.ones((3, 11)), (9, 9), "larger than the image"),
    ):
        with pytest.raises(ShapeError, match=words):
            ops.blur(kernel, sizes)
    with pytest.raises(BudgetError, match="none of zero"):
        ops.blur(np.ones((3, 3)), (9, 9), "mirror")
    with pytest.raises(PrecisionError, match="1 of 9 entries are not finite"):
        ops.blur(np.diag([1.0, np.nan, 1.0]), (9, 9))


def test_a_covariance_function_on_a_grid_is_a_stream():
    axes = [np.linspace(0, 1, 6), np.linspace(0, 2, 5)]

    def matern(x, y):
        r = np.linalg.norm(x - y, axis=-1)
        return (1 + r) * np.exp(-r)

    stream = ops.covariance_on_grid(matern, axes)
    points = np.array([(x, y) for x in axes[0] for y in axes[1]])
    dense = matern(points[:, None], points[None])
    shape = lsr.KroneckerShape(((6, 6), (5, 5)))
    found = lsr.decompose(stream, shape, rtol=1e-8)
    assert np.linalg.norm(found.to_matrix() - dense) <= 1e-8 * np.linalg.norm(dense)
    assert_allclose(
        ops.nearest_kronecker(stream, shape).to_matrix(),
        ops.nearest_kronecker(dense, shape).to_matrix(),
        atol=1e-10,
    )


# Gaussian processes
# ------------------------------------------------------------------------------------------------


def squared_exponential(points, length):
    gap = points[:, None] - points[None, :]
    k = np.exp(-0.5 * (gap / length) ** 2)
    return k, k * gap**2 / length**3


@drawing(1.5)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.floats(0.05, 2.0),
    st.integers(0, 2**32 - 1),
)
def test_likelihood_and_gradient_equal_the_dense_ones(sizes, noise, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.uniform(0.3, 1.5, len(sizes))
    pairs = [
        squared_exponential(np.linspace(0, 1, m), length)
        for m, length in zip(sizes, lengths, strict=True)
    ]
    y = rng.standard_normal(sizes)
    found = ops.log_marginal_likelihood([k for k, _ in pairs], noise, y)

    def kron(matrices):
        total = np.ones((1, 1))
        for matrix in matrices:
            total = np.kron(total, matrix)
        return total

    n, flat = y.size, y.reshape(-1)
    full = kron([k for k, _ in pairs]) + noise * np.eye(n)
    alpha = np.linalg.solve(full, flat)
    value = -0.5 * (flat @ alpha + np.linalg.slogdet(full)[1] + n * math.log(2 * math.pi))
    inner = 0.5 * (np.outer(alpha, alpha) - np.linalg.inv(full))
    assert_allclose(found.value, value, rtol=1e-10)
    assert_allclose(found.weights, alpha, rtol=1e-8, atol=1e-10)
    assert_allclose(
        found.noise_gradient, np.trace(inner), rtol=1e-10, atol=1e-10 * np.linalg.norm(inner)
    )
    for i, (_, slope) in enumerate(pairs):
        other = kron([slope if j == i else k for j, (k, _) in enumerate(pairs)])
        scale = np.linalg.norm(inner) * np.linalg.norm(other)
        assert abs(
            np.sum(found.covariance_gradients[i] * slope) - np.sum(inner * other)
        ) <= 1e-10 * max(scale, 1e-300)


def test_grids_that_will_not_do_are_refused():
    k = np.eye(3)
    with pytest.raises(ShapeError, match=r"8 observations on a grid of \(3, 3\)"):
        ops.log_marginal_likelihood([k, k], 1.0, np.ones(8))
    with pytest.raises(MatrixError, match="noise must be positive"):
        ops.log_marginal_likelihood([k], 0.0, np.ones(3))
    with pytest.raises(MatrixError, match="not Hermitian"):
        ops.log_marginal_likelihood([np.triu(np.ones((3, 3)))], 1.0, np.ones(3))
    with pytest.raises(MatrixError, match="not positive definite"):
        ops.log_marginal_likelihood([-2 * k], 1.0, np.ones(3))
