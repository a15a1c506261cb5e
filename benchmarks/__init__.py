"""What was measured, and how: a folder for each question; README.md lists them."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
"""Where the records are that the pages show."""


THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)
"""What tells linear algebra how many threads to use."""


def provenance(*packages: str) -> dict[str, Any]:
    """Return what a record says of the code that ran: versions, commit and threads.

    ``packages`` are those whose versions are told beside ours.
    """
    # Some commands set the number of threads before NumPy is imported
    from lsrdecomp.training.record import commit

    names = ("lsrdecomp", "numpy", "scipy", *packages)
    versions = {"python": platform.python_version()} | {name: version(name) for name in names}
    return {"versions": versions, "commit": commit(), "environment": environment()}


def environment() -> dict[str, Any]:
    """Return how many threads this process could use: cores, variables that are set, and libraries.

    The library itself takes one BLAS thread for small problems, whatever stands here.
    """
    from lsrdecomp.threads import blas_libraries

    torch = sys.modules.get("torch")
    return {
        "cores": os.cpu_count(),
        "variables": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "blas": [library.threads for library in blas_libraries()],
        "torch": None if torch is None else torch.get_num_threads(),
    }
