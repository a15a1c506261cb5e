"""Covariances handed to GPyTorch's lazy matrices: the same numbers, or a refusal in words."""

import numpy as np
import pytest

import lsrdecomp as lsr
from lsrdecomp import operators as ops
from lsrdecomp.errors import MatrixError, ShapeError

torch = pytest.importorskip("torch", reason="GPyTorch's operators hold tensors of torch")


@pytest.fixture
def lazy():
    reason = "needs the package linear_operator"
    return pytest.importorskip("linear_operator", reason=reason).operators


def definite(rng, size):
    factor = rng.standard_normal((size, size))
    return factor @ factor.T + np.eye(size)


def covariance(rng, sizes, noise=0.5, signs=1.0):
    """A sum whose larger term has signs in its factors, and whose smaller one is definite."""
    first, *others = [definite(rng, size) for size in sizes]
    factors = [signs * first, signs * others[0], *others[1:]]
    identities = [np.eye(size) for size in sizes]
    stacks = [np.stack(pair) for pair in zip(factors, identities, strict=True)]
    return lsr.SeparatedMatrix.from_factors(stacks, np.array([1.0, noise]))


@pytest.mark.parametrize("sizes", [(3, 4), (2, 3, 2)])
@pytest.mark.parametrize("signs", [1.0, -1.0])
def test_a_sum_of_two_products_solves_and_has_its_determinant(lazy, rng, sizes, signs):
    matrix = covariance(rng, sizes, signs=signs)
    operator = ops.to_gpytorch(matrix)
    assert type(operator) is lazy.SumKroneckerLinearOperator
    dense = matrix.toarray()
    b = rng.standard_normal((len(dense), 2))
    np.testing.assert_allclose(operator.to_dense().numpy(), dense, rtol=1e-12, atol=1e-12)
    solution = operator.solve(torch.tensor(b)).numpy()
    np.testing.assert_allclose(solution, np.linalg.solve(dense, b), rtol=1e-8, atol=1e-10)
    assert float(operator.logdet()) == pytest.approx(np.linalg.slogdet(dense)[1], rel=1e-9)


def test_the_definite_term_is_the_one_that_it_solves_by(lazy, rng):
    singular = [np.outer(v, v) for v in (rng.standard_normal(3), rng.standard_normal(4))]
    stacks = [np.stack([np.eye(len(f)), f]) for f in singular]
    matrix = lsr.SeparatedMatrix.from_factors(stacks, np.array([100.0, 1.0]))
    assert matrix.weights[0] > matrix.weights[1], "the definite term comes first"
    dense = matrix.toarray()
    solution = ops.to_gpytorch(matrix).solve(torch.ones(12, 1, dtype=torch.float64))
    np.testing.assert_allclose(solution.numpy()[:, 0], np.linalg.solve(dense, np.ones(12)))


def test_one_term_is_one_product_and_gradients_reach_its_factors(lazy, rng):
    factor = torch.tensor(definite(rng, 3), requires_grad=True)
    matrix = lsr.SeparatedMatrix.from_factors([factor[None], torch.eye(2).double()[None]])
    operator = ops.to_gpytorch(matrix)
    assert type(operator) is lazy.KroneckerProductLinearOperator
    operator.to_dense().sum().backward()
    np.testing.assert_allclose(factor.grad.numpy(), np.full((3, 3), 2.0), rtol=1e-12)


def test_what_it_cannot_hold_is_refused_in_words(rng):
    matrix = covariance(rng, (3, 4))
    three = matrix + lsr.SeparatedMatrix.from_factors([definite(rng, n)[None] for n in (3, 4)])
    with pytest.raises(ShapeError, match="of two Kronecker .* has 3 terms: .*rank=2"):
        ops.to_gpytorch(three)
    with pytest.raises(ShapeError, match="this matrix has 0 terms"):
        ops.to_gpytorch(matrix.truncate(0))
    with pytest.raises(MatrixError, match="the factors are complex"):
        ops.to_gpytorch(1j * matrix)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: np.triu(f), "factor 1 is not Hermitian"),
        (lambda f: f - 3.0 * np.eye(3), "factor 1 is not positive"),
        (lambda f: f[:, :2], "factor 1 is 3×2; .* needs square factors"),
    ],
)
def test_factors_that_it_would_solve_wrongly_with_are_refused(lazy, change, message, rng):
    factors = [change(np.diag([1.0, 2.0, 5.0]) + 0.5), np.eye(2)]
    matrix = lsr.SeparatedMatrix.from_factors([f[None] for f in factors])
    with pytest.raises((MatrixError, ShapeError), match=message):
        ops.to_gpytorch(matrix)


def test_without_a_definite_term_it_is_refused(lazy, rng):
    v = rng.standard_normal((2, 3))
    singular = np.einsum("ki,kj->kij", v, v)
    matrix = lsr.SeparatedMatrix.from_factors([singular, singular])
    with pytest.raises(MatrixError, match="not positive definite: .*the second product"):
        ops.to_gpytorch(matrix)
