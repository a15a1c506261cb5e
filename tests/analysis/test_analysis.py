"""Error curves, fronts, limits, spectra and grids say what they claim."""

import json
import math
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from lsrdecomp import KroneckerShape, LowRank, decompose, error_curve
from lsrdecomp.analysis import (
    ErrorCurve,
    Spectrum,
    error_curves,
    gaussian_limit,
    layer_grid,
    low_rank_curve,
    pareto_front,
    rearranged_spectrum,
    solver_curve,
)
from lsrdecomp.errors import BudgetError
from lsrdecomp.testing import separated_matrices

I = np.arange(36.0)  # noqa: E741 - indices, as in a formula
HILBERT = 1.0 / (1.0 + I[:, None] + I[None, :])
SHAPES = [KroneckerShape(((m, m), (36 // m, 36 // m))) for m in (2, 6, 12)]


def test_curves_of_many_shapes_are_those_of_each():
    assert error_curves(HILBERT, SHAPES) == tuple(error_curve(HILBERT, shape) for shape in SHAPES)


def test_a_solver_curve_is_the_optimum_where_the_solver_is():
    best = error_curve(HILBERT, SHAPES[1])
    found = solver_curve(HILBERT, SHAPES[1], (1, 2, 4))
    assert found.ranks == (1, 2, 4)
    assert found.parameters == tuple(best.parameters[s] for s in found.ranks)
    assert_allclose(
        found.relative_errors, [best.relative_errors[s] for s in found.ranks], rtol=1e-6
    )
    assert_allclose(found.conditions, 1.0, rtol=1e-12)


def test_a_solver_curve_is_measured_as_stored():
    rounded = solver_curve(HILBERT, SHAPES[1], (6,), storage="float16").relative_errors[0]
    assert rounded == decompose(HILBERT, SHAPES[1], rank=6, storage="float16").relative_error
    assert rounded > 10 * solver_curve(HILBERT, SHAPES[1], (6,)).relative_errors[0]


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1)), min_size=1, max_size=20))
def test_no_point_beats_the_front_and_the_front_is_made_of_points(points):
    curves = [
        ErrorCurve(str(k), (k,), (size,), (error,), 1.0) for k, (size, error) in enumerate(points)
    ]
    front = pareto_front(curves)
    for size, error in points:
        assert any(p.size <= size and p.relative_error <= error for p in front)
    assert all((p.size, p.relative_error) in points for p in front)
    assert all(a.size < b.size and a.relative_error > b.relative_error for a, b in pairwise(front))


def test_a_front_in_bytes_counts_bytes():
    front = pareto_front(error_curves(HILBERT, SHAPES), storage="float16")
    assert [p.size for p in front] == [
        2 * p.size for p in pareto_front(error_curves(HILBERT, SHAPES))
    ]


@given(separated_matrices(shape=KroneckerShape(((3, 2), (2, 4))), max_rank=3))
def test_the_spectrum_has_as_many_values_as_terms(case):
    spectrum = rearranged_spectrum(case.to_matrix(), case.kronecker_shape)
    assert sum(value > 1e-9 for value in spectrum.relative) <= case.separation_rank
    assert_allclose(math.hypot(*spectrum.values), case.norm, rtol=1e-9)
    assert 1.0 <= spectrum.effective_rank <= case.separation_rank + 1e-6


def test_the_gaussian_limit_is_the_closed_form_for_one_component():
    pair = LowRank(np.ones((3, 1)), np.ones((1, 5)))
    limit = gaussian_limit([pair])
    bits = 8.0 * np.asarray(limit.bytes) / (3 + 5)
    assert_allclose(limit.relative_errors, np.sqrt(1.0 - (1.0 - 4.0**-bits) ** 2), atol=1e-7)
    assert len(limit.bytes) > 100


def test_the_gaussian_limit_lies_below_truncated_svd_and_is_the_cheapest_mix(rng):
    pairs = [
        LowRank(rng.standard_normal((20, 4)) * 3.0**-k, rng.standard_normal((4, 30)))
        for k in range(3)
    ]
    limit = gaussian_limit(pairs)
    squares = np.asarray(limit.relative_errors) ** 2
    assert np.all(np.diff(limit.bytes) > 0)
    assert np.all(np.diff(squares) < 0)
    slopes = np.diff(squares) / np.diff(limit.bytes)
    assert np.all(np.diff(slopes) >= -1e-9 * np.abs(slopes[:-1])), "a convex hull"
    curve, alone = low_rank_curve(pairs[0]), gaussian_limit(pairs[:1])
    for size, error in list(zip(curve.bytes("float16"), curve.relative_errors, strict=True))[:-1]:
        assert np.interp(size, alone.bytes, alone.relative_errors) <= error + 1e-12


