"""Pictures hold what the records say; drawing asks for no display and changes no global state."""

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402
from matplotlib.testing.compare import compare_images  # noqa: E402

from lsrdecomp.analysis import (  # noqa: E402
    ErrorCurve,
    Limit,
    ParetoPoint,
    Spectrum,
    layer_grid,
    pareto_front,
)
from lsrdecomp.plots import (  # noqa: E402
    COLOURS,
    plot_error_curves,
    plot_layer_grid,
    plot_pareto,
    plot_spectra,
    plot_sweeps,
    save_figure,
)
from lsrdecomp.plots.pictures import LINE_NAME  # noqa: E402
from lsrdecomp.solvers.solver import Sweep  # noqa: E402

BASELINES = Path(__file__).parent / "baseline_images"

FAST = ErrorCurve("fast", (0, 1, 2, 3), (0, 100, 200, 300), (1.0, 1e-2, 1e-4, 1e-18), 1.0)
SLOW = ErrorCurve(
    "slow", (0, 1, 2, 3), (0, 80, 160, 240), (1.0, 0.5, 0.25, 0.125), 1.0, condition=8.0
)
LIMIT = Limit("Gaussian limit", (0.0, 150.0, 300.0, 600.0), (1.0, 0.5, 1e-2, 1e-5))
SWEEPS = {
    "plain": [Sweep(k, 0.5**k, 2.0**k) for k in range(8)],
    "penalised": [Sweep(k, 0.6**k, 1.5) for k in range(8)],
}
GRID = layer_grid(
    {f"h.{k}.{m}": 0.1 * k + 0.05 * j for k in range(3) for j, m in enumerate(("q", "v"))}
)


def line(ax, label):
    found = [one for one in ax.get_lines() if one.get_label() == label]
    assert len(found) == 1
    return found[0].get_xydata()


def texts(ax):
    return [text.get_text() for text in ax.texts if text.get_gid() != LINE_NAME]


def legend(ax):
    """Names of the lines: at their ends, or in a legend where they are many."""
    at_lines = [text.get_text() for text in ax.texts if text.get_gid() == LINE_NAME]
    return at_lines or [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize(
    ("against", "x"), [("parameters", (100, 200)), ("ranks", (1, 2)), ("bytes", (200, 400))]
)
def test_a_curve_is_drawn_as_it_is_but_for_zeros(against, x):
    ax = plot_error_curves([FAST, SLOW], against=against)
    assert np.array_equal(line(ax, "fast"), np.column_stack([x, (1e-2, 1e-4)]))
    assert legend(ax) == ["fast", "slow"]
    assert ax.get_yscale() == "log"
    assert ax.get_ylabel() == "relative Frobenius error, log scale"
    assert len(plot_error_curves(FAST, against=against).get_lines()) == 1


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="expected parameters, ranks or bytes, got 'flops'"):
        plot_error_curves([FAST], against="flops")


def test_floors_are_those_of_the_worst_condition():
    ax = plot_error_curves([FAST, SLOW], storages=("float16", "bfloat16"))
    heights = sorted(one.get_ydata()[0] for one in ax.get_lines() if one.get_linestyle() == ":")
    assert heights == [8.0 * 2**-11, 8.0 * 2**-8]
    assert "float16 rounding" in texts(ax)


def test_limits_are_references_on_the_axis_of_bytes():
    ax = plot_error_curves([FAST], against="bytes", limits=[LIMIT])
    assert "Gaussian limit" in legend(ax)
    assert len(line(ax, "Gaussian limit")) >= 1


def test_the_axes_given_are_the_axes_returned():
    own = Figure().subplots(5)
    assert plot_error_curves([FAST], ax=own[0]) is own[0]
    assert plot_pareto(pareto_front([FAST]), ax=own[1]) is own[1]
    assert plot_spectra([Spectrum("s", (1.0, 0.5))], ax=own[2]) is own[2]
    assert plot_sweeps(SWEEPS, ax=own[3]) is own[3]
    assert plot_layer_grid(GRID, ax=own[4]) is own[4]


def test_nothing_to_draw_is_an_empty_picture():
    assert plot_error_curves([]).get_lines() == []
    assert plot_pareto([]).get_legend() is None


