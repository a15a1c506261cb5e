"""`compress` as it is started: killed in the middle of its search it goes on, and more workers write the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
from checkpoint_files import directory, pair, snapshot

from lsrdecomp.checkpoints import Journal, open_checkpoint
from lsrdecomp.compression import CompressionPlan, compress, solve

SIZES = ((24, 16), (16, 24), (32, 12))

KILLED = """
import os, signal
from lsrdecomp.checkpoints import Journal
put, left = Journal.put, [{puts}]
def counted(self, key, arrays=None, *, facts=None):
    put(self, key, arrays, facts=facts)
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.put = counted
"""
RUN = "from lsrdecomp.cli.main import run; run()"


def main(program: str, *order: object) -> subprocess.CompletedProcess[str]:
    """The command, after a few lines of Python; with one thread, on whose number last digits depend."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    line = [sys.executable, "-c", program, *map(str, order)]
    return subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, **threads})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {
        name: value for i in range(6) for name, value in pair(f"l.{i}.q", *SIZES[i % len(SIZES)], r=4, seed=i).items()
    }
    return directory(tmp_path / "in", tensors, r=4)


@pytest.fixture
def calm(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run of one process writes."""
    done = main(RUN, "compress", source, "--ratio", 4, "--out", tmp_path / "calm" / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    return snapshot(tmp_path / "calm" / "out")


def test_two_workers_write_the_same_bytes_as_one(source: Path, calm: dict[str, bytes], tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    done = main(RUN, "compress", source, "--ratio", 4, "--workers", 2, "--out", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    assert snapshot(tmp_path / "out") == calm


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_search_that_is_killed_goes_on_where_it_was(
    source: Path, calm: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "place" / "out"
    order = ("compress", source, "--ratio", 4, "--out", out, "--quiet")
    out.parent.mkdir()
    assert main(KILLED.format(puts=2) + RUN, *order).returncode == -signal.SIGKILL
    assert [entry.name for entry in out.parent.iterdir()] == [".out.journal"]
    kept = {path.stem for path in (out.parent / ".out.journal").glob("*.safetensors")}
    assert len(kept) == 2
    copytree(out.parent / ".out.journal", tmp_path / ".copy.journal")

    solved = []

    def counted(task: solve.Task) -> list[solve.Answer]:
        solved.append(solve.task_key(task))
        return real(task)

    real = solve.solve
    monkeypatch.setattr(solve, "solve", counted)
    with Journal.beside(tmp_path / "copy") as journal:
        compress(open_checkpoint(source), CompressionPlan(ratio=4.0), journal=journal)
    assert solved
    assert len(solved) == len(set(solved))
    assert kept.isdisjoint(solved)

    done = main(RUN, *order)
    assert done.returncode == 0, done.stderr
    assert "Going on from" in done.stderr
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]
    assert snapshot(out) == calm
