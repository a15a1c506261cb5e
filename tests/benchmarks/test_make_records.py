"""The command that makes the records anew."""

import json

import pytest

from benchmarks import __main__ as make
from benchmarks import record


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Give records and jobs of this test: two that write, one that fails, one that lacks data."""
    monkeypatch.setattr(record, "RESULTS", tmp_path / "benchmarks" / "results")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.4.0"\n')
    jobs = (
        make.Job("slow", ("slow",), "slow", 30),
        make.Job("fails", ("fails",), "fails", 1),
        make.Job("quick", ("quick",), "quick", 2, threads=None),
        make.Job("of data", ("data",), "data {adapters}/lora", 1),
    )
    monkeypatch.setattr(make, "JOBS", jobs)
    return record.RESULTS


@pytest.fixture
def ran(monkeypatch, results):
    """Collect the commands in place of running them; each writes its record, but for one."""
    commands = []

    def run(command, env, check):
        name = command[2]
        commands.append((name, *command[3:], env.get("OMP_NUM_THREADS")))
        if name != "fails":
            record.save(results / f"{name}.json", {"rows": []}, seed=0)
        return make.subprocess.CompletedProcess(command, int(name == "fails"))

    monkeypatch.setattr(make.subprocess, "run", run)
    monkeypatch.setattr(record, "_git", lambda *_: "")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    return commands


def test_jobs_run_cheapest_first_and_a_failure_does_not_stop_them(ran, capsys):
    assert make.main([]) == 1
    assert ran == [("fails", "1"), ("quick", "7"), ("slow", "1")]
    printed = capsys.readouterr().err
    assert "1 of 3 failed: fails" in printed
    assert "lacks --input adapters=PATH" in printed


def test_what_is_of_this_release_is_left_out(ran, results):
    make.main(["quick", "slow"])
    held = record.load(results / "slow.json")
    held["provenance"][0]["lsrdecomp"] = "0.3.9"
    (results / "slow.json").write_text(json.dumps(held))
    ran.clear()
    assert make.main(["quick", "slow"]) == 0
    assert ran == [("slow", "1")]
    make.main(["quick", "--again"])
    assert ran[-1] == ("quick", "7")


def test_inputs_go_where_the_command_has_their_names(ran, tmp_path):
    make.main(["of data", "--input", f"adapters={tmp_path}"])
    assert ran == [("data", str(tmp_path / "lora"), "1")]


def test_a_plan_and_the_cheap_ones(ran, capsys):
    assert make.main(["--plan", "--only", "cheap"]) == 0
    assert ran == []
    printed = capsys.readouterr().err
    assert "quick" in printed
    assert "slow" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["other"], "no job 'other'"), (["--input", "nothing=."], "no input 'nothing'")],
)
def test_unknown_names_are_refused(results, arguments, message, capsys):
    with pytest.raises(SystemExit) as refusal:
        make.main(arguments)
    assert message in f"{refusal.value}{capsys.readouterr().err}"


def test_every_record_of_a_job_is_written_by_a_module_that_exists():
    root = record.RESULTS.parents[1]
    for job in make.JOBS:
        module = root / job.command.split()[0].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), job.name


def test_every_input_of_a_job_is_explained():
    unexplained = {job.name: set(job.inputs) - set(make.INPUTS) for job in make.JOBS}
    assert {name: inputs for name, inputs in unexplained.items() if inputs} == {}
    names = [name for job in make.JOBS for name in job.records]
    assert len(names) == len(set(names))


def test_the_cheap_jobs_end_within_an_hour():
    cheap = make.chosen(make.read_arguments(["--only", "cheap"]))
    assert cheap
    assert sum(job.minutes for job in cheap) < 60
