"""Every public name has an example that the doctests run; notebooks run from top to end."""

import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lsrdecomp

ROOMS = (
    "lsrdecomp",
    "lsrdecomp.kronecker",
    "lsrdecomp.operators",
    "lsrdecomp.solvers",
    "lsrdecomp.analysis",
    "lsrdecomp.targets",
    "lsrdecomp.formats",
    "lsrdecomp.lora.files",
    "lsrdecomp.lora.search",
    "lsrdecomp.lora.fleet",
    "lsrdecomp.plots",
    "lsrdecomp.lora.peft",
    "lsrdecomp.lora.base",
    "lsrdecomp.lora.train",
    "lsrdecomp.lora.compress",
    "lsrdecomp.lora.measure",
    "lsrdecomp.testing",
)
WITHOUT = {
    "lsrdecomp": {
        "distill",
    },
    "lsrdecomp.lora.files": {
        "GgufBase",
        "read_base",
        "file_or_directory",
        "remove_leftovers",
        "write_gguf",
        "write_lsr",
        "in_module_names",
    },
    "lsrdecomp.operators": {
        "to_gpytorch",
    },
    "lsrdecomp.lora.fleet": {
        "ray_runner",
    },
    "lsrdecomp.lora.base": {
        "calibrate",
        "Reference",
    },
    "lsrdecomp.lora.train": {
        "FinetuneRecord",
        "evaluate",
        "finetune",
        "read_record",
    },
    "lsrdecomp.lora.compress": {
        "MeasuredCompression",
        "distill",
        "truncate",
    },
    "lsrdecomp.lora.measure": {
        "Evaluator",
        "ask_server",
    },
}
"""Names still without an example; this may only shrink.

Exceptions and protocols need none. Those of base, train and measure need a model, or a server, one
of fleet a cluster.
"""


def offered(room):
    module = importlib.import_module(room)
    names = getattr(module, "__all__", None) or dir(module)
    for name in names:
        value = getattr(module, name)
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isroutine(value)):
            needs_none = inspect.isclass(value) and (
                issubclass(value, BaseException) or getattr(value, "_is_protocol", False)
            )
            if not needs_none:
                yield name, value


def without_example(room):
    return {name for name, value in offered(room) if ">>>" not in (inspect.getdoc(value) or "")}


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_an_example_or_is_listed(room):
    assert without_example(room) == WITHOUT.get(room, set())


def test_the_root_offers_what_is_looked_for():
    assert lsrdecomp.decompose in dict(offered("lsrdecomp")).values()


NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_end(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    for target in re.findall(r"\]\(([^)]+)\)", "\n".join(texts)):
        assert (path.parent / target).exists(), target
    names = {"__name__": path.stem}
    for cell in cells:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            exec("\n".join(line for line in lines if not line.startswith("%")), names)
    assert len(NOTEBOOKS) == 3


def first_code(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    source = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return "\n".join(line for line in source.splitlines() if not line.startswith("%"))


def installed_by_first_cell(monkeypatch, place):
    """Run it in a directory as if the package were missing; return what pip is asked to install."""
    asked = []
    monkeypatch.chdir(place)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "check_call", asked.append)
    exec(first_code(NOTEBOOKS[0]), {})
    return asked[0][-1]


def test_notebooks_share_their_first_cell_and_hold_outputs():
    assert len({first_code(path) for path in NOTEBOOKS}) == 1
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert sum(bool(cell.get("outputs")) for cell in cells) >= 2, path


def test_a_notebook_installs_the_clone_that_it_lies_in(monkeypatch):
    root = NOTEBOOKS[0].parents[2]
    assert installed_by_first_cell(monkeypatch, NOTEBOOKS[0].parent) == f"{root}[plots,testing]"


@pytest.mark.parametrize("name", ["lsrdecomp-main.zip", "lsrdecomp-0.4.0.tar.gz"])
def test_a_notebook_by_itself_installs_an_archive_beside_it(name, monkeypatch, tmp_path):
    (tmp_path / name).touch()
    assert installed_by_first_cell(monkeypatch, tmp_path) == f"{tmp_path / name}[plots,testing]"


def test_a_notebook_without_clone_and_archive_says_what_to_do(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="upload an archive"):
        installed_by_first_cell(monkeypatch, tmp_path)


def test_the_example_with_jax_passes_and_finds_what_cannot_be_compiled(tmp_path):
    pytest.importorskip("jax")
    pytest.importorskip("array_api_extra")
    example = Path(__file__).parents[1] / "examples" / "test_kronecker_in_jax.py"
    sound = example.read_text(encoding="utf-8")
    branching = sound.replace(
        "    return xp.", "    if a.size and a.max() > 1e30:\n        return a\n    return xp."
    )
    assert branching != sound
    for text, words in ((sound, "1 passed"), (branching, "TracerBoolConversionError")):
        file = tmp_path / example.name
        file.write_text(text, encoding="utf-8")
        order = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
        done = subprocess.run(order, cwd=tmp_path, capture_output=True, text=True)
        assert words in done.stdout, done.stdout + done.stderr
