"""PEFT's published rows, and what a record of the script puts beside them."""

import json
import re

import pytest

from benchmarks.gpu import arena


def record(**changes):
    """Of a run at three sizes, in two stages; the LoRA has the parameters of theirs."""
    model = {"model": "models/Llama-3.2-3B"} | changes
    first = [
        {"structure": "LoRA", "ratio": 1.0, "accuracy": 50.5},
        {"structure": "LSR", "ratio": 8.0, "accuracy": 45.25},
    ]
    second = [
        {"structure": "SVD", "ratio": 8.0, "accuracy": 41.0},
        {"structure": "LSR", "ratio": 140.0, "accuracy": 39.0},
    ]
    stages = {"large lora": {"parameters": 18_350_080}}
    return {
        "stages": stages
        | {
            f"large answers {i}": model | {"rows": r}
            for i, r in enumerate((first, second), start=1)
        }
    }


def cells(lines, name):
    """What stands behind the published accuracy of a row."""
    (row,) = (line for line in lines if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in row.split("|")[5:-1]]


def test_without_a_record_every_cell_says_that_it_was_not_run(tmp_path, capsys):
    arena.main(["--record", str(tmp_path / "none.json")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(arena.PUBLISHED["rows"])
    assert all("not run" in line for line in lines[2:])
    assert not re.search(r"\d", "".join("|".join(line.split("|")[5:]) for line in lines))
    assert max(map(len, lines)) <= 100
    assert "| UniLora r = 4 | trained | 131,072 | 40.79 | not run | not run |" in lines


def test_what_was_measured_stands_beside_the_rows_of_its_size(tmp_path, capsys):
    (tmp_path / "gpu.json").write_text(json.dumps(record()))
    arena.main(["--record", str(tmp_path / "gpu.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("| 52.92 | LoRA 50.50 |  |")
    assert cells(lines, "LoKr r = 32, factor 4") == ["45.25", "41.00"]
    assert cells(lines, "`rank=8`") == ["45.25", "41.00"]
    assert cells(lines, "UniLora r = 4") == ["39.00", "not run"]
    assert cells(lines, "`rank=16`") == ["not run", "not run"]
    assert cells(lines, "`rank=0.5`") == ["not run", "not run"]  # 6 % smaller


@pytest.mark.parametrize("other", [record(model="SmolLM2-135M"), record() | {"small": True}])
def test_another_base_or_a_small_walk_fills_nothing_in(other):
    assert arena.table(other) == arena.table({})


def test_the_files_become_prompts_as_peft_writes_them(tmp_path, capsys):
    pairs = [
        {"query": "1 + 1?", "response": "The answer is: 2", "type": "x"},
        {"query": "2", "response": "2" * 1300},
    ]
    (tmp_path / "train.json").write_text(json.dumps(pairs))
    (tmp_path / "test.jsonl").write_text(
        json.dumps({"question": "3?", "answer": "é\n#### 3"}) + "\n"
    )
    files = [str(tmp_path / "train.json"), str(tmp_path / "test.jsonl")]
    arena.main(["--prepare", *files, "--out", str(tmp_path / "arena")])
    read = {
        name: (tmp_path / "arena" / f"{name}.jsonl").read_text("utf-8")
        for name in ("train", "test")
    }
    prompt = "Question: {} Think step by step.\nAnswer:"
    assert json.loads(read["train"]) == {
        "prompt": prompt.format("1 + 1?"),
        "completion": "The answer is: 2",
    }
    assert json.loads(read["test"]) == {"prompt": prompt.format("3?"), "completion": "é\n#### 3"}
    assert "train.jsonl: 1 examples" in capsys.readouterr().out
