"""compress --config: settings of a run in a file, read, written, and repeated."""

import json
import shlex
import shutil
import sys
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lsrdecomp as lsr
from lsrdecomp.cli.app import app
from lsrdecomp.cli.run_config import FIELDS, merged, read_run, run_text
from lsrdecomp.errors import LsrError
from lsrdecomp.lora.files import open_checkpoint

DEMO = Path(lsr.__file__).parent / "cli" / "demo_adapter"
PLAN = {"separation_rank": 1, "inner_shape": [2, 2], "storage": "float16"}


def compress(*words):
    return CliRunner().invoke(app, ["compress", str(DEMO), "--quiet", *map(str, words)])


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(run_text(PLAN), encoding="utf-8")
    return path


def weights(directory):
    return (directory / "adapter_model.safetensors").read_bytes()


def test_a_run_is_repeated_by_its_file_by_its_record_and_by_the_line_it_prints(
    plan, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    typed = ["--config", plan, "--out", "first", "--write-config", "again.toml"]
    done = compress(*typed)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "first/compression.json").read_text())["settings"] == {
        "separation_rank": 1,
        "inner_shape": [2, 2],
        "storage": "float16",
    }
    assert read_run(tmp_path / "again.toml") == {**PLAN, "inner_shape": (2, 2)}
    assert compress("--config", "again.toml", "--out", "second").exit_code == 0
    assert compress("--config", "first/compression.json", "--out", "third").exit_code == 0
    (line,) = (row for row in done.stdout.splitlines() if row.startswith("  lsrdecomp compress"))
    words = shlex.split(line)
    first = weights(tmp_path / "first")
    assert words[1:] == ["compress", str(DEMO), "--quiet", *map(str, typed)]
    (tmp_path / "first/adapter_model.safetensors").unlink()
    assert CliRunner().invoke(app, [*words[1:], "--force"]).exit_code == 0
    assert all(weights(tmp_path / name) == first for name in ("first", "second", "third"))


def test_the_report_has_the_line_that_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed = ["--separation-rank", 1, "--out", "small", "--report", "page.html"]
    assert compress(*typed).exit_code == 0
    page = unescape((tmp_path / "page.html").read_text(encoding="utf-8"))
    words = " ".join(["compress", shlex.quote(str(DEMO)), "--quiet", *map(str, typed)])
    assert f"lsrdecomp {words}</pre>" in page


def test_a_record_repeats_a_run_from_another_directory(tmp_path, monkeypatch):
    """By the absolute path of what was typed, while it lies there; else by what was typed."""
    here = tmp_path / "here"
    shutil.copytree(DEMO.with_name("demo_statistics"), here / "statistics")
    monkeypatch.chdir(here)
    done = compress("--statistics", "statistics", "--separation-rank", 1, "--out", "small")
    assert done.exit_code == 0, done.output
    record = json.loads((here / "small/compression.json").read_text())
    assert record["settings"]["statistics"] == "statistics"
    assert record["resolved"] == {"statistics": "../statistics"}  # from where the record lies

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = compress("--config", here / "small/compression.json", "--out", "again")
    assert done.exit_code == 0, done.output
    assert weights(tmp_path / "elsewhere/again") == weights(here / "small")

    base = {"base": "smollm2", "data": "texts.txt", "keep": 0.9}
    (here / "texts.txt").write_text("a text", encoding="utf-8")
    (here / "base").mkdir()
    full = {"base": "HuggingFaceTB/SmolLM2-135M-Instruct", "data": str(here / "texts.txt")}
    named = {"settings": base, "resolved": full}
    (here / "named.json").write_text(json.dumps(named), encoding="utf-8")
    assert read_run(here / "named.json") == {**base, "data": full["data"]}
    placed = {
        "settings": {**base, "base": "base"},
        "resolved": {**full, "base": str(here / "base")},
    }
    (here / "placed.json").write_text(json.dumps(placed), encoding="utf-8")
    assert read_run(here / "placed.json")["base"] == str(here / "base")

    (here / "statistics").rename(tmp_path / "elsewhere/statistics")
    assert read_run(here / "small/compression.json")["statistics"] == "statistics"
    bad = {**record, "resolved": {"statistics": 3}}
    (here / "bad.json").write_text(json.dumps(bad), encoding="utf-8")
    with pytest.raises(LsrError, match="bad.json: statistics must be a text"):
        read_run(here / "bad.json")


