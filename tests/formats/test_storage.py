"""Stored forms: none exceeds the error it claims; formats chosen term by term save bytes."""

import itertools

import numpy as np
import pytest
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st
from oracles import exact_error

from lsrdecomp.errors import BudgetError, PrecisionError
from lsrdecomp.formats.allocation import PartOptions, cheapest_formats, within_cost
from lsrdecomp.formats.mixed_precision import SMALL_FORMATS, _Rounding, least_bytes, smallest
from lsrdecomp.formats.number_formats import (
    FORMATS,
    nearest_codes,
    pack_digits,
    packed_digits_size,
    round_factor,
    storage_format,
    unpack_digits,
)
from lsrdecomp.kronecker.rearrange import inverse_rearrange
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.targets.target import Dense

EIGHT = KroneckerShape(((8, 8), (8, 8)))


def with_spectrum(sigma: np.ndarray, shape: KroneckerShape, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    p, q = shape.sizes
    left, right = (np.linalg.qr(rng.standard_normal((n, len(sigma))))[0] for n in (p, q))
    return inverse_rearrange((left * sigma) @ right.T, shape)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", [np.float64, np.complex128])
def test_codes_read_back_to_the_error_that_was_measured(name, kind, rng):
    factor = rng.standard_normal((5, 7)).astype(kind)
    if kind is np.complex128:
        factor = factor + 1j * rng.standard_normal((5, 7))
    factor = factor / np.linalg.norm(factor)
    stored, error = round_factor(factor, name)
    values = stored.values
    scale = np.real(np.vdot(values, factor)) / np.linalg.norm(values) ** 2
    assert np.isclose(np.linalg.norm(factor - scale * values), error, rtol=1e-6, atol=1e-15)
    assert stored.bytes == FORMATS[name].bytes(factor.size * (2 if kind is np.complex128 else 1))
    if FORMATS[name].kind == "float":
        assert error <= unit_roundoff(name)


@pytest.mark.parametrize("bits", [4, 8])
def test_integer_codes_are_those_of_the_best_clipping_level(bits, rng):
    rows, top = rng.standard_normal((3, 200)), 2 ** (bits - 1) - 1
    codes, steps = nearest_codes(rows, bits)
    errors = np.linalg.norm(rows - steps[:, None] * codes, axis=1)
    for row, error in zip(rows, errors, strict=True):
        left = []
        for level in np.linspace(1.0, 0.25, 24):
            tried = np.clip(np.rint(row / (level * np.max(np.abs(row)) / top)), -top, top)
            left.append(np.linalg.norm(row - tried * (row @ tried) / (tried @ tried)))
        assert error == pytest.approx(min(left), rel=1e-12)
        assert bits == 8 or error < 0.95 * left[0]  # the largest of so many is worth clipping


@pytest.mark.parametrize("entries", [1, 2, 7, 8])
def test_two_int4_codes_share_a_byte(entries):
    factor = np.arange(-3.0, entries - 3.0)[None, :] + 0.5
    factor = factor / np.linalg.norm(factor)
    stored, _ = round_factor(factor, "int4")
    assert stored.codes.nbytes == (entries + 1) // 2
    assert stored.values.shape == factor.shape


def test_a_power_of_two_scale_keeps_float16_at_its_roundoff_for_tiny_entries():
    factor = np.full((300, 300), 1e-9)
    factor[0, 0] = 1.0
    factor = factor / np.linalg.norm(factor)
    assert round_factor(factor, "float16")[1] < 2.0**-11


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(PrecisionError, match="int3.*float64"):
        round_factor(np.ones((1, 1)), "int3")


CASES = given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-300, 1e-150, 1e-12, 1.0, 1e12, 1e150, 1e300]),
    st.sampled_from([0.3, 3e-2, 1e-2, 1e-3, 1e-5]),
    st.sets(st.sampled_from(sorted(FORMATS)), min_size=1),
    st.sampled_from(["decay", "flat", "graded", "tails", "complex", "rank one"]),
    st.sampled_from(
        [
            ((3, 2), (2, 4)),
            ((1, 6), (5, 1)),
            ((4, 4), (3, 3)),
            ((1, 1), (7, 5)),
            ((2, 2), (2, 3), (3, 1)),
        ]
    ),
)


@drawing(3)
@CASES
def test_no_stored_matrix_exceeds_the_error_it_claims(seed, scale, rtol, formats, kind, pairs):
    check_claim(seed, scale, rtol, formats, kind, pairs)


@pytest.mark.slow
@drawing(25)
@CASES
def test_no_stored_matrix_of_thousands_exceeds_the_error_it_claims(
    seed, scale, rtol, formats, kind, pairs
):
    check_claim(seed, scale, rtol, formats, kind, pairs)


