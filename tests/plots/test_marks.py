"""What a reader needs of a picture: sizes, labels, marks and ticks, read back from its axes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex  # noqa: E402

from lsrdecomp.analysis import (  # noqa: E402
    ErrorCurve,
    Limit,
    ParetoPoint,
    Spectrum,
    layer_grid,
)
from lsrdecomp.plots import (  # noqa: E402
    COLOURS,
    plot_error_curves,
    plot_layer_grid,
    plot_pareto,
    plot_shares,
    plot_spectra,
    plot_sweeps,
    save_figure,
)
from lsrdecomp.plots.pictures import LINE_NAME, MARKERS, dress, new_axes  # noqa: E402
from lsrdecomp.solvers.solver import Sweep  # noqa: E402

CURVES = [
    ErrorCurve(f"curve {i}", (0, 1, 2), (0, 10 + i, 20 + i), (1.0, 0.3, 0.02), 1.0)
    for i in range(9)
]


def grid(n_blocks, n_modules):
    values = {f"h.{i}.m{j}": i + j / 10 for i in range(n_blocks) for j in range(n_modules)}
    return layer_grid(values)


def line_names(ax):
    """Return the names that stand at the ends of lines."""
    return [text.get_text() for text in ax.texts if text.get_gid() == LINE_NAME]


def inches(ax):
    return tuple(ax.get_figure().get_size_inches())


def test_a_grid_is_as_large_as_its_rows_and_columns_need_up_to_a_page():
    sizes = [inches(plot_layer_grid(grid(*shape))) for shape in ((2, 2), (12, 2), (12, 6))]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[0][0] == sizes[1][0]  # as many modules
    assert sizes[1][1] == sizes[2][1]  # as many blocks
    assert sizes[2][0] - sizes[1][0] == pytest.approx(4 * 0.9)
    assert sizes[1][1] - sizes[0][1] == pytest.approx(10 * 0.32)
    assert inches(plot_layer_grid(grid(60, 14))) == (12.0, 12.0)


@pytest.mark.parametrize(("n_blocks", "every"), [(1, 1), (40, 1), (41, 2), (80, 2), (81, 3)])
def test_at_most_forty_blocks_are_named_from_the_first_on(n_blocks, every):
    ax = plot_layer_grid(grid(n_blocks, 1))
    named = [tick.get_text() for tick in ax.get_yticklabels()]
    assert named == [f"h.{i}" for i in range(0, n_blocks, every)]
    assert list(ax.get_yticks()) == list(range(0, n_blocks, every))


@pytest.mark.parametrize(("max_written", "is_written"), [(6, True), (5, False)])
def test_values_are_written_where_there_is_room(max_written, is_written):
    ax = plot_layer_grid(grid(3, 2), max_written=max_written)
    written = {text.get_position(): (text.get_text(), text.get_color()) for text in ax.texts}
    if not is_written:
        assert not written
        return
    assert {place: text for place, (text, _) in written.items()} == {
        (j, i): f"{i + j / 10:.2g}" for i in range(3) for j in range(2)
    }
    # Light on the dark of small values, dark on the light of large ones
    assert [written[0, i][1] for i in range(3)] == ["w", "w", "k"]


def test_curves_differ_in_colour_and_mark_and_have_their_name_in_their_colour():
    ax = plot_error_curves(CURVES)
    lines = ax.get_lines()
    looks = [(to_hex(line.get_color()).upper(), line.get_marker()) for line in lines]
    assert looks[:7] == list(zip(COLOURS, MARKERS, strict=True))
    assert looks[7:] == looks[:2]
    names = ax.get_legend().get_texts()
    assert [name.get_text() for name in names] == [curve.label for curve in CURVES]
    assert [name.get_color() for name in names] == [line.get_color() for line in lines]


@pytest.mark.parametrize("dpi", [72, 100, 200])
def test_names_at_the_ends_of_lines_do_not_overlap_and_stand_as_near_as_they_can(dpi):
    # One end far below, a pair, and far above two ends at one height
    last_errors = (1e-6, 1e-3, 1.1e-3, 0.5, 0.5)
    curves = [
        ErrorCurve(f"at {error:g}", (0, 1), (0, 10), (1.0, error), 1.0) for error in last_errors
    ]
    ax = new_axes()
    ax.get_figure().set_dpi(dpi)
    plot_error_curves(curves, ax=ax)
    ax.get_figure().canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_gid() == LINE_NAME]
    ends = [ax.transData.transform((10, error))[1] for error in last_errors]
    middles = [(box.y0 + box.y1) / 2 for box in boxes]
    height = boxes[0].height
    assert sorted(middles) == pytest.approx(middles)  # in the order of their ends
    for below, above in pairwise(boxes):
        assert below.y1 <= above.y0
    assert middles[0] == pytest.approx(ends[0], abs=0.2 * height)
    for pair in (slice(1, 3), slice(3, 5)):
        assert np.mean(middles[pair]) == pytest.approx(np.mean(ends[pair]), abs=0.2 * height)
        assert np.diff(middles[pair]) < 2.0 * height


@pytest.mark.parametrize(("n_sweeps", "has_marks"), [(40, True), (41, False)])
def test_sweeps_are_counted_from_one_and_marked_while_they_can_be_told_apart(n_sweeps, has_marks):
    ax = plot_sweeps({"a": [Sweep(k, 0.5, 2.0) for k in range(n_sweeps)]})
    (line,) = ax.get_lines()
    assert list(line.get_xdata()) == list(range(1, n_sweeps + 1))
    assert (line.get_marker() == "o") == has_marks
    assert line_names(ax) == ["a"]


def test_singular_values_are_relative_and_counted_from_one():
    (line,) = plot_spectra(Spectrum("a", (4.0, 1.0, 0.5))).get_lines()
    assert np.array_equal(line.get_xydata(), [(1, 1.0), (2, 0.25), (3, 0.125)])


@pytest.mark.parametrize("x_max", [3, 12])
def test_terms_are_whole_numbers_on_their_axis(x_max):
    ax = plot_spectra(Spectrum("a", tuple(0.5**k for k in range(x_max))))
    ax.get_figure().canvas.draw()
    ticks = ax.get_xticks()
    assert np.array_equal(ticks, np.round(ticks))


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((500, 8000), {500: "500", 5000: "5,000"}),
        ((9000, 40000), {10000: "10k", 20000: "20k"}),
        ((900_000, 4_000_000), {1e6: "1M", 2e6: "2M"}),
        ((9e8, 4e9), {1e9: "1G", 2e9: "2G"}),
    ],
)
def test_sizes_are_short_words(values, texts):
    ax = plot_shares({"a": [(values[0], 0.2), (values[1], 0.9)]})
    named = ax.xaxis.get_major_formatter()
    assert {value: named(value, 0) for value in texts} == texts
    assert set(texts) <= set(ax.get_xticks())


def test_shares_are_drawn_by_size_below_the_whole():
    shares = {"LSR": [(96, 0.9), (24, 0.5), (48, 0.8)], "SVD": [(96, 0.6)]}
    ax = plot_shares(shares, whole=4608)
    lsr, svd, whole = ax.get_lines()
    assert np.array_equal(lsr.get_xydata(), [(24, 0.5), (48, 0.8), (96, 0.9)])
    assert np.array_equal(svd.get_xydata(), [(96, 0.6)])
    assert list(whole.get_ydata()) == [1.0, 1.0]
    assert line_names(ax) == ["LSR", "SVD"]
    assert ax.get_ylim() == (0.0, 1.1)
    assert len(plot_shares(shares).get_lines()) == 2


def test_below_the_finest_rounding_there_is_little_room():
    curve = CURVES[0]
    ax = plot_error_curves(curve, storages=("float16", "bfloat16"))
    floors = {f"{storage} rounding": curve.floor(storage) for storage in ("float16", "bfloat16")}
    said = {text.get_text(): text.xy[1] for text in ax.texts if text.get_gid() != LINE_NAME}
    assert said == floors
    drawn = [line.get_ydata()[0] for line in ax.get_lines() if line.get_linestyle() == ":"]
    assert sorted(drawn) == sorted(floors.values())
    assert ax.get_ylim()[0] == pytest.approx(0.5 * min(floors.values()))


def test_points_of_a_front_stand_at_their_size_and_error():
    points = [ParetoPoint("a", 1, 10, 0.5), ParetoPoint("b", 1, 20, 0.2)]
    steps, a, b = plot_pareto(points).get_lines()
    assert np.array_equal(steps.get_xydata(), [(10, 0.5), (20, 0.2)])
    assert np.array_equal(a.get_xydata(), [(10, 0.5)])
    assert np.array_equal(b.get_xydata(), [(20, 0.2)])
    assert (a.get_marker(), b.get_marker()) == MARKERS[:2]


def test_a_limit_is_drawn_within_the_axes_as_the_curves_left_them():
    limit = Limit("limit", (0.0, 25.0, 50.0, 4000.0), (1.0, 0.4, 0.1, 1e-5))
    without = plot_error_curves(CURVES[:1], against="bytes")
    ax = plot_error_curves(CURVES[:1], against="bytes", limits=[limit])
    assert np.array_equal(ax.get_lines()[-1].get_xydata(), [(25.0, 0.4)])
    assert ax.get_xlim() == without.get_xlim()
    assert list(ax.get_lines()[0].get_xdata()) == [2 * size for size in (10, 20)]
    low, high = without.get_xlim()
    from_end_to_end = Limit("limit", (0.5 * low, low, high, 2.0 * high), (0.8, 0.4, 0.2, 0.1))
    ax = plot_error_curves(CURVES[:1], against="bytes", limits=[from_end_to_end])
    assert list(ax.get_lines()[-1].get_xdata()) == [low, high]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_of_the_kind_its_ending_says_and_always_the_same(ending, tmp_path):
    first, second = (tmp_path / f"{name}.{ending}" for name in "ab")
    for path in (first, second):
        save_figure(plot_error_curves(CURVES[:2]), path)
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[ending]
    assert first.read_bytes().startswith(start)
    assert b"<dc:date>" not in first.read_bytes()
    named = tmp_path / "picture.of.mine"
    save_figure(plot_error_curves(CURVES[:2]), named, ending)
    assert named.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("draw", "labels", "scales"),
    [
        (
            lambda: plot_error_curves(CURVES),
            ("parameters", "relative Frobenius error"),
            ("log", "log"),
        ),
        (
            lambda: plot_error_curves(CURVES, against="ranks"),
            ("separation rank s", "relative Frobenius error"),
            ("linear", "log"),
        ),
        (
            lambda: plot_error_curves(CURVES, against="bytes", storage="float32"),
            ("bytes in float32", "relative Frobenius error"),
            ("log", "log"),
        ),
        (
            lambda: plot_pareto([ParetoPoint("a", 1, 10, 0.5)]),
            ("parameters", "relative Frobenius error"),
            ("log", "log"),
        ),
        (
            lambda: plot_spectra(Spectrum("a", (4.0, 1.0))),
            ("term k", "λ_k / λ_1"),
            ("linear", "log"),
        ),
        (
            lambda: plot_sweeps({"a": [Sweep(0, 0.5, 2.0)]}, quantity="relative_error"),
            ("sweep", "relative Frobenius error"),
            ("linear", "log"),
        ),
        (
            lambda: plot_shares({"a": [(96, 0.6)]}),
            ("parameters", "share of the LoRA's effect that is kept"),
            ("log", "linear"),
        ),
    ],
)
def test_axes_say_what_they_count_and_where_they_are_logarithmic(draw, labels, scales):
    ax = draw()
    said = [
        f"{label}, log scale" if scale == "log" else label
        for label, scale in zip(labels, scales, strict=True)
    ]
    assert [ax.get_xlabel(), ax.get_ylabel()] == said
    assert (ax.get_xscale(), ax.get_yscale()) == scales


@pytest.mark.parametrize(("top", "has_powers"), [(990.0, False), (1000.0, True), (1e5, True)])
def test_errors_over_three_decades_are_written_as_powers_of_ten(top, has_powers):
    ax = new_axes()
    ax.set_yscale("log")
    ax.set_ylim(1.0, top)
    dress(ax, "terms", "error")
    assert ("^" in ax.yaxis.get_major_formatter()(10.0)) is has_powers


def test_a_logarithmic_axis_whose_range_reaches_zero_is_dressed_as_a_short_one():
    ax = new_axes()
    ax.set_ylim(0.0, 1.0)
    ax.set_yscale("log")
    dress(ax, "terms", "error")
    assert ax.yaxis.get_major_formatter()(5.0) == "5"
