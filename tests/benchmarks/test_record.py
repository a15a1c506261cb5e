"""Records say which code measured them, and when."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import record

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def git(*arguments):
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_says_what_measured_it(path):
    held = record.load(path)
    assert record.problems(held) == []
    commands = [entry["command"] for entry in held["provenance"] if "command" in entry]
    assert not [command for command in commands if re.search(r"(^|[\s'\"=])/", command)]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_commits_of_a_record_are_in_the_history(path):
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history of a clone")
    for entry in record.load(path)["provenance"]:
        inside = git("merge-base", "--is-ancestor", entry["commit"], "HEAD")
        assert inside.returncode == 0, f"{path.name}: no commit {entry['commit']} in the history"


def test_a_record_grows_by_an_entry_for_each_process(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "one.json"
    record.save(path, {"rows": [1]}, seed=3)
    record.save(path, record.load(path) | {"rows": [1, 2]}, seed=3)
    (entry,) = record.load(path)["provenance"]
    assert (entry["seed"], entry["commit"]) == (
        3,
        git("rev-parse", "--short=12", "HEAD").stdout.strip(),
    )
    monkeypatch.setattr(record, "STARTED", "2030-01-01T00:00:00+00:00")
    record.save(path, record.load(path), "hypothesis", seed=None)
    held = record.load(path)
    assert [each["seed"] for each in held["provenance"]] == [3, None]
    assert "hypothesis" in held["provenance"][1]["versions"]
    assert (held["rows"], record.problems(held)) == ([1, 2], [])
    assert [file.name for file in path.parent.iterdir()] == ["one.json"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda held: held.pop("provenance"), "no provenance"),
        (lambda held: held["provenance"][0].pop("command"), "entry 0 lacks command"),
        (
            lambda held: held["provenance"][0].update(cpu_seconds=None),
            "entry 0: cpu_seconds is None",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path, change, problem):
    path = tmp_path / "one.json"
    record.save(path, {"rows": []}, seed=0)
    held = json.loads(path.read_text())
    change(held)
    assert record.problems(held) == [problem]


def test_the_oldest_version_dates_a_record():
    entries = [
        {"lsrdecomp": "0.10.0", "started": "2030-02-03T00:00:00+00:00"},
        {"lsrdecomp": "0.9.2", "started": "2030-01-02T00:00:00+00:00"},
    ]
    version, day = record.measured_with({"provenance": entries})
    assert (version, day.isoformat()) == ("0.9.2", "2030-01-02")
    assert record.is_outdated(version, "0.10.0")
    assert not record.is_outdated(version, "0.9.5")


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))]
MODULES = [
    path
    for path in sorted((ROOT / "lsrdecomp").rglob("*.py"))
    if "benchmarks/" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", [*PAGES, *MODULES], ids=lambda path: path.stem)
def test_what_a_page_or_docstring_cites_of_the_benchmarks_is_there(page):
    """Sentences outlived the records and scripts that they name."""
    text = page.read_text(encoding="utf-8")
    files = {name for name in re.findall(r"benchmarks/[\w./*-]*\w", text) if "*" not in name}
    suites = {f"benchmarks/experiments/{name}" for name in re.findall(r"[\w-]+\.toml", text)}
    modules = re.findall(r"-m (benchmarks(?:\.\w+)+)", text)
    modules = {each.replace(".", "/") for each in modules}
    written_by_readers = {
        "benchmarks/experiments/suite.toml",
        "benchmarks/experiments/pyproject.toml",
    }
    missing = [name for name in files | (suites - written_by_readers) if not (ROOT / name).exists()]
    missing += [
        name for name in modules if not ((ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file())
    ]
    assert missing == []


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_shown_or_quoted_somewhere(path):
    """A record that nothing reads is made again for nobody."""
    readers = [*PAGES, *sorted((ROOT / "docs" / "_extensions").glob("*.py"))]
    readers += [ROOT / "tests" / "test_records.py", *sorted((ROOT / "examples").rglob("*.py"))]
    readers += sorted((ROOT / "lsrdecomp").rglob("*.py"))
    name = re.compile(rf"(?<![\w-]){re.escape(path.stem)}(?![\w-])")
    assert any(name.search(reader.read_text(encoding="utf-8")) for reader in readers)


def test_every_table_of_the_pages_is_made_from_its_record(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_extensions"))
    result_tables = pytest.importorskip("result_tables")
    shown = set()
    for page in PAGES:
        shown |= set(re.findall(r"^```\{results\} (\S+)$", page.read_text("utf-8"), re.MULTILINE))
    assert shown == set(result_tables.TABLES)
    for name in shown:
        head, rows = result_tables.table(name)
        assert rows, name
        assert {len(row) for row in rows} == {len(head)}, name
        cells = [str(cell) for row in (head, *rows) for cell in row]
        assert [cell for cell in cells if re.search(r"(?<![\w.])\.\d", cell)] == [], name