@pytest.mark.parametrize("energies", [(1.0, 1.0), (1.0, 0.3), (1.0, 1e-3)])
def test_no_share_of_bits_between_two_components_loses_less_than_the_gaussian_limit(energies):
    """By trying all: a component of energy E with b bits a number loses E (1 − (1 − 4⁻ᵇ)²)."""
    left, right = np.eye(4, 2) * np.sqrt(energies), np.eye(2, 6)
    limit = gaussian_limit([LowRank(left, right)])
    assert limit.bytes[0] == 0.0
    for size, error in zip(limit.bytes, limit.relative_errors, strict=True):
        bits = 8.0 * size / (4 + 6)  # of both components together, a number of each
        first = np.linspace(0.0, bits, 2001)
        kept = [(1.0 - 4.0**-b) ** 2 for b in (first, bits - first)]
        losses = sum(e * (1.0 - k) for e, k in zip(energies, kept, strict=True)) / sum(energies)
        assert error**2 <= losses.min() + 1e-9
        assert error**2 == pytest.approx(losses.min(), rel=1e-3, abs=1e-9)


def test_the_gaussian_limit_reaches_from_nothing_kept_to_rounding():
    pair = LowRank(np.ones((3, 1)), np.ones((1, 5)))
    limit = gaussian_limit([pair])
    assert (limit.bytes[0], limit.relative_errors[0]) == (0.0, 1.0)
    assert limit.relative_errors[-1] < 1e-8
    # Of less than so much of a bit a component has nothing: it jumps where coding first pays
    first = 8.0 * limit.bytes[1] / 8
    assert 0.5 < first < 1.5
    coarse = gaussian_limit([pair], decades=2, points_per_decade=3)
    assert len(coarse.bytes) < 8
    assert coarse.relative_errors[-1] > 0.05
    # Near rounding, one bit more costs a quarter of the squared error, and so does its price
    fine = gaussian_limit([pair], decades=12, points_per_decade=5).relative_errors
    assert (fine[-6] / fine[-1]) ** 2 == pytest.approx(10.0, rel=1e-4)


def test_a_layer_of_zeros_has_a_limit_at_zero():
    assert gaussian_limit([LowRank(np.zeros((3, 2)), np.ones((2, 4)))]).relative_errors == (0.0,)


def test_components_without_energy_get_no_bits():
    """Factors of a rank that is not used: as many points, at the same places, as without them."""
    left, right = np.zeros((4, 3)), np.eye(3, 6)
    left[0, 0] = left[1, 1] = 1.0
    padded, plain = LowRank(left, right), LowRank(left[:, :2], right[:2])
    assert_allclose(gaussian_limit([padded]).bytes, gaussian_limit([plain]).bytes)
    assert_allclose(
        gaussian_limit([padded, padded]).bytes[-1], 2 * gaussian_limit([plain]).bytes[-1]
    )


@pytest.mark.parametrize("rank", [1, 4, 36])
def test_a_curve_of_so_many_terms_is_the_beginning_of_the_whole_curve(rank):
    """It is found by a decomposition of that rank, not by all singular values."""
    whole, part = error_curve(HILBERT, SHAPES[1]), error_curve(HILBERT, SHAPES[1], rank=rank)
    n = len(part.ranks)
    assert n == min(rank, 36) + 1
    assert part.ranks == whole.ranks[:n]
    assert part.parameters == whole.parameters[:n]
    assert_allclose(part.relative_errors, whole.relative_errors[:n], rtol=1e-6, atol=1e-12)


def test_rows_of_a_curve_are_its_points_with_their_conditions():
    curve = ErrorCurve("c", (0, 1, 2), (0, 7, 14), (1.0, 0.5, 0.25), 1.0, condition=3.0)
    rows = curve.to_rows()
    assert [row["rank"] for row in rows] == [0, 1, 2]
    assert [row["parameters"] for row in rows] == [0, 7, 14]
    assert [row["relative_error"] for row in rows] == [1.0, 0.5, 0.25]
    assert {row["curve"] for row in rows} == {"c"}
    assert {row["condition"] for row in rows} == {3.0}
    measured = solver_curve(HILBERT, SHAPES[1], (1, 2))
    assert [row["condition"] for row in measured.to_rows()] == list(measured.conditions)


