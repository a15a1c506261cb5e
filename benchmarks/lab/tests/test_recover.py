"""Compress and recover, small: every structure can be judged and trained on; nothing twice."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("peft")

from peft import PeftModel  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from transformers import AutoModelForSequenceClassification  # noqa: E402
from typer.main import get_command  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from benchmarks.lab.app import app, open_suite  # noqa: E402
from benchmarks.lab.embedded import EmbeddedRecipe, embedded  # noqa: E402
from benchmarks.lab.recover import table as recover_table  # noqa: E402
from benchmarks.lab.recover.compress_lora import compress_lora, direct_sums, shape_settings  # noqa: E402
from benchmarks.lab.recover.jobs import jobs  # noqa: E402
from benchmarks.lab.recover.plan import STRUCTURES, lora_settings, recover_plan  # noqa: E402
from benchmarks.lab.recover.recovery import chosen_rate, recover  # noqa: E402
from benchmarks.lab.suite import SuiteError, read_suite  # noqa: E402
from lsrdecomp.errors import BudgetError, CheckpointError  # noqa: E402
from lsrdecomp.lora.files import open_checkpoint  # noqa: E402
from lsrdecomp.lora.files.statistics import read_statistics  # noqa: E402
from lsrdecomp.lora.search.layers import layer_pair  # noqa: E402
from lsrdecomp.lora.search.plan import Search  # noqa: E402
from lsrdecomp.lora.train.finetune_record import ADAPTER  # noqa: E402

SUITE = """
seeds = [0, 1]
rates = [1e-2, 5e-2]
[common]
base = "{model}"
data = "{data}"
device = "cpu"
log_every = 0
train_examples = 200
dev_examples = 100
[tasks.embedded]
[recover]
budgets = [64, 256]
judged = [128]
tune_budget = 64
steps = 3
distill = 6
lora = {{ learning_rate = 5e-2, steps = 20, options = {{ r = 8, lora_alpha = 16 }} }}
head = {{ learning_rate = 3e-2, steps = 40 }}
structures = ["lsr", "direct", "lsr-paper", "lora-int8"]
scratch = ["lsr"]
samples = 64
"""
SMALL = Search(orders=(2,), rounds=0, sweeps=2)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A suite file, its suite, and the directory where it was run."""
    folder = tmp_path_factory.mktemp("recover")
    place = embedded(folder / "place", recipe=EmbeddedRecipe(steps=60))
    (folder / "suite.toml").write_text(SUITE.format(model=place.model, data=place.data))
    suite = read_suite(folder / "suite.toml")
    recover(suite, folder / "out", search=SMALL)
    return folder / "suite.toml", suite, folder / "out"


@pytest.fixture(scope="module")
def first(done):
    return jobs(done[1], recover_plan(done[1]), done[2])[0]


def changes(job, directory):
    """ΔW by layer, as PEFT adds it to the base."""
    base = AutoModelForSequenceClassification.from_pretrained(
        job.suite.common["base"], num_labels=10
    )
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, directory).merge_and_unload()
    after = merged.state_dict()
    return {
        name: (after[name] - tensor).double().numpy()
        for name, tensor in before.items()
        if "attention" in name
    }


def test_rates_are_chosen_with_the_first_seed_at_one_budget(done):
    out = done[2] / "embedded"

    def tried(seed, point, kind):
        return sorted(
            path.parent.name for path in (out / f"seed-{seed}" / point / kind).glob("*/record.json")
        )

    for point in ("lsr-64", "direct-64"):
        assert tried(0, point, "recovered") == ["rate-0.01", "rate-0.05"]
        assert len(tried(1, point, "recovered")) == 1
    assert len(tried(0, "lsr-64", "scratch")) == 2
    for point in ("lsr-256", "direct-256"):
        assert tried(0, point, "recovered") == tried(1, point, "recovered")
        assert len(tried(0, point, "recovered")) == 1
    assert tried(0, "direct-64", "scratch") == []
    assert tried(0, "lora-int8", "recovered") == []
    for whole in ("lora", "lsr-paper"):
        assert [len(tried(seed, whole, "recovered")) for seed in (0, 1)] == [2, 1]


