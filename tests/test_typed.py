"""A program that uses the package passes mypy --strict: what is public has types."""

import inspect
import subprocess
import sys
from typing import get_type_hints

import pytest

from lsrdecomp import compress, distill
from lsrdecomp.lora.compress import truncate
from lsrdecomp.lora.compress.distill_settings import DistillSettings
from lsrdecomp.lora.search.measured_settings import MeasuredSettings
from lsrdecomp.lora.search.plan import CompressionPlan

pytest.importorskip("mypy")

PROGRAM = """
import numpy as np

import lsrdecomp as lsr
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp import compress

shape = lsr.KroneckerShape(((4, 4), (4, 4)))
result = lsr.decompose(np.eye(16), shape, rtol=1e-6)
rank: int = result.separation_rank
error: float = result.relative_error
needed: int = lsr.error_curve(np.eye(16)).rank_for(1e-6)
reveal_type(result.relative_error)
columns: int = lsr.operators.solve(result, np.ones(16)).x.ndim
lsr.compress("my-lora/", ratio=10, storage="float16", device="cuda").save("small/")
small = lsr.compress("my-lora/", base="smollm2", data="texts.txt", keep=0.95, seed=1)
kept: float = small.fidelity.kept
lsr.distill(
    "small/", base="smollm2", data="texts.txt", teacher="my-lora/", steps=60, learning_rate=1e-3
)
"""
WRONG = """
import numpy as np

import lsrdecomp as lsr

rank: str = lsr.decompose(np.eye(16), rank=1).separation_rank
lsr.compress("my-lora/", ration=10)
lsr.compress("my-lora/", ratio="ten")
lsr.distill("small/", base="smollm2", data="texts.txt", teacher="my-lora/", step=60)
x: str = lsr.operators.solve(lsr.decompose(np.eye(16), rank=1), np.ones(16)).x
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
    kinds = {
        (line.split(":")[1], line.rpartition(" ")[2])
        for line in said
        if line.startswith("wrong.py")
    }
    wanted = {
        ("6", "[assignment]"),
        ("7", "[call-arg]"),
        ("8", "[arg-type]"),
        ("9", "[call-arg]"),
        ("10", "[assignment]"),
    }
    assert wanted <= kinds, done.stdout
    assert {line for line, _ in kinds} == {"6", "7", "8", "9", "10"}
    assert all(line.startswith("wrong.py") for line in said), done.stdout
    assert (
        'right.py:13: note: Revealed type is "float"' in done.stdout
        or "builtins.float" in done.stdout
    )


@pytest.mark.parametrize(
    ("function", "table", "names"),
    [
        (
            compress,
            CompressionPlan,
            tuple(name for name in CompressionPlan.fields if name != "only"),
        ),
        (compress, MeasuredSettings, ("keep", "distill", "seed", "device")),
        (
            truncate,
            CompressionPlan,
            ("ratio", "bytes", "parameters", "rtol", "storage", "max_rank", "only"),
        ),
        (distill, DistillSettings, ("steps", "learning_rate", "seed", "device")),
    ],
)
def test_an_argument_has_the_type_of_its_setting_and_none_says_that_it_is_not_given(
    function, table, names
):
    hints = get_type_hints(table)
    parameters = inspect.signature(function).parameters
    for name in names:
        assert parameters[name].default is None
        assert parameters[name].annotation == str(hints[name] | None)