def check_claim(seed, scale, rtol, formats, kind, pairs):
    rng, shape = np.random.default_rng(seed), KroneckerShape(pairs)
    s = 4 if kind != "rank one" else 1
    factors = [rng.standard_normal((s, m, n)) for m, n in pairs]
    if kind == "tails":
        factors = [f * np.exp(3.0 * rng.standard_normal(f.shape)) for f in factors]
    if kind == "complex":
        factors = [f + 1j * rng.standard_normal(f.shape) for f in factors]
    weights = {"flat": np.ones(s), "graded": 10.0 ** -(4.0 * np.arange(s))}.get(
        kind, 0.3 ** np.arange(s)
    )
    separated = SeparatedMatrix.from_factors(factors, weights)
    separated = SeparatedMatrix(separated.weights / separated.norm * scale, separated.factors)
    if shape.order == 2:
        separated = separated.canonical()
    matrix = separated.to_matrix()
    target = Dense(matrix)
    try:
        stored = smallest(target, separated, atol=rtol * target.norm, formats=sorted(formats))
    except BudgetError:
        assert not formats & {"float32", "float64"}
        return
    actual = exact_error(matrix, stored.approximation)
    assert actual <= stored.certified_error <= rtol * target.norm
    assert stored.certified_error <= 1.01 * actual + 1e-12 * target.norm


@pytest.mark.parametrize("pairs", [((3, 2), (2, 4)), ((1, 1), (7, 5)), ((2, 2), (2, 3), (3, 1))])
@pytest.mark.parametrize("formats", [SMALL_FORMATS, ("float16",), ("int8", "float8_e5m2")])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_no_stored_terms_take_fewer_bytes_than_are_said_to_be_the_least(pairs, formats, rank, rng):
    """A search for fewer bytes ends by this number: too large, and it ends too early.

    It is reached: here all that could be is asked for, an error as large as the matrix.
    """
    shape = KroneckerShape(pairs)
    factors = [rng.standard_normal((max(rank, 1), m, n)) for m, n in pairs]
    separated = SeparatedMatrix.from_factors(factors, 2.0 ** -np.arange(max(rank, 1)))
    target = Dense(separated.to_matrix())
    cheapest = min(
        (
            [storage_format(name) for name in chosen]
            for chosen in itertools.product(formats, repeat=shape.order)
        ),
        key=lambda chosen: sum(f.bytes(n) for f, n in zip(chosen, shape.sizes, strict=True)),
    )
    codes = sum(f.bytes(n) for f, n in zip(cheapest, shape.sizes, strict=True))
    term = 4 + shape.order + codes  # a weight in float32, a byte a factor, the codes
    assert least_bytes(shape, rank, formats) == 8 + rank * term
    for share in (0.9, 0.3, 0.05):
        try:
            stored = smallest(target, separated, atol=share * target.norm, formats=formats)
        except BudgetError:
            continue
        assert stored.bytes >= least_bytes(shape, stored.separation_rank, formats)


@pytest.mark.parametrize("spectrum", ["exponential", "algebraic"])
def test_formats_chosen_term_by_term_save_a_quarter_of_the_bytes_of_float16(spectrum):
    shape, k = KroneckerShape(((16, 16), (16, 16))), np.arange(64.0)
    sigma = np.exp(-0.5 * k) if spectrum == "exponential" else 1.0 / (1.0 + k) ** 2
    target = Dense(with_spectrum(sigma, shape))
    candidates = SVD().solve(target, shape, atol=2e-3 * target.norm).approximation
    mixed = smallest(target, candidates, atol=1e-2 * target.norm)
    plain = smallest(target, candidates, atol=1e-2 * target.norm, formats=("float16",))
    assert mixed.separation_rank > 3
    assert mixed.bytes <= 0.75 * plain.bytes
    assert mixed.relative_error <= 1e-2
    assert np.isclose(
        mixed.bytes - 8, sum(6 + sum(FORMATS[f].bytes(256) for f in term) for term in mixed.formats)
    )


def test_several_formats_take_no_more_than_any_single_one():
    target = Dense(with_spectrum(0.5 ** np.arange(10.0), EIGHT))
    candidates = SVD().solve(target, EIGHT, rank=10).approximation
    mixed = smallest(target, candidates, atol=3e-2 * target.norm)
    for name in ("float32", "float16", "int8"):
        assert (
            mixed.bytes
            <= smallest(target, candidates, atol=3e-2 * target.norm, formats=(name,)).bytes
        )


@pytest.mark.parametrize("budget", [0.05, 0.7])  # the second is above half of all that there is
def test_the_allocation_is_as_cheap_as_trying_everything(budget, rng):
    weights, squares = 0.4 ** np.arange(3.0), 10.0 ** -rng.uniform(1, 6, (3, 2, 3))
    sizes = np.array([[40, 20, 10], [80, 40, 20]])
    every = [None, *((a, b) for a in range(3) for b in range(3))]
    costs = []
    for choice in [(x, y, z) for x in every for y in every for z in every]:
        error = sum(
            w**2 * (1.0 if c is None else squares[k, 0, c[0]] + squares[k, 1, c[1]])
            for k, (w, c) in enumerate(zip(weights, choice, strict=True))
        )
        cost = sum(0 if c is None else 6 + sizes[0, c[0]] + sizes[1, c[1]] for c in choice)
        if error <= budget**2:
            costs.append(cost)
    found = cheapest_formats(weights, squares, sizes, budget, 6)
    cost = sum(0 if c is None else 6 + sizes[0, c[0]] + sizes[1, c[1]] for c in found)
    assert min(costs) <= cost <= 1.25 * min(costs)