def test_further_budgets_are_judged_and_not_trained_on(done):
    for seed in (0, 1):
        point = done[2] / "embedded" / f"seed-{seed}" / "lsr-128"
        assert json.loads((point / "judged.json").read_text())["scores"]["loss"] > 0
        assert not (point / "recovered").exists()
        assert not (point / "scratch").exists()
    found = recover_table.read_recovery(done[1], done[2])
    (line,) = (line for line in found.lines if (line.structure, line.budget) == ("lsr", 128))
    assert [len(line.stages[stage]) for stage in recover_table.STAGES] == [2, 2, 0, 0]


def test_forms_are_distilled_and_judged_as_often_as_the_plan_says(done, first):
    found = recover_table.read_recovery(done[1], done[2])
    lines = {(line.structure, line.budget): line.stages for line in found.lines}
    assert [len(lines["lsr", budget]["distilled"]) for budget in (64, 128, 256)] == [2, 2, 2]
    assert lines["direct", 64]["distilled"] == lines["lora-int8", 0]["distilled"] == ()
    place = first.place.point("lsr", 64)
    written = json.loads((place / "distilled" / "adapter" / "compression.json").read_text())[
        "distillation"
    ]
    assert written["steps"] == 6
    assert written["after"]["kl"] < written["before"]["kl"]
    assert "distilled" in recover_table.table(found)[0]


def test_the_rate_is_that_of_least_validation_loss(done, first):
    losses = {}
    for rate in (1e-2, 5e-2):
        file = first.place.point("lsr", 64) / "scratch" / f"rate-{rate:g}" / "record.json"
        losses[rate] = json.loads(file.read_text())["validation"]["loss"]
    assert chosen_rate(first, "lsr", "scratch") == min(losses, key=losses.get)


def test_every_run_of_a_seed_has_the_same_head_and_does_not_train_it(done, first):
    heads = []
    for name in (
        "head",
        "lora",
        "lsr-64",
        "lsr-64/scratch/rate-0.01",
        "direct-64/recovered/rate-0.05",
    ):
        tensors = load_file(first.place.directory / name / "adapter" / "adapter_model.safetensors")
        heads.append(tensors["base_model.model.classifier.weight"])
    assert all(np.array_equal(heads[0], head) for head in heads[1:])


def test_nothing_was_trained_on_what_rates_are_chosen_on(done, first):
    counts = set()
    for name in ("head", "lora", "lsr-64/scratch/rate-0.01", "direct-64/recovered/rate-0.05"):
        record = json.loads((first.place.directory / name / "record.json").read_text())
        counts.add((record["train_examples"], record["validation"]["examples"]))
    assert counts == {(180, 20)}  # of 200


def test_the_table_counts_shares_of_what_the_lora_gained(done):
    found = recover_table.read_recovery(done[1], done[2])
    assert [(gain.task, gain.seed, gain.matrices) for gain in found.gains] == [
        ("embedded", 0, 4),
        ("embedded", 1, 4),
    ]
    lines = {(line.structure, line.budget): line for line in found.lines}
    whole = {("lora", 0), ("lsr-paper", 0), ("lora-int8", 0)}
    assert set(lines) == whole | {(s, b) for s in ("lsr", "direct") for b in (64, 128, 256)}
    gain, judged = found.gains[0], lines["lsr", 256].stages["recovered"][0]
    assert judged.share == pytest.approx(
        (gain.loss_before - judged.loss) / (gain.loss_before - gain.loss)
    )
    assert [one.share for one in lines["lora", 0].stages["compressed"]] == [1.0, 1.0]
    assert lines["lora-int8", 0].stages["compressed"][0].share == pytest.approx(1.0, abs=0.05)
    assert lines["lora-int8", 0].bytes < lines["lora", 0].bytes / 3
    assert lines["lsr-paper", 0].parameters == 4 * 2 * 16 * (8 * 2 + 8 * 2)
    for structure in ("lsr", "direct"):
        assert (
            lines[structure, 64].parameters <= 64 * 4 < lines[structure, 256].parameters <= 256 * 4
        )
    head, rows = recover_table.table(found)
    assert all(len(row) == len(head) for row in rows)
    json.dumps(recover_table.to_json(found), allow_nan=False)


