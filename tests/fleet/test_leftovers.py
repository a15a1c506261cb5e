"""A fleet that ends leaves nothing behind, however old or young a killed run's leftovers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from checkpoint_files import lora_pair, write_lora_directory

from lsrdecomp.checkpoints.writing import new_directory, remove_leftovers
from lsrdecomp.compression.settings import CompressionPlan
from lsrdecomp.fleet.batch import Job, run_fleet, run_job

DAY = 86_400.0


def in_this_process(jobs: list[Job], plan: CompressionPlan):
    return (run_job(job, plan) for job in jobs)


def leftover(out: Path, seconds: float) -> Path:
    part = out.parent / f".{out.name}.0123456789ab.partial"
    part.mkdir(parents=True)
    (part / "half").write_bytes(b"x")
    os.utime(part, (time.time() + seconds, time.time() + seconds))
    return part


@pytest.mark.parametrize("seconds", [0.0, -DAY, DAY])
def test_a_fleet_that_ends_leaves_nothing_behind(tmp_path: Path, seconds: float) -> None:
    write_lora_directory(tmp_path / "in" / "team" / "a", lora_pair("l.0", 16, 12, 2), r=2)
    plan = CompressionPlan(separation_rank=1)
    done = run_fleet(tmp_path / "in", tmp_path / "out", plan, runner=in_this_process)
    # Of another run, killed before it could record anything.
    left = leftover(tmp_path / "out" / "team" / "a", seconds)
    again = run_fleet(tmp_path / "in", tmp_path / "out", plan, runner=in_this_process)
    assert [outcome.state for outcome in (*done, *again)] == ["done", "done"]
    assert not left.exists()
    assert sorted(entry.name for entry in left.parent.iterdir()) == ["a"]


def test_a_leftover_dated_in_the_future_is_not_kept_for_ever(tmp_path: Path) -> None:
    left = leftover(tmp_path / "out", DAY)
    with new_directory(tmp_path / "out") as part:
        (part / "file").write_bytes(b"x")
    assert not left.exists()


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out") as part:
        (part / "file").write_bytes(b"x")
        remove_leftovers(tmp_path / "out", age=0.0)
        assert part.is_dir()
    assert (tmp_path / "out" / "file").is_file()
