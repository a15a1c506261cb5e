"""The plan for a GPU that is lent for two short calls, and its stages, small, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiny_bases import make_model, save_base

from benchmarks.gpu import carried


def test_the_plan_is_two_calls_of_five_minutes_under_64_mib(capsys, tmp_path):
    shared = carried.calls(carried.parts())
    assert len(shared) == carried.CALLS
    for stages in shared:
        assert sum(each.seconds for each in stages) <= carried.CALL_SECONDS - carried.RESERVE
    assert sum(carried.carried(tmp_path).values()) <= 64 * 2**20
    assert carried.main(["--plan", "--from", str(tmp_path)]) == {}
    printed = capsys.readouterr().out
    assert "| 1 | one layer |" in printed
    assert f"not packed yet: python -m benchmarks.gpu.carried --pack {tmp_path}" in printed


def test_a_stage_stands_after_those_that_it_builds_on():
    names: list[str] = []
    for stage in carried.parts():
        assert set(stage.after) <= set(names)
        names.append(stage.name)


def test_what_is_packed_is_counted(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "weights").write_bytes(bytes(1000))
    assert carried.carried(tmp_path)["base"] == 1000


@pytest.mark.parametrize("package", ["torch", "peft", "typer", "array_api_compat"])
def test_the_plan_never_fails_and_says_what_to_type(package):
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from benchmarks.gpu import carried; carried.main(['--plan'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert f"missing here: pip install {package.replace('_', '-')}" in done.stdout


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a whole run, small, in two calls, and its record."""
    folder = tmp_path_factory.mktemp("carried")
    save_base(make_model("SEQ_CLS", layers=1)[0].bert, folder / "in" / "base")
    carried.write_task(folder / "in" / "task", 60, 40)
    given = ["--small", "--device", "cpu", "--from", str(folder / "in")]
    given += ["--work", str(folder / "work"), "--out", str(folder / "gpu.json")]
    carried.main(given)
    return folder, given


def test_every_stage_runs_small_and_is_in_the_record(ran):
    folder, _ = ran
    record = json.loads((folder / "gpu.json").read_text())
    assert record["errors"] == {}
    assert list(record["stages"]) == [stage.name for stage in carried.parts()]
    assert set(record["stages"]["answers"]["answers"]) == {
        "lora",
        "lsr-8",
        "lsr-32",
        "svd-8",
        "svd-32",
    }


def test_a_second_call_does_nothing_again_and_goes_on(ran):
    folder, given = ran
    (folder / "work" / "answers.json").unlink()
    before = (folder / "work" / "lora.json").stat().st_mtime_ns
    record = carried.main(given)
    assert "answers" in record["stages"]
    assert (folder / "work" / "lora.json").stat().st_mtime_ns == before
