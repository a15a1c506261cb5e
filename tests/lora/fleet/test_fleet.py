"""Fleets: every adapter once, the same bytes wherever it ran, nothing lost to a kill."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from checkpoint_files import lora_pair, write_lora_directory
from safetensors.numpy import save_file

from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.lora.files import open_checkpoint, write_lora
from lsrdecomp.lora.fleet import fleet_run as batch
from lsrdecomp.lora.fleet import runners
from lsrdecomp.lora.fleet.fleet_run import Job, find_adapters, run_fleet, run_job, summary
from lsrdecomp.lora.fleet.manifest import MANIFEST, Outcome
from lsrdecomp.lora.search.plan import CompressionPlan

joblib = pytest.importorskip("joblib")
from lsrdecomp.lora.fleet.runners import joblib_runner, ray_runner  # noqa: E402 - after the skip

PLAN = CompressionPlan(separation_rank=2, storage="float16")


def in_process(jobs, plan):
    """The simplest runner."""
    return (run_job(job, plan) for job in jobs)


def make_fleet(folder: Path, count: int, size: int = 12) -> Path:
    rng = np.random.default_rng(0)
    for i in range(count):
        layers = [
            (f"layers.{k}.q", rng.standard_normal((size, 2)), rng.standard_normal((2, size)))
            for k in range(2)
        ]
        write_lora(
            folder / f"team{i % 3}" / f"adapter{i}",
            layers=layers,
            config={"base_model_name_or_path": "base"},
        )
    return folder


def contents(out: Path) -> dict[str, bytes]:
    """Every byte below ``out``, except the manifest, whose order is that of finishing."""
    files = (path for path in out.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    return make_fleet(tmp_path_factory.mktemp("fleet") / "in", 9)


@pytest.fixture(scope="module")
def undisturbed(fleet, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    outcomes = run_fleet(fleet, out, PLAN, runner=in_process)
    assert summary(outcomes) | {"parameters": 0, "parameters_before": 0} == {
        "adapters": 9,
        "done": 9,
        "missed": 0,
        "failed": 0,
        "orphaned": 0,
        "parameters": 0,
        "parameters_before": 0,
    }
    return out


def test_what_a_kill_left_half_written_is_no_adapter(fleet, tmp_path):
    shutil.copytree(fleet, tmp_path / "in")
    name = find_adapters(fleet)[0]
    (tmp_path / "in" / name).rename((tmp_path / "in" / name).with_name(".adapter.0123.partial"))
    assert find_adapters(tmp_path / "in") == find_adapters(fleet)[1:]


def test_every_adapter_appears_at_its_place(fleet, undisturbed):
    assert find_adapters(fleet) == find_adapters(undisturbed)
    assert all(open_checkpoint(undisturbed / name).format == "lsr" for name in find_adapters(fleet))


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_write_the_same_bytes(fleet, undisturbed, tmp_path, workers):
    steps = []
    run_fleet(fleet, tmp_path / "out", PLAN, runner=joblib_runner(workers), on_step=steps.append)
    assert contents(tmp_path / "out") == contents(undisturbed)
    assert [(step.done, step.total) for step in steps] == [(done, 9) for done in range(10)]


def never(jobs, plan):
    """A runner for runs that should find nothing to do."""
    raise AssertionError(f"{len(jobs)} jobs were run again")


def test_a_second_run_does_nothing(fleet, undisturbed):
    before = (undisturbed / MANIFEST).read_bytes()
    assert len(run_fleet(fleet, undisturbed, PLAN, runner=never)) == 9
    assert (undisturbed / MANIFEST).read_bytes() == before


def test_bad_adapters_are_reported_and_stop_nobody(fleet, tmp_path):
    folder = tmp_path / "in"
    make_fleet(folder, 3)
    (folder / "team0" / "adapter0" / "adapter_model.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\n"
    )
    (folder / "team1" / "adapter1" / "adapter_config.json").write_text("[]")
    outcomes = {
        o.name: o for o in run_fleet(folder, tmp_path / "out", PLAN, runner=joblib_runner(2))
    }
    assert {name: outcome.state for name, outcome in outcomes.items()} == {
        "team0/adapter0": "failed",
        "team1/adapter1": "failed",
        "team2/adapter2": "done",
    }
    assert "adapter_model.safetensors" in outcomes["team0/adapter0"].message
    assert find_adapters(tmp_path / "out") == ["team2/adapter2"]


def test_a_tolerance_out_of_reach_is_missed_and_not_tried_again(tmp_path):
    make_fleet(tmp_path / "in", 2)
    plan = CompressionPlan(rtol=1e-6, storage="bfloat16")
    outcomes = run_fleet(tmp_path / "in", tmp_path / "out", plan, runner=in_process)
    assert {outcome.state for outcome in outcomes} == {"missed"}
    assert run_fleet(tmp_path / "in", tmp_path / "out", plan, runner=None) == outcomes


def test_a_worker_that_dies_is_tried_again_alone(fleet, undisturbed, tmp_path):
    groups = []

    def fragile(jobs, plan):
        groups.append(len(jobs))
        for job in jobs:
            dies = job.name == "team1/adapter1" or (job.name == "team2/adapter2" and len(jobs) > 1)
            yield (
                Outcome(job.name, "died", "its worker died: killed") if dies else run_job(job, plan)
            )

    outcomes = {o.name: o for o in run_fleet(fleet, tmp_path / "out", PLAN, runner=fragile)}
    assert groups == [9, 1, 1]
    assert (outcomes["team2/adapter2"].state, outcomes["team2/adapter2"].attempts) == ("done", 2)
    assert (outcomes["team0/adapter0"].state, outcomes["team0/adapter0"].attempts) == ("done", 1)
    assert (outcomes["team1/adapter1"].state, outcomes["team1/adapter1"].message) == (
        "failed",
        "its worker died: killed",
    )


def dies_of(name):
    """A job that ends its whole process, as the system does to one that takes too much memory."""

    def job(job, plan):
        if job.name == name:
            time.sleep(0.2)  # others are finished by then, and others begun
            os.kill(os.getpid(), signal.SIGKILL)
        return run_job(job, plan)

    return job


def test_each_job_of_a_pool_whose_worker_is_killed_ends_under_its_own_name(
    undisturbed, tmp_path, monkeypatch
):
    folder, out = make_fleet(tmp_path / "in", 4), tmp_path / "out"
    names = find_adapters(folder)
    fatal = names[2]
    monkeypatch.setattr(runners, "run_job", dies_of(fatal))
    pools = []

    def noted(jobs, plan):
        pools.append([])
        for outcome in joblib_runner(2)(jobs, plan):
            pools[-1].append(outcome)
            yield outcome

    outcomes = {outcome.name: outcome for outcome in run_fleet(folder, out, PLAN, runner=noted)}
    assert sorted(outcome.name for outcome in pools[0]) == sorted(names)
    assert {outcome.name: outcome.state for outcome in pools[0]}[fatal] == "died"
    # Those that died are tried again alone: only the one that kills is lost
    assert all(len(pool) == 1 for pool in pools[1:])
    states = {name: outcome.state for name, outcome in outcomes.items()}
    assert states == dict.fromkeys(names, "done") | {fatal: "failed"}
    assert re.fullmatch(r"its worker died: [^\n]{5,}", outcomes[fatal].message)
    whole = contents(undisturbed)
    made = tuple(f"{name}/" for name in names if name != fatal)
    assert contents(out) == {name: whole[name] for name in whole if name.startswith(made)}


def counts_those_beside(folder):
    """Return a job that says how many of its kind run as it does."""

    def job(job, plan):
        mark = folder / job.name
        mark.touch()
        time.sleep(0.05)
        beside = len(list(folder.iterdir())) - 1
        mark.unlink()
        return Outcome(job.name, "done", f"{beside} beside")

    return job


def test_one_worker_runs_one_job_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(runners, "run_job", counts_those_beside(tmp_path))
    jobs = [Job(f"adapter{i}", "in", "out") for i in range(5)]
    outcomes = list(joblib_runner(1)(jobs, PLAN))
    assert sorted(outcome.name for outcome in outcomes) == [job.name for job in jobs]
    assert {outcome.message for outcome in outcomes} == {"0 beside"}


@pytest.mark.parametrize(
    "line",
    [
        {"name": "team0/adapter0"},
        {"state": "done"},
        {"name": "team0/adapter0", "state": "finished"},
        {"name": 7, "state": "done"},
        {"name": "team0/adapter0", "state": "done", "parameters": "12"},
        {"name": "team0/adapter0", "state": "done", "relative_error": "0.5"},
        {"name": "team0/adapter0", "state": "done", "attempts": 1.5},
        {"name": "team0/adapter0", "state": "done", "message": None},
        {"name": "team0/adapter0", "state": "done", "seconds": 1},
        {"plan": {}},
        [1, 2],
        "done",
    ],
)
def test_a_line_of_another_program_is_refused_and_never_taken_for_a_finished_adapter(
    fleet, tmp_path, line
):
    """Else that adapter would never be made."""
    out = tmp_path / "out"
    out.mkdir()
    manifest = json.dumps({"plan": PLAN.to_json()}) + "\n" + json.dumps(line) + "\n"
    (out / MANIFEST).write_text(manifest)
    with pytest.raises(CheckpointError, match="choose another output"):
        run_fleet(fleet, out, PLAN, runner=never)
    assert (out / MANIFEST).read_text() == manifest
    assert [path.name for path in out.iterdir()] == [MANIFEST]


def first_line(out):
    return (out / MANIFEST).read_bytes().splitlines(keepends=True)[0]


@pytest.mark.parametrize("cut", [1, 7, 8, 9, -1])
def test_a_first_line_that_a_kill_cut_short_is_written_again(fleet, undisturbed, tmp_path, cut):
    out = tmp_path / "out"
    out.mkdir()
    (out / MANIFEST).write_bytes(first_line(undisturbed)[:cut])
    assert summary(run_fleet(fleet, out, PLAN, runner=in_process))["done"] == 9
    assert contents(out) == contents(undisturbed)
    assert run_fleet(fleet, out, PLAN, runner=never)


def test_bytes_that_begin_no_manifest_are_not_overwritten(fleet, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / MANIFEST).write_bytes(b'{"pla"')
    with pytest.raises(CheckpointError, match="is not a manifest written here"):
        run_fleet(fleet, out, PLAN, runner=never)
    assert (out / MANIFEST).read_bytes() == b'{"pla"'


def test_what_has_lost_its_line_is_made_again(fleet, undisturbed, tmp_path):
    out = tmp_path / "out"
    run_fleet(fleet, out, PLAN, runner=in_process)
    lines = (out / MANIFEST).read_text().splitlines(keepends=True)
    # As if killed in mid-line: five outputs have no line.
    (out / MANIFEST).write_text("".join(lines[:4]) + lines[4][:20])

    steps = []
    outcomes = run_fleet(fleet, out, PLAN, runner=in_process, on_step=steps.append)
    assert summary(outcomes)["done"] == 9
    assert (steps[-1].done, steps[-1].total) == (6, 6)
    assert contents(out) == contents(undisturbed)


def test_another_plan_and_bad_places_are_refused(fleet, undisturbed, tmp_path):
    with pytest.raises(CheckpointError, match="belongs to another plan"):
        run_fleet(fleet, undisturbed, CompressionPlan(rtol=0.5), runner=in_process)
    with pytest.raises(CheckpointError, match="must not be inside the input"):
        run_fleet(fleet, fleet / "out", PLAN, runner=in_process)
    with pytest.raises(CheckpointError, match="holds no adapters"):
        run_fleet(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", PLAN, runner=in_process)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MANIFEST).write_text("not json\n")
    with pytest.raises(CheckpointError, match="is not a manifest"):
        run_fleet(fleet, tmp_path / "out", PLAN, runner=in_process)


RUN = """
import sys
from lsrdecomp.lora.search.plan import CompressionPlan
from lsrdecomp.lora.fleet.fleet_run import run_fleet
from lsrdecomp.lora.fleet.runners import joblib_runner
run_fleet(sys.argv[1], sys.argv[2], CompressionPlan(**{plan}), runner=joblib_runner(2))
"""


def written_lines(out):
    return len((out / MANIFEST).read_text().splitlines()) if (out / MANIFEST).exists() else 0


def test_a_kill_of_all_processes_loses_nothing(tmp_path):
    folder, out = make_fleet(tmp_path / "in", 12), tmp_path / "out"
    program = RUN.format(plan={"separation_rank": 2, "storage": "float16"})
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder), str(out)], start_new_session=True
    )
    deadline = time.monotonic() + 60
    while written_lines(out) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    outcomes = run_fleet(folder, out, PLAN, runner=in_process)
    assert summary(outcomes)["done"] == 12
    run_fleet(folder, tmp_path / "calm", PLAN, runner=in_process)
    assert contents(out) == contents(tmp_path / "calm")
    lines = [json.loads(line) for line in (out / MANIFEST).read_text().splitlines()[1:]]
    assert len({line["name"] for line in lines}) == len(lines) == 12


@pytest.mark.slow
def test_two_ray_nodes_write_the_bytes_of_joblib(fleet, undisturbed, tmp_path):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        outcomes = run_fleet(fleet, tmp_path / "out", PLAN, runner=ray_runner(cluster.address))
        assert summary(outcomes)["done"] == 9
        assert contents(tmp_path / "out") == contents(undisturbed)
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()


def test_a_job_solves_on_its_device(fleet, tmp_path, monkeypatch):
    asked = []

    def searched(*_, resources, **named):
        asked.append(resources.device)
        raise LsrError("it has been heard")

    monkeypatch.setattr(batch, "search_adapter", searched)
    run_job(
        Job("a", str(fleet / find_adapters(fleet)[0]), str(tmp_path / "out"), device="cpu"), PLAN
    )
    assert asked == ["cpu"]


def test_jobs_take_the_gpus_of_a_host_in_turn(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(runners, "check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert runners._devices(-1, "cuda", 3) == (6, ["cuda:0", "cuda:1"])
    assert runners._devices(4, "cuda", 3) == (4, ["cuda:0", "cuda:1"])
    assert runners._devices(-1, "cuda:1", 3) == (-1, ["cuda:1"])
    assert runners._devices(-1, None, 1) == (-1, [None])
    jobs = [Job(str(k), "nowhere", "nowhere") for k in range(3)]
    monkeypatch.setattr(runners, "run_job", device_of)
    assert sorted(found.message for found in joblib_runner(2, "cuda")(jobs, PLAN)) == [
        "cuda:0",
        "cuda:0",
        "cuda:1",
    ]
    assert {found.message for found in joblib_runner(1, "cpu")(jobs, PLAN)} == {"cpu"}


def device_of(job, plan):
    return Outcome(job.name, "done", job.device)


def test_a_device_that_is_not_there_stops_a_fleet_before_it_starts(fleet, tmp_path):
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip("here is a CUDA device")
    with pytest.raises(LsrError, match="cannot compute in float64 on device 'cuda'"):
        run_fleet(fleet, tmp_path / "out", PLAN, runner=joblib_runner(2, "cuda"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [0, 1])
def test_ray_gives_every_job_its_share_of_a_gpu(fleet, tmp_path, gpus):
    """Ray believes in a GPU that is not there; the job with a share of it fails in one line."""
    ray = pytest.importorskip("ray")
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip("here is a CUDA device")
    ray.init(num_cpus=2, num_gpus=gpus)
    try:
        runner = ray_runner(device="cuda", per_gpu=2)
        if gpus == 0:
            with pytest.raises(LsrError, match="no node of the Ray cluster has a GPU"):
                run_fleet(fleet, tmp_path / "out", PLAN, runner=runner)
        else:
            outcomes = run_fleet(fleet, tmp_path / "out", PLAN, runner=runner)
            assert summary(outcomes)["failed"] == 9
            assert all(
                "cannot compute in float64 on device 'cuda'" in outcome.message
                for outcome in outcomes
            )
            mine = run_fleet(fleet, tmp_path / "cpu", PLAN, runner=ray_runner(device="cpu"))
            assert summary(mine)["done"] == 9
            run_fleet(fleet, tmp_path / "joblib", PLAN, runner=joblib_runner(2, "cpu"))
            assert contents(tmp_path / "cpu") == contents(tmp_path / "joblib")
    finally:
        ray.shutdown()


class Cluster(ModuleType):
    """A stand-in for ray in this process: a job runs when its result is fetched, last first."""

    def __init__(self, gpus: float) -> None:
        super().__init__("ray")
        self.gpus, self.asked, self.running, self.most = gpus, {}, [], 0
        self.exceptions = SimpleNamespace(RayError=ConnectionError)
        self.init = lambda address, log_to_driver: self.asked.update(address=address)
        self.is_initialized = lambda: "address" in self.asked
        self.cluster_resources = lambda: {"CPU": 2.0} | ({"GPU": self.gpus} if self.gpus else {})
        self.get = lambda answer: answer()

    def remote(self, **wanted):
        self.asked.update(wanted)

        def submit(work, *arguments):
            self.running.append(partial(work, *arguments))
            self.most = max(self.most, len(self.running))
            return self.running[-1]

        return lambda work: SimpleNamespace(remote=partial(submit, work))

    def wait(self, answers, num_returns):
        assert set(answers) == set(self.running)
        assert num_returns <= len(answers)  # ray raises a ValueError
        return [self.running.pop()], list(self.running)


@pytest.mark.parametrize("make_runner", [joblib_runner, ray_runner])
def test_jobs_cannot_share_a_gpu_where_none_is_used(make_runner):
    with pytest.raises(LsrError, match="3 jobs are to share a GPU, but the device is cpu"):
        make_runner(per_gpu=3)


@pytest.mark.parametrize(("device", "gpus", "share"), [("cuda", 1.0, 0.5), (None, 0.0, 0.0)])
def test_a_cluster_runs_every_job_once_and_one_that_dies_alone_dies(
    device, gpus, share, monkeypatch
):
    ray = Cluster(gpus)
    monkeypatch.setitem(sys.modules, "ray", ray)

    def job(job, plan):
        if job.name == "2":
            raise ConnectionError("the node is gone\nmany lines")
        return Outcome(job.name, "done", str(job.device))

    monkeypatch.setattr(runners, "run_job", job)
    jobs = [Job(str(number), "in", "out") for number in range(5)]
    per_gpu = 2 if device == "cuda" else 1
    run = ray_runner("head:1", device, per_gpu=per_gpu, max_submitted=2)
    outcomes = {outcome.name: outcome for outcome in run(jobs, PLAN)}
    assert outcomes.keys() == {job.name for job in jobs}
    assert ray.most == 2
    assert outcomes.pop("2") == Outcome("2", "died", "its worker died: the node is gone")
    assert {(outcome.state, outcome.message) for outcome in outcomes.values()} == {
        ("done", str(device))
    }
    asked = {name: ray.asked[name] for name in ("address", "num_cpus", "num_gpus", "max_retries")}
    assert asked == {"address": "head:1", "num_cpus": 1, "num_gpus": share, "max_retries": 0}
    assert ray.asked["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"


def test_a_cluster_without_a_gpu_is_refused_before_any_job(monkeypatch):
    ray = Cluster(0.0)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(LsrError, match="no node of the Ray cluster has a GPU"):
        list(ray_runner(device="cuda")([Job("a", "in", "out")], PLAN))
    assert not ray.running


def test_a_finished_output_that_changed_is_made_again(fleet, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "out")
    name = find_adapters(fleet)[0]
    (tmp_path / "out" / name / "adapter_config.json").write_text("{}")
    steps = []
    run_fleet(fleet, tmp_path / "out", PLAN, runner=in_process, on_step=steps.append)
    assert (steps[-1].done, steps[-1].total) == (1, 1)
    assert json.loads((tmp_path / "out" / MANIFEST).read_text().splitlines()[-1])["name"] == name
    assert contents(tmp_path / "out") == contents(undisturbed)


def test_single_files_are_adapters_of_a_fleet_and_parts_of_models_are_not(tmp_path):
    folder, rng = tmp_path / "in", np.random.default_rng(1)
    for place in ("styles", "model"):
        (folder / place).mkdir(parents=True)
        halves = {"lora_unet_q.lora_down.weight": (2, 12), "lora_unet_q.lora_up.weight": (12, 2)}
        tensors = {
            key: rng.standard_normal(shape).astype(np.float32) for key, shape in halves.items()
        }
        save_file(tensors, folder / place / "ink.safetensors")
    (folder / "model" / "config.json").write_text("{}")
    assert find_adapters(folder) == ["styles/ink.safetensors"]
    (outcome,) = run_fleet(folder, tmp_path / "out", PLAN, runner=in_process)
    assert outcome.state == "done"
    assert open_checkpoint(tmp_path / "out" / "styles" / "ink").format == "lsr"


def test_a_lora_of_llama_cpp_is_an_adapter_of_a_fleet_and_a_model_is_not(tmp_path):
    (tmp_path / "styles").mkdir()
    for name, words in {"ink": b"adapter.type", "model": b"general.type"}.items():
        (tmp_path / "styles" / f"{name}.gguf").write_bytes(b"GGUF\x03\0\0\0" + words)
    assert find_adapters(tmp_path) == ["styles/ink.gguf"]


def layouts(folder):
    """An adapter of each kind of place that `compress` reads, and three that it refuses."""
    rng = np.random.default_rng(2)

    def halves(down, up, transposed=False):
        shapes = {down: (2, 12), up: (12, 2)}
        return {
            f"model.layers.0.q{key}": rng.standard_normal(
                shape[::-1] if transposed else shape
            ).astype(np.float32)
            for key, shape in shapes.items()
        }

    write_lora_directory(folder / "peft", {**lora_pair("q", 16, 16)})
    mlx = folder / "mlx"
    mlx.mkdir()
    save_file(halves(".lora_a", ".lora_b", transposed=True), mlx / "adapters.safetensors")
    scale = {"lora_parameters": {"rank": 2, "scale": 2.0}, "model": "tiny"}
    (mlx / "adapter_config.json").write_text(json.dumps(scale))
    (folder / "styles").mkdir()
    kohya = halves(".lora_down.weight", ".lora_up.weight")
    save_file(kohya, folder / "styles" / "ink.safetensors")
    torch = pytest.importorskip("torch")
    torch.save(
        {key: torch.from_numpy(array) for key, array in kohya.items()}, folder / "styles" / "ink.pt"
    )
    # What cannot be had: a config whose weights are missing, a method that is not read, damage.
    (folder / "config only").mkdir()
    (folder / "config only" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    write_lora_directory(folder / "dora", use_dora=True)
    write_lora_directory(folder / "cut")
    weights = folder / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    return folder


def test_every_adapter_is_counted_done_or_with_its_reason(tmp_path):
    folder = layouts(tmp_path / "in")
    found = run_fleet(folder, tmp_path / "out", PLAN, runner=in_process)
    states = {outcome.name: outcome.state for outcome in found}
    assert states == {
        "config only": "failed",
        "cut": "failed",
        "dora": "failed",
        "mlx": "done",
        "peft": "done",
        "styles/ink.pt": "done",
        "styles/ink.safetensors": "done",
    }
    reasons = {outcome.name: outcome.message for outcome in found}
    assert "but no weights" in reasons["config only"]
    assert "DoRA" in reasons["dora"]
    assert "truncated" in reasons["cut"]
    # Each under a name of its own.
    for name, place in (
        ("styles/ink.pt", "styles/ink.pt"),
        ("styles/ink.safetensors", "styles/ink"),
    ):
        assert states[name] == "done"
        assert open_checkpoint(tmp_path / "out" / place).format == "lsr"


def test_a_file_and_a_directory_of_one_name_have_outputs_of_their_own(tmp_path):
    folder = tmp_path / "in"
    write_lora_directory(folder / "ink", lora_pair("q", 16, 16))
    halves = {"lora_unet_q.lora_down.weight": (2, 12), "lora_unet_q.lora_up.weight": (12, 2)}
    tensors = {key: np.ones(shape, np.float32) for key, shape in halves.items()}
    save_file(tensors, folder / "ink.safetensors")
    run_fleet(folder, tmp_path / "out", PLAN, runner=in_process)
    assert open_checkpoint(tmp_path / "out" / "ink").layers[0].name == "q"
    assert open_checkpoint(tmp_path / "out" / "ink.safetensors").layers[0].name == "lora_unet_q"


def test_one_adapter_is_no_fleet_and_the_message_says_what_is(tmp_path):
    write_lora_directory(tmp_path / "in")
    with pytest.raises(CheckpointError, match=f"one adapter.*compress {tmp_path / 'in'}"):
        run_fleet(tmp_path / "in", tmp_path / "out", PLAN, runner=in_process)


def test_an_outcome_without_numbers_counts_none():
    missed = Outcome("b", "missed", "no rank is small enough")
    assert (missed.parameters_before, missed.parameters, missed.attempts) == (0, 0, 1)
