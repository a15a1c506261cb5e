"""The verb `measure` on files alone: verdict, exit codes, JSON and SARIF."""

import json
import shutil
from importlib.resources import files

import numpy as np
import pytest
from console import run_command
from safetensors.numpy import load_file, save_file

import lsrdecomp as lsr
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.lora.base import Behaviour
from lsrdecomp.lora.measure import Comparison, Fidelity

DEMO = files("lsrdecomp.cli") / "demo_adapter"


@pytest.fixture
def lora(tmp_path):
    shutil.copytree(DEMO, tmp_path / "lora")
    return tmp_path / "lora"


@pytest.fixture
def wreck(lora, tmp_path):
    """The same with alpha as the rank."""
    shutil.copytree(lora, tmp_path / "wreck")
    config = tmp_path / "wreck" / "adapter_config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "lora_alpha": fields["r"]}))
    return tmp_path / "wreck"


def test_the_verdict_comes_first_and_the_coverage_last(lora, wreck):
    done = run_command("measure", lora, lora)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Whole: lora does what lora does, judged by the weights alone")
    assert done.stdout.endswith("12 of 12 layers compared; 0 not.\n")
    done = run_command("measure", lora, wreck)
    assert (done.returncode, done.stderr) == (1, "")
    first, second, third, *_ = done.stdout.splitlines()
    assert first.startswith("Damaged: wreck is not what lora should have become")
    assert second.startswith("- scale: ΔW is 2 times too small in all 12 matrices: alpha was not")
    assert third == "12 of 12 layers compared; 0 not."


def test_json_and_sarif_say_the_same(lora, wreck, tmp_path):
    report = tmp_path / "found.sarif"
    done = run_command("measure", lora, wreck, "--json", "-", "--sarif", report)
    found = json.loads(done.stdout)
    assert (found["verdict"], found["passed"], found["kept"]) == ("damaged", False, None)
    assert [reason["code"] for reason in found["reasons"]] == ["scale"]
    assert len(found["layers"]) == 12
    sarif = json.loads(report.read_text())
    assert sarif["version"] == "2.1.0"
    (run,) = sarif["runs"]
    results = {result["ruleId"]: result for result in run["results"]}
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {"scale", "share"}
    assert results["scale"]["level"] == "error"
    assert results["scale"]["message"]["text"] == found["reasons"][0]["sentence"]
    places = results["scale"]["locations"][0]
    assert places["physicalLocation"]["artifactLocation"]["uri"] == str(wreck)
    assert len(places["logicalLocations"]) == 12
    again = run_command("measure", lora, wreck, "--sarif", report)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_a_layer_that_does_nothing_is_whole_where_it_is_left_out(lora, tmp_path):
    weights = lora / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(each for each in tensors if "lora_B" in each)
    save_file(tensors | {name: np.zeros_like(tensors[name])}, weights, {"format": "pt"})
    small = lsr.compress(lora, ratio=48).save(tmp_path / "small")
    idle = [each for each in lsr.measure(lora, small).layers if each.norm == 0.0]
    assert idle
    assert {(each.code, each.relative_error) for each in idle} == {("same", 0.0)}


def test_what_cannot_be_measured_is_one_line(lora, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for arguments, words in [
        ((lora, lora, "--fail-below", "0.9"), "--fail-below is about outputs: give --base"),
        ((lora, tmp_path / "model"), "is a whole model: give the base"),
        ((lora, tmp_path / "nothing"), "no such file or directory"),
        ((lora, lora, "--served-as", "a"), "names an adapter of a server"),
        ((lora, lora, "--data", lora / "README.md"), "outputs are compared on a base"),
    ]:
        done = run_command("measure", *arguments)
        assert done.returncode == 2, done.stdout
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_missing_head_and_layers_of_nobody_are_faults(lora, tmp_path):
    tensors = load_file(lora / "adapter_model.safetensors")
    shutil.copytree(lora, tmp_path / "headless")
    headless = {key: value for key, value in tensors.items() if "classifier" not in key}
    save_file(headless, tmp_path / "headless" / "adapter_model.safetensors")
    found = lsr.measure(lora, tmp_path / "headless")
    assert (found.verdict, [reason.code for reason in found.reasons]) == ("damaged", ["heads"])
    key = next(key for key in tensors if "classifier" in key)
    shutil.copytree(lora, tmp_path / "changed")
    save_file(tensors | {key: 2.0 * tensors[key]}, tmp_path / "changed/adapter_model.safetensors")
    found = lsr.measure(lora, tmp_path / "changed")
    assert (found.verdict, [reason.code for reason in found.reasons]) == ("damaged", ["heads"])
    shutil.copytree(lora, tmp_path / "larger")
    for side in "AB":
        key = next(key for key in tensors if f"lora_{side}" in key)
        tensors[key.replace("layer.3", "layer.9")] = np.full_like(tensors[key], 0.01)
    save_file(tensors, tmp_path / "larger" / "adapter_model.safetensors")
    found = lsr.measure(lora, tmp_path / "larger")
    assert (found.verdict, [reason.code for reason in found.reasons]) == ("damaged", ["unknown"])


def test_what_compress_writes_has_no_fault(lora, tmp_path):
    small = lsr.compress(lora, ratio=16).save(tmp_path / "small")
    found = lsr.measure(lora, small)
    assert found.verdict == "reduced"
    assert not found.faults
    assert found.passed()
    assert lsr.measure(small, small).verdict == "whole"


def test_errors_of_the_library_name_their_arguments(lora):
    with pytest.raises(LsrError, match="give base= "):
        lsr.measure(lora, lora, data=["a text"])
    with pytest.raises(CheckpointError, match="no such file"):
        lsr.measure(lora, lora.parent / "nowhere")


@pytest.mark.parametrize(("matching", "verdict"), [(60, "whole"), (0, "reduced")])
def test_whole_is_what_has_the_effect_and_the_answers(matching, verdict):
    behaviour = Behaviour(128, 3000, "token", 0.001, 0.99, 1.79, 0.008)
    files = {"bytes_before": 100, "bytes_after": 10}
    fidelity = Fidelity.of(behaviour, data="d", base="b", **files, answered=64, n_matching=matching)
    assert Comparison("a", "b", "adapter", (), fidelity=fidelity).verdict == verdict
