"""The tool that plants faults: where it finds places, how it draws, and what it says of tests."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mutation import child
from mutation.faults import Fault, draw, faults
from mutation.reach import Reach, copy_project, files_of_tests
from mutation.table import table
from mutation.trial import Effort, Outcome, control, try_fault


@pytest.mark.parametrize(
    ("source", "kind", "planted"),
    [
        ("x = a - b", "sign", "x = a + b"),
        ("x = a ** b", "sign", "x = a * b"),
        ("x = -a", "sign", "x = (a)"),
        ("x = (α) * (b)", "sign", "x = (α) / (b)"),
        ("x = 3", "constant", "x = 4"),
        ("x = 0.5", "constant", "x = 1.0"),
        ("f(flag=True)", "constant", "f(flag=False)"),
        ("x = a.sum(axis=1)", "axis", "x = a.sum(axis=0)"),
        ("x = a.sum(axis=-1)", "axis", "x = a.sum(axis=-2)"),
        ("x = a.T @ b", "axis", "x = (a) @ b"),
        ("x = a[:, 1:]", "slice", "x = a[:, (1) + 1:]"),
        ("x = a[::-1]", "slice", "x = a[::1]"),
        ("x = a[0]", "slice", "x = a[-1]"),
        ("if a <= b: f()", "condition", "if a < b: f()"),
        ("if a not in b: f()", "condition", "if a in b: f()"),
        ("if not a: f()", "condition", "if (a): f()"),
        ("if a: f()", "condition", "if not (a): f()"),
        ("x = a and b and c", "condition", "x = a or b or c"),
        ("x = [a for a in b if a.c]", "condition", "x = [a for a in b if not (a.c)]"),
        ("def f() -> bool: return a", "return", "def f() -> bool: return not (a)"),
        ("def f() -> float: return a", "return", "def f() -> float: return (a) + 1"),
        ("def f(): return a, b, c", "return", "def f(): return (b, a, c)"),
        ("def f(): return g(a)", "return", "def f(): return None"),
        ("f(a)", "statement", "pass"),
        ("raise ValueError(a)", "statement", "pass"),
        ("def f(a):\n a = g(a)", "statement", "def f(a):\n pass"),
        ("def f(a):\n a.b = c", "statement", "def f(a):\n pass"),
        ("x += a", "statement", "pass"),
    ],
)
def test_a_place_of_each_kind_is_found_and_changed(source: str, kind: str, planted: str) -> None:
    contents = source.encode()
    found = [fault for fault in faults("lsrdecomp/a/b.py", contents) if fault.kind == kind]
    assert planted in [fault.planted(contents).decode() for fault in found]


@pytest.mark.parametrize(
    "source",
    [
        '"""Two words, 1 and 2."""',
        "x: tuple[Literal[1], int]",
        "def f(a: Array[1]) -> Array[2]: ...",
        "@dataclass(frozen=True)\nclass A:\n pass",
        'x = f"{a + 1}" "and"',
        "if TYPE_CHECKING:\n from a import b\n f(1)",
        "@overload\ndef f(a: int = 1): return a",
        "x = 'a' + b",
        "__all__ = ['a'][0:1]",
    ],
)
def test_words_types_and_decorators_are_left_alone(source: str) -> None:
    assert faults("lsrdecomp/a/b.py", source.encode()) == []


def test_of_an_error_only_the_raising_is_changed() -> None:
    (fault,) = faults("lsrdecomp/a/b.py", b"raise ValueError(f'{a}', b + 1, a[0])")
    assert (fault.kind, fault.after) == ("statement", "pass")


def test_a_file_with_a_fault_can_be_parsed() -> None:
    file = Path(__file__).with_name("faults.py")
    found = faults("lsrdecomp/a/b.py", file.read_bytes())
    assert len({fault.kind for fault in found}) == 6  # no axis is there
    for fault in found[::4]:
        planted = fault.planted(file.read_bytes())
        assert planted != file.read_bytes()
        ast.parse(planted)


def test_a_fault_is_not_planted_in_a_file_that_has_changed() -> None:
    fault = faults("lsrdecomp/a/b.py", b"x = a - b")[0]
    with pytest.raises(ValueError, match="has changed"):
        fault.planted(b"x = a + b")


def many_faults() -> list[Fault]:
    fault = Fault("lsrdecomp/a/b.py", "sign", 1, 0, 1, "a", "b")
    paths = [f"lsrdecomp/{room}/file.py" for room in "abc"] + ["lsrdecomp/file.py"]
    return [
        replace(fault, path=path, kind=kind, line=line)
        for path in paths
        for line in range(1, 30)
        for kind in ("sign", "slice", "return")
    ]


def test_a_draw_is_that_of_its_seed_and_takes_as_many_from_each_room_and_no_line_twice() -> None:
    drawn = draw(many_faults(), 24, seed=3)
    assert drawn == draw(many_faults(), 24, seed=3) != draw(many_faults(), 24, seed=4)
    assert Counter(fault.room for fault in drawn) == {"a": 6, "b": 6, "c": 6, "(top)": 6}
    assert len({(fault.path, fault.line) for fault in drawn}) == 24
    assert len({fault.kind for fault in drawn}) == 3


def test_of_few_faults_all_are_drawn() -> None:
    few = [fault for fault in many_faults() if fault.kind == "sign"][:5]
    assert sorted(draw(few, 50, seed=0), key=str) == sorted(few, key=str)


SUMS = """
def total(values):
    result = 0
    for value in values:
        result += value
    return result

