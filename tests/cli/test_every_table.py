"""Every verb that ends in a table, at 80, 100 and 130 columns: no line is longer and no figure is cut."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lsrdecomp.cli import tables
from lsrdecomp.cli.app import app
from lsrdecomp.cli.sheet import Sheet
from lsrdecomp.experiments import compare_table, recover_table
from lsrdecomp.experiments.compare_table import Difference, Spread
from lsrdecomp.experiments.recover_table import Gain, Judged, Recovery
from lsrdecomp.experiments.suite import Suite
from lsrdecomp.fleet.manifest import Outcome

WIDTHS = (80, 100, 130)
ALL = 1000
DEMO = Path(tables.__file__).parent / "demo_adapter"
STATISTICS = DEMO.with_name("demo_statistics")


def figures(text):
    """Words with a digit, as they stand between blanks."""
    return {word for word in text.split() if re.search(r"\d", word)}


def check(narrow, whole, width, needed=()):
    """``narrow`` fits, each figure in it stands so in the ``whole`` table, and what is needed is there."""
    assert max(map(len, narrow.splitlines())) <= width
    names = {word for word in figures(narrow) if "…" in word}  # names of layers lose their middle
    assert all(re.search(r"[a-z_]", word) for word in names), names
    assert figures(narrow) - names <= figures(whole)
    for word in needed:
        assert word in narrow, f"{word!r} is missing at {width} columns:\n{narrow}"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("written") / "lsr"
    done = CliRunner().invoke(app, ["compress", str(DEMO), "--separation-rank", "2", "--out", str(out), "--quiet"])
    assert done.exit_code == 0, done.output
    return out


VERBS = {
    "inspect": ("layer", "parameters", "rank for 1 %"),
    "curve": ("parameters", "error"),
    "compress": ("layer", "structure", "parameters", "error"),
    "compress --calibrated": ("layer", "structure", "parameters", "K-FAC error"),
    "verify": ("layer", "error"),
}


def command(verb, written):
    return {
        "inspect": ["inspect", str(DEMO)],
        "curve": ["curve", str(DEMO), "--quiet"],
        "compress": ["compress", str(DEMO), "--separation-rank", "2", "--dry-run", "--quiet"],
        "compress --calibrated": [
            *("compress", str(DEMO), "--ratio", "48", "--calibrated", str(STATISTICS), "--dry-run", "--quiet"),
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


def compared():
    difference = Difference("lora r=8", 0.0123, (-0.0045, 0.0291), "equal")
    for method in ("lora r=8", "lsr 4x4, 16 terms", "svd at the same size"):
        for task in ("sst2", "mrpc", "cola", "qnli", "rte", "stsb"):
            score = Spread((0.81234, 0.82345, 0.80456))
            yield compare_table.Line(
                method=method, task=task, metric="matthews_correlation", score=score,
                metrics={"matthews_correlation": score, "accuracy": score}, accuracy=score, loss=score, baseline=0.509,
                adapter_parameters=1234567, head_parameters=770, adapter_bytes=4938268, rate=3e-4, edge=True,
                steps=12345, wall_seconds=4321.0, failures=1, difference=difference,
            )  # fmt: skip


def recovered():
    judged = tuple(Judged(seed, 0.31234, 0.9123, 0.8765) for seed in range(3))
    lines = [
        recover_table.Line(
            task, label, label, 640, 1234567.0, 4938268.0,
            {"compressed": judged, "distilled": judged, "recovered": judged, "scratch": judged},
        )
        for task in ("mrpc", "cola") for label in ("LSR, K-FAC norm", "truncated SVD, Frobenius norm")
    ]  # fmt: skip
    gains = [Gain("mrpc", seed, "f1", 0.6931, 0.2123, 0.5, 0.9123, 0.51, 1234567, 4938268, 12) for seed in range(3)]
    return Recovery(Suite.__new__(Suite), tuple(gains), tuple(lines), {}, (), {}, 80, 0.01, 100)


MADE_BY = {
    "compare": lambda: tables.text_table(*compare_table.overview(list(compared()))),
    "compare, details": lambda: tables.text_table(*compare_table.details(list(compared()))),
    "recover": lambda: tables.text_table(*recover_table.table(recovered())),
    "recover, gains": lambda: tables.text_table(*recover_table.gains_table(recovered())),
    "fleet": lambda: tables.outcome_table(
        [Outcome("adapters/" + "deep/" * 30 + "q8", "failed", "layer 11: 1,234,567 numbers asked for, 73,728 there")]
    ),
}
FIRST = {
    "compare": ("method", "1,234,567"),
    "compare, details": ("task", "method"),
    "recover": ("task", "1,234,567", "0.88 ± 0.00"),
    "recover, gains": ("task", "0.6931"),
    "fleet": ("failed", "1,234,567", "73,728"),
}


@pytest.mark.parametrize("verb", MADE_BY)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_of_figures_that_took_hours_fits(verb, width, capsys, monkeypatch):
    narrow, whole = (printed(MADE_BY[verb](), each, capsys, monkeypatch) for each in (width, ALL))
    check(narrow, whole, width, FIRST[verb])
