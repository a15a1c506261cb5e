"""Gradients of torch through sums of Kronecker products, against finite differences."""

import numpy as np
import pytest

import lsrdecomp as lsr
from lsrdecomp import operators as ops
from lsrdecomp.errors import MatrixError

torch = pytest.importorskip("torch")
SUMS = {
    "Kronecker sum, symmetric": {"sizes": (3, 2), "symmetric": True},
    "Kronecker sum of three, symmetric": {"sizes": (2, 3, 2), "symmetric": True},
    "Kronecker sum": {"sizes": (3, 2), "symmetric": False},
    "Kronecker sum of three": {"sizes": (2, 3, 2), "symmetric": False},
    "Kronecker sum, complex": {"sizes": (3, 2), "symmetric": False, "dtype": torch.complex128},
    "Kronecker sum, Hermitian": {"sizes": (3, 2), "symmetric": True, "dtype": torch.complex128},
}


def parts_of(sizes, symmetric, dtype=torch.float64, seed=0):
    """Square matrices with a large diagonal that require a gradient."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for m in sizes:
        part = torch.randn(m, m, dtype=dtype, generator=generator)
        part = part @ part.mH if symmetric else part
        parts.append((part + 4.0 * torch.eye(m, dtype=dtype)).requires_grad_(True))
    return parts


def hermitian(part):
    return 0.5 * (part + part.mH)


def sum_of(parts, symmetric, **_):
    """A Kronecker sum; what changes its parts a little must leave symmetric ones symmetric."""
    return ops.kronecker_sum(*(map(hermitian, parts) if symmetric else parts))


@pytest.mark.parametrize("name", SUMS)
def test_solutions_with_a_kronecker_sum_have_gradients(name):
    settings = SUMS[name]
    parts = parts_of(**settings)
    n = int(np.prod(settings["sizes"]))
    b = torch.arange(1.0, n + 1).to(parts[0].dtype).requires_grad_(True)

    def solution(b, *parts):
        return ops.solve(sum_of(parts, **settings), b).x

    assert torch.autograd.gradcheck(solution, (b, *parts))
    constants = [q.detach() for q in (b, *parts)]
    assert torch.equal(solution(b, *parts).detach(), solution(*constants))


@pytest.mark.parametrize("name", SUMS)
def test_log_determinants_of_a_kronecker_sum_have_gradients(name):
    settings = SUMS[name]
    parts = parts_of(**settings)

    def log_det(*parts):
        return ops.slogdet(sum_of(parts, **settings))[1]

    assert torch.autograd.gradcheck(log_det, tuple(parts))


@pytest.mark.parametrize("columns", [1, 2])
def test_gradients_reach_every_entry_of_every_term(columns):
    """Of identities too, which a Kronecker sum holds fixed, and of the weights."""
    generator = torch.Generator().manual_seed(1)
    stacks = [torch.randn(2, m, m, dtype=torch.float64, generator=generator) for m in (3, 2)]
    stacks[0][0] += 4.0 * torch.eye(3)
    stacks[1][0] += 4.0 * torch.eye(2)
    weights = torch.tensor([2.0, 1.0], dtype=torch.float64)
    b = torch.randn(6, columns, dtype=torch.float64, generator=generator)
    leaves = [q.requires_grad_(True) for q in (weights, *stacks)]

    def figures(weights, *stacks):
        matrix = lsr.SeparatedMatrix.from_factors(stacks, weights)
        return ops.solve(matrix, b).x, ops.slogdet(matrix)[1]

    assert torch.autograd.gradcheck(figures, tuple(leaves))


@pytest.mark.parametrize("sizes", [(3,), (3, 2), (2, 2, 3)])
def test_a_likelihood_has_the_gradient_of_covariances_noise_and_observations(sizes):
    covariances = parts_of(sizes, symmetric=True)
    noise = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    y = torch.arange(float(np.prod(sizes)), dtype=torch.float64).reshape(sizes).requires_grad_(True)

    def value(noise, y, *covariances):
        return ops.log_marginal_likelihood(list(map(hermitian, covariances)), noise, y).value

    assert torch.autograd.gradcheck(value, (noise, y, *covariances))
    arrays = [k.detach().numpy() for k in covariances]
    plain = ops.log_marginal_likelihood(arrays, 0.3, y.detach().numpy())
    assert value(noise, y, *covariances).item() == plain.value


def test_a_covariance_with_equal_eigenvalues_has_a_gradient():
    covariance = torch.eye(3, dtype=torch.float64, requires_grad=True)
    ops.log_marginal_likelihood([covariance], 0.5, torch.ones(3)).value.backward()
    slope = 0.5 * (np.ones((3, 3)) / 1.5**2 - np.eye(3) / 1.5)
    np.testing.assert_allclose(covariance.grad.numpy(), slope, rtol=1e-14)


@pytest.mark.parametrize(
    "figure",
    [
        lambda a, b: ops.logdet(ops.kronecker_sum(a, b)) ** 2,
        lambda a, b: ops.solve(ops.kronecker_sum(a, b), torch.ones(6).double()).x.sum(),
        lambda a, b: ops.log_marginal_likelihood([a, b], 0.1, torch.ones(6)).value,
    ],
    ids=["logdet", "solve", "likelihood"],
)
def test_a_second_derivative_is_refused_and_not_wrong(figure):
    parts = parts_of((3, 2), symmetric=True)
    (slope,) = torch.autograd.grad(figure(*parts), parts[0], create_graph=True)
    with pytest.raises(MatrixError, match="second derivatives are not followed"):
        slope.sum().backward()


def three_terms():
    generator = torch.Generator().manual_seed(0)
    stacks = [torch.randn(3, m, m, dtype=torch.float64, generator=generator) for m in (3, 2)]
    return lsr.SeparatedMatrix.from_factors([stack.requires_grad_(True) for stack in stacks])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, x: ops.solve(three_terms(), x), "not followed through iterations"),
        (lambda a, x: ops.solve(a, x, method="cg"), "not followed through iterations"),
        (lambda a, x: ops.expm_multiply(a, x), "detach the tensors"),
        (lambda a, x: ops.eigenvalues(a), "detach the tensors"),
        (lambda a, x: ops.approximate_inverse(a), "detach the tensors"),
        (lambda a, x: ops.logdet(three_terms()), "no closed form"),
    ],
)
def test_other_gradients_of_sums_are_refused_in_words(call, message):
    matrix = ops.kronecker_sum(*parts_of((3, 2), symmetric=True))
    with pytest.raises(MatrixError, match=message):
        call(matrix, torch.ones(6, dtype=torch.float64))
