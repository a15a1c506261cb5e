"""Fixtures shared by all tests: the array libraries, and real files where they are at hand."""

from __future__ import annotations

import gc
import importlib
import os
from functools import cache
from pathlib import Path
from types import ModuleType

# Before numpy is imported: matrices are small, and `processes` forks.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import typer.main
import typer.testing
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import of the hub: no test needs a network
# The embedded base is trained once per checkout, and not in the home of whoever runs the tests.
os.environ.setdefault(
    "LSRDECOMP_CACHE", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "lsrdecomp")
)

settings.register_profile("default", deadline=None, derandomize=True, max_examples=20)
# What `make test-random` draws anew each day; a failure prints how to draw its case again.
settings.register_profile(
    "random",
    deadline=None,
    derandomize=False,
    max_examples=int(os.environ.get("EXAMPLES", "1000")),
    print_blob=True,
)
settings.load_profile("default")

# Typer makes all verbs and their options at each call, 70 ms of which a command line in its own
# process has only one.
typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)

# What modules hold is never garbage: it is looked for among the rest, once all are imported.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    # By the usual 700 a tenth of the time went into looking for it.
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


LIBRARIES = ("numpy", "torch", "array_api_strict")


@pytest.fixture(params=LIBRARIES)
def xp(request: pytest.FixtureRequest) -> ModuleType:
    """The namespace of each array library in turn; a test that takes it runs on all of them."""
    module = pytest.importorskip(request.param)
    if request.param == "array_api_strict":
        return module
    return importlib.import_module(f"array_api_compat.{module.__name__}")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260101)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return real adapters and task files that may not be committed, or skip the test."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real adapters and task files are not beside this checkout")
    return folder
