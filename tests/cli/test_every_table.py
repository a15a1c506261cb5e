"""Every verb that ends in a table, at 80, 100 and 130 columns: no line too long, no figure cut."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lsrdecomp.cli import tables
from lsrdecomp.cli.app import app
from lsrdecomp.cli.sheet import Sheet, SheetColumn
from lsrdecomp.fleet.manifest import Outcome

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
    "compress --calibrated": ("layer", "structure", "parameters", "output error (est.)"),
    "verify": ("layer", "error"),
}


def command(verb, written):
    return {
        "inspect": ["inspect", str(DEMO)],
        "curve": ["curve", str(DEMO), "--quiet"],
        "compress": ["compress", str(DEMO), "--separation-rank", "2", "--dry-run", "--quiet"],
        "compress --calibrated": [
            *(
                "compress",
                str(DEMO),
                "--separation-rank",
                "2",
                "--calibrated",
                str(STATISTICS),
                "--dry-run",
                "--quiet",
            ),
        ],
        "verify": ["verify", str(DEMO), str(written), "--quiet"],
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
