"""The pictures of the pages are drawn from their records by the scripts that drew them."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from benchmarks.behaviour import demo_picture
from benchmarks.headline import headline
from benchmarks.language import (
    answer_curve_picture,
    from_lora_picture,
    kept_by_bytes_picture,
    rivals_picture,
)
from benchmarks.language.rival_results import RivalResults
from benchmarks.solvers import two_factors
from lsrdecomp.plots.pictures import COLOURS, MARKERS, METHOD_NAMES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def rival_results():
    """Two sizes of LSR, as compressed and trained at two rates, and one of another method."""
    effects = [10.0, 20.0]

    def row(method, budget, steps, lost, *, rate=0.1, seed=0):
        kept = 1.0 - sum(lost) / sum(effects)
        facts = {"method": method, "budget": budget, "bytes": budget - 8, "steps": steps}
        facts |= {"seed": seed, "rate": rate, "kept": kept, "error": 0.01, "lost": lost}
        return {"task": "E2E", "base": "smollm2", **facts}

    rows = [
        row("LSR", 1000, 0, [4.0, 8.0]),
        row("LSR", 1000, 40, [2.0, 4.0]),
        row("LSR", 1000, 40, [1.0, 2.0], rate=0.3),
        row("LSR", 1000, 40, [2.0, 1.0], rate=0.3, seed=1),
        row("LSR", 3000, 40, [0.5, 1.0]),
        row("Uni-LoRA", 1000, 40, [2.0, 2.0]),
    ]
    about = {"task": "E2E", "base": "smollm2", "effects": effects, "bytes_of_lora": 3_718_782}
    return RivalResults({"rows": rows, "tasks": [about]}, "E2E")


def test_rivals_are_shown_at_the_rate_that_was_best_with_the_first_seed():
    results = rival_results()
    assert [row["rate"] for row in results.trained("LSR", 1000)] == [0.3, 0.3]
    assert results.share("LSR", 1000).value == pytest.approx(0.9)
    assert results.trained("Uni-LoRA", 3000) == []
    # Of the same seed: 4 nats are lost by the other, 3 by LSR, of 30.
    lead = results.lead("Uni-LoRA", 1000)
    assert lead.value == pytest.approx(1.0 / 30.0)
    without_one = [(2.0 - 2.0) / 20.0, (2.0 - 1.0) / 10.0]
    assert lead.error == pytest.approx(np.std(without_one))


def test_small_adapters_have_a_panel_a_task_with_named_lines():
    panels = rivals_picture.draw([rival_results(), rival_results()])
    assert [panel.get_title() for panel in panels] == ["E2E", "E2E"]
    for panel in panels:
        assert panel.get_legend() is None
        assert {text.get_text() for text in panel.texts} == {"LSR", "Uni-LoRA"}


def test_solvers_have_a_panel_for_each_problem_on_which_they_differ(tmp_path, monkeypatch):
    rows = json.loads((RESULTS / "solvers-threads1.json").read_text())["dense"]["rows"]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    two_factors.figure(rows, tmp_path / "solvers.png")
    panels = drawn[0].axes
    assert [panel.get_title() for panel in panels] == [
        "1/k",
        "exponential kernel",
        "noise",
        "0.18^k",
    ]
    named = {text.get_text() for panel in panels for text in panel.texts}
    assert named == set(two_factors.SOLVERS.values())
    assert all(len(panel.texts) == 5 and panel.get_legend() is None for panel in panels)


def test_training_from_a_lora_has_its_picture(tmp_path):
    out = tmp_path / "from-lora.png"
    from_lora_picture.main(RESULTS / "from_lora.json", out)
    assert out.stat().st_size > 10_000


def test_what_is_kept_by_bytes_has_a_line_a_method_and_training():
    axes = kept_by_bytes_picture.draw(rival_results())
    lines, labels = axes.get_legend_handles_labels()
    drawn = {}
    for line, label in zip(lines, labels, strict=True):
        drawn[label] = [[round(value, 3) for value in point] for point in line.get_xydata()]
    assert drawn == {
        "LSR, distilled": [[0.992, 0.9], [2.992, 0.95]],
        "LSR, as compressed": [[0.992, 0.6]],
        "Uni-LoRA, trained": [[0.992, 0.867]],
    }
    assert "3,719" in axes.get_xlabel()
    assert {label.get_text() for label in axes.texts} == set(drawn)
    assert len(axes.containers) == len(drawn)
    ticks = axes.yaxis.get_transform().transform([0.0, 0.9, 0.99])
    assert ticks.tolist() == pytest.approx([0.0, 1.0, 2.0])


def drawn_pictures(tmp_path, monkeypatch):
    """Return the axes of each picture of the pages, and of the demo."""
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    rows = json.loads((RESULTS / "solvers-threads1.json").read_text())["dense"]["rows"]
    two_factors.figure(rows, tmp_path / "solvers.png")
    from_lora_picture.main(RESULTS / "from_lora.json", tmp_path / "from-lora.png")
    demo_picture.main(RESULTS / "demo_function.json", tmp_path / "demo-function.png")
    kept_by_bytes_picture.main(RESULTS / "rivals.json", tmp_path / "kept-by-bytes.png")
    answers = tmp_path / "answers.png"
    answer_curve_picture.main(RESULTS / "answer_curve.json", RESULTS / "rivals.json", answers)
    rivals_picture.main(RESULTS / "rivals.json", tmp_path / "small-adapters.png")
    return [axes for figure in saved for axes in figure.axes]


def test_an_axis_that_is_not_linear_says_so_in_words(tmp_path, monkeypatch):
    axes = drawn_pictures(tmp_path, monkeypatch)
    labels = [
        axis.get_label_text()
        for each in axes
        for axis in (each.xaxis, each.yaxis)
        if axis.get_scale() != "linear" and axis.get_label_text()
    ]
    assert len(labels) >= 10
    assert [label for label in labels if "log scale" not in label] == []


def test_a_method_has_one_colour_and_one_marker_and_training_one_line(tmp_path, monkeypatch):
    seen = {}
    for axes in drawn_pictures(tmp_path, monkeypatch):
        title = axes.get_figure().get_suptitle()
        for line in axes.get_lines():
            label = line.get_label()
            name = next((each for each in METHOD_NAMES if label.startswith(each)), None)
            if name is None:
                continue
            is_trained = any(word in label + title for word in ("trained", "distilled"))
            assert (line.get_linestyle() == "-") == is_trained, label
            filled = "none" if not is_trained else line.get_color()
            assert line.get_markerfacecolor() == filled, label
            seen.setdefault(name, set()).add((line.get_color(), line.get_marker()))
    assert set(seen) == set(METHOD_NAMES[:5])
    place = {name: METHOD_NAMES.index(name) for name in seen}
    assert seen == {name: {(COLOURS[i], MARKERS[i])} for name, i in place.items()}


def test_the_front_doors_figure_is_marked_in_its_picture(tmp_path, monkeypatch):
    (axes,) = (
        each
        for each in drawn_pictures(tmp_path, monkeypatch)
        if "word for word" in each.get_ylabel()
    )
    told = headline()
    words = " ".join(text.get_text() for text in axes.texts)
    assert f"{told.sizes[1]}, {told.count}" in words
    stars = {tuple(line.get_xydata()[0]) for line in axes.get_lines() if line.get_marker() == "*"}
    assert (told.bytes / 1000, 100 * told.n_matching / told.answered) in stars


def test_whole_answers_have_a_line_a_method_and_a_point_a_storage():
    def row(method, size, n_matching):
        return {"method": method, "bytes": size, "n_matching": n_matching, "answered": 64}

    rows = [
        row("LSR", 60_000, 41),
        row("LSR", 8_000, 2),
        row("LSR, trained", 60_000, 48),
        row("LSR without the norm", 60_000, 1),
        row("truncated SVD", 60_000, 18),
        row("the LoRA in int8", 981_000, 64),
    ]
    axes = answer_curve_picture.draw(rows)
    lines, labels = axes.get_legend_handles_labels()
    drawn = {}
    for line, label in zip(lines, labels, strict=True):
        drawn[label] = [tuple(point) for point in line.get_xydata().tolist()]
    assert drawn == {
        "LSR, trained": [(60.0, 75.0)],
        "LSR, as compressed": [(8.0, 3.125), (60.0, 64.0625)],
        "truncated SVD": [(60.0, 28.125)],
        "the LoRA in int8": [(981.0, 100.0)],
    }
    assert {label.get_text() for label in axes.texts} == set(drawn)
    assert "% of 64" in axes.get_ylabel()
