"""A full disk under `compress` and `fleet`: one line, the old state; room brings the rest."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import file_contents, lora_pair, write_lora_directory
from console import run_command
from test_kills import make_fleet, outputs

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.files import write_lora
from lsrdecomp.lora.files.file_checks import changed_files
from lsrdecomp.lora.fleet.fleet_run import find_adapters, run_fleet, run_job, summary
from lsrdecomp.lora.fleet.manifest import MANIFEST, Manifest, Outcome
from lsrdecomp.lora.search.plan import CompressionPlan

PLAN = CompressionPlan(separation_rank=2, storage="float16")


def in_process(jobs, plan):
    return (run_job(job, plan) for job in jobs)


class FullFrom:
    """From its n-th call on, a system call finds the disk full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, first: int) -> None:
        self.calls, self.first, self.call = 0, first, getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls >= self.first:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.call(*args, **kwargs)


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    folder = make_fleet(tmp_path_factory.mktemp("fleet") / "in", 4)
    run_fleet(folder, folder.parent / "out", PLAN, runner=in_process)
    return folder, outputs(folder.parent / "out")


@pytest.mark.parametrize("first", [1, 2, 3, 7, 8, 12, 20, 30])
def test_a_fleet_on_a_disk_that_fills_up_goes_on_when_there_is_room(calm, tmp_path, first):
    folder, wanted = calm
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        full = FullFrom(monkeypatch, "fsync", first)
        with pytest.raises(OSError, match="No space left"):  # the manifest cannot be written either
            run_fleet(folder, out, PLAN, runner=in_process)
    assert full.calls >= first
    assert outputs(out).items() <= wanted.items()
    assert all(changed_files(out / name) == () for name in find_adapters(out))
    assert summary(run_fleet(folder, out, PLAN, runner=in_process))["done"] == 4
    assert outputs(out) == wanted


def test_an_output_that_did_not_fit_is_failed_and_tried_again(calm, tmp_path, monkeypatch):
    folder, wanted = calm
    jobs_done = []

    def cramped(jobs, plan):
        for job in jobs:
            with pytest.MonkeyPatch.context() as inner:
                if jobs_done:
                    FullFrom(inner, "fsync", 1)
                outcome = run_job(job, plan)
            jobs_done.append(job)
            yield outcome

    counts = summary(run_fleet(folder, tmp_path / "out", PLAN, runner=cramped))
    assert (counts["done"], counts["failed"]) == (1, 3)
    assert len(find_adapters(tmp_path / "out")) == 1
    assert summary(run_fleet(folder, tmp_path / "out", PLAN, runner=in_process))["done"] == 4
    assert outputs(tmp_path / "out") == wanted


def test_a_line_cut_by_a_full_disk_is_forgotten(tmp_path):
    manifest = Manifest(tmp_path / MANIFEST, PLAN)
    manifest.append(Outcome("a", "done"))
    whole = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).write_bytes(whole + b'{"name": "b", "sta')
    again = Manifest(tmp_path / MANIFEST, PLAN)
    assert list(again.recorded) == ["a"]
    assert (tmp_path / MANIFEST).read_bytes() == whole


@pytest.mark.parametrize(
    "text", ["dear diary", '{"a": 1}', '["plan"]', '{"plan": 1}\n[]\n', "[" * 10**5 + "\n"]
)
def test_somebody_elses_file_is_not_touched(tmp_path, text):
    path = tmp_path / MANIFEST
    path.write_text(text)
    with pytest.raises(CheckpointError, match="choose another output"):
        Manifest(path, PLAN)
    assert path.read_text() == text


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 256 KiB in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None or os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("no small file system can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_really_full_file_system(small_disk, tmp_path):
    """A small disk gives a line that says so; after enlarging, the bytes of a large one."""
    pytest.importorskip("joblib")
    tensors = {k: v for i in range(12) for k, v in lora_pair(f"l.{i}", 640, 640, 16, i).items()}
    source, one = write_lora_directory(tmp_path / "one", tensors, r=16), ("--separation-rank", 16)
    write_lora(small_disk / "out", layers=[("q", np.ones((4, 2)), np.ones((2, 6)))])
    before = file_contents(small_disk)
    done = run_command("compress", source, "--out", small_disk / "out", *one, "--force")
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "could not be written: No space left on device; nothing was left behind"
    )
    assert len(done.stderr.splitlines()) == 1
    assert file_contents(small_disk) == before
    shutil.rmtree(small_disk / "out")

    folder, plan = make_fleet(tmp_path / "in", 20), tmp_path / "plan.toml"
    plan.write_text('[compress]\nseparation_rank = 2\nstorage = "float16"\n')
    done = run_command("fleet", folder, small_disk / "fleet", "--plan", plan, "--workers", 1)
    held = [
        Path(name).parent.as_posix()
        for name in file_contents(small_disk / "fleet")
        if name.endswith("SHA256SUMS")
    ]
    assert 0 < len(held) < 20
    assert done.returncode in (1, 2)
    assert "No space left on device" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert find_adapters(small_disk / "fleet") == sorted(held)
    assert all(changed_files(small_disk / "fleet" / name) == () for name in held)
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    done = run_command(
        "fleet", folder, small_disk / "fleet", "--plan", plan, "--workers", 1, "--json", "-"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["done"] == 20
    run_fleet(folder, tmp_path / "calm", PLAN, runner=in_process)
    assert outputs(small_disk / "fleet") == outputs(tmp_path / "calm")
