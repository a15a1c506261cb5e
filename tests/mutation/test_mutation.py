"""The tool that plants faults: where it finds places, how it draws, and what it says of tests."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mutation import __main__ as command
from mutation import child
from mutation.faults import Fault, draw, faults
from mutation.reach import Reach, copy_project, files_of_tests
from mutation.table import EQUIVALENT, equivalent, table
from mutation.trial import Effort, Outcome, Trial


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


@pytest.fixture
def trial(project: Path, tmp_path: Path) -> Trial:
    """The project above in a copy, nothing measured yet."""
    pytest.importorskip("coverage")
    copy = tmp_path / "copy"
    copy_project(project, copy)
    return trial_of(copy, tmp_path)


def trial_of(copy: Path, tmp_path: Path) -> Trial:
    context, limits = child.server(preloaded=["pytest"]), child.Limits(start=60.0)
    told: list[str] = []
    files = files_of_tests(copy, [])
    reach = Reach(tmp_path / "reach", copy, files, context, limits, tell=told.append)
    trial = Trial(context, copy, reach, limits)
    trial.told = told  # type: ignore[attr-defined]
    return trial


SUMS_PATH = "lsrdecomp/sums/sums.py"
SUMS_TESTS = "tests/sums/test_sums.py"
OTHER_TESTS = "tests/others/test_others.py"


def tried(trial: Trial, text: str) -> Outcome:
    found = {fault.before: fault for fault in faults(SUMS_PATH, SUMS.encode())}
    in_room = trial.of_room(found[text])
    return in_room if in_room.status == "killed" else trial.of_all(found[text], in_room)


def test_what_tests_check_is_killed_and_what_they_only_run_survives(trial: Trial) -> None:
    outcomes = {text: tried(trial, text) for text in ("result += value", "a + 1", "a * 2")}
    assert {text: outcome.status for text, outcome in outcomes.items()} == {
        "result += value": "killed",
        "a + 1": "unreached",
        "a * 2": "survived",
    }
    assert outcomes["result += value"].by.endswith("::test_total")
    assert all("fails_anyhow" not in test for test in trial.reach.seconds)
    assert (trial.copy / SUMS_PATH).read_text() == SUMS


def test_a_loop_without_an_end_is_killed_by_its_limit(trial: Trial) -> None:
    trial.limits = replace(trial.limits, start=10.0)
    outcome = tried(trial, "number -= 1")
    assert outcome.status == "killed"
    assert outcome.by.startswith("time or memory")


def test_a_limit_that_tests_pass_without_a_fault_decides_nothing(trial: Trial) -> None:
    trial.reach.measure(trial.reach.files)
    trial.effort = Effort(patience=1.0)
    trial.limits = replace(trial.limits, start=0.0)
    trial._control = lambda files: None  # type: ignore[method-assign]
    assert tried(trial, "result += value").status == "undecided"


def test_other_rooms_are_measured_only_for_what_its_own_tests_miss(trial: Trial) -> None:
    others = trial.copy / OTHER_TESTS
    others.parent.mkdir()
    others.write_text(
        "from lsrdecomp.sums.sums import loose\n\ndef test_it():\n    assert loose(2) == 4\n"
    )
    trial = trial_of(trial.copy, trial.copy.parent)
    tried(trial, "result += value")
    assert trial.told == [SUMS_TESTS]  # type: ignore[attr-defined]
    assert tried(trial, "a * 2").by == f"{OTHER_TESTS}::test_it"
    assert trial.told == [SUMS_TESTS, OTHER_TESTS]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changed", "before", "after", "is_run_again"),
    [
        (SUMS_PATH, "return a + 1", "return a + 2", False),  # no test comes by
        (SUMS_PATH, "def total", "import math\n\n\ndef total", False),  # only moved
        (SUMS_PATH, "return result", "return +result", True),
        (SUMS_PATH, "    return result", "    result *= 1\n    return result", True),
        (SUMS_TESTS, "loose(2)", "loose(3)", True),
        ("tests/values.py", "1", "2", True),
    ],
)
def test_a_file_is_measured_again_when_what_it_came_by_has_changed(
    trial: Trial, changed: str, before: str, after: str, is_run_again: bool
) -> None:
    (trial.copy / "tests" / "values.py").write_text("ONE = 1\n")
    with (trial.copy / SUMS_TESTS).open("a") as file:
        file.write("\ndef test_more():\n    from values import ONE\n    assert ONE\n")
    trial.reach.measure([SUMS_TESTS])
    text = (trial.copy / changed).read_text()
    assert before in text
    (trial.copy / changed).write_text(text.replace(before, after, 1))
    again = trial_of(trial.copy, trial.copy.parent)
    again.reach.measure([SUMS_TESTS])
    assert again.told == [SUMS_TESTS] * is_run_again  # type: ignore[attr-defined]


def test_a_file_whose_run_was_ended_is_run_again_next_time(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(child, "run", lambda *_, **__: None)
        trial.reach.measure([SUMS_TESTS])
    assert trial.reach.tests(SUMS_TESTS) == []
    assert "was ended" in trial.told[-1]  # type: ignore[attr-defined]
    again = trial_of(trial.copy, trial.copy.parent)
    again.reach.measure([SUMS_TESTS])
    assert f"{SUMS_TESTS}::test_total" in again.reach.tests(SUMS_TESTS)


def test_no_fault_is_begun_after_the_hours_that_were_given(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("coverage")
    monkeypatch.setattr(command, "ROOT", project)
    arguments = ["--count", "3", "--out", str(tmp_path / "out"), "--max-hours", "0"]
    assert command.main(arguments) == 2
    assert capsys.readouterr().out == "0 of 3 faults were tried in 0 hours\n\n"


def test_lines_are_found_where_they_stand_now(trial: Trial) -> None:
    trial.reach.measure([SUMS_TESTS])
    path = trial.copy / SUMS_PATH
    path.write_text("LIMIT = 3\n" + SUMS)
    again = trial_of(trial.copy, trial.copy.parent).reach
    again.measure([SUMS_TESTS])
    line = SUMS.splitlines().index("        result += value") + 2
    (direct, _) = again.rounds(SUMS_PATH, [line], [SUMS_TESTS])
    assert direct == [f"{SUMS_TESTS}::test_total"]
    # What is new outside of functions runs at import
    assert len(again.rounds(SUMS_PATH, [1], [SUMS_TESTS])[0]) == 3


def test_the_table_counts_by_room_and_lists_what_was_not_noticed() -> None:
    four = [fault for fault in many_faults() if fault.line == 1 and fault.kind == "sign"]
    outcomes = [
        Outcome("killed", "tests/a/test_a.py::t", 1, in_its_room=True),
        Outcome("survived", "", 7, 2),
        Outcome("unreached"),
        Outcome("killed", "tests/a/test_a.py::t", 1),
    ]
    text = table(four, {f.name: o for f, o in zip(four, outcomes, strict=True)})
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["a"] == ["1", "1", "1", "0", "0", "0", "100"]
    assert rows["b"] == ["1", "0", "0", "1", "0", "0", "0"]
    assert rows["(top)"] == ["1", "1", "0", "0", "0", "0", "100"]
    assert rows["all"] == ["4", "2", "1", "1", "1", "0", "50"]
    assert "lsrdecomp/b/file.py:1 sign: a → b  (7 tests, 2 slow ones left out)" in text
    assert "lsrdecomp/c/file.py:1 sign: a → b  (no test comes by)" in text
    text = table(four, {f.name: o for f, o in zip(four, outcomes, strict=True)}, {four[1].name})
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["b"] == ["1", "0", "0", "0", "0", "1", "100"]
    assert rows["all"] == ["4", "2", "1", "0", "1", "1", "67"]
    assert "lsrdecomp/b/file.py" not in text


def test_an_equivalent_fault_is_known_by_the_text_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "lsrdecomp" / "b.py"
    file.parent.mkdir()
    file.write_text("x = 1\nif a <= b:  # close\n    pass\nif a <= c:\n    pass\n")
    found = [f for f in faults("lsrdecomp/b.py", file.read_bytes()) if f.after == "<"]
    listed = tmp_path / "equivalent.txt"
    listed.write_text(
        "# why\nlsrdecomp/b.py | if a <= b:  # close | condition: <= → < | they are never equal\n"
    )
    assert equivalent(found, tmp_path, listed) == {found[0].name}


def test_the_listed_faults_are_there() -> None:
    """A line of the list whose source has changed is of no use any more."""
    root = Path(__file__).parents[2]
    for line in EQUIVALENT.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            path, source, change, _reason = line.split(" | ")
            text = (root / path).read_bytes()
            lines = text.decode().splitlines()
            assert any(
                fault.change == change and lines[fault.line - 1].strip() == source
                for fault in faults(path, text)
            ), line
