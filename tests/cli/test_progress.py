"""Progress: a bar on a terminal, a line a minute elsewhere, nothing with --quiet."""

from __future__ import annotations

import inspect
import os
import pty
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from lsrdecomp.cli import progress_bars as progress
from lsrdecomp.cli.app import app
from lsrdecomp.cli.commands import ALL, export
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.lora.files.progress import Counter, PlannedSteps, ProgressUpdate

module = import_module("lsrdecomp.cli.compress_command")
SHORT = {export}
"""Verbs that only read and write."""


class Clock:
    """Seconds that pass only when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def on_a_terminal(
    steps: list[ProgressUpdate],
    monkeypatch: pytest.MonkeyPatch,
    *,
    quiet: bool = False,
    columns: int = 100,
    clock: Clock | None = None,
) -> str:
    """What a terminal shows of these steps, ten seconds apart by ``clock``."""
    main, other = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    with os.fdopen(other, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        clock = clock or Clock()
        with follow(quiet=quiet, clock=clock) as show:
            for step in steps:
                show(step)
                clock.now += 10.0
        terminal.write("end")
        terminal.flush()
        shown = b""
        while not shown.endswith(b"end"):
            shown += os.read(main, 65536)
    os.close(main)
    return shown.decode()


def test_a_terminal_shows_stage_counts_and_what_is_done_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = on_a_terminal(
        [
            ProgressUpdate("refining", 1, 2, "layers"),
            ProgressUpdate("solving", 1200, 2400, "layers"),
        ],
        monkeypatch,
    )
    assert "solving" in shown
    assert "1,200/2,400 layers" in shown
    assert "reading" in on_a_terminal([ProgressUpdate("reading", 0, 0)], monkeypatch)


@pytest.mark.parametrize("columns", [80, 110, 130])
def test_the_line_fits_the_terminal_and_ends_before_results(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    training = (
        "training 1 of at most 2, 250 times fewer numbers: distilling, at most 60 steps of 8 "
        "examples"
    )
    steps = [ProgressUpdate(f"step 6 of 6 · {training}", done, 60, "steps") for done in range(3)]
    shown = on_a_terminal(
        [ProgressUpdate("step 1 of 6 · opening the base", 0, 0), *steps],
        monkeypatch,
        columns=columns,
    )
    lines = [
        line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)) if line
    ]
    assert max(map(cell_len, lines)) <= columns
    assert "step 1 of 6 · opening the base" in shown
    assert "2/60 steps · about 10 min left" in shown
    assert "step 6 of 6 · training 1 of a" in shown
    assert shown.endswith("\x1b[2Kend")  # wiped: results begin an empty line


def test_a_quiet_terminal_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        on_a_terminal([ProgressUpdate("solving", 1, 2, "layers")], monkeypatch, quiet=True) == "end"
    )


def test_a_log_gets_a_line_a_minute_with_the_time_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with follow(clock=clock) as show:
        counter = Counter(show, "solving shapes", 40, "layers")
        for _ in range(10):
            clock.now += 15.0
            counter.add()
    assert capsys.readouterr().err.splitlines() == [
        "lsrdecomp: solving shapes: 4 of 40 layers, about 9 min left",
        "lsrdecomp: solving shapes: 8 of 40 layers, about 8 min left",
    ]


def test_what_was_done_before_is_not_counted(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with follow(clock=clock) as show:
        show(ProgressUpdate("calibrating", 100, 200, "examples"))  # gone on with after a kill
        clock.now += 60.0
        show(ProgressUpdate("calibrating", 120, 200, "examples"))
    assert (
        capsys.readouterr().err == "lsrdecomp: calibrating: 120 of 200 examples, about 4 min left\n"
    )


def test_time_before_the_first_count_says_nothing_of_the_rest(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with follow(clock=clock) as show:
        show(ProgressUpdate("distilling", 0, 0))
        clock.now += 50.0  # the LoRA answers the lessons
        for step in range(1, 5):
            show(ProgressUpdate("distilling", step, 60, "steps"))
            clock.now += 10.0
    assert capsys.readouterr().err == "lsrdecomp: distilling: 2 of 60 steps, about 10 min left\n"


def test_the_time_left_is_that_of_the_whole_run_and_the_bar_never_refills(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten minutes, of which calibration takes four and a search of two stages six."""
    shares: list[float] = []
    with follow(clock=clock) as show:

        def watched(step: ProgressUpdate) -> None:
            assert step.share is not None
            shares.append(step.share)
            show(step)

        steps = PlannedSteps(watched, [4.0, 6.0])
        for stage, parts in (("calibrating", 4), ("solving", 3), ("refining", 3)):
            if stage != "refining":
                steps.begin(stage)
            for part in range(1, parts + 1):
                clock.now += 60.0
                steps(ProgressUpdate(stage, part, parts, "parts"))
    assert shares == sorted(shares)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "lsrdecomp: step 1 of 2 · calibrating"  # at once
    assert len(lines) == 10
    minutes = [
        int(match[1]) for line in lines if (match := re.search(r"about (\d+) min left", line))
    ]
    assert minutes[0] >= 9, "not the three minutes of the stage"
    assert all(left >= 2 for left in minutes[:7])
    assert lines[4].startswith("lsrdecomp: step 2 of 2 · solving: 1 of 3 parts, about ")


