"""The script for a GPU runs small on a CPU: every arm, in bfloat16, in one JSON."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("sklearn")

from lsrdecomp.training.embedded import embedded

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_script.py"


def test_the_gpu_script_runs_small(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    place = embedded(tmp_path / "embedded", steps=40)
    base = ["--model", str(place.model), "--data", str(place.data)]
    length = ["--steps", "8", "--recover", "4", "--samples", "32"]
    out = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "figures.json")]
    script.main(["--small", *base, *length, *out])
    figures = json.loads((tmp_path / "figures.json").read_text())
    arms = figures["arms"]
    assert (figures["precision"], figures["steps"]) == ("bfloat16", 8)
    assert arms["LoRA"]["parameters"] == 4096
    assert arms["compressed to LSR"]["parameters"] == arms["LSR, trained on"]["parameters"] <= 4096 / 6
    trained = [name for name, values in arms.items() if "step_seconds" in values]
    assert trained == ["LoRA", "LSR, trained on", "LoRA, trained on", "LSR from scratch"]
    assert all(arms[name]["step_seconds"] > 0 and arms[name]["peak_bytes"] > 0 for name in trained)
    assert all(set(figures["majority"]) <= set(values) for values in arms.values())
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(arms)
    script.main(["--small", *base, *length, *out])  # finished runs are not done again
    again = json.loads((tmp_path / "figures.json").read_text())["arms"]
    assert again["LSR, trained on"] == arms["LSR, trained on"]
