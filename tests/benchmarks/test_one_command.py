"""The record of commands as typed: rows one by one, the cheapest first, and none made twice."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from tiny_bases import write_directories

import lsrdecomp as lsr
from benchmarks.cost import one_command
from lsrdecomp.lora.search.measured_settings import MeasuredSettings


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the benchmark with rows that cost nothing; returns what was measured, and the rows."""
    for task in ("e2e", "arithmetic"):
        (tmp_path / "loras" / task).mkdir(parents=True)
    out = tmp_path / "record.json"

    def run(*words):
        made = []

        def measured(name, draw, *_):
            made.append((name, draw))
            if len(made) == 8:
                raise KeyboardInterrupt
            return {"name": name, "seed": draw}

        monkeypatch.setattr(one_command, "measured", measured)
        fixed = [str(tmp_path), "--loras", str(tmp_path / "loras"), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["one_command", *fixed, *words])
        try:
            one_command.main()
        except KeyboardInterrupt:
            made.pop()
        return made, json.loads(out.read_text())["rows"]

    return run


def test_a_killed_run_goes_on_row_by_row_and_cheap_rows_come_first(run, capsys):
    words = ("--draws", "0", "1", "--resume")
    first, rows = run(*words)
    assert first[:3] == [
        ("smollm2 keep .9", 0),
        ("smollm2 answers .9", 0),
        ("smollm2 keep .95 distill 60", 0),
    ]
    assert [(row["name"], row["seed"]) for row in rows] == first
    assert "extraction keep .95 distill 60 is left out: no LoRA" in capsys.readouterr().err
    second, rows = run(*words)
    assert not set(first) & set(second)
    names = {
        name
        for name, command in one_command.COMMANDS.items()
        if command.task in ("e2e", "arithmetic")
    }
    expected = {(name, draw) for name in names for draw in (0, 1)}
    assert {(row["name"], row["seed"]) for row in rows} == expected
    assert run(*words)[0] == []


def test_a_row_is_made_anew_unless_it_is_to_stay(run):
    words = ("--only", "smollm2 keep .9")
    assert run(*words)[0] == run(*words)[0] == [("smollm2 keep .9", 0)]
    assert len(run(*words)[1]) == 1


def test_what_a_row_reads_is_what_compress_writes(tmp_path):
    folder = write_directories(tmp_path, "SEQ_CLS", layers=1)
    texts = [f"w{i % 30} w{i % 7} w{i % 11}" for i in range(48)]
    settings = MeasuredSettings(max_length=16)
    result = lsr.compress(
        folder / "lora", base=folder / "base", data=texts, ratio=4, distill=4, settings=settings
    )
    row = one_command.written(result.save(tmp_path / "out"))
    assert row["kept"] == result.fidelity.kept
    assert row["bytes"] == result.fidelity.bytes_after
    assert (row["answered"], row["alike"]) == (result.fidelity.answered, result.fidelity.n_matching)
    assert row["weight_bytes"] == (tmp_path / "out" / "adapter_model.safetensors").stat().st_size
    assert row["directory_bytes"].keys() >= {"README.md", "adapter_config.json"}
    assert row["tried"][0]["steps"] == 4


def test_reviews_that_judge_are_none_that_the_command_had(tmp_path, monkeypatch):
    reviews = tmp_path / "train.tsv"
    lines = [f"review {i}\t{i % 2}" for i in range(40)]
    reviews.write_text("\n".join(["sentence\tlabel", *lines]))
    monkeypatch.setattr(one_command, "SENTENCES", 30)
    monkeypatch.setattr(one_command, "FURTHER", 10)
    arguments, given = Namespace(reviews=reviews), tmp_path / "given.txt"
    assert one_command.draw_prompts(one_command.REVIEWS, 1, arguments, given) == 30
    further = one_command.further_reviews(given, 1, arguments)
    every = {*given.read_text().splitlines(), *(text for text, _ in further)}
    assert every == {f"review {i}" for i in range(40)}