def count_down(number):
    while number > 0:
        number -= 1
    return number

def unused(a):
    return a + 1

def loose(a):
    return a * 2
"""
TESTS = """
from lsrdecomp.sums.sums import count_down, loose, total

def test_total():
    assert total([1, 2]) == 3

def test_count_down():
    assert count_down(3) == 0

def test_loose():
    loose(2)

def test_that_fails_anyhow():
    assert total([]) == 1
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "original"
    (root / "lsrdecomp" / "sums").mkdir(parents=True)
    (root / "tests" / "sums").mkdir(parents=True)
    for package in (root / "lsrdecomp", root / "lsrdecomp" / "sums"):
        (package / "__init__.py").write_text("")
    (root / "lsrdecomp" / "sums" / "sums.py").write_text(SUMS)
    (root / "tests" / "sums" / "test_sums.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def test_what_tests_check_is_killed_and_what_they_only_run_survives(
    project: Path, tmp_path: Path
) -> None:
    pytest.importorskip("coverage")
    copy, limits = tmp_path / "copy", child.Limits(start=60.0)
    copy_project(project, copy)
    context = child.server(preloaded=["pytest"])
    reach = Reach(tmp_path / "reach")
    files = files_of_tests(project, [])
    assert list(reach.measure(context, copy, files, limits)) == ["tests/sums/test_sums.py"]
    control(context, copy, list(reach.seconds), limits)
    path = "lsrdecomp/sums/sums.py"
    found = {fault.before: fault for fault in faults(path, SUMS.encode())}
    outcomes = {
        text: try_fault(context, copy, found[text], reach, limits, Effort())
        for text in ("result += value", "a + 1", "a * 2")
    }
    # A loop without an end is ended by its limit, on a busy machine as on an idle one.
    soon = child.Limits(start=2.0)
    endless = found["number -= 1"]
    outcomes["number -= 1"] = try_fault(context, copy, endless, reach, soon, Effort())

    assert {text: outcome.status for text, outcome in outcomes.items()} == {
        "result += value": "killed",
        "a + 1": "unreached",
        "a * 2": "survived",
        "number -= 1": "killed",
    }
    assert outcomes["result += value"].by.endswith("::test_total")
    assert outcomes["number -= 1"].by.startswith("time or memory")
    assert all("fails_anyhow" not in test for test in reach.seconds)
    assert (copy / path).read_text() == SUMS == (project / path).read_text()
    # What was measured is read again, and a file of tests that has changed is run again
    again = Reach(tmp_path / "reach")
    assert list(again.measure(context, copy, files, limits)) == []
    assert again.of(path, [5]) == reach.of(path, [5])
    (copy / files[0]).write_text(TESTS + "\ndef test_more():\n    pass\n")
    assert list(again.measure(context, copy, files, limits)) == files
    assert "tests/sums/test_sums.py::test_more" in again.seconds


def test_the_table_counts_by_room_and_lists_what_was_not_noticed() -> None:
    three = [fault for fault in many_faults() if fault.line == 1 and fault.kind == "sign"][:3]
    outcomes = [Outcome("killed", "t", 1), Outcome("survived", "", 7, 2), Outcome("unreached")]
    text = table(three, {f.name: o for f, o in zip(three, outcomes, strict=True)})
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["a"] == ["1", "1", "0", "0", "100"]
    assert rows["b"] == ["1", "0", "1", "0", "0"]
    assert rows["all"] == ["3", "1", "1", "1", "33"]
    assert "lsrdecomp/b/file.py:1 sign: a → b  (7 tests, 2 slow ones left out)" in text
    assert "lsrdecomp/c/file.py:1 sign: a → b  (no test comes by)" in text
