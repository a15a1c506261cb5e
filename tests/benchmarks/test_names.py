"""The count of names without content sees every value a file binds, and nothing else."""

import runpy
from pathlib import Path

READING = Path(__file__).resolve().parents[2] / "benchmarks" / "lab" / "reading"
NAMES = runpy.run_path(str(READING / "names.py"))

SOURCE = """
from somewhere import kept
def found(self, told, *held, asked=1, **error):
    place: int = told
    self.known, norm = held
    for one in [given for given in (place,) if (rank := given)]:
        print(one)
"""


def test_every_binding_is_counted_once():
    names = sorted(name for _, name in NAMES["bindings"](SOURCE))
    assert names == [
        "asked",
        "error",
        "given",
        "held",
        "known",
        "norm",
        "one",
        "place",
        "rank",
        "told",
    ]


def test_rooms_and_their_sum_are_printed(tmp_path, capsys):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text("_found = 1\nother = 2\n")
    NAMES["main"]([str(tmp_path), "--each"])
    *each, _, room, together = capsys.readouterr().out.splitlines()
    assert any(line.endswith("a.py:3: told") for line in each)
    assert room.split()[:4] == ["room", "10", "names", "7"]
    assert together.split()[1:4] == ["12", "names", "8"]
