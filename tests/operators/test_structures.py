"""Sums of Kronecker products that come as sparse matrices, and the operators of other libraries."""

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.sparse.linalg import aslinearoperator

import lsrdecomp as lsr


def linear_elements(n):
    """Stiffness and mass matrix of n interior nodes on the unit interval."""
    h = 1.0 / (n + 1)
    stiffness = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)) / h
    mass = sp.diags_array([1.0, 4.0, 1.0], offsets=[-1, 0, 1], shape=(n, n)) * (h / 6)
    return stiffness, mass


@pytest.fixture(scope="module")
def assembled():
    (k1, m1), (k2, m2) = linear_elements(12), linear_elements(9)
    return sp.csr_array(sp.kron(k1, m2) + sp.kron(m1, k2))


def test_bilinear_elements_on_a_grid_are_two_terms(assembled):
    result = lsr.decompose(assembled, lsr.KroneckerShape(((12, 12), (9, 9))), rtol=1e-10)
    assert result.separation_rank == 2
    assert result.relative_error <= 1e-13


def test_pylops_takes_it_as_an_operator(assembled, rng):
    pylops = pytest.importorskip("pylops")
    separated = lsr.decompose(
        assembled, lsr.KroneckerShape(((12, 12), (9, 9))), rank=2
    ).approximation
    operator = pylops.LinearOperator(Op=aslinearoperator(separated))
    x = rng.standard_normal(assembled.shape[1])
    np.testing.assert_allclose(operator @ x, assembled @ x, rtol=1e-10, atol=1e-10)
    assert pylops.utils.dottest(operator, *assembled.shape)
