"""Pictures of comparisons: every method at its place, with its spread; stages differ by lines."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from benchmarks.lab import pictures
from benchmarks.lab.pictures import Point
from lsrdecomp import plots


def test_every_method_is_a_labelled_point_with_its_spread():
    ax = pictures.plot_quality(
        [Point("LoRA", 768, 83.0, 0.5), Point("LSR", 704, 82.0), Point("head", 10, 60.0, 0.1)]
    )
    drawn = {
        line.get_label(): tuple(line.get_xydata()[0])
        for line in ax.get_lines()
        if line.get_label()[0] != "_"
    }
    assert drawn == {"LoRA": (768.0, 83.0), "LSR": (704.0, 82.0), "head": (10.0, 60.0)}
    assert {text.get_text() for text in ax.texts} == {"LoRA", "LSR", "head"}
    assert len(ax.containers) == 2  # one seed has no spread


def test_stages_have_a_panel_each_and_structures_keep_their_colour():
    path = [Point("", 300, 0.7, 0.1), Point("", 100, 0.5)]
    paths = {
        "LSR": {"as compressed": path, "from scratch": path[:1]},
        "SVD": {"from scratch": path},
    }
    first, second = pictures.plot_stages(paths, references={"the LoRA": 1.0})
    assert [panel.get_title() for panel in (first, second)] == ["as compressed", "from scratch"]
    drawn = [
        [
            line
            for line in panel.get_lines()
            if line.get_marker() in plots.pictures.MARKERS and len(line.get_xdata())
        ]
        for panel in (first, second)
    ]
    assert [len(lines) for lines in drawn] == [1, 2]
    lsr, again, svd = (*drawn[0], *drawn[1])
    assert list(lsr.get_xdata()) == sorted(lsr.get_xdata())
    assert lsr.get_color() == again.get_color() != svd.get_color()
    assert again.get_marker() != svd.get_marker()
    assert again.get_xdata()[0] != svd.get_xdata()[-1], "bars of one size stand side by side"
    legend = [text.get_text() for text in first.figure.legends[0].get_texts()]
    assert legend == ["LSR", "SVD"]
