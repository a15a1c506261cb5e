"""Pictures of comparisons: every method at its place, with its spread; stages told apart by their lines."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from lsrdecomp import plots
from lsrdecomp.plots import Point


def test_every_method_is_a_labelled_point_with_its_spread():
    ax = plots.plot_quality([Point("LoRA", 768, 83.0, 0.5), Point("LSR", 704, 82.0), Point("head", 10, 60.0, 0.1)])
    drawn = {line.get_label(): tuple(line.get_xydata()[0]) for line in ax.get_lines() if line.get_label()[0] != "_"}
    assert drawn == {"LoRA": (768.0, 83.0), "LSR": (704.0, 82.0), "head": (10.0, 60.0)}
    assert {text.get_text() for text in ax.texts} == {"LoRA", "LSR", "head"}
    assert len(ax.containers) == 2  # one seed has no spread


def test_stages_share_a_colour_and_differ_in_their_lines():
    path = [Point("", 300, 0.7), Point("", 100, 0.5)]
    paths = {"LSR": {"as compressed": path, "from scratch": path[:1]}, "SVD": {"from scratch": path}}
    ax = plots.plot_stages(paths, references={"the LoRA": 1.0})
    first, second, third = [line for line in ax.get_lines() if line.get_marker() in plots.pictures.MARKERS]
    assert list(first.get_xdata()) == [100, 300]
    assert first.get_color() == second.get_color() != third.get_color()
    assert first.get_linestyle() != second.get_linestyle() == third.get_linestyle()
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["LSR", "SVD", "as compressed", "from scratch"]
