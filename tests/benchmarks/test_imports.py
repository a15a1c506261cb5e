"""Benchmarks and examples import names that are there, also where a function does so late."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)


def our_imports(path):
    """Yield module and name of each ``from lsrdecomp… import name``, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lsrdecomp":
            for alias in node.names:
                yield node.module, alias.name


def exists(module, name):
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_that_is_imported_exists(path):
    missing = [f"{module}.{name}" for module, name in our_imports(path) if not exists(module, name)]
    assert not missing
