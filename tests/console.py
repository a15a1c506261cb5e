"""The console command as a user starts it."""

import subprocess
import sys


def lsr(*arguments, cwd=None):
    """Run the console command in a process of its own."""
    command = [sys.executable, "-m", "lsrdecomp.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
