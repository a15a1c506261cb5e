"""The console command as a user starts it, in this process or in one of its own."""

import io
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
from unittest.mock import patch


def run_command(*arguments, cwd="."):
    """Run the console command in this process; return its exit code and what it printed."""
    from lsrdecomp.cli.main import run

    command = ["lsrdecomp", *map(str, arguments)]
    out, error = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code = 0
    with (
        patch.object(sys, "argv", command),
        chdir(cwd),
        redirect_stdout(out),
        redirect_stderr(error),
    ):
        try:
            run()
        except SystemExit as end:
            code = end.code or 0
    return CompletedProcess(
        command, code, *(stream.buffer.getvalue().decode() for stream in (out, error))
    )


def run_in_process(*arguments, cwd=None):
    """Run the console command in a process of its own."""
    command = [sys.executable, "-m", "lsrdecomp.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
