"""The script for a GPU runs small on a CPU: every arm, in bfloat16, in one JSON."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("peft")
pytest.importorskip("sklearn")

from tiny_language_model import make_base

from benchmarks.gpu import language, script
from lsrdecomp.training.embedded import embedded


def test_the_gpu_script_runs_small(tmp_path, capsys):
    place = embedded(tmp_path / "embedded", steps=40)
    base = ["--model", str(place.model), "--data", str(place.data)]
    length = ["--steps", "8", "--recover", "4", "--samples", "32"]
    out = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "figures.json")]
    script.main(["--small", *base, *length, *out])
    figures = json.loads((tmp_path / "figures.json").read_text())
    arms = figures["arms"]
    assert (figures["precision"], figures["steps"]) == ("bfloat16", 8)
    assert arms["LoRA"]["parameters"] == 4096
    assert arms["compressed to LSR"]["parameters"] == arms["LSR, trained on"]["parameters"] <= 4096 / 6
    trained = [name for name, values in arms.items() if "step_seconds" in values]
    assert trained == ["LoRA", "LSR, trained on", "LoRA, trained on", "LSR from scratch"]
    assert all(arms[name]["step_seconds"] > 0 and arms[name]["peak_bytes"] > 0 for name in trained)
    assert all(set(figures["majority"]) <= set(values) for values in arms.values())
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(arms)
    script.main(["--small", *base, *length, *out])  # finished runs are not done again
    again = json.loads((tmp_path / "figures.json").read_text())["arms"]
    assert again["LSR, trained on"] == arms["LSR, trained on"]


def sums(path, count):
    """Questions whose answers are numbers, in the words of the tiny tokenizer."""
    rows = [{"prompt": f"user one {i % 3}", "completion": f"two {1000 + i % 3:,}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_language_model_is_compared_with_the_table_of_peft(tmp_path, capsys):
    base, out = str(make_base(tmp_path)), tmp_path / "figures.json"
    given = ["--llm", base, "--data", sums(tmp_path / "train.jsonl", 12), "--test", sums(tmp_path / "test.jsonl", 6)]
    given += ["--rank", "4", "--steps", "2", "--batch", "4", "--samples", "8", "--new-tokens", "3", "--device", "cpu"]
    given += ["--max-length", "32", "--ratios", "2.0", "8.0", "--structures", "LSR", "SVD"]
    given += ["--work", str(tmp_path / "work"), "--out", str(out)]
    script.main(given)
    figures = json.loads(out.read_text())
    lora, forms = figures["lora"], figures["forms"]
    config = json.loads((tmp_path / "work" / "lora" / "adapter" / "adapter_config.json").read_text())
    assert config["use_rslora"]
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
    assert lora["parameters"] == 2 * 4 * (32 + 32 + 32 + 16)
    assert [(row["structure"], row["ratio"]) for row in forms] == [
        ("LSR", 2.0),
        ("LSR", 8.0),
        ("SVD", 2.0),
        ("SVD", 8.0),
    ]
    assert {row["ratio"]: (row["peft_rank"], row["peft_points"]) for row in forms} == {
        2.0: ("rank 32", -1.44),
        8.0: ("rank 8", -9.55),
    }
    for row in forms:
        assert row["parameters"] * row["ratio"] <= lora["parameters"]
        assert row["points"] == round(row["accuracy"] - lora["accuracy"], 2)
        assert row["kl"] > 0
    assert forms[0]["kept"] > forms[1]["kept"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[2] == "| fewer parameters | LSR | SVD | PEFT, on its own LoRA |"
    assert printed[-1].startswith("| 8 × | ")
    assert printed[-1].endswith("| -9.55 (rank 8) |")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*") if path.is_file()}
    script.main(given)  # what is finished is not done again
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 1,234 it is", 1234.0), ("3 and -2.5.", -2.5), ("#### 18", 18.0), ("none", None), ("1, 2, 3", 3.0)],
)
def test_an_answer_is_its_last_number(text, number):
    assert language.last_number(text) == number


def test_the_language_part_says_what_it_reads(capsys):
    with pytest.raises(SystemExit):
        script.main(["--llm", "x", "--data", "/nowhere.jsonl"])
    assert "--data /nowhere.jsonl is no file" in capsys.readouterr().err
