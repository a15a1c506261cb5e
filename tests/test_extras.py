"""Without what an extra brings, the room that needs it says what to install."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("missing", "code", "words"),
    [
        (
            "hypothesis",
            "import lsrdecomp.testing",
            "ImportError: lsrdecomp.testing needs hypothesis: pip install 'lsrdecomp[testing]'",
        ),
        (
            "torch",
            "import lsrdecomp.adapters",
            "ImportError: lsrdecomp.adapters needs torch and PEFT: pip install 'lsrdecomp[peft]'",
        ),
        (
            "matplotlib",
            "import lsrdecomp.plots as plots; plots.plot_error_curves([])",
            "lsrdecomp.errors.LsrError: a picture needs matplotlib: pip install 'lsrdecomp[plots]'",
        ),
    ],
)
def test_without_an_extra_the_way_out_is_told(missing, code, words):
    command = [sys.executable, "-c", f"import sys; sys.modules[{missing!r}] = None; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, words)
