"""The comparison with the best peer goes on after a kill, and survives a peer that gives up."""

import math

from benchmarks import record as records
from benchmarks.solvers import best_peer


def test_a_peer_that_gives_up_has_taken_forever():
    def gives_up():
        raise ValueError("no convergence")

    ways = {"fine": lambda: [0.0], "gives up": gives_up}
    taken = best_peer.in_turns(ways, {"fine": 1.0, "gives up": 1.0}, seconds=0.0)
    assert math.isinf(taken["gives up"])
    assert math.isfinite(taken["fine"])


def test_a_run_goes_on_only_with_its_own_settings(tmp_path):
    work = tmp_path / "work.json"
    settings = {"sizes": [16]}
    records.save(work, {"settings": settings, "rows": [{"size": 16}]}, seed=0)
    assert best_peer.begun(work, settings)["rows"] == [{"size": 16}]
    assert best_peer.begun(work, {"sizes": [32]})["rows"] == []


def test_all_terms_of_a_matrix_are_no_cell():
    found = best_peer.cells([16, 4096], [1, 4, 16], [])
    assert {cell.rank for cell in found if cell.size == 16} == {1, 4}
    assert {cell.rank for cell in found if cell.size == 4096} == {4, 16}
