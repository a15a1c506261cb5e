"""compress, distill, calibrate and verify without texts: the model writes them, and it is said."""

from __future__ import annotations

import json
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from tiny_bases import write_directories  # noqa: E402
from tiny_language_model import make_base, make_lora  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import lsrdecomp as lsr  # noqa: E402
from lsrdecomp.cli.app import app  # noqa: E402
from lsrdecomp.lora.base import written_texts  # noqa: E402
from lsrdecomp.lora.base.dataset import PromptExample  # noqa: E402
from lsrdecomp.lora.base.texts import CONTINUED, SENTENCES, WRITTEN  # noqa: E402
from lsrdecomp.lora.compress.html_report import html_report  # noqa: E402
from lsrdecomp.lora.files import Journal  # noqa: E402
from lsrdecomp.lora.files.statistics import read_statistics  # noqa: E402
from lsrdecomp.lora.measure import evaluator as evaluate  # noqa: E402
from lsrdecomp.lora.measure.fidelity import WRITTEN_BIAS  # noqa: E402

GIVEN = [
    PromptExample(f"user {words} assistant", " one", "here")
    for words in ("one two three four", "three two assistant six", "six five one", "four user two")
]


@pytest.fixture(autouse=True)
def few_and_short_texts(monkeypatch):
    monkeypatch.setattr(written_texts, "NEW_TOKENS", 5)
    monkeypatch.setattr(written_texts, "MIN_FOUND", 0.01)  # this base has few words
    monkeypatch.setattr(evaluate, "N_WRITTEN", 50)
    monkeypatch.setattr(evaluate, "N_WRITTEN_TO_TRAIN", 60)
    # The verbs write as many as `write_texts` does by itself.
    monkeypatch.setattr(written_texts, "write_texts", partial(written_texts.write_texts, count=40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    make_base(folder)
    lsr.compress(make_lora(folder), separation_rank=2).save(folder / "small")
    return folder


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None, done.output
    return done.output


def test_without_texts_result_record_card_and_report_say_so(folder, tmp_path):
    made = lsr.compress(folder / "lora", ratio=4, base=folder / "base")
    fidelity = made.fidelity
    assert fidelity.written == WRITTEN
    said = f"{fidelity.examples} texts that the model wrote itself"
    bias, spread, n_tasks = WRITTEN_BIAS[WRITTEN]
    assert f"on {n_tasks} tasks" in fidelity.sentence()
    apart = f"{100 * bias:+.1f} ± {100 * spread:.1f} points"
    for text in (repr(made), fidelity.sentence()):
        assert said in text
        assert apart in text
    assert said in html_report(made, ())
    path = made.save(tmp_path / "out")
    record = json.loads((path / "compression.json").read_text())["promise"]
    assert record["written"] == WRITTEN
    assert said in record["sentence"]
    assert said in (path / "README.md").read_text()


def test_the_command_line_needs_no_texts_and_says_what_it_measured_on(folder, tmp_path):
    base = ("--base", folder / "base")
    printed = run("compress", folder / "lora", *base, "--ratio", 4, "--out", tmp_path / "out")
    assert "texts that the model wrote itself" in " ".join(printed.split())
    assert "give some by --data" in " ".join(printed.split())
    assert "--data" not in printed.split("To repeat it:")[1]


def test_a_few_prompts_are_gone_on_with_and_calibrate(folder):
    made = lsr.compress(folder / "lora", ratio=4, base=folder / "base", data=GIVEN)
    assert made.fidelity.written == CONTINUED
    evaluator = evaluate.Evaluator(folder / "base", folder / "lora", GIVEN)
    assert evaluator.calibration_texts[: len(GIVEN)] == GIVEN
    assert not set(GIVEN) & set(evaluator.held_out)
    assert all(text.prompt.startswith("user ") for text in evaluator.held_out)


def test_with_enough_texts_none_are_written(folder, monkeypatch):
    monkeypatch.setattr(evaluate, "write_texts", None)
    texts = [(f"user one two three {'four ' * i}", None) for i in range(36)]
    evaluator = evaluate.Evaluator(folder / "base", folder / "lora", texts)
    assert evaluator.written is None


def test_a_run_that_goes_on_measures_the_same(folder, tmp_path, monkeypatch):
    whole = lsr.compress(folder / "lora", ratio=4, base=folder / "base").fidelity
    journal = Journal(tmp_path / "journal")
    with journal, monkeypatch.context() as patch:
        settings = {"ratio": 4, "base": folder / "base", "journal": journal}
        lsr.compress(folder / "lora", **settings)
        patch.setattr(written_texts, "generate", None)  # what was written is read
        assert lsr.compress(folder / "lora", **settings).fidelity == whole


def test_a_classifier_is_measured_on_sentences_of_the_package(tmp_path):
    folder = write_directories(tmp_path, "SEQ_CLS", layers=1)
    fidelity = lsr.compress(folder / "lora", ratio=4, base=folder / "base").fidelity
    assert fidelity.written == SENTENCES
    assert f"{fidelity.examples} {SENTENCES}" in fidelity.sentence()
    assert "is not known" in fidelity.sentence()


def test_distill_needs_no_texts(folder, tmp_path):
    out = tmp_path / "out"
    run(
        *("distill", folder / "small", "--teacher", folder / "lora", "--base", folder / "base"),
        *("--steps", 4, "--out", out),
    )
    assert json.loads((out / "compression.json").read_text())["promise"]["written"] == WRITTEN
    assert not list(tmp_path.glob(".*"))


def test_calibrate_needs_no_texts(folder, tmp_path):
    out = tmp_path / "statistics"
    printed = run("calibrate", folder / "base", "--adapter", folder / "lora", "--out", out)
    assert f"The examples are {WRITTEN}." in printed
    assert read_statistics(out).metadata["examples"] in range(36, 41)
    assert not list(tmp_path.glob(".*"))


def test_measure_on_a_base_needs_no_texts(folder, tmp_path):
    figures = tmp_path / "measured.json"
    printed = run(
        *("measure", folder / "lora", folder / "small", "--base", folder / "base"),
        *("--json", figures),
    )
    assert WRITTEN in " ".join(printed.split())
    assert json.loads(figures.read_text())["fidelity"]["written"] == WRITTEN
