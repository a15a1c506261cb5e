"""Adapters of one base and the same layers: one is searched, the others take its shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lsrdecomp import compress
from lsrdecomp.errors import CheckpointError
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.files import open_checkpoint, write_lora
from lsrdecomp.lora.files.statistics import read_statistics
from lsrdecomp.lora.fleet.fleet_run import Job, find_adapters, run_fleet, run_job
from lsrdecomp.lora.fleet.manifest import MANIFEST, Outcome
from lsrdecomp.lora.search.plan import DEFAULT_STORAGE, CompressionPlan, Search
from lsrdecomp.lora.search.shapes import ShapeRequest, shapes_like

PLAN = CompressionPlan(ratio=4.0, structure="lsr")
DEMO = files("lsrdecomp") / "cli"


class Recorded:
    """A runner in this process that remembers its jobs."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def __call__(self, jobs: Sequence[Job], plan: CompressionPlan) -> Iterator[Outcome]:
        for job in jobs:
            self.jobs.append(job)
            yield run_job(job, plan)

    @property
    def leaders(self) -> dict[str, str | None]:
        """By adapter, whose shapes it took."""
        return {job.name: None if job.like is None else Path(job.like).name for job in self.jobs}


def make_adapter(folder: Path, seed: int, size: int = 24, base: str = "base") -> None:
    """Two square layers whose weights are near a short sum of Kronecker products."""
    rng = np.random.default_rng(seed)
    layers = []
    for k in range(2):
        left = np.kron(rng.standard_normal((size // 4, 1)), rng.standard_normal((4, 2)))
        right = np.kron(rng.standard_normal((1, 4)), rng.standard_normal((2, size // 4)))
        layers.append((f"layers.{k}.q", left + 0.1 * rng.standard_normal(left.shape), right))
    write_lora(folder, layers=layers, config={"base_model_name_or_path": base})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate("abc"):
        make_adapter(tmp_path / "in" / name, seed)
    make_adapter(tmp_path / "in" / "of another base", 3, base="other")
    make_adapter(tmp_path / "in" / "wider", 4, size=32)
    return tmp_path / "in"


def contents(out: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(out)): p.read_bytes()
        for p in out.rglob("*")
        if p.is_file() and p.name != MANIFEST
    }


def test_the_first_of_a_kind_is_searched_and_the_others_take_its_shapes(
    folder: Path, tmp_path: Path
) -> None:
    runner = Recorded()
    outcomes = run_fleet(folder, tmp_path / "out", PLAN, runner=runner)
    assert {outcome.state for outcome in outcomes} == {"done"}
    assert runner.leaders == {"a": None, "b": "a", "c": "a", "of another base": None, "wider": None}
    assert runner.jobs[0].name == "a"
    plain = Recorded()
    run_fleet(folder, tmp_path / "alone", PLAN, runner=plain, share=False)
    assert set(plain.leaders.values()) == {None}
    assert contents(tmp_path / "out" / "a") == contents(tmp_path / "alone" / "a")


@pytest.mark.parametrize("plan", [CompressionPlan(separation_rank=2), CompressionPlan(rtol=0.5)])
def test_plans_without_a_search_over_sizes_share_nothing(
    folder: Path, tmp_path: Path, plan: CompressionPlan
) -> None:
    runner = Recorded()
    run_fleet(folder, tmp_path / "out", plan, runner=runner)
    assert set(runner.leaders.values()) == {None}


def test_a_run_that_goes_on_has_the_same_leader_and_the_same_bytes(
    folder: Path, tmp_path: Path
) -> None:
    run_fleet(folder, tmp_path / "calm", PLAN, runner=Recorded())
    out = tmp_path / "out"

    def stopped(jobs: Sequence[Job], plan: CompressionPlan) -> Iterator[Outcome]:
        yield run_job(jobs[0], plan)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fleet(folder, out, PLAN, runner=stopped)
    runner = Recorded()
    run_fleet(folder, out, PLAN, runner=runner)
    assert runner.leaders == {"b": "a", "c": "a", "of another base": None, "wider": None}
    assert contents(out) == contents(tmp_path / "calm")


def test_where_the_first_cannot_be_read_the_next_leads(folder: Path, tmp_path: Path) -> None:
    weights = folder / "a" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    runner = Recorded()
    states = {
        outcome.name: outcome.state
        for outcome in run_fleet(folder, tmp_path / "out", PLAN, runner=runner)
    }
    assert (states["a"], states["b"], states["c"]) == ("failed", "done", "done")
    assert (runner.leaders["b"], runner.leaders["c"]) == (None, "b")


@pytest.mark.parametrize(
    ("failing", "leaders"),
    [("a", {"a": None, "b": None, "c": "b"}), ("abc", {"a": None, "b": None, "c": None})],
)
def test_where_the_first_fails_the_next_leads_until_none_is_left(
    folder: Path, tmp_path: Path, failing: str, leaders: dict[str, str | None]
) -> None:
    class Fragile(Recorded):
        def __call__(self, jobs: Sequence[Job], plan: CompressionPlan) -> Iterator[Outcome]:
            for outcome in super().__call__(jobs, plan):
                yield replace(outcome, state="failed") if outcome.name in failing else outcome

    runner = Fragile()
    outcomes = run_fleet(folder, tmp_path / "out", PLAN, runner=runner)
    assert {name: runner.leaders[name] for name in "abc"} == leaders
    states = {outcome.name: outcome.state for outcome in outcomes}
    assert {name for name, state in states.items() if state == "failed"} == set(failing)


def test_a_plan_without_a_storage_is_that_of_the_default_one_for_every_adapter(
    folder: Path, tmp_path: Path
) -> None:
    narrow = folder / "b" / "adapter_model.safetensors"
    tensors = load_file(narrow)
    save_file({key: value.astype(np.float16) for key, value in tensors.items()}, narrow)
    out = tmp_path / "out"
    plan = CompressionPlan(separation_rank=1)
    run_fleet(folder, out, plan, runner=Recorded())
    assert {open_checkpoint(out / name).storage for name in "abc"} == {DEFAULT_STORAGE}
    # Whoever writes the default out goes on with the same run
    again = Recorded()
    run_fleet(folder, out, plan.replace(storage=DEFAULT_STORAGE), runner=again)
    assert again.jobs == []


def test_a_fleet_counts_errors_in_the_norm_of_its_statistics(tmp_path: Path) -> None:
    for name in ("first", "second"):
        copytree(str(DEMO / "demo_adapter"), tmp_path / "in" / name)
        weights = tmp_path / "in" / name / "adapter_model.safetensors"
        save_file(
            {
                key: value
                for key, value in load_file(weights).items()
                if "layer.3.attention.self.query." in key
            },
            weights,
        )
    plan, statistics = CompressionPlan(ratio=48.0), Path(str(DEMO / "demo_statistics"))
    alone = compress(
        open_checkpoint(tmp_path / "in" / "first"), plan, statistics=read_statistics(statistics)
    )
    runner = Recorded()
    first, second = run_fleet(
        tmp_path / "in", tmp_path / "out", plan, runner=runner, statistics=statistics
    )
    assert runner.leaders == {"first": None, "second": "first"}
    assert first.relative_error == pytest.approx(alone.totals.functional_error, rel=1e-9)
    assert second.relative_error <= 1.05 * first.relative_error
    copytree(statistics, tmp_path / "each" / "first")
    with pytest.raises(
        CheckpointError, match="no statistics for 1 of 2 adapters, and none for all .* second"
    ):
        run_fleet(
            tmp_path / "in", tmp_path / "other", plan, runner=runner, statistics=tmp_path / "each"
        )
    assert not (tmp_path / "other").exists()
    copytree(statistics, tmp_path / "each" / "second")
    with pytest.raises(CheckpointError, match="belongs to another norm"):
        run_fleet(
            tmp_path / "in", tmp_path / "out", plan, runner=runner, statistics=tmp_path / "each"
        )
    runner = Recorded()
    run_fleet(
        tmp_path / "in", tmp_path / "other", plan, runner=runner, statistics=tmp_path / "each"
    )
    assert [job.statistics for job in runner.jobs] == [
        str(tmp_path / "each" / name) for name in ("first", "second")
    ]
    assert find_adapters(tmp_path / "other") == ["first", "second"]


def test_shapes_of_each_layer_and_the_commonest_of_its_size() -> None:
    even, tall, rare = (ProductShape(out, (1, 2), (4, 6)) for out in ((4, 6), (2, 12), (6, 4)))
    wide = ProductShape((4, 6), (1, 1), (8, 8))
    chosen = {
        "a": (even, (1, 1)),
        "b": (even, (3, 2)),
        "c": (tall, (2, 2)),
        "d": (tall, (2, 2)),
        "e": (rare, (1, 2)),
    }
    sizes = {**dict.fromkeys("abcdeg", (24, 24)), "f": (24, 64), "h": (7, 7)}
    found = shapes_like({**chosen, "f": (wide, (1, 1))}, sizes)
    assert (
        [chain.shape for chain in found["a"]]
        == [chain.shape for chain in found["c"]]
        == [even, tall]
    )
    assert [chain.shape for chain in found["e"]] == [even, tall, rare]
    # Those that were taken, and one more of each.
    assert found["a"][0] == ShapeRequest(even, ((1, 1), (2, 2), (3, 2), (4, 3)))
    assert [chain.shape for chain in found["f"]] == [wide]
    assert found["g"] == found["a"]  # left out, or low rank, in the other adapter
    assert found["h"] == ()


def test_only_given_shapes_are_solved(folder: Path, tmp_path: Path) -> None:
    written = open_checkpoint(compress(open_checkpoint(folder / "a"), PLAN).save(tmp_path / "a"))
    search = Search.like(written)
    made = compress(open_checkpoint(folder / "b"), PLAN, search=search)
    shapes = {layer.shape for layer in made.layers if layer.structure == "LSR"}
    assert shapes
    assert shapes <= {str(shape) for shape, _ in search.shapes.values()}
    assert made.totals.relative_error <= made.totals.low_rank_error * (1 + 1e-9)
