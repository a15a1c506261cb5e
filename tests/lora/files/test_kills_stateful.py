"""Write, kill, resume in any order: a fleet and its manifest against a model of both."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from checkpoint_files import file_contents
from cli_server import Server, server
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lsrdecomp import compress
from lsrdecomp.lora.files import open_checkpoint, write_lora
from lsrdecomp.lora.fleet.fleet_run import find_adapters
from lsrdecomp.lora.fleet.manifest import MANIFEST
from lsrdecomp.lora.search.plan import CompressionPlan

PLAN = CompressionPlan(separation_rank=1, storage="float16")
PHASES = (Phase.generate,)
STEPS = st.sampled_from(range(20, 240))  # before, nothing is written


class Fleet(RuleBasedStateMachine):
    """Commands that end, or are killed at one of their looks at the file system."""

    run: ClassVar[Server]

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.place = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.folder, self.out, self.plan = (
            self.place / name for name in ("in", "out", "plan.toml")
        )
        self.plan.write_text('[compress]\nseparation_rank = 1\nstorage = "float16"\n')
        self.wanted: dict[str, dict[str, bytes]] = {}

    def teardown(self) -> None:
        self.stack.close()

    @initialize()
    def first(self) -> None:
        self.an_adapter_comes()

    @rule()
    @precondition(lambda self: len(self.wanted) < 4)
    def an_adapter_comes(self) -> None:
        name = f"a{len(self.wanted)}"
        rng = np.random.default_rng(len(self.wanted))
        layers = [("q", rng.standard_normal((6, 2)), rng.standard_normal((2, 4)))]
        write_lora(self.folder / name, layers=layers, config={"base_model_name_or_path": "base"})
        reference = self.place / "reference" / name
        compress(open_checkpoint(self.folder / name), PLAN).save(reference)
        self.wanted[name] = file_contents(reference)

    def command(self, **order: int) -> int:
        end = self.run("fleet", self.folder, self.out, "--plan", self.plan, here=True, **order)
        assert end["code"] in (0, -9), end["stderr"]
        return end["code"]

    @rule(step=STEPS)
    def it_is_killed(self, step: int) -> None:
        self.command(step=step)

    @rule()
    def it_ends(self) -> None:
        assert self.command() == 0
        assert find_adapters(self.out) == sorted(self.wanted)
        names = [line["name"] for line in self.outcomes()]
        assert set(names) == set(self.wanted)
        before = (self.out / MANIFEST).read_bytes()
        assert self.command() == 0
        assert (self.out / MANIFEST).read_bytes() == before

    @rule(cut=st.integers(1, 200))
    @precondition(lambda self: (self.out / MANIFEST).exists())
    def the_manifest_loses_its_end(self, cut: int) -> None:
        content = (self.out / MANIFEST).read_bytes()
        (self.out / MANIFEST).write_bytes(content[:-cut])

    @rule(data=st.data())
    @precondition(lambda self: self.out.exists() and find_adapters(self.out))
    def an_output_is_removed(self, data: st.DataObject) -> None:
        shutil.rmtree(self.out / data.draw(st.sampled_from(find_adapters(self.out))))

    def outcomes(self) -> list[dict[str, object]]:
        path = self.out / MANIFEST
        return (
            [json.loads(line) for line in path.read_text().split("\n")[1:-1]]
            if path.exists()
            else []
        )

    @invariant()
    def what_is_there_is_whole(self) -> None:
        if self.out.exists():
            shown = [
                entry
                for entry in self.out.iterdir()
                if not entry.name.startswith(".") and entry.is_dir()
            ]
            assert all(file_contents(entry) == self.wanted[entry.name] for entry in shown)
        assert all(line["state"] == "done" for line in self.outcomes())


@pytest.mark.skipif(
    sys.platform != "linux", reason="forks, process groups and audit events of Linux"
)
@pytest.mark.parametrize("examples", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_write_kill_resume_in_any_order(examples: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    chosen = settings(
        max_examples=examples,
        stateful_step_count=10,
        deadline=None,
        derandomize=True,
        phases=PHASES,
    )
    with server() as Fleet.run:
        run_state_machine_as_test(Fleet, settings=chosen)
