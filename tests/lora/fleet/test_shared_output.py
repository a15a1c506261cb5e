"""One output for several runs and over time: stale sources, orphans, locks, parts, own formats."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from checkpoint_files import file_contents
from console import run_command
from safetensors.numpy import save_file

from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.fields import SettingsError
from lsrdecomp.lora.files import open_checkpoint, write_lora
from lsrdecomp.lora.fleet import fleet_lock as locks
from lsrdecomp.lora.fleet.fleet_lock import fleet_lock
from lsrdecomp.lora.fleet.fleet_run import run_fleet, run_job, summary
from lsrdecomp.lora.fleet.manifest import MANIFEST
from lsrdecomp.lora.measure import verify
from lsrdecomp.lora.search.plan import CompressionPlan

PLAN = CompressionPlan(separation_rank=2, storage="float16")
LOCK = ".fleet.lock"


class Recorded:
    """A runner in this process that remembers the names of its jobs."""

    def __init__(self):
        self.names = []

    def __call__(self, jobs, plan):
        for job in jobs:
            self.names.append(job.name)
            yield run_job(job, plan)


def make_adapter(folder, seed):
    rng = np.random.default_rng(seed)
    layers = [("l.q", rng.standard_normal((12, 2)), rng.standard_normal((2, 12)))]
    shutil.rmtree(folder, ignore_errors=True)
    write_lora(folder, layers=layers, config={"base_model_name_or_path": "base"})


@pytest.fixture
def folder(tmp_path):
    for seed, name in enumerate("abcde"):
        make_adapter(tmp_path / "in" / name, seed)
    return tmp_path / "in"


def run(folder, out, **options):
    runner = Recorded()
    options = {"plan": PLAN, **options}
    outcomes = run_fleet(folder, out, runner=runner, **options)
    return runner.names, outcomes


# -- sources that change or go ---------------------------------------------------------------------


def retrained(source):
    make_adapter(source, 99)


def scaled_anew(source):
    config = json.loads((source / "adapter_config.json").read_text())
    config["lora_alpha"] *= 2
    (source / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("change", [retrained, scaled_anew])
def test_what_was_made_of_a_source_that_changed_is_made_anew_and_named(folder, tmp_path, change):
    out, notes = tmp_path / "out", []
    run(folder, out)
    change(folder / "c")
    names, outcomes = run(folder, out, on_note=notes.append)
    assert names == ["c"]
    assert notes == ["1 output is made anew, because source or output changed since: c."]
    assert verify(open_checkpoint(folder / "c"), open_checkpoint(out / "c")).passed
    assert summary(outcomes)["done"] == 5
    assert run(folder, out)[0] == []


def test_another_order_of_a_config_is_no_change(folder, tmp_path):
    run(folder, tmp_path / "out")
    path = folder / "c" / "adapter_config.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert run(folder, tmp_path / "out")[0] == []


def test_a_source_that_became_unreadable_fails_and_is_not_called_done(folder, tmp_path):
    run(folder, tmp_path / "out")
    (folder / "b" / "adapter_model.safetensors").write_bytes(b"short")
    _, outcomes = run(folder, tmp_path / "out")
    assert [outcome.state for outcome in outcomes] == ["done", "failed", "done", "done", "done"]


def test_new_statistics_make_all_outputs_anew(folder, tmp_path):
    from lsrdecomp.lora.fleet.fleet_run import Job, _digest

    made_from = []
    for sha256 in ("0", "0", "1"):
        (tmp_path / "statistics.json").write_text(json.dumps({"sha256": sha256}))
        job = Job("a", str(folder / "a"), "out", statistics=str(tmp_path))
        made_from.append(_digest(open_checkpoint(folder / "a"), job))
    assert made_from[0] == made_from[1] != made_from[2]


def test_an_output_whose_source_is_gone_is_named_and_stays(folder, tmp_path):
    out = tmp_path / "out"
    run(folder, out)
    shutil.rmtree(folder / "d")
    names, outcomes = run(folder, out)
    assert names == []
    assert [outcome.state for outcome in outcomes] == ["done"] * 4 + ["orphaned"]
    assert outcomes[-1].name == "d"
    assert outcomes[-1].message.endswith(f"remove {out / 'd'}")
    assert (out / "d").is_dir()
    counts = summary(outcomes)
    assert (counts["adapters"], counts["done"], counts["orphaned"]) == (4, 4, 1)
    shutil.rmtree(out / "d")
    assert len(run(folder, out)[1]) == 4


def test_an_orphan_is_a_line_of_the_command_and_no_failure(folder, tmp_path):
    pytest.importorskip("joblib")
    arguments = (folder, tmp_path / "out", "--separation-rank", 2, "--storage", "float16")
    run(folder, tmp_path / "out")
    shutil.rmtree(folder / "d")
    done = run_command("fleet", *arguments, "--workers", 1)
    assert done.returncode == 0, done.stderr
    assert "orphaned" in done.stdout
    assert "4 of 4 adapters done, 0 missed their tolerance, 0 failed, 1 left" in done.stdout


def test_an_orphan_and_an_adapter_of_its_name_do_not_share_a_place(folder, tmp_path):
    tensors = {
        "lora_unet_q.lora_down.weight": np.ones((2, 12), np.float32),
        "lora_unet_q.lora_up.weight": np.ones((12, 2), np.float32),
    }
    save_file(tensors, folder / "a.safetensors")
    out = tmp_path / "out"
    run(folder, out)
    shutil.rmtree(folder / "a")
    names, outcomes = run(folder, out)
    assert names == []
    assert outcomes[-1].message.endswith(f"remove {out / 'a'}")
    assert open_checkpoint(out / "a").layers[0].name == "l.q"


# -- locks -----------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from lsrdecomp.lora.fleet.fleet_lock import fleet_lock
with fleet_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def hold():
    processes = []

    def start(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


needs_locks = pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")


@needs_locks
def test_of_two_fleets_on_one_output_one_works_and_the_other_says_who(folder, tmp_path, hold):
    out = tmp_path / "out"
    process = hold(out / LOCK)
    words = f"process {process.pid} on host {socket.gethostname()} is at work on this output; wait"
    with pytest.raises(CheckpointError, match=words):
        run(folder, out)
    done = run_command("fleet", folder, out, "--separation-rank", 2)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in out.iterdir()] == [LOCK]


@needs_locks
def test_the_lock_of_a_run_that_was_killed_is_taken_over_with_a_line(folder, tmp_path, hold):
    out, notes = tmp_path / "out", []
    process = hold(out / LOCK)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (out / LOCK).is_file()
    names, _ = run(folder, out, on_note=notes.append)
    assert len(names) == 5
    where = f"process {process.pid} on host {socket.gethostname()}"
    assert notes == [f"A run here was killed ({where}); this one goes on from there."]
    assert not (out / LOCK).exists()


def test_a_lock_goes_with_its_run_also_after_an_error(folder, tmp_path):
    def broken(jobs, plan):
        assert (tmp_path / "out" / LOCK).is_file()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fleet(folder, tmp_path / "out", PLAN, runner=broken)
    assert not (tmp_path / "out" / LOCK).exists()


@needs_locks
@pytest.mark.parametrize("system", ["no module", "no support"])
def test_where_there_are_no_locks_the_process_that_is_named_decides(tmp_path, monkeypatch, system):
    class Unsupported:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def flock(handle, operation):
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks, "fcntl", None if system == "no module" else Unsupported)
    path = tmp_path / LOCK
    with fleet_lock(path) as killed:
        assert killed is None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = socket.gethostname()
    path.write_text(json.dumps({"host": here, "process": ended.pid}))
    with fleet_lock(path) as killed:
        assert killed == f"process {ended.pid} on host {here}"
    for holder in ({"host": here, "process": os.getppid()}, {"host": "else", "process": ended.pid}):
        path.write_text(json.dumps(holder))
        with (
            pytest.raises(CheckpointError, match=f"remove {LOCK} if it has"),
            fleet_lock(path),
        ):
            pass
        assert json.loads(path.read_text()) == holder


def test_a_lock_file_that_says_nothing_is_taken(tmp_path):
    for text in ("", "{", "[]", '{"process": 3}'):
        (tmp_path / LOCK).write_text(text)
        with fleet_lock(tmp_path / LOCK):
            pass
        assert not (tmp_path / LOCK).exists()


@needs_locks
def test_a_lock_file_that_somebody_removed_stops_nobody(tmp_path):
    with fleet_lock(tmp_path / LOCK):
        (tmp_path / LOCK).unlink()


# -- parts -----------------------------------------------------------------------------------------


def test_parts_are_disjoint_and_together_all_and_a_last_call_sums_up(folder, tmp_path):
    out = tmp_path / "out"
    run(folder, tmp_path / "calm")
    done = [run(folder, out, shard=(k, 3)) for k in (1, 2, 3)]
    assert [names for names, _ in done] == [["a", "d"], ["b", "e"], ["c"]]
    assert [summary(outcomes)["adapters"] for _, outcomes in done] == [2, 2, 1]
    manifests = {"fleet-1-of-3.jsonl", "fleet-2-of-3.jsonl", "fleet-3-of-3.jsonl"}
    assert {path.name for path in out.glob("*.jsonl")} == manifests
    names, outcomes = run(folder, out)
    assert names == []
    assert [outcome.name for outcome in outcomes] == list("abcde")
    assert summary(outcomes)["done"] == 5

    def contents(place):
        found = file_contents(place)
        return {name: content for name, content in found.items() if not name.endswith(".jsonl")}

    assert contents(out) == contents(tmp_path / "calm")


def test_a_part_has_no_need_to_be_nonempty(folder, tmp_path):
    assert run(folder, tmp_path / "out", shard=(9, 9)) == ([], [])


@pytest.mark.parametrize("shard", [(0, 3), (4, 3)])
def test_a_part_that_is_none_is_refused(folder, tmp_path, shard):
    with pytest.raises(LsrError, match="the first number runs from 1 to the second"):
        run(folder, tmp_path / "out", shard=shard)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/2/3", "-1/3"])
def test_a_part_is_typed_as_two_numbers(folder, tmp_path, text):
    done = run_command("fleet", folder, tmp_path / "out", "--ratio", 2, "--shard", text)
    assert done.returncode == 2
    assert "expected a part such as 3/8" in done.stderr


def test_a_part_of_another_plan_is_refused(folder, tmp_path):
    run(folder, tmp_path / "out", shard=(1, 2))
    other = PLAN.replace(separation_rank=1)
    for shard in (None, (2, 2)):
        with pytest.raises(CheckpointError, match=r"fleet-1-of-2.jsonl: belongs to another plan"):
            run(folder, tmp_path / "out", plan=other, shard=shard)


def test_the_newest_outcome_counts_whichever_part_recorded_it(folder, tmp_path):
    out = tmp_path / "out"
    run(folder, out)
    make_adapter(folder / "a", 77)
    assert run(folder, out, shard=(1, 2))[0] == ["a"]
    assert run(folder, out)[0] == []  # though its own manifest knows only the old one
    make_adapter(folder / "a", 78)
    assert run(folder, out)[0] == ["a"]
    assert run(folder, out, shard=(1, 2))[0] == []


def test_a_line_that_another_part_is_writing_stays(folder, tmp_path):
    out = tmp_path / "out"
    run(folder, out, shard=(1, 2))
    other = out / "fleet-1-of-2.jsonl"
    other.write_bytes(other.read_bytes() + b'{"name": "c", "sta')
    content = other.read_bytes()
    run(folder, out, shard=(2, 2))
    assert other.read_bytes() == content


@needs_locks
def test_parts_of_equally_many_run_at_once_and_others_do_not(folder, tmp_path, hold):
    out = tmp_path / "out"
    hold(out / ".fleet-1-of-2.lock")
    assert run(folder, out, shard=(2, 2))[0] == ["b", "d"]
    for shard in ((1, 2), (2, 3), None):
        with pytest.raises(CheckpointError, match="is at work on this output"):
            run(folder, out, shard=shard)
    hold(out / LOCK)
    with pytest.raises(CheckpointError, match="is at work on this output"):
        run(folder, out, shard=(2, 2))


def test_the_lock_of_a_killed_part_is_cleared_by_the_last_call(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".fleet-1-of-2.lock").write_text(json.dumps({"host": "gone", "process": 1}))
    run(folder, out)
    assert not list(out.glob(".*"))


SHARDS = """
import sys
from lsrdecomp.lora.search.plan import CompressionPlan
from lsrdecomp.lora.fleet.fleet_run import run_fleet, run_job
run_fleet(
    sys.argv[1], sys.argv[2], CompressionPlan(separation_rank=2, storage="float16"),
    runner=lambda jobs, plan: (run_job(job, plan) for job in jobs), shard=(int(sys.argv[3]), 2),
)
"""


def test_parts_that_run_at_once_and_are_killed_lose_nothing(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    for seed in range(30):
        make_adapter(folder / f"a{seed:02}", seed)

    def start(number):
        return subprocess.Popen([sys.executable, "-c", SHARDS, folder, out, str(number)])

    def lines(number):
        path = out / f"fleet-{number}-of-2.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    processes = [start(1), start(2)]
    deadline = time.monotonic() + 60
    while min(lines(1), lines(2)) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(1).wait() == 0
    names, outcomes = run(folder, out)  # the second part was never started again
    assert summary(outcomes)["done"] == 30
    assert all(int(name[1:]) % 2 for name in names)
    run(folder, tmp_path / "calm")
    calm = file_contents(tmp_path / "calm")
    found = {name: text for name, text in file_contents(out).items() if ".jsonl" not in name}
    assert found == {name: text for name, text in calm.items() if name != MANIFEST}


# -- original formats ------------------------------------------------------------------------------

SAME = {"plan": CompressionPlan(ratio=2.0), "to": "same"}


def in_own_formats(folder):
    """A PEFT directory, kohya files with and without a place of their own, a torch file."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    make_adapter(folder / "peft", 1)
    kohya = {
        "lora_unet_q.lora_down.weight": rng.standard_normal((4, 12)).astype(np.float16),
        "lora_unet_q.lora_up.weight": rng.standard_normal((12, 4)).astype(np.float16),
        "lora_unet_q.alpha": np.array(2.0, np.float16),
    }
    diffusers = {
        f"unet.q.lora_{half}.weight": kohya[f"lora_unet_q.lora_{word}.weight"]
        for half, word in (("A", "down"), ("B", "up"))
    }
    (folder / "styles").mkdir()
    save_file(kohya, folder / "styles" / "ink.safetensors")
    torch.save({key: torch.from_numpy(value) for key, value in kohya.items()}, folder / "old.pt")
    (folder / "pipeline").mkdir()
    save_file(diffusers, folder / "pipeline" / "pytorch_lora_weights.safetensors")
    return folder


