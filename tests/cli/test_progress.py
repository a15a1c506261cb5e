"""Progress where nobody watches: a line a minute that says how far a run is and how long it will take."""

from __future__ import annotations

from lsrdecomp.cli import progress, tables


def test_a_log_gets_a_line_a_minute_with_the_time_left(monkeypatch, capsys):
    seconds = iter([0.0, 10.0, 50.0, 70.0, 100.0, 131.0])  # one is taken at the start, one with each call
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with tables.meter(40, "examples") as show:
        for done in (0, 10, 20, 25, 30):
            show(done)
    assert capsys.readouterr().err.splitlines() == [
        "lsrdecomp: examples: 20 of 40, about 60 s left",
        "lsrdecomp: examples: 30 of 40, about 40 s left",
    ]
