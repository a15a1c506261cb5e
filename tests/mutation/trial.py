"""One fault, and the tests that come by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    patience : float
        What the limits of a child are multiplied by when one was ended, and the same tests without
        the fault took more than half as long.
    """

    max_seconds: float = 120.0
    max_unreached_seconds: float = 40.0
    tests_at_once: int = 40
    patience: float = 4.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests made of a fault.

    Attributes
    ----------
    status : str
        ``killed``, ``survived``, ``unreached`` by any of them, or ``undecided`` where a run without
        the fault was no faster than the one that was ended.
    by : str
        The test that noticed it.
    n_asked, n_left_out : int
        Tests that were asked, and those that would have taken too long.
    seconds : float
        What the tests that were asked take without a fault.
    in_its_room : bool
        Whether a test of its own room noticed it.
    """

    status: str
    by: str = ""
    n_asked: int = 0
    n_left_out: int = 0
    seconds: float = 0.0
    in_its_room: bool = False


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


@dataclass
class Trial:
    """Plants faults in a copy of the project, one at a time, and asks the tests that come by."""

    context: Any
    copy: Path
    reach: Reach
    limits: child.Limits = field(default_factory=child.Limits)
    effort: Effort = field(default_factory=Effort)
    _controlled: set[str] = field(default_factory=set)

    def of_room(self, fault: Fault) -> Outcome:
        """Ask the tests of the fault's own room; nothing else is measured for it."""
        files = self.reach.of_room(fault.room)
        self.reach.measure(files)
        if fault.room not in self._controlled:
            self._control(files)
            self._controlled.add(fault.room)
        outcome = self._ask(fault, files, Outcome("unreached"))
        return replace(outcome, in_its_room=outcome.status == "killed")

    def of_all(self, fault: Fault, in_room: Outcome) -> Outcome:
        """Ask the tests of the other rooms too, after what those of its own said."""
        own = self.reach.of_room(fault.room)
        others = [file for file in self.reach.files if file not in own]
        self.reach.measure(others)
        outcome = self._ask(fault, others, in_room)
        if outcome.status != "unreached":
            return outcome
        # No test comes by in its own process; one of its room may in a process that it starts.
        tests = [test for file in own for test in self.reach.tests(file)]
        limit = self.effort.max_unreached_seconds
        kept, left_out = self._affordable([self.reach.fastest_first(tests)], limit)
        asked = self._planted(fault, kept)
        if asked.status == "survived":
            return replace(asked, status="unreached", n_left_out=left_out)
        return asked

    def _ask(self, fault: Fault, files: Sequence[str], before: Outcome) -> Outcome:
        """Ask the tests of files that come by the fault, after other tests were asked."""
        source = (self.copy / fault.path).read_bytes()
        rounds = self.reach.rounds(fault.path, set(lines(fault, source)), files)
        if not rounds:
            return before
        tests, left_out = self._affordable(rounds, self.effort.max_seconds - before.seconds)
        outcome = self._planted(fault, tests)
        return replace(
            outcome,
            n_asked=before.n_asked + outcome.n_asked,
            n_left_out=before.n_left_out + left_out,
            seconds=before.seconds + outcome.seconds,
        )

    def _affordable(
        self, rounds: Sequence[Sequence[str]], max_seconds: float
    ) -> tuple[list[str], int]:
        """Return tests, round by round, until their time is used up; and how many were left out."""
        tests: list[str] = []
        left_out, spent = 0, 0.0
        for some in rounds:
            for test in some:
                spent += self.reach.seconds[test]
                if spent <= max_seconds or not tests:
                    tests.append(test)
                else:
                    left_out += 1
        return tests, left_out

    def _planted(self, fault: Fault, tests: Sequence[str]) -> Outcome:
        """Plant the fault, ask tests in the order given until one fails, and take it out again."""
        file = self.copy / fault.path
        source = file.read_bytes()
        spent = 0.0
        for start in range(0, len(tests), self.effort.tests_at_once):
            some = tests[start : start + self.effort.tests_at_once]
            asked = start + len(some)
            seconds = sum(self.reach.seconds[test] for test in some)
            spent += seconds
            answer = None
            for limits in (self.limits, self.limits.scaled(self.effort.patience)):
                file.write_bytes(fault.planted(source))
                try:
                    answer = self._run(some, seconds, limits)
                finally:
                    file.write_bytes(source)
                if answer is not None:
                    break
                if self._is_fast(some, seconds, limits):
                    by = f"time or memory, at one of {len(some)} tests"
                    return Outcome("killed", by, asked, seconds=spent)
            if answer is None:
                return Outcome("undecided", "", asked, seconds=spent)
            failed, status = answer
            if failed:
                return Outcome("killed", failed, asked, seconds=spent)
            if status != pytest.ExitCode.OK:
                raise RuntimeError(f"{fault}: pytest ended with {status}, and no test failed")
        return Outcome("survived", "", len(tests), seconds=spent)

    def _is_fast(self, tests: Sequence[str], seconds: float, limits: child.Limits) -> bool:
        """Return whether tests end without a fault, now, in half of what they were allowed.

        That a limit was passed says something of the fault only where the machine, as busy as it
        is, leaves the tests far below it.
        """
        return self._run(tests, seconds, limits.scaled(0.5)) == ("", pytest.ExitCode.OK)

    def _run(self, tests: Sequence[str], seconds: float, limits: child.Limits) -> Any:
        return child.run(self.context, self.copy, ask, tests, seconds=seconds, limits=limits)

    def _control(self, files: Sequence[str]) -> None:
        """Ask the fastest tests of files without a fault: they pass, or no outcome means anything.

        Raises
        ------
        RuntimeError
            If one fails.
        """
        tests = [test for file in files for test in self.reach.tests(file)]
        fastest = self.reach.fastest_first(tests)[: self.effort.tests_at_once]
        if fastest and self._run(fastest, 100.0, self.limits) != ("", pytest.ExitCode.OK):
            raise RuntimeError(f"tests of {files[0]} and its like fail without a fault")