def test_a_fleet_is_cut_in_its_original_formats(tmp_path):
    folder, out = in_own_formats(tmp_path / "in"), tmp_path / "out"
    names, outcomes = run(folder, out, **SAME)
    assert {outcome.name: outcome.state for outcome in outcomes} == dict.fromkeys(names, "done")
    places = {
        "old.pt": "old.safetensors",
        "peft": "peft",
        "pipeline": "pipeline/pytorch_lora_weights.safetensors",
        "styles/ink.safetensors": "styles/ink.safetensors",
    }
    for outcome in outcomes:
        source = open_checkpoint(folder / outcome.name)
        written = open_checkpoint(out / places[outcome.name])
        assert written.format == source.format
        assert written.storage == source.storage
        check = verify(source, written)
        assert check.passed
        assert check.relative_error == pytest.approx(outcome.relative_error, abs=2e-3)
        assert 2 * written.adapter_parameters == source.adapter_parameters
    assert run(folder, out, **SAME)[0] == []


def test_an_own_format_that_changed_or_went_is_cut_anew(tmp_path):
    folder, out = in_own_formats(tmp_path / "in"), tmp_path / "out"
    run(folder, out, **SAME)
    place = out / "styles" / "ink.safetensors"
    before = place.read_bytes()
    place.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    (out / "old.safetensors").unlink()
    assert run(folder, out, **SAME)[0] == ["old.pt", "styles/ink.safetensors"]
    assert place.read_bytes() == before


