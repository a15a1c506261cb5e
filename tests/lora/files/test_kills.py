"""kill -9 at any moment of `compress` and `fleet`: nothing lost, nothing half there.

Moments are drawn at random over the whole run, and besides every look at the file system can be the
last one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import file_contents, lora_pair, write_lora_directory
from cli_server import Server, server

from lsrdecomp.lora.files import write_lora
from lsrdecomp.lora.files.file_checks import changed_files
from lsrdecomp.lora.fleet.fleet_run import find_adapters
from lsrdecomp.lora.fleet.manifest import MANIFEST

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="forks, process groups and audit events of Linux"
)

LONG = pytest.mark.slow


@pytest.fixture(scope="module")
def run():
    with server() as running:
        yield running


def forget_age(folder: Path) -> None:
    """Make leftovers of killed runs look old, so that the next run clears them."""
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            os.utime(entry, (0, 0))


def as_argument(terms: int) -> tuple[object, ...]:
    return ("--separation-rank", terms, "--storage", "float16", "--force")


@pytest.mark.parametrize(("times", "steps"), [(2, 8), pytest.param(150, 1000, marks=LONG)])
def test_compress_leaves_the_old_output_or_the_new_one(
    run: Server, tmp_path: Path, times: int, steps: int
) -> None:
    source = write_lora_directory(
        tmp_path / "in",
        {k: v for i in range(4) for k, v in lora_pair(f"l.{i}", 96, 64, 4, i).items()},
        r=4,
    )
    states = {}
    for terms in (1, 2):
        done = run(
            "compress", source, "--out", tmp_path / f"ref{terms}", *as_argument(terms), step=0
        )
        assert done["code"] == 0, done["stderr"]
        states[terms] = file_contents(tmp_path / f"ref{terms}")
    assert states[1] != states[2]
    place = tmp_path / "place"
    place.mkdir()
    out = place / "out"
    chance = random.Random(11)
    moments: list[dict[str, float]] = [
        {"seconds": chance.uniform(0.0, 1.1 * done["seconds"])} for _ in range(times)
    ]
    first = 1 if steps > done["steps"] else done["steps"] // 2  # the short run looks at the writing
    moments += [
        {"step": int(step)}
        for step in np.unique(np.linspace(first, done["steps"], steps, dtype=int))
    ]
    chance.shuffle(moments)
    present, killed = None, 0
    for turn, moment in enumerate(moments):
        wanted = 1 + turn % 2
        if present is not None and turn % 3 == 0:
            shutil.rmtree(out)
            present = None
        end = run("compress", source, "--out", out, *as_argument(wanted), **moment)
        killed += end["code"] == -9
        assert end["code"] in (0, -9), end["stderr"]
        held = file_contents(out) if out.exists() else None
        assert held in (present, states[wanted])
        assert end["code"] == -9 or held == states[wanted]
        names = {entry.name for entry in place.iterdir() if not entry.name.endswith(".partial")}
        assert names <= {"out", ".out.journal"}
        present = held
    assert killed >= (200 if times > 100 else 4)
    forget_age(place)
    assert run("compress", source, "--out", out, *as_argument(1))["code"] == 0
    assert file_contents(out) == states[1]
    assert [entry.name for entry in place.iterdir()] == ["out"]


def make_fleet(folder: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    for i in range(count):
        layers = [
            (f"l.{k}.q", rng.standard_normal((24, 2)), rng.standard_normal((2, 24)))
            for k in range(2)
        ]
        write_lora(
            folder / f"team{i % 3}" / f"adapter{i}",
            layers=layers,
            config={"base_model_name_or_path": "base"},
        )
    return folder


def outputs(out: Path) -> dict[str, bytes]:
    """Return every byte of every output.

    Left out are hidden leftovers and the manifest, whose order is that of finishing.
    """
    found = file_contents(out)
    return {
        name: content
        for name, content in found.items()
        if name != MANIFEST and "/." not in f"/{name}"
    }


@pytest.mark.parametrize(
    ("kills", "count", "workers"), [(2, 3, 0.0), pytest.param(210, 12, 0.25, marks=LONG)]
)
def test_a_fleet_loses_nothing_and_does_nothing_twice(
    run: Server, tmp_path: Path, kills: int, count: int, workers: float
) -> None:
    pytest.importorskip("joblib")
    folder, plan = make_fleet(tmp_path / "in", count), tmp_path / "plan.toml"
    plan.write_text('[compress]\nseparation_rank = 2\nstorage = "float16"\n')
    usual = run(
        "fleet", folder, tmp_path / "calm", "--plan", plan, "--workers", 1, here=not workers
    )
    assert usual["code"] == 0
    calm = outputs(tmp_path / "calm")
    full, idle = (
        run("fleet", folder, tmp_path / "alone", "--plan", plan, here=True, step=0)
        for _ in range(2)
    )
    assert outputs(tmp_path / "alone") == calm
    chance = random.Random(5)

    def moment(left: int) -> dict[str, object]:
        """Draw when to kill a run of so many adapters: on its way, or just too late."""
        if chance.random() < workers:  # with workers, which may outlive their master for a moment
            seconds = chance.uniform(0.0 if left == count else 0.5, 1.1) * usual["seconds"]
            return {"seconds": seconds, "whole": chance.random() < 0.75}
        span = idle["steps"] + (full["steps"] - idle["steps"]) * left / count
        return {"step": round(chance.uniform(0.5 * idle["steps"], 1.1 * span)), "here": True}

    killed = turn = 0
    while killed < kills:
        out, code, left = tmp_path / f"out{turn}", -9, count
        turn += 1
        while code != 0:
            calmly = killed >= kills or (not left and chance.random() < 0.5)
            order = {"here": True} if calmly else moment(left)
            end = run("fleet", folder, out, "--plan", plan, "--workers", 1, **order)
            code = end["code"]
            assert code in (0, -9), end["stderr"]
            killed += code == -9
            held = outputs(out) if out.exists() else {}
            assert held.items() <= calm.items()
            written, recorded = find_adapters(out) if held else [], _recorded(out)
            assert all(changed_files(out / name) == () for name in written)
            assert all(outcome["state"] == "done" for outcome in recorded)
            assert {outcome["name"] for outcome in recorded} <= set(written)
            left = count - len(written)
        for team in out.glob("*/"):
            forget_age(team)
        assert run("fleet", folder, out, "--plan", plan, here=True)["code"] == 0
        assert outputs(out) == calm
        names = [outcome["name"] for outcome in _recorded(out)]
        assert len(names) == len(set(names)) == count


def _recorded(out: Path) -> list[dict[str, object]]:
    manifest = out / MANIFEST
    lines = manifest.read_text().split("\n")[1:-1] if manifest.exists() else []
    return [json.loads(line) for line in lines]
