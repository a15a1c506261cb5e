"""The rules of `rules.py` in a process of their own.

Where torch knows a device beside the CPU it starts threads that forbid forks to the whole process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("torch", "peft", "transformers"):
    pytest.importorskip(package)

RULES = Path(__file__).with_name("rules.py")


def test_every_road_runs_on_a_pretended_gpu():
    words = ("-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(RULES))
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=RULES.parents[2],
        env=os.environ | {"GPU_RULES": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
