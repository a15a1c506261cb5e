"""Unit roundoffs, rounding and the rule γ·μ·‖M‖ ≤ ε."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsrdecomp import ErrorBudget, unit_roundoff
from lsrdecomp.arrays import norm
from lsrdecomp.errors import BudgetError, PrecisionError
from lsrdecomp.precision import PRECISIONS, numpy_dtype, round_to

STORED = [name for name in PRECISIONS if name != "tf32"]


@pytest.mark.parametrize("name", STORED)
def test_unit_roundoff_is_where_one_plus_u_rounds_to_even(name):
    u, kind = unit_roundoff(name), np.dtype(getattr(ml_dtypes, name, name))
    one = np.ones((), kind)
    assert np.asarray(1.0 + u).astype(kind) == one  # a tie, to even
    above = 1.0 + 2 * u if name == "float64" else 1.0 + u * (1 + 2.0**-12)
    assert np.asarray(above).astype(kind) > one


@given(st.floats(1e-3, 100.0), st.sampled_from(STORED))
def test_rounding_a_normal_number_is_within_the_unit_roundoff(x, name):
    rounded, smallest = (
        round_to(np.array([x, -x]), name),
        float(ml_dtypes.finfo(numpy_dtype(name)).smallest_normal),
    )
    assert rounded.dtype == np.float64
    assert abs(rounded[0] - x) <= unit_roundoff(name) * x + smallest * unit_roundoff(name)
    assert rounded[1] == -rounded[0]


def test_libraries_and_dtypes_agree(xp):
    values = np.array([1.0, 1 / 3, 65000.0, 1e-7])
    for name in ("float64", "float32", "float16", "bfloat16"):
        assert np.array_equal(
            np.asarray(round_to(xp.asarray(values), name)), round_to(values, name)
        )
    assert unit_roundoff(xp.float32) == unit_roundoff(np.float32) == 2.0**-24


def test_overflow_and_unknown_types_are_refused_with_numbers():
    with pytest.raises(
        PrecisionError, match="float16: the entry 1e\\+06 lies above the largest number 65504"
    ):
        round_to(np.array([1e6]), "float16")
    with pytest.raises(PrecisionError, match="no unit roundoff is known for the type 'int8'"):
        unit_roundoff("int8")
    with pytest.raises(PrecisionError, match="tf32"):
        round_to(np.ones(1), "tf32")


def test_the_rule_couples_condition_precision_and_tolerance():
    budget = ErrorBudget(rtol=1e-2, compute="float32", storage="float16")
    assert budget.unit_roundoff == 2.0**-11
    assert budget.allowed(10.0) == pytest.approx(0.1)
    assert budget.largest_condition(10.0) == pytest.approx(1e-2 * 2**11)
    assert budget.admits(10.0, 20.0)
    assert not budget.admits(10.0, 21.0)
    assert ErrorBudget(atol=0.5).allowed(10.0) == 0.5
    for wrong in ({}, {"rtol": 1.0, "atol": 1.0}, {"rtol": -1.0}, {"atol": float("inf")}):
        with pytest.raises(BudgetError):
            ErrorBudget(**wrong)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_norms_of_every_type_are_taken_in_double_precision(dtype):
    rng = np.random.default_rng(5)
    for size in (1, 7, 40):
        matrix = rng.standard_normal((size, size)) * 10.0 ** rng.uniform(-3, 3)
        if dtype.startswith("complex"):
            matrix = matrix + 1j * rng.standard_normal((size, size))
        matrix = matrix.astype(dtype)
        wide = matrix.astype(np.clongdouble)
        exact = np.sqrt(np.sum(wide.real**2 + wide.imag**2))
        assert abs(norm(matrix) / exact - 1.0) <= 64 * 2.0**-53


def test_overflow_is_not_told_to_use_the_type_it_overflowed_in():
    with pytest.raises(PrecisionError, match="store it as float64$"):
        round_to(np.array([1e39]), "bfloat16")
    with pytest.raises(PrecisionError, match="store it as float64 or float32 or bfloat16"):
        round_to(np.array([1e30]), "float16")


@pytest.mark.parametrize("name", [name for name in PRECISIONS if name != "tf32"])
def test_a_type_has_the_bits_that_an_array_of_it_takes(name):
    assert PRECISIONS[name].bits == 8 * numpy_dtype(name).itemsize