def test_the_hull_of_options_is_the_lower_convex_one(rng):
    for _ in range(20):
        costs, losses = rng.permutation(12).astype(float), rng.permutation(12).astype(float)
        options = PartOptions.of(costs, losses)
        corners = []
        for i in range(12):
            # A corner is the best option at some price of a cost, of which there are many here
            prices = np.geomspace(1e-3, 1e3, 4000)
            if np.any(np.argmin(losses + prices[:, None] * costs, axis=1) == i):
                corners.append(i)
        assert options.hull() == sorted(corners, key=lambda i: costs[i])


def test_what_one_part_spends_the_others_lack():
    parts = [PartOptions.of([0.0, 1.0], [5.0 + i, 1.0]) for i in range(3)]
    assert within_cost(parts, 2.0) == [0, 1, 1]


@pytest.mark.parametrize("bits", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 1024, 1025, 2500])
def test_codes_are_read_back_from_digits_of_several_numbers(bits, count, rng):
    top = 2 ** (bits - 1) - 1
    codes = rng.integers(-top, top + 1, (count, 1)).astype(np.int8)
    packed = pack_digits(codes, bits)
    assert packed.size == packed_digits_size(count, bits)
    assert np.array_equal(unpack_digits(packed, bits, codes.shape), codes)


def test_a_budget_below_the_truncation_says_so():
    target = Dense(with_spectrum(0.5 ** np.arange(10.0), EIGHT))
    candidates = SVD().solve(target, EIGHT, rank=2).approximation
    with pytest.raises(BudgetError, match="truncation alone"):
        smallest(target, candidates, atol=1e-3 * target.norm)


def test_a_budget_below_the_rounding_names_the_finest_format():
    target = Dense(with_spectrum(0.5 ** np.arange(10.0), EIGHT))
    candidates = SVD().solve(target, EIGHT, rank=10).approximation
    formats = ("float16", "int4")
    with pytest.raises(
        BudgetError, match="rounding, even in float16.*; store in float64 or float32, or"
    ):
        smallest(target, candidates, atol=1e-6 * target.norm, formats=formats)
    with pytest.raises(
        BudgetError, match="rounding, even in float16.*; store in float64, or allow"
    ):
        smallest(target, candidates, atol=1e-9 * target.norm, formats=formats)


def test_the_zero_matrix_and_a_generous_budget_take_no_terms():
    target = Dense(with_spectrum(0.5 ** np.arange(4.0), EIGHT))
    candidates = SVD().solve(target, EIGHT, rank=4).approximation
    stored = smallest(target, candidates, atol=2.0 * target.norm)
    assert stored.separation_rank == 0
    assert np.all(stored.approximation.to_matrix() == 0.0)
    assert stored.certified_error <= 2.0 * target.norm


def test_terms_that_cancel_are_certified_as_stored():
    """Two nearly opposite terms, γ ≈ 100: rounded one by one they would miss the budget."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 6, 6))
    first, second = a / np.linalg.norm(a), (a / np.linalg.norm(a) + 1e-2 * b / np.linalg.norm(b))
    factors = [np.stack((first, second)) for _ in range(3)]
    separated = SeparatedMatrix.from_factors(factors, np.array([1.0, -1.0]))
    target = Dense(separated.to_matrix())
    stored = smallest(
        target, separated, atol=1e-3 * target.norm, formats=(*SMALL_FORMATS, "float64")
    )
    assert exact_error(target.matrix, stored.approximation) <= 1e-3 * target.norm
    assert stored.approximation.condition > 10.0


def test_more_formats_to_choose_from_never_lose_a_budget_that_one_of_them_keeps():
    """Of terms that cancel the first choice may miss it; then others are chosen."""
    for seed in (0, 1, 2, 34):
        rng = np.random.default_rng(seed)
        left, right = (rng.standard_normal((3, m, m)) for m in (3, 4))
        left[1] = -left[0] + 1e-2 * rng.standard_normal((3, 3))
        right[1] = right[0] + 1e-2 * rng.standard_normal((4, 4))
        separated = SeparatedMatrix.from_factors([left, right])
        target = Dense(separated.to_matrix())
        for formats in (("float32",), ("int8", "float16", "float32")):
            stored = smallest(target, separated, atol=1e-2 * target.norm, formats=formats)
            assert exact_error(target.matrix, stored.approximation) <= 1e-2 * target.norm


@pytest.mark.parametrize("complex_values", [False, True])
def test_the_bytes_that_formats_are_chosen_by_are_those_of_the_codes(rng, complex_values):
    factors = [rng.standard_normal((2, 4, 4)) + 1j * complex_values for _ in range(2)]
    rounding = _Rounding.measure(SeparatedMatrix(np.ones(2), factors), ("int8", "float16"))
    for sizes, stored in zip(rounding.bytes, rounding.rounded[0], strict=True):
        assert list(sizes) == [factor.bytes for factor in stored]