def test_a_finished_experiment_trains_and_compresses_nothing(done, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("done again")

    # Modules by their names: a room shows functions that are called as their modules are.
    ours = ("compress_lora", "evaluate", "calibrate", "distill")
    places = {
        "lsrdecomp.lora.train.finetune_run": ("finetune",),
        "benchmarks.lab.recover.recovery": ours,
    }
    for place, names in places.items():
        for name in names:
            monkeypatch.setattr(import_module(place), name, refuse)
    recover(done[1], done[2], search=SMALL)


def test_a_lora_that_gains_too_little_is_not_compressed(done, monkeypatch):
    monkeypatch.setattr(import_module("benchmarks.lab.recover.recovery"), "compress_lora", None)
    file, _, out = done
    text = file.read_text().replace("samples = 64", "samples = 64\nleast_gain = 50.0")
    other = file.with_name("other.toml")
    wanted = 'structures = ["lsr", "direct", "lsr-paper", "lora-int8"]\nscratch = ["lsr"]'
    other.write_text(text.replace(wanted, 'structures = ["svd"]\nscratch = []'))
    recover(read_suite(other), out)
    found = recover_table.read_recovery(read_suite(other), out)
    assert found.lines == ()
    assert "too little to speak of shares" in " ".join(recover_table.notes(found))


def test_a_kill_between_writing_and_recording_is_mended(done, first, monkeypatch):
    point = first.place.point("direct", 64)
    before = (point / "judged.json").read_text()
    for name in ("judged.json", "compressed.json"):
        (point / name).unlink()
    recover(done[1], done[2], search=SMALL)
    again = json.loads((point / "judged.json").read_text())
    assert again | {"cpu_seconds": 0} == json.loads(before) | {"cpu_seconds": 0}


def test_the_command_line_draws_what_is_there(done, tmp_path):
    arguments = [
        "recover",
        str(done[0]),
        "--out",
        str(done[2]),
        "--table",
        "--json",
        str(tmp_path / "figures.json"),
    ]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "LSR, Fisher norm" in shown.stdout
    assert len(json.loads((tmp_path / "figures.json").read_text())["lines"]) == 9
    assert (done[2] / "embedded-parameters.png").stat().st_size > 5000
    assert "| embedded | direct Kronecker sum |" in (done[2] / "table.md").read_text()


def test_a_direct_sum_is_written_as_it_was_solved(first):
    checkpoint = open_checkpoint(first.place.lora / "adapter")
    statistics = read_statistics(first.place.statistics)
    written = changes(first, first.place.point("direct", 64) / "adapter")
    chosen = direct_sums(checkpoint, 64 * 4, statistics)
    assert 0 < len(chosen) < 4
    for name, matrix in written.items():
        if not name.endswith(".weight"):
            continue
        direct = chosen.get(name.removesuffix(".weight"))
        expected = 0.0 if direct is None else np.asarray(direct.form.to_matrix())
        np.testing.assert_allclose(matrix, np.broadcast_to(expected, matrix.shape), atol=1e-6)


def test_a_truncated_svd_is_the_best_of_its_rank(first, tmp_path):
    checkpoint = open_checkpoint(first.place.lora / "adapter")
    made = compress_lora(
        first.place.lora / "adapter", STRUCTURES["svd"], 1024, None, tmp_path / "svd"
    )
    assert made.parameters == 1024 * 4
    assert made.relative_error < 1e-6
    half = compress_lora(
        first.place.lora / "adapter", STRUCTURES["svd"], 128, None, tmp_path / "small"
    )
    size = sum(layer_pair(checkpoint, layer).norm ** 2 for layer in checkpoint.layers)
    values = sorted(
        v**2 for layer in checkpoint.layers for v in layer_pair(checkpoint, layer).svd[1]
    )[::-1]
    assert half.relative_error == pytest.approx((1 - sum(values[:4]) / size) ** 0.5, rel=1e-5)


def test_training_from_scratch_has_the_shapes_of_the_compressed_form(done, first):
    for structure, budget in (("lsr", 64), ("lsr", 256)):
        point = first.place.point(structure, budget)
        counts = {
            kind: json.loads(next(point.glob(f"{kind}/*/record.json")).read_text())[
                "adapter_parameters"
            ]
            for kind in ("recovered", "scratch")
        }
        assert counts["recovered"] == counts["scratch"]


def test_shape_settings_keep_to_the_layers_of_the_compressed_form(first):
    directory = first.place.point("lsr-paper", 0) / "adapter"
    names = [layer.name for layer in open_checkpoint(directory).layers]
    assert shape_settings(directory, "lsr")["target_modules"] == sorted(names)


def test_a_budget_below_the_smallest_direct_sum_is_refused(first, tmp_path):
    with pytest.raises(BudgetError, match="the smallest direct sum has"):
        compress_lora(
            first.place.lora / "adapter", STRUCTURES["direct"], 1, None, tmp_path / "none"
        )
    assert not (tmp_path / "none").exists()


def test_shape_settings_name_the_layers_that_are_kept(first):
    point = first.place.point("direct", 64) / "adapter"
    settings = shape_settings(point, "direct")
    assert set(settings["options"]["shape_pattern"]) == {
        f"^{name}$" for name in settings["target_modules"]
    }


def test_one_task_may_want_another_lora(tmp_path):
    text = SUITE.format(model="embedded", data="d").replace(
        "samples = 64", "lora_of.embedded = { learning_rate = 0.25 }"
    )
    (tmp_path / "suite.toml").write_text(text)
    suite = read_suite(tmp_path / "suite.toml")
    settings = lora_settings(suite, recover_plan(suite), "embedded", 0, "head")
    assert (settings.learning_rate, settings.steps) == (0.25, 20)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("budgets = [64, 256]\n", "", "budgets must be given"),
        (
            "budgets = [64, 256]",
            "budgets = [0]",
            r"\[recover\] budgets must be a list of whole numbers of 1 or more, got \[0\]",
        ),
        ("budgets = [64, 256]", 'budgets = "64"', r"\[recover\] budgets must be a list"),
        ("tune_budget = 64", "tune_budget = 65", "tune_budget 65 is not one of the budgets"),
        (
            "samples = 64",
            "sample = 64",
            (
                r"\[recover\] no setting is called 'sample'; did you mean 'samples'\? known: "
                r"budgets, steps"
            ),
        ),
        (
            '"lsr", "direct"',
            '"lsr", "tucker"',
            (
                r"\[recover\] structures must be a list of structures, which are lsr, .*, got "
                r"\['lsr', 'tucker'"
            ),
        ),
        ("judged = [128]", "judged = [64]", "judged must be budgets beside"),
        ("judged = [128]", "judged = [0]", "whole numbers of 1 or more"),
        ("samples = 64", "lora_of.CoIA = { steps = 5 }", "no task is called 'CoIA'"),
        ('scratch = ["lsr"]', 'scratch = ["lora-int8"]', "lora-int8 is not among the structures"),
        (
            "learning_rate = 5e-2, steps = 20",
            "learning_rate = -1.0",
            r"\[recover\] together: learning_rate must be",
        ),
        ("[recover]\n", "[other]\n", "no setting is called 'other'"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(old, new, message, tmp_path):
    text = SUITE.format(model="embedded", data="d")
    assert old in text
    (tmp_path / "suite.toml").write_text(text.replace(old, new))
    with pytest.raises(SuiteError, match=message):
        recover_plan(read_suite(tmp_path / "suite.toml"))


def test_experiments_that_ship_can_be_read():
    from benchmarks.lab.compare.comparison import check_options

    folder = Path(__file__).resolve().parents[2] / "experiments"
    # Suites with [loras.…] are the language driver's.
    files = [file for file in sorted(folder.glob("*.toml")) if "[loras." not in file.read_text()]
    assert len(files) >= 4
    for file in files:
        suite = read_suite(file)
        check_options(suite)
        if suite.recover:
            recover_plan(suite)


@pytest.mark.parametrize("structure", ["lsr", "direct"])
def test_statistics_of_another_base_are_refused_by_name(done, first, tmp_path, structure):
    statistics = read_statistics(first.place.statistics)
    declared = json.loads((first.place.lora / ADAPTER / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    assert statistics.metadata["settings"]["adapter_base"] == declared
    other = {**statistics.metadata["settings"], "adapter_base": "someone/else"}
    statistics.metadata = {**statistics.metadata, "settings": other}
    with pytest.raises(CheckpointError, match="of base someone/else, and the adapter is for"):
        compress_lora(
            first.place.lora / ADAPTER,
            STRUCTURES[structure],
            64,
            statistics,
            tmp_path / "out",
            SMALL,
        )
    assert not (tmp_path / "out").exists()


def test_the_precision_of_the_base_can_be_given_on_the_command_line(done):
    given = {"data": None, "base": None, "device": None}
    assert (
        open_suite(done[0], None, {**given, "precision": "bfloat16"}).common["precision"]
        == "bfloat16"
    )
    assert "precision" not in open_suite(done[0], None, {**given, "precision": None}).common
    (verb,) = (
        command for command in get_command(app).commands.values() if command.name == "recover"
    )
    assert any("--precision" in parameter.opts for parameter in verb.params)