def test_a_time_left_that_rises_is_not_told(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with follow(clock=clock) as show:
        for minute, share in enumerate((0.0, 0.5, 0.6, 0.65, 0.68, 0.9)):
            clock.now = 60.0 * minute
            show(ProgressUpdate("step 2 of 2 · searching", 0, 0, share=share))
    told = [line.rpartition(" · searching")[2] for line in capsys.readouterr().err.splitlines()]
    # From the first count on, the mean speed says 240, 280, 320 and 60 s: twice the end is later.
    assert told == ["", "", ": about 4 min left", "", "", ": about 60 s left"]


def test_steps_beyond_the_plan_and_resumed_ones_let_no_share_fall() -> None:
    shares: list[float | None] = []
    steps = PlannedSteps(lambda step: shares.append(step.share), [1.0, 1.0])
    for stage in ("a", "b", "c", "d"):
        steps.begin(stage)
        for done in (90, 100, 0, 50):
            steps(ProgressUpdate(stage, done, 100, "examples"))
    told = [share for share in shares if share is not None]
    assert told == sorted(told)
    assert max(told) <= 1.0


def test_a_short_run_and_a_quiet_one_write_no_line(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds, quiet in ((59.0, False), (600.0, True)):
        with follow(quiet=quiet, clock=clock) as show:
            clock.now += seconds
            show(ProgressUpdate("solving", 1, 2, "layers"))
    assert capsys.readouterr().err == ""


def test_a_stage_without_counts_is_named(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with follow(clock=clock) as show:
        clock.now += 60.0
        show(ProgressUpdate("reading the base", 0, 0))
    assert capsys.readouterr().err == "lsrdecomp: reading the base\n"


def test_every_long_verb_can_be_quiet_and_is_not_unless_asked() -> None:
    for verb in ALL:
        parameters = inspect.signature(verb, eval_str=False).parameters
        assert ("quiet" in parameters) == (verb not in SHORT), verb.__name__
        if "quiet" in parameters:
            assert parameters["quiet"].default is False, verb.__name__


def test_bars_have_one_helper() -> None:
    folder = Path(progress.__file__).parent
    bars = [path.name for path in folder.glob("*.py") if "rich.progress" in path.read_text()]
    assert bars == ["progress_bars.py"]


def test_results_are_printed_when_the_bar_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed beside a living bar, lines of a table run into it."""
    bars: list[str] = []

    @contextmanager
    def watched(**_: object) -> Iterator[Callable[[ProgressUpdate], None]]:
        bars.append("bar")
        yield lambda _: None
        bars.remove("bar")

    def show(*_: object, **__: object) -> None:
        assert not bars
        printed.append(True)

    printed: list[bool] = []
    demo = str(Path(module.__file__).parent / "demo_adapter")
    monkeypatch.setattr(module, "follow", watched)
    monkeypatch.setattr(module.tables, "show", show)
    done = CliRunner().invoke(app, ["compress", demo, "--ratio", "96,10", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert len(printed) >= 4
