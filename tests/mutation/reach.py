"""Which test comes by which line, and what each takes: a run of each file under ``coverage``.

A file of tests is run when one of its tests may be asked, and again only when it, a module of tests
that it imports, or a function of the package that it came by has changed.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

from mutation import child
from mutation.faults import PACKAGE, TOP

AROUND = "::around"
"""Ends the context of a file's fixtures: what they run, each test of the file depends on."""
PAGES = ("docs", "examples", "fuzz", "records", "site_in_browser", "tutorial")
LEFT_OUT = (
    *("tests/benchmarks", "tests/servers", "tests/mutation"),
    *(f"tests/test_{page}.py" for page in PAGES),
)
"""Tests that hold no room of the package: those that ``make test`` leaves to others."""


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


def cover(copy: Path, file: str, into: str) -> tuple[dict[str, float], list[str], list[str]]:
    """Run one file of tests under coverage.

    Returns the CPU seconds of its tests, which of them failed, and the files of the package that
    they came by.
    """
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
    return contexts.seconds, sorted(contexts.failed), sorted(cover.get_data().measured_files())


class Reach:
    """The tests of a project by the lines that they come by, kept in a folder as they are found.

    Parameters
    ----------
    folder : Path
        Where what was measured is kept, over states of the package.
    copy : Path
        The project as it is now.
    files : sequence of str
        Its files of tests.
    context : Any
        The server of `child`, whose children run them.
    limits : child.Limits
        What a child may use.
    tell : callable
        Called with the name of a file before it is run.
    """

    def __init__(
        self,
        folder: Path,
        copy: Path,
        files: Sequence[str],
        context: Any,
        limits: child.Limits,
        tell: Callable[[str], None] = lambda file: None,
    ) -> None:
        self.folder, self.copy, self.files = folder, copy, list(files)
        self._context, self._limits, self._tell = context, limits, tell
        self.seconds: dict[str, float] = {}
        self._measured: dict[str, Measured] = {}
        (folder / "sources").mkdir(parents=True, exist_ok=True)

    def of_room(self, room: str) -> list[str]:
        """Return the files of tests of a room, and its files with examples in docstrings."""
        if room == TOP:
            return [file for file in self.files if file.count("/") == 1]
        folders = (f"tests/{room}/", f"{PACKAGE}/{room}/")
        return [file for file in self.files if file.startswith(folders)]

    def measure(self, files: Iterable[str]) -> None:
        """Run those of the files that were not run yet, or not as they are now."""
        for file in files:
            if file not in self._measured:
                self._measured[file] = self._stored(file) or self._run(file)
                self.seconds |= self._measured[file].seconds

    def _stored(self, file: str) -> Measured | None:
        note = self._note(file)
        if not note.exists():
            return None
        measured = Measured(self.folder, self.copy, **json.loads(note.read_text()))
        return measured if measured.digest == self._digest(file) and measured.holds else None

    def _run(self, file: str) -> Measured:
        self._tell(file)
        into = self.folder / (file.replace("/", "-") + ".coverage")
        into.unlink(missing_ok=True)
        result = child.run(
            self._context, self.copy, cover, file, str(into), seconds=900, limits=self._limits
        )
        if result is None:
            # No file of tests takes an hour: something else ended it, and the next run tries again
            self._tell(f"{file} (it was ended, so its tests are not asked)")
            return Measured(self.folder, self.copy, file, self._digest(file), {}, {})
        seconds, failed, paths = result
        note: dict[str, Any] = {
            "file": file,
            "digest": self._digest(file),
            "seconds": {test: spent for test, spent in seconds.items() if test not in failed},
            "sources": {path: self._keep(path) for path in paths},
        }
        self._note(file).write_text(json.dumps(note))
        return Measured(self.folder, self.copy, **note)

    def _note(self, file: str) -> Path:
        return self.folder / (file.replace("/", "-") + ".json")

    def _digest(self, file: str) -> str:
        return digest([self.copy / file, *supports(self.copy, file)])

    def _keep(self, path: str) -> str:
        """Keep a source as it is now, for it may change; return its digest."""
        name = digest([self.copy / path])
        (self.folder / "sources" / name).write_bytes((self.copy / path).read_bytes())
        return name

    def rounds(self, path: str, lines: Iterable[int], files: Sequence[str]) -> list[list[str]]:
        """Return tests of measured files, in rounds in which to ask them, each fastest first.

        First those that come by one of the lines; then, of files whose fixtures do or which run the
        line as they import the package, the tests that come by the file at all.
        """
        direct: set[str] = set()
        indirect: set[str] = set()
        wanted = set(lines)
        for file in files:
            measured = self._measured[file]
            contexts = measured.contexts(path)
            here = set().union(*(found for line, found in contexts.items() if line in wanted))
            direct |= here & measured.seconds.keys()
            if here:
                indirect |= set().union(*contexts.values()) & measured.seconds.keys()
            if file + AROUND in here:
                indirect |= measured.seconds.keys()
        return [self.fastest_first(tests) for tests in (direct, indirect - direct) if tests]

    def tests(self, file: str) -> list[str]:
        """Return the tests of a measured file."""
        return list(self._measured[file].seconds)

    def fastest_first(self, tests: Iterable[str]) -> list[str]:
        """Return tests in the order of their CPU seconds."""
        return sorted(tests, key=lambda test: (self.seconds[test], test))


