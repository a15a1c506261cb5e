"""Whole answers of a LoRA, of its base and of a version: a row each, made once."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("accelerate")
pytest.importorskip("sacrebleu")

from tiny_language_model import make_base  # noqa: E402

from benchmarks.language import answers  # noqa: E402
from benchmarks.language.tasks import write_tasks  # noqa: E402
from lsrdecomp import compress  # noqa: E402
from lsrdecomp.lora.train.finetune_record import ADAPTER  # noqa: E402
from lsrdecomp.lora.train.finetune_run import finetune  # noqa: E402
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings  # noqa: E402


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Return the arguments of a run for a tiny model, and the file that it writes."""
    folder = tmp_path_factory.mktemp("answers")
    base = make_base(folder)
    assert "arithmetic" not in write_tasks(folder, folder / "tasks", held=6)
    task = folder / "tasks" / "arithmetic"
    settings = {
        "base": str(base),
        "data": str(task / "train.jsonl"),
        "dev_data": str(task / "held.jsonl"),
        "steps": 3,
        "learning_rate": 0.05,
        "batch": 4,
        "samples": 0,
        "target_modules": ["q_proj", "v_proj"],
        "options": {"r": 2, "lora_alpha": 4},
    }
    finetune(FinetuneSettings.from_mapping(settings), folder / "run")
    lora = folder / "run" / ADAPTER
    compress(lora, ratio=2, storage="float32").save(folder / "half")
    out = folder / "answers.json"
    words = ["sums", "--base", base, "--lora", lora, "--held", task / "held.jsonl"]
    words += ["--other", task / "held.jsonl", "--bleu", 2, "--out", out]
    words += ["--versions", f"half={folder / 'half'}"]
    return [str(word) for word in words], out


def run(command, monkeypatch):
    words, out = command
    monkeypatch.setattr("sys.argv", ["answers", *words])
    answers.main()
    rows = json.loads(out.read_text())["rows"]
    return {row["name"]: row for row in rows}


def test_the_base_keeps_nothing_the_lora_all_and_a_version_less(command, monkeypatch):
    rows = run(command, monkeypatch)
    assert list(rows) == [answers.NO_ADAPTER, answers.LORA, "half"]
    assert rows[answers.NO_ADAPTER]["kept"] == pytest.approx(0.0, abs=1e-6)
    assert rows[answers.LORA]["kept"] == pytest.approx(1.0, abs=1e-6)
    assert rows[answers.LORA]["other_kl"] == pytest.approx(0.0, abs=1e-6)
    assert rows["half"]["kept"] < 1.0
    assert 0 == rows[answers.NO_ADAPTER]["bytes"] < rows["half"]["bytes"]
    # The other task is the same here, so the share that is kept of it is too.
    half = rows["half"]
    assert 1.0 - half["other_kl"] / half["other_effect"] == pytest.approx(half["kept"], abs=1e-6)
    assert all(0.0 <= row["bleu"] <= 100.0 for row in rows.values())
    assert all(row["examples"] == 6 for row in rows.values())


def test_a_row_that_is_there_is_not_made_again(command, monkeypatch):
    first = run(command, monkeypatch)

    def refuse(*_):
        raise AssertionError("judged again")

    monkeypatch.setattr(answers.Judges, "row", refuse)
    assert run(command, monkeypatch) == first
