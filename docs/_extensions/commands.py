"""Runs the commands that pages show: for the site while it is built, and for the tests."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path

from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 100
"""Width of the terminal on the pages: what fits beside the navigation on a common screen."""
FENCE = re.compile(r"^```\{shell\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Shell:
    """A directory, and the commands of `lsrdecomp`, or of the clone's benchmarks, run in it."""

    def __init__(self) -> None:
        # Removed with this object.
        self._held = tempfile.TemporaryDirectory(prefix="lsrdecomp-docs-")
        self.folder = Path(self._held.name)
        for name in ("adapter", "statistics"):
            with as_file(files("lsrdecomp.cli") / f"demo_{name}") as source:
                shutil.copytree(source, self.folder / name)

    def run(self, command: str) -> str:
        """What one line prints; `RuntimeError` if it does not exit with 0."""
        from lsrdecomp.cli.app import app

        program, *arguments = shlex.split(command, comments=True)
        if program == "python":
            path = {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=self.folder,
                env=os.environ | path,
                check=True,
                capture_output=True,
                text=True,
            )
            return done.stdout
        if program != "lsrdecomp":
            raise RuntimeError(f"only lsrdecomp and python run here, not {program!r}")
        with _inside(self.folder):
            result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(COLUMNS)})
        if result.exit_code != 0:
            raise RuntimeError(
                f"{command}: exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
            )
        return result.stdout


def blocks(text: str) -> list[list[str]]:
    """The commands of each shell block of a page."""
    return [[line for line in block.splitlines() if line.strip()] for block in FENCE.findall(text)]


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
