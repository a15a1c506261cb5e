"""What a verb writes: refused before any work where it would cost a file or fail at the end."""

import errno
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, get_args

import pytest
from checkpoint_files import file_contents, lora_pair, write_lora_directory
from console import run_command

import lsrdecomp
from lsrdecomp.cli import commands
from lsrdecomp.cli.outputs import NEW_DIRECTORY, NEW_FILE, PLACE, Input, Output, checked
from lsrdecomp.errors import CheckpointError

DEMO = Path(lsrdecomp.__file__).parent / "cli" / "demo_adapter"
WRITTEN = {"json", "sarif", "report", "out", "outdir", "write_config"}


@pytest.mark.parametrize("verb", commands.ALL, ids=lambda verb: verb.__name__)
def test_every_path_that_a_verb_writes_is_marked(verb):
    parameters = inspect.signature(verb, eval_str=True).parameters
    hints = {name: parameter.annotation for name, parameter in parameters.items()}
    marked = {
        name
        for name, hint in hints.items()
        if any(isinstance(part, Output) for part in get_args(hint)[1:])
    }
    paths = {name for name in WRITTEN & set(hints) if get_args(hints[name])[0] is not bool}
    assert marked == paths


def call(source: Path, **outputs: Path | bool | None) -> list[str]:
    """A verb that would write them, if it were reached."""
    done = []

    def verb(
        source: Path,
        base: Annotated[str | None, Input] = None,
        out: Annotated[Path | None, NEW_DIRECTORY] = None,
        json: Annotated[Path | None, NEW_FILE] = None,
        report: Annotated[Path | None, NEW_FILE] = None,
        runs: Annotated[Path | None, PLACE] = None,
        force: bool = False,
    ) -> None:
        done.append("done")

    checked(verb)(source, **outputs)
    return done


@pytest.fixture
def adapter(tmp_path) -> Path:
    return write_lora_directory(tmp_path / "a")


def test_a_file_that_is_read_is_missed_before_torch_is_loaded(adapter, tmp_path):
    argv = [
        "compress",
        str(adapter),
        "--base",
        "b",
        "--data",
        "no.txt",
        "--keep",
        ".8",
        "--out",
        str(tmp_path / "o"),
    ]
    code = f"import sys; sys.argv[1:] = {argv}; from lsrdecomp.cli.main import run\n"
    code += "try:\n    run()\nfinally:\n    print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr == "lsrdecomp: no.txt: no such file or directory\n"


def test_outputs_that_can_be_written_are_let_through(adapter, tmp_path):
    (tmp_path / "old.json").write_text("{}")
    new = {
        "out": tmp_path / "o",
        "json": tmp_path / "new" / "j",
        "report": tmp_path / "r",
        "runs": tmp_path,
    }
    assert call(adapter, **{**new, "runs": tmp_path / "runs"}) == ["done"]
    assert call(adapter, json=tmp_path / "old.json", force=True) == ["done"]
    assert call(adapter, json=Path("-")) == ["done"]
    assert call(adapter, base="a name, not a place", json=tmp_path / "j") == ["done"]


@pytest.mark.parametrize("force", [False, True])
def test_nothing_that_is_read_is_ever_written(adapter, tmp_path, force):
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    for source, out in (
        (adapter, weights),
        (adapter, adapter),
        (adapter, tmp_path),
        (weights, config),
    ):
        for kind in ("json", "out", "runs"):
            with pytest.raises(CheckpointError, match="the output must not|not replaced"):
                call(source, **{kind: out}, force=force)
    with pytest.raises(CheckpointError, match="inside the input"):
        call(weights, base=str(adapter), json=adapter / "new.json", force=force)


def test_other_places_that_would_fail_later_are_refused_now(adapter, tmp_path):
    (tmp_path / "old.json").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "old.json")
    os.mkfifo(tmp_path / "pipe")
    refused = {
        "already exists": {"json": tmp_path / "old.json"},
        "a directory": {"json": tmp_path / "d", "force": True},
        "no regular file": {"json": tmp_path / "pipe", "force": True},
        "symbolic link": {"json": tmp_path / "link", "force": True},
        "is a file, not a directory": {"out": tmp_path / "old.json" / "below"},
        "takes no files": {"json": Path("/proc/new.json")},
        "are the same file": {"json": tmp_path / "j", "report": tmp_path / "." / "j"},
        "lies inside another": {"json": tmp_path / "o" / "j", "out": tmp_path / "o"},
        "is a file; name a directory": {"runs": tmp_path / "old.json"},
    }
    (tmp_path / "d").mkdir()
    before = file_contents(tmp_path / "a"), sorted(tmp_path.iterdir())
    for words, outputs in refused.items():
        if words == "takes no files" and not Path("/proc").is_dir():
            continue
        with pytest.raises(CheckpointError, match=words):
            call(adapter, **outputs)
    assert (tmp_path / "old.json").read_text() == "mine"
    assert before == (file_contents(tmp_path / "a"), sorted(tmp_path.iterdir()))


