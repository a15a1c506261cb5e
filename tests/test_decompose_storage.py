"""decompose with a storage type: what is stored keeps the tolerance, at any scale of the matrix."""

import math

import numpy as np
import pytest
from problems import kronecker_sum

import lsrdecomp as lsr
from lsrdecomp.errors import ConvergenceError
from lsrdecomp.solvers import Status

FOUR = lsr.KroneckerShape(((4, 4), (4, 4)))


@pytest.fixture
def square(rng):
    return rng.standard_normal((16, 16))


@pytest.mark.parametrize(
    ("storage", "floor"), [("float16", 2e-3), ("bfloat16", 1e-2), ("float32", 1e-6)]
)
def test_a_tolerance_holds_for_what_is_stored(rng, storage, floor):
    matrix = rng.standard_normal((24, 24)) * np.exp(-0.5 * np.arange(24))
    result = lsr.decompose(matrix, rtol=floor, storage=storage)
    assert result.status is Status.converged
    assert np.linalg.norm(matrix - result.approximation.to_matrix()) <= floor * np.linalg.norm(
        matrix
    )
    for factor in result.approximation.folded():  # what is stored survives the cast unchanged
        again = lsr.SeparatedMatrix.from_factors((factor, np.ones((factor.shape[0], 1, 1))))
        assert np.all(np.isfinite(again.weights))


def test_storage_too_coarse_for_the_tolerance_is_said(rng):
    result = lsr.decompose(rng.standard_normal((12, 12)), rtol=1e-5, storage="bfloat16")
    assert result.status is Status.precision_exhausted
    assert result.relative_error > 1e-5
    with pytest.raises(ConvergenceError, match="Rounding to the storage type") as caught:
        lsr.decompose(rng.standard_normal((12, 12)), rtol=1e-5, storage="bfloat16", throw=True)
    assert caught.value.record.storage == "bfloat16"


@pytest.mark.parametrize(
    ("order", "rtol", "storage"),
    [
        (3, 1e-2, "bfloat16"),
        (3, 1e-3, "float16"),
        (3, 1e-6, "float32"),
        (3, 1e-6, None),
        (3, 1e-10, None),
        (4, 1e-2, "bfloat16"),
    ],
)
def test_a_tolerance_that_the_exact_terms_keep_is_kept_with_three_and_more_factors(
    order, rtol, storage
):
    exact = kronecker_sum(order)
    matrix = exact.to_matrix()
    result = lsr.decompose(matrix, exact.kronecker_shape, rtol=rtol, storage=storage, throw=True)
    assert result.status is Status.converged
    assert np.linalg.norm(matrix - result.approximation.to_matrix()) <= rtol * np.linalg.norm(
        matrix
    )
    assert result.separation_rank <= order


def test_a_tolerance_below_what_the_storage_can_do_is_still_refused():
    exact = kronecker_sum(3, 3)
    result = lsr.decompose(exact.to_matrix(), exact.kronecker_shape, rtol=1e-6, storage="bfloat16")
    assert result.status in (Status.precision_exhausted, Status.ill_conditioned)


@pytest.mark.parametrize(
    "storage", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "int8", "int4"]
)
@pytest.mark.parametrize("scale", [1e-300, 1e-8, 1e8, 1e300])
def test_storage_loses_neither_small_nor_large_matrices(square, storage, scale):
    plain = lsr.decompose(square, FOUR, rank=8, storage=storage)
    scaled = lsr.decompose(square * scale, FOUR, rank=8, storage=storage)
    assert scaled.relative_error == pytest.approx(plain.relative_error, rel=1e-2)
    assert scaled.relative_error < 0.5
    assert scaled.storage == storage


def test_storage_of_a_torch_tensor_stays_there(square):
    torch = pytest.importorskip("torch")
    for storage in (torch.float16, torch.bfloat16, "int8", "fp8"):
        found = lsr.decompose(torch.asarray(square), FOUR, rank=2, storage=storage).approximation
        assert isinstance(found.factors[0], torch.Tensor)
        assert found.factors[0].dtype == torch.float64


BITS = {"int8": 8, "int4": 4, "float8_e4m3fn": 8, "bfloat16": 16, "float32": 32}


@pytest.mark.parametrize("storage", BITS)
def test_the_zero_matrix_is_stored_in_every_format(storage):
    result = lsr.decompose(np.zeros((12, 12)), "3x3, 4x4", rank=2, storage=storage)
    assert (result.separation_rank, result.relative_error, result.bytes) == (0, 0.0, 0)
    assert result.storage == storage
    assert "0 × [3×3 ⊗ 4×4]" in str(result)


@pytest.mark.parametrize("storage", BITS)
def test_bytes_are_those_of_the_numbers_rounded_up(storage):
    ones = lsr.decompose(np.ones((12, 12)), "3x3, 4x4", rank=1, storage=storage)
    numbers = 3 * 3 + 4 * 4
    assert ones.bytes == math.ceil(numbers * BITS[storage] / 8)
