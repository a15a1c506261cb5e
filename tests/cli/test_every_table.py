"""Every verb that ends in a table, at 80, 100 and 130 columns: no line too long, no figure cut."""

import importlib
import re
from pathlib import Path

import pytest
from console import run_command
from typer.testing import CliRunner

from lsrdecomp.cli import tables
from lsrdecomp.cli.app import app
from lsrdecomp.cli.sheet import Sheet, SheetColumn
from lsrdecomp.lora.fleet.manifest import Outcome
from lsrdecomp.lora.train.finetune_record import FinetuneRecord, Scores
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

WIDTHS = (80, 100, 130)
ALL = 1000
DEMO = Path(tables.__file__).parent / "demo_adapter"
STATISTICS = DEMO.with_name("demo_statistics")


def figures(text):
    """Words with a digit, as they stand between blanks."""
    return {word for word in text.split() if re.search(r"\d", word)}


def check(narrow, whole, width, needed=()):
    """Check that ``narrow`` fits, and that its figures stand so in the ``whole`` table."""
    assert max(map(len, narrow.splitlines())) <= width
    names = {word for word in figures(narrow) if "…" in word}  # names of layers lose their middle
    assert all(re.search(r"[a-z_]", word) for word in names), names
    assert figures(narrow) - names <= figures(whole)
    for word in needed:
        assert word in narrow, f"{word!r} is missing at {width} columns:\n{narrow}"


def test_a_training_run_ends_with_each_score_of_each_set_of_examples(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    module = importlib.import_module("lsrdecomp.lora.train.finetune_run")
    record = FinetuneRecord(
        settings=FinetuneSettings("base", "train.tsv", "classes", learning_rate=0.01),
        start=Scores({"accuracy": 0.25, "f1": 0.5}, 0.25, 0.75, 1408),
        dev=Scores({"accuracy": 0.875, "f1": 0.9375}, 0.875, 0.1875, 1408),
        validation=Scores({"accuracy": 0.8125, "f1": 0.625}, 0.8125, None, 367),
        baseline={"accuracy": 0.6875},
        adapter_parameters=650,
        head_parameters=0,
        adapter_bytes=2600,
        file_bytes=3000,
        train_examples=3301,
        steps=9,
        best_step=None,
        losses=(),
        wall_seconds=1.0,
        step_seconds=0.1,
        peak_bytes=None,
        device="cpu",
        processes=1,
        versions={},
        commit=None,
    )
    monkeypatch.setattr(module, "finetune", lambda *_, **__: record)
    done = run_command(
        "finetune", "--base", "all-minilm-l6-v2", "--data", __file__, "--out", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["classes", "majority", "before", "dev", "validation"] in rows
    assert ["accuracy", "0.6875", "0.2500", "0.8750", "0.8125"] in rows
    assert ["f1", "0.5000", "0.9375", "0.6250"] in rows
    assert ["loss", "0.7500", "0.1875", "not", "finite"] in rows
    assert ["examples", "1,408", "1,408", "367"] in rows


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("written") / "lsr"
    done = CliRunner().invoke(
        app, ["compress", str(DEMO), "--separation-rank", "2", "--out", str(out), "--quiet"]
    )
    assert done.exit_code == 0, done.output
    return out


VERBS = {
    "inspect": ("layer", "parameters", "rank for 1 %"),
    "curve": ("parameters", "error"),
    "compress": ("layer", "structure", "parameters", "weight error"),
    "compress --statistics": ("layer", "structure", "parameters", "output error (est.)"),
    "verify": ("layer", "error"),
    "measure": ("layer", "largest error", "scale"),
}


def command(verb, written):
    return {
        "inspect": ["inspect", str(DEMO)],
        "curve": ["curve", str(DEMO), "--quiet"],
        "compress": ["compress", str(DEMO), "--separation-rank", "2", "--dry-run", "--quiet"],
        "compress --statistics": [
            *(
                "compress",
                str(DEMO),
                "--separation-rank",
                "2",
                "--statistics",
                str(STATISTICS),
                "--dry-run",
                "--quiet",
            ),
        ],
        "verify": ["verify", str(DEMO), str(written), "--quiet"],
        "measure": ["measure", str(DEMO), str(written), "--quiet"],
    }[verb]


def printed(sheet, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    capsys.readouterr()
    tables.show(None, sheet)
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_prints_a_table_that_fits(verb, written, capsys, monkeypatch):
    shown = []
    with monkeypatch.context() as watched:
        watched.setattr(tables, "show", lambda json, *parts, wide=False: shown.extend(parts))
        done = CliRunner().invoke(app, command(verb, written))
    assert done.exit_code == 0, done.output
    (sheet,) = (part for part in shown if isinstance(part, Sheet))
    leaving = [column.rank for column in sheet.columns if column.rank]
    assert len(leaving) == len(set(leaving)), "two columns of one rank: which leaves first?"
    whole = printed(sheet, ALL, capsys, monkeypatch)
    for width in WIDTHS:
        check(printed(sheet, width, capsys, monkeypatch), whole, width, VERBS[verb])


MADE_BY = {
    "fleet": lambda: tables.outcome_table(
        [
            Outcome(
                "adapters/" + "deep/" * 30 + "q8",
                "failed",
                "layer 11: 1,234,567 numbers asked for, 73,728 there",
            )
        ]
    ),
}
FIRST = {
    "fleet": ("failed", "1,234,567", "73,728"),
}


@pytest.mark.parametrize("verb", MADE_BY)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_of_figures_that_took_hours_fits(verb, width, capsys, monkeypatch):
    narrow, whole = (printed(MADE_BY[verb](), each, capsys, monkeypatch) for each in (width, ALL))
    check(narrow, whole, width, FIRST[verb])


def test_words_of_others_are_printed_as_they_are(capsys, monkeypatch):
    """A prompt, or a layer's name, may hold what a markup language takes for its own."""
    layer = Sheet(
        (SheetColumn("layer", name=True), SheetColumn("error")), [("blocks[/0].attn", "0.5 [red]")]
    )
    shown = printed(layer, 80, capsys, monkeypatch)
    tables.show(None, "  [INST] sort [3, 1] [/INST]")
    shown += capsys.readouterr().out
    assert "blocks[/0].attn" in shown
    assert "0.5 [red]" in shown
    assert "  [INST] sort [3, 1] [/INST]\n" in shown
