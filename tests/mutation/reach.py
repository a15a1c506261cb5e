"""Which test comes by which line, and what each takes: one run of the tests under ``coverage``."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mutation import child
from mutation.faults import PACKAGE

AROUND = "::around"
"""Ends the context of a file's fixtures: what they run, each test of the file depends on."""
LEFT_OUT = ("tests/benchmarks", "tests/servers", "tests/mutation")
"""Folders whose tests hold no room of the package."""


def digest(files: Iterable[Path]) -> str:
    """Return a short hash of the contents of files, in the order given."""
    sha = hashlib.sha256()
    for file in files:
        sha.update(hashlib.sha256(file.read_bytes()).digest())
    return sha.hexdigest()[:12]


def copy_project(root: Path, copy: Path) -> None:
    """Copy what git knows of the project, as it is in the working tree, and compile the package.

    What is compiled is checked by the contents of its source: a fault of the same length, planted
    within the same second, is seen.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((root / name).read_bytes())
    compiler = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*compiler, PACKAGE], cwd=copy, check=True)


def files_of_tests(root: Path, below: Sequence[str]) -> list[str]:
    """Return the files of tests, and the files of the package with examples in docstrings."""
    files = [*sorted((root / "tests").rglob("test_*.py"))]
    files += [p for p in sorted((root / PACKAGE).rglob("*.py")) if ">>> " in p.read_text("utf-8")]
    names = [file.relative_to(root).as_posix() for file in files]
    kept = [name for name in names if not name.startswith(LEFT_OUT)]
    return [name for name in kept if not below or name.startswith(tuple(below))]


@dataclass(eq=False)  # pytest wants plugins that can be hashed
class Contexts:
    """A pytest plugin: names coverage's context after each test, and notes how tests end."""

    switch: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        around = item.nodeid.split("::")[0] + AROUND
        self.switch(around)
        before = _cpu_seconds()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = _cpu_seconds() - before
            self.switch(around)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.switch(item.nodeid)
        try:
            return (yield)
        finally:
            self.switch(item.nodeid.split("::")[0] + AROUND)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:  # one that is skipped cannot notice anything either
            self.failed.add(report.nodeid)


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def cover(copy: Path, file: str, into: str) -> tuple[dict[str, float], list[str]]:
    """Run one file of tests under coverage; return CPU seconds of its tests, and which failed."""
    # The monitoring that newer interpreters default to names no contexts
    os.environ["COVERAGE_CORE"] = "ctrace"
    import coverage

    cover = coverage.Coverage(
        data_file=into, config_file=False, include=[f"{copy / PACKAGE}/*"], messages=False
    )
    cover.set_option("run:relative_files", True)
    cover.start()
    contexts = Contexts(cover.switch_context)
    pytest.main([file, "-q", "-p", "no:cacheprovider"], plugins=[contexts])
    cover.stop()
    cover.save()
    return contexts.seconds, sorted(contexts.failed)


class Reach:
    """The tests of a project by the lines that they come by, kept in a folder as they are found.

    A folder is for one state of the package; a file of tests that has changed is run again.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self._digests: dict[str, str] = {}
        self._lines: dict[str, dict[int, set[str]]] = {}
        for line in self._notes.read_text().splitlines() if self._notes.exists() else ():
            self._take(json.loads(line))

    @property
    def _notes(self) -> Path:
        return self.folder / "tests.jsonl"

    def _take(self, note: dict[str, Any]) -> None:
        self._digests[note["file"]] = note["digest"]
        for test in [test for test in self.seconds if test.split("::")[0] == note["file"]]:
            del self.seconds[test]
        failed = set(note["failed"])
        self.seconds |= {t: s for t, s in note["seconds"].items() if t not in failed}

    def measure(
        self, context: Any, copy: Path, files: Iterable[str], limits: child.Limits
    ) -> Iterator[str]:
        """Run each file that was not run yet; yield its name before."""
        for file in files:
            digest_of_file = digest([copy / file])
            if self._digests.get(file) == digest_of_file:
                continue
            yield file
            into = str(self._data(file))
            self._data(file).unlink(missing_ok=True)
            # No file of tests takes an hour; one that does is not asked again
            result = child.run(context, copy, cover, file, into, seconds=900, limits=limits)
            seconds, failed = result or ({}, [])
            note = {"file": file, "digest": digest_of_file, "seconds": seconds, "failed": failed}
            with self._notes.open("a") as notes:
                notes.write(json.dumps(note) + "\n")
            self._take(note)
        self._lines.clear()

    def _data(self, file: str) -> Path:
        return self.folder / (file.replace("/", "-") + ".coverage")

    def of(self, path: str, lines: Iterable[int]) -> list[list[str]]:
        """Return tests in the order in which they should be asked, in rounds; fastest first.

        First those that come by one of the lines; then, of files whose fixtures do or which run the
        line as they import the package, the tests that come by the file at all.
        """
        reached = self._contexts(path)
        contexts: set[str] = set().union(*(reached.get(line, set()) for line in lines))
        direct = {test for test in contexts if test in self.seconds}
        files = {c.removesuffix(AROUND) for c in contexts if c.endswith(AROUND)}
        files |= {test.split("::")[0] for test in direct}
        at_import = "" in contexts
        indirect = set()
        for test in set().union(*reached.values()):
            if test in self.seconds and (at_import or test.split("::")[0] in files):
                indirect.add(test)
        for test in self.seconds:
            file = test.split("::")[0]
            if file in files and file + AROUND in contexts:
                indirect.add(test)
        rounds = [direct, indirect - direct]
        return [sorted(tests, key=self.seconds.__getitem__) for tests in rounds if tests]

    def of_room(self, room: str) -> list[str]:
        """Return the tests in the folder of a room, fastest first."""
        tests = [test for test in self.seconds if test.startswith(f"tests/{room}/")]
        return sorted(tests, key=self.seconds.__getitem__)

    def _contexts(self, path: str) -> dict[int, set[str]]:
        if path not in self._lines:
            import coverage

            found: dict[int, set[str]] = {}
            for file in sorted(self._digests):
                if not self._data(file).exists():
                    continue
                data = coverage.CoverageData(basename=str(self._data(file)))
                data.read()
                for line, contexts in data.contexts_by_lineno(path).items():
                    found.setdefault(line, set()).update(contexts)
            self._lines[path] = found
        return self._lines[path]
