"""The walk of the laboratory: what it counts, on small files; that of the package stays short."""

import importlib.util
import json
import sys

import pytest

from benchmarks.lab.reading.walk import ROOT, compress_demo, main, summary, walk


def load(path, monkeypatch):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def test_a_file_is_opened_again_for_a_function_that_was_not_read(tmp_path, monkeypatch):
    (tmp_path / "lower_file.py").write_text(
        "def first(x): return x\ndef second(x): return x\n"
        "class Third:\n  def __init__(self): self.squares = [x for x in (1, 2)]"
    )
    (tmp_path / "upper_file.py").write_text(
        "def start(lower):\n  lower.first(1); lower.first(2); middle(lower)\n"
        "def middle(lower):\n  lower.second(3); (lambda: 4)(); lower.Third()"
    )
    lower = load(tmp_path / "lower_file.py", monkeypatch)
    upper = load(tmp_path / "upper_file.py", monkeypatch)
    walked = walk(lambda: upper.start(lower), tmp_path)
    assert [(each.file, each.functions, each.opened) for each in walked] == [
        ("upper_file.py", ["start", "middle"], 2),
        ("lower_file.py", ["first", "second", "Third.__init__"], 2),
    ]
    assert summary(walked) == {"files": 2, "functions": 5, "returns": 1}


def test_what_runs_while_a_module_is_imported_is_not_part_of_it(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text(
        "def made(): return 1\nvalue = made()\ndef used(): return value\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_late", raising=False)

    def work():
        import imported_late

        imported_late.used()

    assert [each.functions for each in walk(work, tmp_path)] == [["used"]]


@pytest.fixture(scope="module")
def demo():
    return walk(compress_demo, ROOT / "lsrdecomp")


def test_the_walk_from_an_adapter_to_its_file_is_short(demo):
    assert "lora/compress/compress_lora.py" in {each.file for each in demo}
    # Twice what it was when the house had been tidied (51 files, 13 returns): a tangle breaks these
    # bounds, a file that is cut in two does not.
    assert summary(demo)["files"] <= 100
    assert summary(demo)["returns"] <= 26


def test_the_table_and_the_json_tell_the_same(tmp_path, capsys, monkeypatch, demo):
    monkeypatch.setattr("benchmarks.lab.reading.walk.walk", lambda *_: demo)
    main(["--each", "--json", str(tmp_path / "walk.json")])
    written = json.loads((tmp_path / "walk.json").read_text())
    assert {name: written[name] for name in ("files", "functions", "returns")} == summary(demo)
    text = capsys.readouterr().out
    assert all(
        each["file"] in text and each["functions"][0] in text
        for each in written["walk"]
        if each["functions"]
    )
