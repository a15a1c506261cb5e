"""Ctrl-C at any moment: exit code 130, one line, no traceback."""

import importlib
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from console import run_command

import lsrdecomp

DEMO = Path(lsrdecomp.__file__).parent / "cli" / "demo_adapter"
STARTED = """
import sys
class Stop:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
sys.argv = ["lsrdecomp", "inspect", {adapter!r}]
from {entry} import {function}
sys.exit({function}())
"""


def entry_point() -> tuple[str, str]:
    """Module and function of the console command, as pyproject.toml names them."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["lsrdecomp"].split(":")
    return module, function


def stopped_at(module: str) -> subprocess.CompletedProcess[str]:
    """Run ``lsrdecomp inspect`` with Ctrl-C while ``module`` is imported."""
    entry, function = entry_point()
    code = STARTED.format(module=module, adapter=str(DEMO), entry=entry, function=function)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "module",
    ["lsrdecomp.cli.main", "lsrdecomp.cli.commands", "lsrdecomp.lora.files.tensors"],
)
def test_ctrl_c_while_a_module_is_imported_is_one_line(module):
    done = stopped_at(module)
    assert (done.returncode, done.stderr.count("\n")) == (130, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("lsrdecomp: stopped")


def test_without_ctrl_c_the_same_start_is_a_run():
    done = stopped_at("no_such_module")
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_names_the_command_however_it_was_started():
    done = run_command("export", "--no-such-option")
    assert (done.returncode, "Try 'lsrdecomp export -h'" in done.stderr) == (2, True), done.stderr


def test_the_module_runs_where_it_is_run_and_not_where_it_is_imported(monkeypatch):
    calls = []
    program = importlib.import_module("lsrdecomp.cli.main")
    monkeypatch.setattr(program, "run", lambda: calls.append(1))
    path = str(Path(lsrdecomp.__file__).with_name("__main__.py"))
    runpy.run_path(path, run_name="imported")
    assert calls == []
    runpy.run_path(path, run_name="__main__")
    assert calls == [1]
