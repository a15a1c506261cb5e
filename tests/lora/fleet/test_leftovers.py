"""A fleet that ends leaves nothing behind, however old or young a killed run's leftovers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from checkpoint_files import lora_pair, write_lora_directory
from console import run_command

from lsrdecomp.lora.files.writing import new_directory, new_file, remove_leftovers
from lsrdecomp.lora.fleet.fleet_run import Job, run_fleet, run_job
from lsrdecomp.lora.search.plan import CompressionPlan

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


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_half_written_output_of_a_killed_run_goes_or_is_named(tmp_path: Path, kind: str) -> None:
    """Of an hour ago it goes; one of this moment stays and is named, with the command."""
    write_lora_directory(tmp_path / "in", lora_pair("l.0", 16, 12, 2), r=2)
    out = tmp_path / ("out.json" if kind == "file" else "out")
    lefts = [tmp_path / f".{out.name}.{digit * 12}.partial" for digit in "0a"]
    # Of outputs of other names these say nothing.
    others = [
        tmp_path / f".{out.name}.more.0123456789ab.partial",
        tmp_path / f".more-{out.name}.0123456789ab.partial",
    ]
    for left in (*lefts, *others):
        left.write_bytes(b"half") if kind == "file" else left.mkdir()
    hour_ago = time.time() - 3600
    for left in (lefts[0], *others):
        os.utime(left, (hour_ago, hour_ago))
    options = ("--json", out) if kind == "file" else ("--out", out)
    verb = "inspect" if kind == "file" else "export"
    done = run_command(verb, tmp_path / "in", *options)
    assert done.returncode == 0, done.stderr
    assert not lefts[0].exists()
    assert f"{lefts[1]} was left by a run that was killed" in done.stderr
    assert done.stderr.strip().endswith(f"rm -r {lefts[1]}")
    assert all(other.exists() for other in others)


def test_a_file_that_another_run_is_writing_stays_and_is_not_named(tmp_path: Path) -> None:
    with new_file(tmp_path / "out.json") as part:
        part.write_text("half")
        assert remove_leftovers(tmp_path / "out.json", age=0.0) == []
        assert part.is_file()
    assert (tmp_path / "out.json").read_text() == "half"


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out") as part:
        (part / "file").write_bytes(b"x")
        remove_leftovers(tmp_path / "out", age=0.0)
        assert part.is_dir()
    assert (tmp_path / "out" / "file").is_file()