def test_a_front_names_each_curve_once():
    points = [
        ParetoPoint("a", 1, 10, 0.5),
        ParetoPoint("b", 1, 20, 0.2),
        ParetoPoint("a", 2, 30, 0.1),
    ]
    ax = plot_pareto(points, size="bytes")
    assert sorted(legend(ax)) == ["a", "b"]
    assert np.array_equal(line(ax, "a"), [(10, 0.5), (30, 0.1)])
    assert ax.get_xlabel() == "bytes, log scale"


def test_sweeps_show_the_condition_or_the_error():
    assert np.array_equal(line(plot_sweeps(SWEEPS), "plain")[:, 1], [2.0**k for k in range(8)])
    assert np.array_equal(
        line(plot_sweeps(SWEEPS, quantity="relative_error"), "plain")[:, 1],
        [0.5**k for k in range(8)],
    )


def test_infinite_conditions_are_left_out():
    ax = plot_sweeps({"a": [Sweep(0, 1.0, math.inf), Sweep(1, 0.5, 2.0)]})
    assert np.array_equal(line(ax, "a"), [(2.0, 2.0)])


def test_a_grid_writes_its_values_and_leaves_gaps():
    ax = plot_layer_grid(layer_grid({"h.0.q": 0.25, "h.1.v": 0.5}))
    assert sorted(texts(ax)) == ["0.25", "0.5"]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["q", "v"]
    assert int(np.ma.count_masked(ax.get_images()[0].get_array())) == 2


def test_a_line_that_leaves_the_picture_leaves_the_margin_above_as_it_is():
    """An exact last point lies far below; a logarithmic margin grows with what lies below."""
    dive = ErrorCurve(
        "exact at last", (0, 1, 2, 3), (0, 100, 200, 300), (1.0, 0.5, 0.2, 1e-14), 1.0
    )
    assert 1.0 < plot_error_curves([dive], storages=("float16",)).get_ylim()[1] < 2.0


def test_colours_stay_apart_for_common_colour_blindness():
    """Distances in linear RGB under simulated protanopia and deuteranopia (Viénot et al. 1999)."""
    linear = np.array([[int(c[k : k + 2], 16) / 255 for k in (1, 3, 5)] for c in COLOURS]) ** 2.2
    protan = np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]])
    deutan = np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]])
    for matrix in (np.eye(3), protan, deutan):
        seen = np.clip(linear @ matrix.T, 0, 1) ** (1 / 2.2)
        assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 0.08


def test_drawing_leaves_pyplot_and_the_settings_alone():
    import matplotlib.pyplot as plt

    before, figures = dict(matplotlib.rcParams), plt.get_fignums()
    plot_error_curves([FAST, SLOW], storages=("float16",))
    plot_layer_grid(GRID)
    assert dict(matplotlib.rcParams) == before
    assert plt.get_fignums() == figures


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_saved_picture_has_no_date_inside(tmp_path, ending):
    save_figure(plot_error_curves([FAST]), tmp_path / f"a.{ending}")
    content = (tmp_path / f"a.{ending}").read_bytes()
    assert len(content) > 2000
    assert b"<dc:date>" not in content


PICTURES = {
    "error_curves": lambda: plot_error_curves([FAST, SLOW], storages=("float16",)),
    "error_curves_bytes": lambda: plot_error_curves([FAST, SLOW], against="bytes", limits=[LIMIT]),
    "pareto": lambda: plot_pareto(pareto_front([FAST, SLOW])),
    "spectra": lambda: plot_spectra(
        [Spectrum("3×3 ⊗ 2×2", (2.0, 1.0, 1e-3)), Spectrum("9×1 ⊗ 1×4", (2.0, 1.5))]
    ),
    "sweeps": lambda: plot_sweeps(SWEEPS),
    "layer_grid": lambda: plot_layer_grid(GRID),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_look_as_they_did_when_someone_looked(name, tmp_path):
    """Fonts and anti-aliasing differ between versions of matplotlib, of late only a little."""
    pytest.importorskip("matplotlib", minversion="3.11")
    ax = PICTURES[name]()
    ax.get_figure().savefig(tmp_path / f"{name}.png", dpi=55)
    difference = compare_images(
        str(BASELINES / f"{name}.png"), str(tmp_path / f"{name}.png"), tol=12
    )
    assert difference is None, difference


def test_a_front_shows_a_choice_of_one_number():
    points = [ParetoPoint("a", 0, 0, 1.0), ParetoPoint("a", 1, 1, 0.5), ParetoPoint("a", 2, 8, 0.1)]
    assert list(plot_pareto(points).lines[0].get_xdata()) == [1, 8]