def test_measure_replaces_no_file_unasked(tmp_path):
    (tmp_path / "old.json").write_text("mine")
    done = run_command("measure", DEMO, DEMO, "--json", tmp_path / "old.json")
    assert done.returncode == 2
    assert "already exists" in done.stderr
    assert (tmp_path / "old.json").read_text() == "mine"


def test_the_command_line_keeps_its_inputs_whole(tmp_path):
    shutil.copytree(DEMO, tmp_path / "a")
    before = file_contents(tmp_path / "a")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    for arguments in (
        (
            "compress",
            tmp_path / "a",
            "--separation-rank",
            2,
            "--out",
            tmp_path / "o",
            "--json",
            weights,
            "--force",
        ),
        ("inspect", tmp_path / "a", "--json", tmp_path / "a" / "adapter_config.json", "--force"),
        ("curve", weights, "--json", tmp_path / "a" / "adapter_config.json", "--force"),
        (
            "compress",
            DEMO,
            "--ratio",
            48,
            "--statistics",
            tmp_path / "a",
            "--out",
            tmp_path / "a" / "inside",
        ),
        ("verify", tmp_path / "a", DEMO, "--json", weights),
        ("export", tmp_path / "a", "--out", tmp_path / "a" / "lora"),
    ):
        done = run_command(*arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert "the output must not" in done.stderr
    assert file_contents(tmp_path) == {f"a/{name}": content for name, content in before.items()}


def test_only_json_is_written_to_standard_output():
    for option in ("--out", "--report"):
        done = run_command("compress", DEMO, "--ratio", 48, option, "-")
        assert done.returncode == 2
        assert (
            done.stderr
            == f"lsrdecomp: -: {option} writes a file; only --json - writes to standard output\n"
        )


@pytest.mark.skipif(os.name != "posix", reason="a shell that closes a stream by >&-")
def test_a_closed_standard_output_is_said_before_the_work():
    command = [sys.executable, "-m", "lsrdecomp", "inspect", str(DEMO), "--json", "-"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "lsrdecomp: -: standard output is closed; --json FILE writes to a file\n",
    )


@pytest.mark.parametrize("first", [1, 2, 3, 5])
def test_on_a_full_disk_all_outputs_of_compress_appear_or_none(tmp_path, monkeypatch, first):
    tensors = {**lora_pair("layers.0.q", 16, 16), **lora_pair("layers.1.v", 16, 16, seed=1)}
    source = write_lora_directory(tmp_path / "a", tensors)
    calls, fsync = [], os.fsync

    def full(handle):
        calls.append(handle)
        if len(calls) >= first:
            raise OSError(errno.ENOSPC, "No space left on device")
        return fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    outputs = {
        "out": tmp_path / "o",
        "report": tmp_path / "r.html",
        "json": tmp_path / "new" / "j.json",
    }
    with pytest.raises(CheckpointError, match="could not be written: No space left"):
        commands.compress(source, separation_rank=1, **outputs)
    assert len(calls) >= first
    assert list(tmp_path.iterdir()) == [source]
    monkeypatch.undo()
    commands.compress(source, separation_rank=1, **outputs)
    assert all(path.exists() for path in outputs.values())


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_standard_output_cannot_encode_is_no_traceback(encoding):
    """Windows' old code page lacks ⊗; the locale C without Python's UTF-8 mode lacks all."""
    command = [sys.executable, "-m", "lsrdecomp", "inspect", DEMO]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"12 layers" in done.stdout


def test_the_home_directory_is_found_where_a_shell_expands_nothing(tmp_path, monkeypatch):
    """Of ``--out=~/small`` bash makes no path; nobody removes a directory called ~ gladly."""
    home = tmp_path / "home"
    shutil.copytree(DEMO, home / "lora")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    done = run_command(
        "compress",
        "~/lora",
        "--separation-rank",
        1,
        "--out=~/small",
        "--json=~/small.json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in home.iterdir()} == {"lora", "small", "small.json"}
    assert not (tmp_path / "~").exists()
