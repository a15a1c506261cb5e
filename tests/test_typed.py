"""A program that uses the package passes mypy --strict: py.typed is honoured, and what is public has types."""

import subprocess
import sys

import pytest

pytest.importorskip("mypy")

PROGRAM = """
import numpy as np

import lsrdecomp as lsr
from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.compression import compress

shape = lsr.KroneckerShape(((4, 4), (4, 4)))
result = lsr.decompose(np.eye(16), shape, rtol=1e-6)
rank: int = result.separation_rank
error: float = result.relative_error
needed: int = lsr.error_curve(np.eye(16)).rank_for(1e-6)
reveal_type(result.relative_error)
lsr.compress("my-lora/", ratio=10).save("small/")
"""
WRONG = """
import numpy as np

import lsrdecomp as lsr

rank: str = lsr.decompose(np.eye(16), lsr.KroneckerShape(((4, 4), (4, 4))), rtol=1e-6).separation_rank
"""


@pytest.mark.slow
def test_a_program_of_a_user_passes_strict_checking_and_a_wrong_one_does_not(tmp_path):
    """Mypy finds the package where any user's does, among what is installed."""
    for name, program in (("right", PROGRAM), ("wrong", WRONG)):
        (tmp_path / f"{name}.py").write_text(program, encoding="utf-8")
    options = ["--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "right.py", "wrong.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [line.split(":")[:2] for line in said] == [["wrong.py", "6"]], done.stdout
    assert said[0].endswith("[assignment]")
    assert 'right.py:13: note: Revealed type is "float"' in done.stdout or "builtins.float" in done.stdout
