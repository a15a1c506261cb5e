"""A benchmark that is tried out leaves its record as it was."""

import json

from benchmarks.operators import solve


def test_a_record_is_replaced_only_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(solve, "RESULTS", tmp_path)
    monkeypatch.setattr(solve, "PARTS", {"galerkin": lambda: {"found": 2}})
    path = tmp_path / "operators-galerkin.json"
    path.write_text('{"found": 1}')
    for typed, found in ((["galerkin"], 1), (["galerkin", "--again"], 2)):
        monkeypatch.setattr("sys.argv", ["solve", *typed])
        solve.main()
        assert json.loads(path.read_text())["found"] == found
    assert "--again replaces it" in capsys.readouterr().err
