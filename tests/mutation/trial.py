"""One fault, and the tests that come by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mutation import child
from mutation.faults import Fault, lines
from mutation.reach import Reach


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is asked of the tests before a fault counts as not noticed.

    Attributes
    ----------
    max_seconds : float
        CPU seconds of tests that are asked about one fault, as measured without it. The tests of a
        round are asked fastest first, so the slowest are left out.
    max_unreached_seconds : float
        The same for a line that no test comes by in its own process, but perhaps in one that it
        starts: those of the room's own folder are asked.
    tests_at_once : int
        Tests of one child. Most faults are found by one of the first; to collect all that come by
        a line takes longer than to run these.
    """

    max_seconds: float = 120.0
    max_unreached_seconds: float = 40.0
    tests_at_once: int = 40


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests made of a fault: ``killed``, ``survived``, or ``unreached`` by any of them."""

    status: str
    by: str = ""
    n_asked: int = 0
    n_left_out: int = 0


@dataclass(eq=False)  # pytest wants plugins that can be hashed
class FirstFailure:
    """A pytest plugin: remembers the first test that failed, or file that could not be imported."""

    name: str = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.name = self.name or f"{report.nodeid} (collecting)"


def ask(copy: Path, tests: Sequence[str]) -> tuple[str, int]:
    """Run tests in the order given until one fails; return its name or "", and pytest's status."""
    first = FirstFailure()
    options = ["-q", "-x", "-p", "no:cacheprovider"]
    status = pytest.main([*options, *tests], plugins=[first])
    if status == pytest.ExitCode.USAGE_ERROR and not first.name:
        # Cases that are made from the package have other names with the fault: ask whole files
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        status = pytest.main([*options, *files], plugins=[first])
    return first.name, int(status)


def control(context: Any, copy: Path, tests: Sequence[str], limits: child.Limits) -> None:
    """Ask tests without a fault: they pass, or nothing that a run finds means anything."""
    answer = child.run(context, copy, ask, tests, seconds=100.0, limits=limits)
    if answer != ("", pytest.ExitCode.OK):
        raise RuntimeError(f"without a fault pytest ended with {answer}")


def try_fault(
    context: Any, copy: Path, fault: Fault, reach: Reach, limits: child.Limits, effort: Effort
) -> Outcome:
    """Plant the fault in the copy, ask the tests that come by it, and take it out again."""
    file = copy / fault.path
    source = file.read_bytes()
    rounds = reach.of(fault.path, lines(fault, source))
    if rounds:
        tests, left_out = _affordable(rounds, reach, effort.max_seconds)
    else:
        tests, _ = _affordable([reach.of_room(fault.room)], reach, effort.max_unreached_seconds)
        left_out = 0
    file.write_bytes(fault.planted(source))
    try:
        for start in range(0, len(tests), effort.tests_at_once):
            some = tests[start : start + effort.tests_at_once]
            seconds = sum(reach.seconds[test] for test in some)
            answer = child.run(context, copy, ask, some, seconds=seconds, limits=limits)
            asked = start + len(some)
            if answer is None:
                return Outcome("killed", f"time or memory, at one of {len(some)} tests", asked)
            failed, status = answer
            if failed:
                return Outcome("killed", failed, asked)
            if status != pytest.ExitCode.OK:
                raise RuntimeError(f"{fault}: pytest ended with {status}, and no test failed")
    finally:
        file.write_bytes(source)
    return Outcome("survived" if rounds else "unreached", "", len(tests), left_out)


def _affordable(
    rounds: Sequence[Sequence[str]], reach: Reach, max_seconds: float
) -> tuple[list[str], int]:
    """Return tests, round by round, until their time is used up; and how many were left out."""
    tests: list[str] = []
    left_out, spent = 0, 0.0
    for some in rounds:
        for test in some:
            spent += reach.seconds[test]
            if spent <= max_seconds or not tests:
                tests.append(test)
            else:
                left_out += 1
    return tests, left_out
