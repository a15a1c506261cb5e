"""Storage in few bits: what a reader gets back, its bytes, and the error that rounding adds."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import weight_of, weighted_svd

from lsrdecomp.errors import PrecisionError
from lsrdecomp.formats.number_formats import (
    expand_steps,
    nearest_codes,
    nearest_grouped_codes,
    nearest_steps,
    pack,
    pack_digits,
    packed_digits_size,
    step_values,
    unpack,
    unpack_digits,
)
from lsrdecomp.formats.quantized import LEVEL_BYTES, QuantizedProduct, split_level
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.files.encodings import bytes_of
from lsrdecomp.lora.search.caches import SpillCache
from lsrdecomp.lora.search.candidates import (
    materialize,
    unrotated_candidates,
    water_filled_candidates,
)
from lsrdecomp.lora.search.layers import Layer
from lsrdecomp.lora.search.plan import CompressionPlan
from lsrdecomp.lora.search.quantize import (
    quantize,
    round_factors_like,
    stored_like,
    stored_product,
    with_short_scales,
)
from lsrdecomp.lora.search.search import fit_budget, search_layers
from lsrdecomp.lora.search.spectral_codes import (
    GAUSSIAN_ERROR,
    GROUPS,
    ComponentCodes,
    equal_width_levels,
    own_pair_losses,
    spectral_code,
    svd_code,
    water_fill,
)
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weights import NormWeights

SHAPE = ProductShape((8, 6), (2, 2), (8, 6))
EXTRA = {"float16": 1e-5, "bfloat16": 5e-4, "int8": 3e-3}


def pair(rng: np.random.Generator, rank: int = 6) -> LowRank:
    return LowRank(
        rng.standard_normal((48, rank)) * 0.6 ** np.arange(rank), rng.standard_normal((rank, 48))
    )


@pytest.fixture
def product(rng: np.random.Generator) -> SeparatedProduct:
    return JointALS().solve(pair(rng), SHAPE, (4, 5)).product


@pytest.mark.parametrize("storage", EXTRA)
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e6])
def test_rounding_adds_little_to_the_error(
    storage: str, scale: float, rng: np.random.Generator
) -> None:
    target = pair(rng)
    target = LowRank(target.left * scale, target.right)
    found = JointALS().solve(target, SHAPE, (4, 4))
    stored = stored_product(found.product, storage).dequantized()
    after = target.residual_norm(stored) / target.norm
    assert after - found.relative_error <= EXTRA[storage]


def test_int4_costs_less_than_half_a_byte_a_number_and_keeps_the_direction(
    product: SeparatedProduct, rng: np.random.Generator
) -> None:
    coded = stored_product(product, "int4")
    stored, size = coded.dequantized(), coded.bytes
    scales = sum(product.separation_ranks)
    digits = math.ceil(product.parameters * math.log2(15) / 8)
    assert size == digits + scales - 2 + LEVEL_BYTES
    numbers = sum(piece.size for piece in bytes_of(coded))
    assert numbers == digits + scales - 2
    difference = np.linalg.norm(stored.to_matrix() - product.to_matrix()) / np.linalg.norm(
        product.to_matrix()
    )
    assert 0.01 < difference < 0.25


def test_a_term_has_one_scale_and_zero_terms_cost_no_trouble() -> None:
    matrix = SeparatedMatrix.from_factors([np.zeros((2, 3, 2)), np.ones((2, 2, 2))])
    code = quantize(matrix, 4)
    assert code.bytes == 1
    assert code.dequantized().norm == 0.0
    one = quantize(SeparatedMatrix.from_factors([np.full((1, 3, 2), 2.0), np.ones((1, 2, 2))]), 8)
    assert one.scales.shape == (1,)
    np.testing.assert_allclose(one.dequantized().to_matrix(), np.full((6, 4), 2.0), rtol=2**-10)


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_a_joined_product_is_what_was_rounded_but_for_its_scales(product, bits) -> None:
    product = product.canonical()
    long = QuantizedProduct(quantize(product.left, bits), quantize(product.right, bits))
    joined = stored_product(product, f"int{bits}")
    assert joined.is_joined
    assert not long.is_joined
    expected = long.dequantized().to_matrix()
    difference = np.linalg.norm(joined.dequantized().to_matrix() - expected)
    # A sixteenth of an octave for each of three scales: half a step is a factor of 2^(1/32).
    assert difference <= 3 * (2 ** (1 / 32) - 1) * np.linalg.norm(expected)


def test_a_level_is_split_evenly_over_both_sides() -> None:
    for level in range(-200, 200):
        left_exponent, first, right_exponent = split_level(level)
        assert 16 * (left_exponent + right_exponent) - first == level
        assert 0 <= first < 16
        assert abs(left_exponent - right_exponent) <= 2


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 1024, 2500])
def test_codes_come_back_from_digits(bits: int, count: int, rng: np.random.Generator) -> None:
    top = 2 ** (bits - 1) - 1
    codes = rng.integers(-top, top + 1, count).astype(np.int8)
    packed = pack_digits(codes, bits)
    assert packed.size == packed_digits_size(count, bits)
    assert packed.size <= math.ceil(count * math.log2(2 * top + 1) / 8) + 2
    assert np.array_equal(unpack_digits(packed, bits, (count,)), codes)
    if count:
        with pytest.raises(PrecisionError, match="needs"):
            unpack_digits(packed[:-1], bits, (count,))


def test_digits_that_no_codes_have_are_refused() -> None:
    with pytest.raises(PrecisionError, match="5 digits of base 3"):
        unpack_digits(np.array([255], np.uint8), 2, (5,))


def test_scales_of_one_byte_are_taken_in_few_bits_where_they_hold_every_term(product) -> None:
    assert stored_product(product, "int4").left.has_byte_scales
    assert not stored_product(product, "int8").left.has_byte_scales
    # A term of a thousandth of the largest has no byte.
    weights = np.array([1.0, 1e-3])
    faint = SeparatedMatrix.from_factors([np.ones((2, 4, 2)), np.ones((2, 2, 2))], weights)
    sides = faint, product.left
    for left, right in (sides, sides[::-1]):
        assert not _coded_sides(left, right).left.has_byte_scales


def _coded_sides(left: SeparatedMatrix, right: SeparatedMatrix):
    return with_short_scales(quantize(left, 4), quantize(right, 4))


@given(st.integers(1, 40), st.integers(0, 1000))
def test_scales_of_one_byte_are_a_thirty_second_of_an_octave_off(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.choice([-1.0, 1.0], count) * 2.0 ** -rng.uniform(0.0, 7.9, count)
    again = step_values(nearest_steps(values))
    assert np.max(np.abs(np.log2(again / values))) <= 1 / 32 + 1e-12


@given(st.integers(2, 8), st.integers(0, 1000))
def test_codes_are_no_worse_than_plain_rounding(bits: int, seed: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((3, 20)) ** 3
    codes, steps = nearest_codes(rows, bits)
    top = 2 ** (bits - 1) - 1
    plain = np.max(np.abs(rows), axis=1, keepdims=True) / top
    error = np.sum((rows - steps[:, None] * codes) ** 2, axis=1)
    assert np.max(np.abs(codes.astype(int))) <= top
    assert np.all(error <= np.sum((rows - plain * np.rint(rows / plain)) ** 2, axis=1) + 1e-12)


@pytest.mark.parametrize("width", [40, 5_000, 20_000])  # all levels at once, five, one
def test_levels_tried_together_give_the_same_codes(width: int, rng: np.random.Generator) -> None:
    # Not contiguous, with a row of zeros.
    rows = np.concatenate([rng.standard_normal((width, 4)), np.zeros((width, 1))], axis=1).T
    each = [nearest_codes(row[None], 4) for row in rows]
    codes, steps = nearest_codes(rows, 4)
    np.testing.assert_array_equal(codes, np.concatenate([one for one, _ in each]))
    np.testing.assert_allclose(steps, np.concatenate([step for _, step in each]), rtol=1e-14)


@given(st.integers(2, 8), st.integers(0, 40), st.integers(0, 1000))
def test_packed_codes_come_back(bits: int, count: int, seed: int) -> None:
    top = 2 ** (bits - 1) - 1
    codes = np.random.default_rng(seed).integers(-top, top + 1, (1, count)).astype(np.int8)
    packed = pack(codes, bits)
    assert packed.size == -(-count * bits // 8)
    np.testing.assert_array_equal(unpack(packed, bits, codes.shape), codes)
    with pytest.raises(PrecisionError, match=f"needs {packed.size}"):
        unpack(np.append(packed, np.uint8(0)), bits, codes.shape)


def test_the_table_of_gaussian_distortion_is_what_the_codes_do() -> None:
    rows = np.random.default_rng(0).standard_normal((100, 1024))
    for bits, expected in GAUSSIAN_ERROR.items():
        for group, error in zip(GROUPS, expected, strict=True):
            values = grouped_values(rows, bits, group)
            scale = np.sum(rows * values, axis=1) / np.sum(values**2, axis=1)
            lost = np.sum((rows - scale[:, None] * values) ** 2) / np.sum(rows**2)
            assert lost == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("size", [1, 7, 16, 48, 1000, 1024])
def test_what_the_own_pair_is_expected_to_lose_is_what_steps_of_its_groups_lose(size, rng) -> None:
    pair = LowRank(rng.standard_normal((size, 3)), rng.uniform(-1.0, 1.0, (3, 40)))
    count, losses = own_pair_losses(Layer.of("q", pair))
    assert count == 3
    squares = [np.sum(side**2, axis=0) for side in (pair.left, pair.right.T)]
    for group, loss in zip(GROUPS, losses, strict=True):
        noises = [
            sum(
                len(part) * (np.abs(part).max(axis=0) / 128) ** 2 / 12
                for part in np.split(side, range(group, len(side), group))
            )
            for side in (pair.left, pair.right.T)
        ]
        assert loss == pytest.approx(noises[0] @ squares[1] + noises[1] @ squares[0])


def grouped_values(rows: np.ndarray, bits: int, group: int) -> np.ndarray:
    codes, steps, units = nearest_grouped_codes(rows, bits, group)
    assert codes.min() >= -(2 ** (bits - 1))
    assert codes.max() < 2 ** (bits - 1)
    return units[:, None] * expand_steps(steps, group, rows.shape[1]) * codes


@given(st.integers(2, 8), st.sampled_from([2, 16, 64]), st.integers(0, 1000))
def test_a_step_for_each_group_follows_numbers_of_very_different_sizes(bits, group, seed) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((3, 150)) * np.repeat(2.0 ** -rng.integers(0, 6, 75), 2)
    rows[1] = 0.0
    values = grouped_values(rows, bits, group)
    np.testing.assert_array_equal(values[1], 0.0)
    whole = grouped_values(rows, bits, 2**20)
    errors = [np.sum((rows - found) ** 2) for found in (values, whole)]
    assert errors[0] <= 1.05 * errors[1]
    # A group's largest number is at most a sixteenth of an octave and half a step off.
    parts = np.abs(np.array_split(rows - values, range(group, 150, group), axis=1)[0]).max(axis=1)
    largest = np.abs(rows[:, :group]).max(axis=1)
    assert np.all(parts <= largest)


def test_the_largest_number_of_a_group_has_the_side_with_one_code_more() -> None:
    for sign in (1.0, -1.0):
        codes, steps, units = nearest_grouped_codes(np.array([[sign, 0.5, -0.5, 0.25]]), 4, 4)
        assert codes[0, 0] == -8
        # One group: its step, and with it the sign, is in the unit.
        assert units[0] == -sign / 8
        assert steps.shape == (1, 0)
        grouped = np.array([[sign, 0.5, -0.5, 0.25, 0.1, 0.1]])
        codes, steps, units = nearest_grouped_codes(grouped, 4, 4)
        assert (codes[0, 0], units[0]) == (-8, 1 / 8)
        assert steps[0, 0] == (128 if sign > 0 else 0)


def test_components_are_priced_as_they_are_coded(rng: np.random.Generator) -> None:
    layer = Layer.of("q", pair(rng))
    svd = _svd(layer)
    levels = water_fill(layer)[9]
    code, squared_error = ComponentCodes(layer, svd).priced(levels)
    bits, groups = zip(*levels, strict=True)
    again = spectral_code(layer, svd, bits, groups, rounds=0)
    assert (again.bits, again.groups, again.bytes) == (code.bits, code.groups, code.bytes)
    np.testing.assert_array_equal(again.dequantized().to_matrix(), code.dequantized().to_matrix())
    assert squared_error == pytest.approx(layer.squared_error(code.dequantized()), rel=1e-9)


def test_finer_groups_are_taken_where_a_byte_does_more_there_than_in_the_next_component() -> None:
    rng = np.random.default_rng(2)
    flat, steep = np.full(6, 1.0), 10.0 ** -np.arange(6.0)
    chosen = []
    for sizes in (flat, steep):
        left, right = rng.standard_normal((192, 6)), rng.standard_normal((6, 192))
        layer = Layer.of("q", LowRank(left * sizes, right))
        levels = equal_width_levels(layer, 4, 3)
        assert [bits for bits, _ in levels] == [4, 4, 4]
        chosen.append([group for _, group in levels])
    assert min(chosen[0]) > max(chosen[1][:2])
    assert chosen[1][0] == min(GROUPS)


@pytest.mark.parametrize("weighted", [False, True])
def test_water_filling_spends_bits_where_they_count(
    weighted: bool, rng: np.random.Generator
) -> None:
    weights = None
    if weighted:
        halves = [rng.standard_normal((48, 48)) @ np.diag(0.9 ** np.arange(48)) for _ in range(2)]
        weights = NormWeights(*(weight_of(half @ half.T) for half in halves))
    layer = Layer.of("q", pair(rng), weights)
    found = water_filled_candidates(layer)
    sizes, errors = [c.bytes for c in found], [c.squared_error for c in found]
    assert sizes == sorted(sizes)
    assert errors[0] < layer.squared_norm
    assert errors[-1] < 1e-3 * layer.squared_norm
    filled = water_fill(layer)
    bits = [[width for width, _ in levels] for levels in filled]
    assert all(sum(late) >= sum(early) for early, late in pairwise(bits))
    if not weighted:  # equal noise in all components: more bits to larger ones
        assert all(widths == sorted(widths, reverse=True) for widths in bits)
    limited = water_fill(layer, 4)
    assert max(width for levels in limited for width, _ in levels) == 4
    assert all(width == 4 for width, _ in limited[-1])


def _svd(layer: Layer) -> tuple[np.ndarray, ...]:
    return weighted_svd(layer.pair, layer.norms)


def test_refitting_to_the_codes_pays(rng: np.random.Generator) -> None:
    layer = Layer.of("q", pair(rng))
    svd, bits = _svd(layer), (4, 4, 3, 2, 0, 0)
    refitted, plain = (spectral_code(layer, svd, bits, rounds=rounds) for rounds in (2, 0))
    errors = [layer.squared_error(code.dequantized()) for code in (refitted, plain)]
    assert errors[0] < errors[1]


def test_uniform_sides_are_nearer_as_found_than_as_singular_vectors(
    rng: np.random.Generator,
) -> None:
    left, right = rng.uniform(-1.0, 1.0, (400, 6)), rng.uniform(-1.0, 1.0, (6, 500))
    left[:, 2] = 0.0
    layer = Layer.of("q", LowRank(left, right))
    (found,) = unrotated_candidates(layer)
    assert found.bytes == 5 * (900 + 3 + 1) + 1
    components = spectral_code(layer, _svd(layer), (8,) * 5, found.groups)
    assert components.bytes == found.bytes
    assert found.squared_error < 0.8 * layer.squared_error(components.dequantized())
    made = materialize(layer, found, SpillCache())
    assert made.stored().storage == "int8"
    assert layer.squared_error(made.product) == found.squared_error
    assert unrotated_candidates(Layer.of("zero", LowRank(0.0 * left, right))) == []


def _factors_near_codes(kind: str, rng: np.random.Generator):
    """Return a stored layer, and the factors of its product moved away from the codes."""
    if kind == "components":
        target = Layer.of("", pair(rng))
        stored = svd_code(target, [6, 4, 3, 2], [64, 16, 2**16, 16])
    else:
        stored = stored_product(JointALS().solve(pair(rng), SHAPE, (4, 5)).product, kind)
    sides = stored.factors()
    return stored, [
        tuple(factor * (1.0 + 0.1 * rng.standard_normal(factor.shape)) for factor in side)
        for side in sides
    ]


@pytest.mark.parametrize("kind", ["int2", "int4", "int6", "int8", "components"])
def test_factors_are_rounded_one_by_one_and_are_codes_then(kind: str, rng) -> None:
    stored, moved = _factors_near_codes(kind, rng)
    rounded = round_factors_like(stored, *moved)
    again = round_factors_like(stored, *rounded)
    for before, once, twice in zip(*map(list, (moved, rounded, again)), strict=True):
        for number, near, same in zip(before, once, twice, strict=True):
            assert near.shape == number.shape
            assert not np.allclose(near, number, rtol=1e-3)
            assert np.linalg.norm(near - number) < 0.6 * np.linalg.norm(number)
            np.testing.assert_allclose(same, near, rtol=1e-3, atol=1e-3 * np.abs(near).max())


@pytest.mark.parametrize("kind", ["int2", "int4", "int6", "int8", "components"])
def test_a_product_of_rounded_factors_is_stored_as_it_is(kind: str, rng) -> None:
    stored, moved = _factors_near_codes(kind, rng)
    left, right = round_factors_like(stored, *moved)
    product = SeparatedProduct(*map(SeparatedMatrix.from_factors, (left, right)))
    halves = rng.standard_normal((2, 48, 60))
    norms = NormWeights(*(weight_of(half @ half.T) for half in halves))
    again = stored_like(stored, product, norms)
    assert again.bytes == stored.bytes
    matrix = product.to_matrix()
    # Up to float16's rounding of a scale.
    error = np.linalg.norm(again.dequantized().to_matrix() - matrix) / np.linalg.norm(matrix)
    assert error < 5e-4


def test_floats_are_left_to_be_rounded_when_they_are_stored(product: SeparatedProduct) -> None:
    stored = stored_product(product, "float16")
    sides = stored.factors()
    assert round_factors_like(stored, *sides) == sides


def test_what_cannot_be_stored_is_said(product: SeparatedProduct) -> None:
    with pytest.raises(PrecisionError, match=r"int7: unknown storage.*float16.*int4"):
        stored_product(product, "int7")
    with pytest.raises(PrecisionError, match="2 to 8 bits, got 9"):
        quantize(product.left, 9)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("ratio", [2, 4])
def test_under_a_parameter_budget_integers_lose_nothing_to_plain_svd_in_the_same_bits(bits, ratio):
    rng = np.random.default_rng(5)
    sizes = 10.0 ** -np.linspace(0.0, 1.0, 8)
    pairs = {
        str(i): LowRank(rng.standard_normal((48, 8)) * sizes, rng.standard_normal((8, 32)))
        for i in range(3)
    }
    layers = [Layer.of(name, pair) for name, pair in pairs.items()]
    budget = CompressionPlan(ratio=ratio).budget(layers)
    fitted = fit_budget(search_layers(layers, [budget], storages=(f"int{bits}",)), budget)
    plain = [svd_code(layer, (bits,) * (8 // ratio)) for layer in layers]
    lost = sum(
        layer.squared_error(code.dequantized()) for layer, code in zip(layers, plain, strict=True)
    )
    svd = np.sqrt(lost / sum(layer.squared_norm for layer in layers))
    found = sum(chosen.candidate.squared_error for chosen in fitted.chosen)
    assert np.sqrt(found / sum(layer.squared_norm for layer in layers)) <= svd * (1 + 1e-9)
    assert fitted.low_rank_error <= svd * 1.02  # priced without fits of one side to the other


@pytest.mark.parametrize("rows", [2, 40])
def test_codes_do_not_depend_on_the_size_of_the_numbers(rng, rows):
    numbers = rng.standard_normal((rows, 32))
    codes, steps, units = nearest_grouped_codes(numbers, 4, 8)
    scaled_codes, scaled_steps, scaled_units = nearest_grouped_codes(numbers * 2.0**-200, 4, 8)
    np.testing.assert_array_equal(scaled_codes, codes)
    np.testing.assert_array_equal(scaled_steps, steps)
    np.testing.assert_array_equal(scaled_units, units * 2.0**-200)
