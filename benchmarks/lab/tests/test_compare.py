"""Suites: one grid for all, rates chosen on a split of the training set, no run done twice."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("peft")

from typer.testing import CliRunner

from benchmarks.lab.app import app
from benchmarks.lab.compare import table as compare_table
from benchmarks.lab.compare.comparison import compare, read_results
from benchmarks.lab.suite import SuiteError, read_suite
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.lora.train.finetune_record import FinetuneRecord, Scores

SUITE = """
seeds = [0, 1, 2]
rates = [1e-3, 1e-2, 1e-1]
[common]
base = "embedded"
patience = 2
[tasks.embedded]
[methods."LoRA r=1"]
method = "lora"
options = { r = 1 }
[methods.LSR]
method = "lsr"
against = "LoRA r=1"
"""


@pytest.fixture
def file(tmp_path):
    def write(text=SUITE):
        (tmp_path / "suite.toml").write_text(text)
        return tmp_path / "suite.toml"

    return write


@pytest.fixture
def runs(monkeypatch):
    """Put a formula in place of `finetune`, and return what it is asked for.

    Dev likes large rates, validation another for each method.
    """
    done = []

    def run(settings, out, *, resume, on_step=None):
        if (settings.method, settings.learning_rate, settings.seed) in failing:
            raise RuntimeError("lost\nits way")
        done.append((settings.method, settings.learning_rate, settings.seed))
        best = {"lora": 1e-2, "lsr": 1e-1}[settings.method]
        loss = 0.2 if settings.learning_rate == best else 0.5
        accuracy = (
            0.5
            + settings.learning_rate
            + 0.01 * settings.seed
            + (0.1 if settings.method == "lsr" else 0.0)
        )
        scores = Scores({"accuracy": accuracy}, accuracy, 1.0 - accuracy, 300)
        record = FinetuneRecord(
            settings=settings,
            start=None,
            dev=scores,
            validation=replace(scores, loss=loss),
            baseline={"accuracy": 0.1},
            adapter_parameters={"lora": 768, "lsr": 704}[settings.method],
            head_parameters=10,
            adapter_bytes=3072,
            file_bytes=4000,
            train_examples=500,
            steps=100,
            best_step=100,
            losses=(),
            wall_seconds=2.0,
            step_seconds=0.02,
            peak_bytes=None,
            device="cpu",
            processes=1,
            versions={},
            commit="abc",
        )
        out.mkdir(parents=True)
        record.write(out)
        return record

    failing = set()
    done_and_failing = type("Runs", (), {"done": done, "failing": failing})
    monkeypatch.setattr(import_module("lsrdecomp.lora.train.finetune_run"), "finetune", run)
    return done_and_failing


def test_every_method_sees_every_rate_and_all_seeds_see_the_chosen_one(file, runs, tmp_path):
    results = compare(read_suite(file()), tmp_path / "out")
    assert sorted(runs.done) == sorted(
        [(method, rate, 0) for method in ("lora", "lsr") for rate in (1e-3, 1e-2, 1e-1)]
        + [
            (method, rate, seed)
            for method, rate in (("lora", 1e-2), ("lsr", 1e-1))
            for seed in (1, 2)
        ]
    )
    assert [(cell.rate, list(cell.records)) for cell in results.cells] == [
        (1e-2, [0, 1, 2]),
        (1e-1, [0, 1, 2]),
    ]
    assert (results.planned, results.done) == (10, 10)


def test_the_rate_is_not_the_one_that_dev_likes(file, runs, tmp_path):
    cell = compare(read_suite(file()), tmp_path / "out").cells[0]
    records = [read_results(read_suite(file()), tmp_path / "out").cells[0].records[0]]
    assert records[0].dev.accuracy < 0.5 + 1e-1
    assert cell.rate == 1e-2


def test_a_rate_at_the_end_of_the_grid_is_marked(file, runs, tmp_path):
    results = compare(read_suite(file()), tmp_path / "out")
    assert [cell.edge for cell in results.cells] == [False, True]
    assert "at an end of the grid for: LSR on embedded" in compare_table.markdown(results)


def test_finished_runs_are_not_done_again(file, runs, tmp_path, monkeypatch):
    first = compare(read_suite(file()), tmp_path / "out")
    runs.done.clear()
    assert compare(read_suite(file()), tmp_path / "out") == first
    assert runs.done == []
    compare(read_suite(file(SUITE.replace("[0, 1, 2]", "[0, 1, 2, 3]"))), tmp_path / "out")
    assert sorted(runs.done) == [("lora", 1e-2, 3), ("lsr", 1e-1, 3)]


def test_a_failing_run_is_recorded_and_stops_no_other(file, runs, tmp_path):
    runs.failing |= {("lora", 1e-2, 0), ("lsr", 1e-1, 2)}
    results = compare(read_suite(file()), tmp_path / "out")
    lora, lsr = results.cells
    assert (lora.rate, lsr.rate) == (1e-3, 1e-1)
    assert (list(lora.records), list(lsr.records)) == ([0, 1, 2], [0, 1])
    assert lora.failures[1e-2, 0].message == "lost its way"
    assert (
        "LSR on embedded, rate 0.1, seed 2 failed: RuntimeError: lost its way"
        in compare_table.markdown(results)
    )
    runs.done.clear()
    compare(read_suite(file()), tmp_path / "out")
    assert runs.done == []
    runs.failing.clear()
    results = compare(read_suite(file()), tmp_path / "out", retry=True)
    assert results.cells[0].rate == 1e-2
    assert not any(cell.failures for cell in results.cells)


def test_no_rate_is_chosen_where_all_failed(file, runs, tmp_path):
    runs.failing |= {("lora", rate, 0) for rate in (1e-3, 1e-2, 1e-1)}
    results = compare(read_suite(file()), tmp_path / "out")
    assert results.cells[0].rate is None
    assert [line.method for line in compare_table.lines(results)] == ["LSR"]


def test_runs_with_other_settings_are_not_taken_for_these(file, runs, tmp_path):
    compare(read_suite(file()), tmp_path / "out")
    other = file(SUITE.replace("patience = 2", "patience = 2\nsteps = 9"))
    with pytest.raises(CheckpointError, match="steps None → 9"):
        compare(read_suite(other), tmp_path / "out")
    moved = file(SUITE.replace("patience = 2", 'patience = 2\ndevice = "cpu"'))
    assert compare(read_suite(moved), tmp_path / "out").done == 10


def test_the_table_has_mean_spread_baseline_and_sizes(file, runs, tmp_path):
    results = compare(read_suite(file()), tmp_path / "out")
    head, rows = compare_table.overview(compare_table.lines(results))
    assert head == ("method", "parameters", "bytes", "embedded (acc)", "mean")
    assert rows == [
        ("majority", "0", "0", "10.0", "10.0"),
        ("LoRA r=1", "768", "3,072", "52.0 ± 1.0", "52.0 ± 1.0"),
        ("LSR", "704", "3,072", "71.0 ± 1.0", "71.0 ± 1.0"),
    ]
    figures = json.loads(json.dumps(compare_table.to_json(results), allow_nan=False))
    assert figures["lines"][0]["score"]["values"] == pytest.approx([0.51, 0.52, 0.53])
    assert figures["lines"][0]["score"]["median"] == pytest.approx(0.52)


def test_a_method_is_judged_against_another_seed_by_seed(file, runs, tmp_path):
    results = compare(read_suite(file()), tmp_path / "out")
    found = compare_table.lines(results)[1].difference
    assert found.mean == pytest.approx(0.19)
    # The spread between seeds is common to both.
    assert found.interval == pytest.approx((0.19, 0.19))
    assert found.verdict == "better"
    one = compare(read_suite(file(SUITE.replace("[0, 1, 2]", "[0]"))), tmp_path / "one")
    assert compare_table.lines(one)[1].difference.verdict == "one seed"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "seeds = [0, 1, 2]",
            "seeds = [0, 0]",
            "seeds must be different whole numbers of 0 or more, at least one",
        ),
        (
            "seeds = [0, 1, 2]",
            "seeds = []",
            "seeds must be different whole numbers of 0 or more, at least one",
        ),
        (
            "seeds = [0, 1, 2]",
            "seed = [0]",
            r"no setting is called 'seed'; did you mean 'seeds'\? known: title, seeds",
        ),
        ("seeds = [0, 1, 2]", "tune_seeds = 2", "tune_seeds must be 1 to 1"),
        ("patience = 2", "", "several rates are compared on a split of the training set"),
        (
            "options = { r = 1 }",
            "learning_rate = 1e-3",
            "methods.LoRA r=1: learning_rate is the suite's",
        ),
        (
            "options = { r = 1 }",
            "patience = 0",
            r"\[methods.'LoRA r=1'\] together: patience must be a whole number",
        ),
        ('against = "LoRA r=1"', 'against = "LoRA"', "against 'LoRA', not one of"),
        ('method = "lsr"', "", "methods.LSR must say which method it is"),
        ("[tasks.embedded]", "", r"a suite needs tables \[tasks"),
        (
            "rates = [1e-3",
            "rates = [nan",
            r"rates must be different numbers above 0, at least one, got \[nan",
        ),
        ("[common]", "[common", "suite.toml"),
        (
            "seeds = [0, 1, 2]",
            "seeds = [0.5]",
            r"seeds must be different whole numbers of 0 or more, at least one, got \[0.5\]",
        ),
        (
            "seeds = [0, 1, 2]",
            "seeds = [true]",
            r"seeds must be different whole numbers .*, got \[True\]",
        ),
        ("seeds = [0, 1, 2]", "recover = 3", "recover must be a table"),
        ("[tasks.embedded]", "[tasks]\nembedded = 3", "tasks.embedded must be a table of settings"),
        ("patience = 2", "patience = 2\nseed = 1", "common: seed is the suite's"),
        ("options = { r = 1 }", 'task = "RTE"', "methods.LoRA r=1: task is the suite's"),
    ],
)
def test_a_suite_that_cannot_be_is_refused(old, new, message, file):
    path = file(SUITE.replace(old, new))
    with pytest.raises(SuiteError, match=message) as found:
        read_suite(path)
    assert str(path) in str(found.value)


def test_a_method_overrides_its_task_and_a_task_what_is_common(file):
    text = 'title = "Three"\n' + SUITE.replace(
        "[tasks.embedded]", "batch = 8\nwarmup = 0.2\n[tasks.embedded]\nbatch = 16"
    )
    suite = read_suite(
        file(text.replace('method = "lsr"', 'method = "lsr"\nbatch = 24')), {"warmup": 0.3}
    )
    settings = [suite.settings(spec, "embedded", 0.01, 2) for spec in suite.specs]
    assert [
        (each.batch, each.warmup, each.patience, each.learning_rate, each.seed) for each in settings
    ] == [
        (16, 0.3, 2, 0.01, 2),
        (24, 0.3, 2, 0.01, 2),
    ]
    assert suite.title == "Three"


def test_two_methods_cannot_share_a_directory(file):
    with pytest.raises(SuiteError, match="share the directory 'LoRA-r=1'"):
        read_suite(file(SUITE.replace("[methods.LSR]", '[methods."LoRA-r=1"]')))


def test_a_misspelt_option_is_found_before_anything_runs(file, runs, tmp_path):
    with pytest.raises(LsrError, match="lora has no option rank"):
        compare(read_suite(file(SUITE.replace("{ r = 1 }", "{ rank = 1 }"))), tmp_path / "out")
    assert runs.done == []


def test_a_task_without_its_files_is_skipped_by_name(file, runs, tmp_path):
    text = SUITE.replace("[tasks.embedded]", '[tasks.embedded]\n[tasks.BoolQ]\ndata = "nowhere"')
    results = compare(read_suite(file(text)), tmp_path / "out")
    assert len(results.cells) == 2
    assert "BoolQ skipped: nowhere/BoolQ/train.jsonl is missing." in compare_table.notes(
        results, []
    )


def test_the_command_line_runs_shows_and_draws(file, runs, tmp_path):
    arguments = ["compare", str(file()), "--out", str(tmp_path / "out")]
    empty = CliRunner().invoke(app, [*arguments, "--table"])
    assert (empty.exit_code, runs.done) == (0, [])
    assert "0 of 10 runs done." in empty.stdout
    done = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "figures.json")])
    assert done.exit_code == 0, done.output
    assert "71.0 ± 1.0" in done.stdout
    assert len(json.loads((tmp_path / "figures.json").read_text())["lines"]) == 2
    assert (tmp_path / "out" / "table.md").read_text().startswith("# Comparison\n\n| method |")
    assert (tmp_path / "out" / "parameters.png").stat().st_size > 5000
    runs.done.clear()
    assert CliRunner().invoke(app, [*arguments, "--table"]).exit_code == 0
    assert runs.done == []
    runs.failing.add(("lsr", 1e-1, 3))
    file(SUITE.replace("[0, 1, 2]", "[0, 1, 2, 3]"))
    assert CliRunner().invoke(app, arguments).exit_code == 1


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    from benchmarks.lab.embedded import EmbeddedRecipe, embedded

    return embedded(tmp_path_factory.mktemp("embedded") / "place", recipe=EmbeddedRecipe(steps=40))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_embedded_task_is_compared(place, file, tmp_path, workers):
    pytest.importorskip("joblib")
    text = SUITE.replace("[0, 1, 2]", "[0, 1]").replace("[1e-3, 1e-2", "[1e-2")
    text = text.replace("patience = 2", "patience = 9\nsteps = 6\nevaluate_every = 3")
    text = text.replace('"embedded"', f'"{place.model}"\ndata = "{place.data}"\ndevice = "cpu"')
    results = compare(read_suite(file(text)), tmp_path / "out", workers=workers)
    assert (results.done, results.planned) == (6, 6)
    lora, lsr = compare_table.lines(results)
    assert lora.adapter_parameters < 2 * lsr.adapter_parameters
    assert 0.0 < lora.baseline < 0.2
    assert len(lsr.score.values) == 2


def test_results_name_no_place_on_this_machine(file, tmp_path):
    suite = read_suite(
        file(), {"base": str(tmp_path / "encoder" / "model"), "data": "/somewhere/glue"}
    )
    assert suite.public_settings == {"base": "encoder/model", "patience": 2}
    assert read_suite(file()).public_settings == {"base": "embedded", "patience": 2}


def test_some_of_the_tasks(file):
    text = SUITE.replace("[tasks.embedded]", '[tasks.embedded]\n[tasks.CB]\ndata = "d"')
    assert list(read_suite(file(text), tasks=["CB"]).tasks) == ["CB"]
    with pytest.raises(SuiteError, match="has no task 'RTE'; its tasks are: embedded, CB"):
        read_suite(file(text), tasks=["RTE"])