@dataclass
class Measured:
    """What one run of a file of tests found.

    Attributes
    ----------
    folder, copy : Path
        Where it is kept; the project as it is now.
    file, digest : str
        The file of tests, and its contents with those of the modules of tests that it imports.
    seconds : dict
        CPU seconds of each test that passed.
    sources : dict
        The digest of each file of the package that it came by, as it was then.
    """

    folder: Path
    copy: Path
    file: str
    digest: str
    seconds: dict[str, float]
    sources: dict[str, str]

    @cached_property
    def _data(self) -> Any:
        import coverage

        data = coverage.CoverageData(str(self.folder / (self.file.replace("/", "-") + ".coverage")))
        data.read()
        return data

    @property
    def holds(self) -> bool:
        """Whether the functions that its tests came by are as they were."""
        return all(
            (old == new) or _same_functions(old, new, self._lines_of_tests(path))
            for path in self.sources
            for old, new in [self._texts(path)]
        )

    def contexts(self, path: str) -> dict[int, set[str]]:
        """Return what came by each line of a file of the package, by the lines as they are now."""
        if path not in self.sources:
            return {}
        found = {line: set(by) for line, by in self._data.contexts_by_lineno(path).items()}
        old, new = self._texts(path)
        if old == new:
            return found
        line_now = moved_lines(old, new)
        found = {line_now[line]: by for line, by in found.items() if line in line_now}
        # What is new outside of functions runs at import
        inside = {line for function in functions(new) for line in function}
        fresh = set(range(1, len(new) + 1)) - set(line_now.values()) - inside
        return found | {line: {""} for line in fresh}

    def _lines_of_tests(self, path: str) -> set[int]:
        contexts = self._data.contexts_by_lineno(path)
        return {line for line, by in contexts.items() if any(by)}

    def _texts(self, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        now = self.copy / path
        new = _text(now) if now.is_file() else ()
        return _text(self.folder / "sources" / self.sources[path]), new


def _text(file: Path) -> tuple[str, ...]:
    return tuple(file.read_text("utf-8").splitlines())


@cache
def functions(source: tuple[str, ...]) -> tuple[range, ...]:
    """Return the lines of each function that lies in no other, without its signature's first."""
    found = []
    waiting: list[ast.AST] = [ast.parse("\n".join(source))]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            else:
                waiting.append(node)
    return tuple(found)


@cache
def moved_lines(old: tuple[str, ...], new: tuple[str, ...]) -> dict[int, int]:
    """Return where the lines of a source stand in its new text, both from 1; of lines kept."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return {
        block.a + offset + 1: block.b + offset + 1
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }


def _same_functions(old: tuple[str, ...], new: tuple[str, ...], lines: set[int]) -> bool:
    """Return whether each function with one of the lines stands unchanged in the new text."""
    line_now = moved_lines(old, new)
    for function in functions(old):
        if lines.isdisjoint(function):
            continue
        now = [line_now.get(line) for line in function]
        if None in now or now[-1] - now[0] != len(function) - 1:  # type: ignore[operator]
            return False
    return True


def supports(root: Path, file: str) -> list[Path]:
    """Return the modules beside the tests that a file of tests imports, directly or by another."""
    found: set[Path] = set()
    waiting = [
        root / file,
        *(root / "tests").glob("conftest.py"),
        (root / file).with_name("conftest.py"),
    ]
    while waiting:
        source = waiting.pop()
        if source in found or not source.is_file():
            continue
        found.add(source)
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
            elif isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            else:
                continue
            for name in names:
                parts = name.removeprefix("tests.").split(".")
                waiting.append((root / "tests").joinpath(*parts).with_suffix(".py"))
    return sorted(found - {root / file})
