"""Without what an extra brings, the room that needs it says what to install."""

import json
import re
import subprocess
import sys
from importlib.resources import files

import pytest


@pytest.mark.parametrize(
    ("missing", "code", "words"),
    [
        (
            "hypothesis",
            "import lsrdecomp.testing",
            (
                "ImportError: lsrdecomp.testing needs hypothesis: "
                "in your clone type pip install -e '.[testing]'"
            ),
        ),
        (
            "torch",
            "import lsrdecomp.lora.peft",
            (
                "ImportError: lsrdecomp.lora.peft needs torch and PEFT: "
                "in your clone type pip install -e '.[peft]'"
            ),
        ),
        (
            "matplotlib",
            "import lsrdecomp.plots as plots; plots.plot_error_curves([])",
            (
                "lsrdecomp.errors.LsrError: a picture needs matplotlib: "
                "in your clone type pip install -e '.[plots]'"
            ),
        ),
    ],
)
def test_without_an_extra_the_way_out_is_told(missing, code, words):
    command = [sys.executable, "-c", f"import sys; sys.modules[{missing!r}] = None; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, words)


BASE = ["--base", "base", "--data", "texts.jsonl"]
VERBS = {
    "finetune": ["--base", "base", "--data", "texts.jsonl", "--out", "out"],
    "compress": ["lora", *BASE, "--keep", "0.9", "--out", "out"],
    "calibrate": ["base", "--adapter", "lora", "--data", "texts.jsonl", "--out", "x.npz"],
    "distill": ["lora", "--teacher", "lora", *BASE, "--out", "out"],
    "measure": ["lora", "lora", *BASE],
}

# In one process without a package, which imports what is large once
WITHOUT = """
import json, sys
sys.modules[sys.argv[1]] = None
from lsrdecomp.__main__ import run
for verb, arguments in json.loads(sys.argv[2]).items():
    sys.argv = ["lsrdecomp", verb, *arguments]
    try:
        run()
    except SystemExit as end:
        print(verb, end.code, flush=True)
"""


@pytest.mark.parametrize("missing", ["torch", "peft", "transformers"])
def test_a_verb_says_in_one_line_what_it_needs(missing, tmp_path):
    demo = files("lsrdecomp.cli") / "demo_adapter"
    (tmp_path / "lora").symlink_to(str(demo))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n' * 20)
    command = [sys.executable, "-c", WITHOUT, missing, json.dumps(VERBS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [f"{verb} 2" for verb in VERBS]
    lines = [line for line in done.stderr.splitlines() if "lsrdecomp: step" not in line]
    assert len(lines) == len(VERBS)
    for line in lines:
        # What is imported first may be another package that wants the missing one
        assert re.search(r"needs \w+: in your clone type pip install -e '\.\[\w+\]'$", line), line
        assert "needs None" not in line
    assert not (tmp_path / "out").exists()
