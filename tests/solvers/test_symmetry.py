"""A symmetric matrix has a symmetric sum of Kronecker products, with three and more factors too."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from lsrdecomp import ALS, ErrorBudget, KroneckerShape, decompose
from lsrdecomp.solvers.cp.symmetry import symmetrised
from lsrdecomp.solvers.solver import Status
from lsrdecomp.targets.target import Dense


def product(rng, sizes, *, symmetric=False):
    factors = [rng.standard_normal((n, n)) for n in sizes]
    if symmetric:
        factors = [factor + factor.T for factor in factors]
    return reduce(np.kron, factors)


def drawn(kind, rng):
    """Return a symmetric matrix and the sizes of its factors."""
    sizes = rng.integers(2, 5, int(rng.integers(3, 5))).tolist()
    side = int(np.prod(sizes))
    if kind == "kernel":
        points = rng.random((side, 2))
        matrix = np.exp(-3.0 * np.linalg.norm(points[:, None] - points[None, :], axis=2))
    elif kind == "noise":
        matrix = rng.standard_normal((side, side))
    elif kind == "symmetric terms":
        matrix = sum(0.5**k * product(rng, sizes, symmetric=True) for k in range(6))
    else:
        matrix = sum(0.5**k * product(rng, sizes) for k in range(3))
    return matrix + matrix.T, tuple((n, n) for n in sizes)


def asymmetry(result):
    formed = np.asarray(result.approximation)
    return np.linalg.norm(formed - formed.T) / np.linalg.norm(formed)


DRAWS = 2


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("kind", ["kernel", "noise", "symmetric terms", "pairs of terms"])
def test_the_answer_is_symmetric_unless_that_costs_accuracy(kind, rank, rng):
    n_symmetric = 0
    for _ in range(DRAWS):
        matrix, shape = drawn(kind, rng)
        result = decompose(matrix, shape, rank=rank)
        error = np.linalg.norm(matrix - np.asarray(result.approximation)) / np.linalg.norm(matrix)
        assert result.relative_error == pytest.approx(error, rel=1e-9, abs=1e-13)
        if asymmetry(result) <= 1e-13:
            n_symmetric += 1
            continue
        start = symmetrised(result.approximation)
        symmetric = symmetrised(decompose(matrix, shape, rank=rank, init=start).approximation)
        assert Dense(matrix).residual_norm(symmetric) > result.error
    assert n_symmetric == DRAWS or kind != "symmetric terms"


def test_two_terms_become_each_others_transpose(rng):
    """The pair was found to 1e-7, as far from symmetric as its fit was from its end."""
    matrix = product(rng, (3, 4, 3))
    matrix = matrix + matrix.T + 1e-3 * product(rng, (3, 4, 3), symmetric=True)
    result = decompose(matrix, [(3, 3), (4, 4), (3, 3)], rank=2)
    assert asymmetry(result) <= 1e-13
    assert result.relative_error < 1e-2


def test_an_answer_that_is_better_unsymmetric_stays_so(rng):
    """One term of T + Tᵀ is nearest when it is T alone, for T far from its transpose."""
    upper = np.triu(rng.standard_normal((3, 3)), 1)
    matrix = reduce(np.kron, [upper] * 3)
    result = decompose(matrix + matrix.T, [(3, 3)] * 3, rank=1)
    assert result.relative_error == pytest.approx(0.5**0.5)
    assert asymmetry(result) > 0.1


@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_what_is_stored_is_symmetric_too(storage, rng):
    matrix, shape = drawn("kernel", rng)
    result = decompose(matrix, shape, rank=2, storage=storage)
    exact = decompose(matrix, shape, rank=2)
    assert (asymmetry(result) <= 1e-13) is (asymmetry(exact) <= 1e-13)


def test_a_tolerance_is_met_by_a_symmetric_sum(rng):
    matrix, shape = drawn("symmetric terms", rng)
    result = decompose(matrix, shape, rtol=1e-2)
    assert result.status is Status.converged
    assert asymmetry(result) <= 1e-13
    stored = np.asarray(decompose(matrix, shape, budget=ErrorBudget(1e-2)))
    assert np.linalg.norm(matrix - stored) <= 1e-2 * np.linalg.norm(matrix)


def test_terms_are_made_symmetric_with_an_even_number_of_antisymmetric_factors(rng):
    antisymmetric = [factor - factor.T for factor in rng.standard_normal((2, 4, 4))]
    symmetric = np.eye(4) + 0.1 * rng.standard_normal((4, 4))
    matrix = reduce(np.kron, [*antisymmetric, symmetric])
    result = ALS().solve(matrix, KroneckerShape(((4, 4),) * 3), rank=1).approximation
    formed = np.asarray(symmetrised(result))
    assert formed == pytest.approx(formed.T, abs=1e-13)
    nearest = reduce(np.kron, [*antisymmetric, 0.5 * (symmetric + symmetric.T)])
    assert formed == pytest.approx(nearest, abs=1e-6)