@pytest.mark.parametrize(("least", "shown"), [(0.2, 0), (0.1, 1), (1e-3, 3), (1e-6, 6), (1e-9, 6)])
def test_a_curve_says_the_terms_for_six_powers_of_ten_at_most(least, shown):
    errors = [1.0, *(10.0**-k for k in range(1, 16) if 10.0**-k > least), least]
    count = tuple(range(len(errors)))
    text = repr(ErrorCurve("c", count, count, tuple(errors), 1.0))
    assert text.count(" with ") == shown
    assert (", …" in text) == (least < 1e-6)
    if shown:
        assert "1e-01 with 1" in text


@pytest.mark.parametrize(("count", "shown"), [(5, 5), (6, 6), (7, 6)])
def test_a_spectrum_says_its_six_largest_values(count, shown):
    values = [0.5**k for k in range(count)]
    text = repr(Spectrum("s", tuple(values)))
    listed = text.partition("values: ")[2].partition(";")[0].removesuffix(", …")
    assert listed.split(", ") == [f"{value:.3g}" for value in values[:shown]]
    assert (", …" in text) == (count > shown)


def test_a_spectrum_without_energy_has_shares_of_zero():
    spectrum = rearranged_spectrum(np.zeros((4, 4)), KroneckerShape(((2, 2), (2, 2))))
    assert set(spectrum.relative) == {0.0}
    assert Spectrum("tiny", (1e-300, 5e-301)).relative == (1.0, 0.5)
    assert Spectrum("empty", ()).relative == ()


def test_layers_are_laid_out_by_number():
    names = [f"model.layers.{k}.{m}" for k in (10, 2, 1) for m in ("q", "v") if (k, m) != (2, "v")]
    grid = layer_grid({name: float(k) for k, name in enumerate(names)}, "γ")
    assert grid.blocks == ("model.layers.1", "model.layers.2", "model.layers.10")
    assert grid.modules == ("q", "v")
    assert grid.values[0] == (3.0, 4.0)
    assert grid.values[2] == (0.0, 1.0)
    assert math.isnan(grid.values[1][1])
    assert grid.to_json()["values"] == [[3.0, 4.0], [2.0, None], [0.0, 1.0]]
    assert len(grid.to_rows()) == len(names)
    assert {(row["block"], row["module"]): row["γ"] for row in grid.to_rows()}[
        "model.layers.10", "v"
    ] == 1.0


def test_records_are_plain_json():
    spectrum, curve = rearranged_spectrum(HILBERT), error_curve(HILBERT)
    limit = gaussian_limit([LowRank(np.eye(3), np.eye(3))])
    front = pareto_front([curve])
    grid = layer_grid({"a.0.b": 1.0, "c": 2.0})
    for record in (spectrum, curve, limit, front[0], grid):
        assert set(record.to_json()) >= {field.name for field in fields(record)}
        assert json.loads(json.dumps(record.to_json(), allow_nan=False)) == record.to_json()


def test_records_show_themselves_in_a_notebook_with_every_name_escaped():
    curve = ErrorCurve("<i>&", tuple(range(30)), tuple(range(30)), (0.5,) * 30, 1.0)
    html = curve._repr_html_()
    assert "&lt;i&gt;&amp;" in html
    assert "<i>" not in html
    assert html.count("<tr>") == 14, "head, six first, dots, six last"
    result = decompose(HILBERT, SHAPES[1], rtol=1e-3)
    assert f"{result.relative_error:.3g}" in result._repr_html_()
    assert result.status.value in result._repr_html_()


def test_records_fit_a_screen_and_draw_themselves(rng):
    pytest.importorskip("matplotlib")
    matrix = rng.standard_normal((64, 64)) * np.exp(-0.3 * np.arange(64))
    curve, spectrum = error_curve(matrix), rearranged_spectrum(matrix)
    for record in (curve, spectrum, layer_grid({"h.0.q": 0.1, "h.1.q": 0.2})):
        assert len(repr(record)) < 320, repr(record)
    assert f"1e-01 with {curve.rank_for(0.1)}" in repr(curve)
    assert "up to 64 terms and 8,192 parameters" in repr(curve)
    assert curve.plot(against="ranks").lines
    assert spectrum.plot().lines


def test_an_error_that_no_point_of_a_curve_reaches_is_refused():
    curve = ErrorCurve("x", (0, 1), (0, 4), (1.0, 0.5), 1.0)
    assert curve.rank_for(0.5) == 1
    with pytest.raises(BudgetError, match="the smallest error on the curve is 0.5, not 0.1"):
        curve.rank_for(0.1)


def test_a_shape_in_words_is_the_label_as_a_curve_writes_it(rng):
    matrix = rng.standard_normal((4, 4))
    assert solver_curve(matrix, "2x2,2x2", [1]).label == "2×2 ⊗ 2×2"
