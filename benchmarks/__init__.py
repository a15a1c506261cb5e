"""What was measured, and how: a folder for each question; README.md lists them."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
"""Where the records are that the pages show."""


def provenance(*packages: str) -> dict[str, Any]:
    """What a record says of the code that ran: versions, also of ``packages``, and the commit."""
    from lsrdecomp.training.record import (
        commit,
    )  # some commands set the number of threads before NumPy is imported

    names = ("lsrdecomp", "numpy", "scipy", *packages)
    versions = {"python": platform.python_version()} | {name: version(name) for name in names}
    return {"versions": versions, "commit": commit()}
