"""Without hypothesis the checks say what to install."""

import subprocess
import sys

WITHOUT = "import sys; sys.modules['hypothesis'] = None; import lsrdecomp.testing"


def test_without_hypothesis_the_way_out_is_told():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: lsrdecomp.testing needs hypothesis: pip install 'lsrdecomp[testing]'"
    )
