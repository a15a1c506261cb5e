"""`compress`, killed in its search, goes on; more workers write the same bytes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import processes
import pytest
from checkpoint_files import file_contents, lora_pair, write_lora_directory
from console import run_command

from lsrdecomp import compress
from lsrdecomp.lora.files import Journal, open_checkpoint
from lsrdecomp.lora.search import CompressionPlan, solve

SIZES = ((24, 16), (16, 24), (32, 12))


def killed_after(puts: int, *order: object) -> None:
    """The command, killed when so many results are in its journal."""
    put, done = Journal.put, []

    def counted(journal: Journal, key: str, *given: Any, **named: Any) -> None:
        put(journal, key, *given, **named)
        done.append(key)
        if len(done) == puts:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.put = counted  # type: ignore[method-assign]
    processes.run_command_here(*order)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {
        name: value
        for i in range(4)
        for name, value in lora_pair(f"l.{i}.q", *SIZES[i % len(SIZES)], r=4, seed=i).items()
    }
    return write_lora_directory(tmp_path_factory.mktemp("source") / "in", tensors, r=4)


@pytest.fixture(scope="module")
def calm(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed run of one process writes."""
    out = tmp_path_factory.mktemp("calm") / "out"
    done = run_command(
        "compress", source, "--ratio", 4, "--structure", "lsr", "--out", out, "--quiet"
    )
    assert done.returncode == 0, done.stderr
    return file_contents(out)


def test_two_workers_write_the_same_bytes_as_one(
    source: Path, calm: dict[str, bytes], tmp_path: Path
) -> None:
    pytest.importorskip("joblib")
    done = run_command(
        "compress",
        source,
        "--ratio",
        4,
        "--structure",
        "lsr",
        "--workers",
        2,
        "--out",
        tmp_path / "out",
        "--quiet",
    )
    assert done.returncode == 0, done.stderr
    assert file_contents(tmp_path / "out") == calm


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_search_that_is_killed_goes_on_where_it_was(
    source: Path, calm: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "place" / "out"
    order = ("compress", source, "--ratio", 4, "--structure", "lsr", "--out", out, "--quiet")
    out.parent.mkdir()
    killed = processes.start_process(killed_after, 2, *order)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert [entry.name for entry in out.parent.iterdir()] == [".out.journal"]
    kept = {path.stem for path in (out.parent / ".out.journal").glob("*.safetensors")}
    assert len(kept) == 2
    copytree(out.parent / ".out.journal", tmp_path / ".copy.journal")

    solved = []

    def counted(task: solve.SolveTask) -> list[solve.SolvedShape]:
        solved.append(solve.task_key(task))
        return real(task)

    real = solve.solve
    monkeypatch.setattr(solve, "solve", counted)
    with Journal.beside(tmp_path / "copy") as journal:
        compress(
            open_checkpoint(source), CompressionPlan(ratio=4.0, structure="lsr"), journal=journal
        )
    assert solved
    assert len(solved) == len(set(solved))
    assert kept.isdisjoint(solved)

    done = run_command(*order)
    assert done.returncode == 0, done.stderr
    assert "Going on from" in done.stderr
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]
    assert file_contents(out) == calm