def test_a_bare_directory_names_no_path_of_this_machine(tmp_path, monkeypatch):
    shutil.copytree(DEMO.with_name("demo_statistics"), tmp_path / "statistics")
    monkeypatch.chdir(tmp_path)
    words = ("--statistics", "statistics", "--separation-rank", 1, "--out", "small", "--bare")
    done = compress(*words)
    assert done.exit_code == 0, done.output
    files = [path for path in (tmp_path / "small").rglob("*") if path.is_file()]
    assert len(files) == 2
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in files)


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        ("bin/lsrdecomp", "bin/lsrdecomp"),  # as `.venv/bin/lsrdecomp`, which no PATH has
        ("my env/lsrdecomp", "'my env/lsrdecomp'"),
        ("on_path/lsrdecomp", "lsrdecomp"),
        (str(Path(lsr.__file__).parent / "__main__.py"), "python3 -m lsrdecomp"),
        ("pytest", "lsrdecomp"),
    ],
)
def test_a_line_to_repeat_a_run_begins_as_the_command_was_typed(
    started, expected, plan, tmp_path, monkeypatch
):
    for folder in ("bin", "my env", "on_path"):
        command = tmp_path / folder / "lsrdecomp"
        command.parent.mkdir()
        command.write_text("#!/bin/sh\n")
        command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "on_path"))
    monkeypatch.setattr(sys, "argv", [started])
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "lsrdecomp"])
    done = compress("--config", plan, "--out", "first")
    assert f"To repeat it:\n  {expected} compress " in done.stdout


def test_an_option_on_the_line_beats_the_file_and_a_goal_its_goal(plan, tmp_path):
    done = compress("--config", plan, "--storage", "float32", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert open_checkpoint(tmp_path / "out").storage == "float32"
    typed = {"ratio": [48.0], "storage": None}
    assert merged({"keep": 0.9, "base": "b"}, typed) == {"base": "b", "ratio": [48.0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[compress]\nkep = 0.9", "plan.toml: no setting is called 'kep'; did you mean 'keep'?"),
        ("keep = 0.9", "plan.toml: has no table [compress]"),
        ("[compress]\nkeep = 2", "plan.toml: keep must be above 0 and below 1, got 2"),
        ("[compress]\nworkers = 0", "plan.toml: workers must be a whole number, 1 or more, got 0"),
        ("[compress]\nratio = []", "plan.toml: ratio is an empty list"),
        ("[compress]\nheld_out = 9\nheld-out = 9", "plan.toml: held_out is given twice"),
        ("[compress]\ndata = 'no.txt'", "no.txt: no such file or directory, named by"),
        ("[compress\n", "plan.toml: "),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_what_would_do(text, message, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LsrError) as caught:
        read_run(path)
    assert message in str(caught.value)
    assert "plan.toml" in str(caught.value)


def test_a_record_of_an_older_release_is_refused(tmp_path):
    (tmp_path / "compression.json").write_text('{"plan": {"ratio": 48}}', encoding="utf-8")
    with pytest.raises(LsrError, match="has no settings; name the compression.json of a run"):
        read_run(tmp_path / "compression.json")


def test_every_setting_of_a_file_can_be_written_and_read(tmp_path):
    for name in ("texts.txt", "statistics"):
        (tmp_path / name).write_text("")
    values = {
        "rtol": 0.5, "separation_rank": 2, "parameters": 1e3, "ratio": [96.0, 48.0], "bytes": 9000,
        "kl": 0.1, "keep": 0.9, "keep_answers": 0.9,
        "inner_shape": [4, 2], "max_rank": 4, "structure": "lsr",
        "only": ["*.attn.*"],
        "energy": 0.9, "min_rank": 1,
        "storage": "auto", "statistics": str(tmp_path / "statistics"), "workers": 2,
        "device": "cuda:1", "base": 'a "b" \\ é', "data": str(tmp_path / "texts.txt"),
        "held_out": 64, "batch": 4, "max_length": 128, "truncate": True, "dtype": "bfloat16",
        "seed": 3, "distill": 60, "examples": 2,
        "passes": 2, "name": "a.safetensors", "alpha": 16.0,
    }  # fmt: skip
    assert set(values) == set(FIELDS)
    (tmp_path / "all.toml").write_text(run_text(values), encoding="utf-8")
    read = read_run(tmp_path / "all.toml")
    assert read == {**values, "inner_shape": (4, 2), "only": ("*.attn.*",)}
