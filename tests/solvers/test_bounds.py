"""What a record claims, against extended precision, for every element type."""

import math

import numpy as np
import pytest
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st
from oracles import exact_error

from lsrdecomp import ErrorBudget, KroneckerShape, decompose
from lsrdecomp.kronecker.rearrange import inverse_rearrange, rearrange
from lsrdecomp.solvers import SVD, ErrorKind, Krylov
from lsrdecomp.testing import kronecker_shapes

TYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
ROUNDING = 2.0**-46
"""Of a norm of a few hundred entries, relative to ‖M‖: what is measured, and not a bound, may err
by it."""


def drawn(dtype, shape, scale, seed):
    """Return a matrix of that type with a falling spectrum, and the same numbers in NumPy."""
    rng, (p, q) = np.random.default_rng(seed), shape.sizes
    rearranged = rng.standard_normal((p, q)) * 10.0 ** (-3.0 * rng.random() * np.arange(q) / q)
    if dtype.startswith("complex"):
        rearranged = rearranged * np.exp(1j * rng.random((p, q)))
    matrix = inverse_rearrange(rearranged / np.abs(rearranged).max(), shape)
    if dtype not in ("float16", "bfloat16"):
        matrix = (scale * matrix).astype(dtype)
        return matrix, matrix
    torch = pytest.importorskip("torch")
    half = torch.tensor(matrix).to(getattr(torch, dtype))
    return half, half.to(torch.float64).numpy()


def exact_norm(matrix):
    return np.sqrt(np.sum(np.abs(matrix.astype(np.clongdouble)) ** 2))


@pytest.mark.filterwarnings("ignore::lsrdecomp.errors.ConvergenceWarning")
@pytest.mark.parametrize("dtype", TYPES)
@drawing(0.4)
@given(
    kronecker_shapes(order=2, max_entries=400),
    st.sampled_from((1e-8, 1.0, 1e8)),
    st.integers(0, 2**32 - 1),
    st.floats(-7.0, -0.3),
)
def test_neither_error_nor_bound_is_below_the_truth(dtype, shape, scale, seed, digits):
    matrix, exact = drawn(dtype, shape, scale, seed)
    norm = exact_norm(exact)
    double = (exact / norm).astype(np.result_type(exact, float))
    optimum = np.linalg.svd(rearrange(double, shape), compute_uv=False)
    solvers = (None, SVD(), SVD(tolerance=1e-6), Krylov())
    goals = [{"rank": 1 + seed % 3, "solver": solver} for solver in solvers]
    goals += [
        {"rtol": 10.0**digits, "storage": "float16", "throw": False},
        {"budget": ErrorBudget(rtol=10.0**digits)},
    ]
    for goal in goals:
        record = decompose(matrix, shape, **goal)
        truth = float(exact_error(exact, record.approximation) / norm)
        if record.error_kind is ErrorKind.bounded:
            assert record.relative_error >= truth
        assert record.relative_error == pytest.approx(truth, rel=1e-9, abs=ROUNDING)
        if (
            record.optimality_gap is not None
            and record.gap_kind is ErrorKind.bounded
            and "rank" in goal
        ):
            least = math.sqrt(np.sum(optimum[record.separation_rank :] ** 2))
            assert record.relative_error <= (1.0 + record.optimality_gap) * least + 2 * ROUNDING


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_terms_that_are_rounded_to_single_precision_are_within_their_bound(dtype):
    """Rounding the factors costs some 1e-8 of an error of 4e-4, more than the space itself."""
    sizes = ((10, 14), (11, 14))
    rng = np.random.default_rng(0)
    for _ in range(10):
        left = np.linalg.qr(rng.standard_normal((140, 140)))[0]
        right = np.linalg.qr(rng.standard_normal((154, 140)))[0]
        spectrum = np.exp(-1.9 * np.arange(140))
        matrix = inverse_rearrange((left * spectrum) @ right.T, KroneckerShape(sizes))
        matrix = (matrix * np.exp(1j) if dtype == "complex64" else matrix).astype(dtype)
        record = decompose(matrix, sizes, rank=4, solver=Krylov())
        assert record.factors[0].dtype == dtype
        assert record.gap_kind is ErrorKind.bounded
        double = matrix.astype(np.result_type(matrix, float))
        optimum = np.linalg.svd(rearrange(double, KroneckerShape(sizes)), compute_uv=False)
        least = float(np.linalg.norm(optimum[4:]))
        truth = float(exact_error(matrix, record.approximation))
        assert truth <= (1.0 + record.optimality_gap) * least * (1.0 + 1e-11)