def test_own_formats_and_lsr_do_not_share_an_output(folder, tmp_path):
    out = tmp_path / "out"
    plan = CompressionPlan(ratio=2.0, storage="float32")
    run(folder, out, plan=plan, to="same")
    with pytest.raises(CheckpointError, match="belongs to another format"):
        run(folder, out, plan=plan)


def test_what_an_own_format_has_no_use_for_is_refused(folder, tmp_path):
    with pytest.raises(SettingsError, match="separation_rank is not read where a LoRA file"):
        run(folder, tmp_path / "out", to="same")
    with pytest.raises(SettingsError, match="statistics is not read where a LoRA file"):
        run(folder, tmp_path / "out", **SAME, statistics=tmp_path)
    with pytest.raises(LsrError, match="as LSR, or as same; got 'kohya'"):
        run(folder, tmp_path / "out", to="kohya")
    done = run_command(
        "fleet", folder, tmp_path / "out", "--to", "same", "--ratio", 2, "--storage", "int8"
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "--storage int8 is not read where a LoRA file is written: leave out --to" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_cuts_a_fleet_and_takes_parts(folder, tmp_path):
    pytest.importorskip("joblib")
    arguments = (folder, tmp_path / "out", "--ratio", 2, "--to", "same", "--workers", 1)
    done = run_command("fleet", *arguments, "--shard", "1/2", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert [outcome["name"] for outcome in json.loads(done.stdout)["outcomes"]] == ["a", "c", "e"]
    done = run_command("fleet", *arguments)
    assert "5 of 5 adapters done" in done.stdout
    assert open_checkpoint(tmp_path / "out" / "b").format == "peft-lora"
