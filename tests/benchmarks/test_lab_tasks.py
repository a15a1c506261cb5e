"""Tasks: published files are read as they are, and rewritten so that `finetune` reads the same."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("sklearn")

from benchmarks.lab.embedded import EmbeddedRecipe, embedded
from benchmarks.lab.tasks import TASKS, metrics_of, published, write_files
from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.base.dataset import DataError
from lsrdecomp.lora.train.finetune_settings import SettingsError
from lsrdecomp.lora.train.labelled import Labels, find_labels

SIZES = {
    "CoLA": (8551, 1043),
    "SST-2": (67349, 872),
    "MRPC": (3668, 408),
    "STS-B": (5749, 1500),
    "RTE": (2490, 277),
    "CB": (250, 56),
    "COPA": (400, 100),
    "WSC": (554, 104),
    "BoolQ": (None, 3270),
}


def written(directory, task, text, split="dev"):
    file = TASKS[task].file(directory, split)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="")
    return directory


@pytest.mark.parametrize("name", SIZES)
def test_published_files_have_their_published_sizes(shared, name):
    for split, size in zip(("train", "dev"), SIZES[name], strict=True):
        if size is not None:
            examples = TASKS[name].read(shared / "glue", split)
            assert len(examples) == size
            assert all(
                first and second != "" for example in examples for first, second in example.choices
            )


@pytest.mark.parametrize("name", ["RTE", "CB", "COPA", "WSC", "STS-B"])
def test_finetune_reads_what_was_published(shared, name, tmp_path, monkeypatch):
    """Classes keep their published order, which decides on the start of the head."""
    monkeypatch.setenv("LSRDECOMP_CACHE", str(tmp_path))
    asked = {"base": "BASE", "task": name, "data": str(shared / "glue")}
    write_files(asked)
    settings = published(asked)
    labels = Labels() if settings["task"] == "scores" else find_labels(settings["data"])
    for file, split in ((settings["data"], "train"), (settings["dev_data"], "dev")):
        assert labels.read(file) == TASKS[name].read(shared / "glue", split)


def test_published_majorities(shared, tmp_path, monkeypatch):
    monkeypatch.setenv("LSRDECOMP_CACHE", str(tmp_path))

    def baseline(name):
        settings = {"base": "BASE", "task": name, "data": str(shared / "glue")}
        write_files(settings)
        files = published(settings)
        labels = Labels() if files["task"] == "scores" else find_labels(files["data"])
        return metrics_of(name, labels.baseline(labels.read(files["dev_data"])))

    assert baseline("MRPC") == pytest.approx({"accuracy": 279 / 408, "f1": 2 * 279 / (408 + 279)})
    assert baseline("WSC") == pytest.approx({"accuracy": 66 / 104})
    assert baseline("CoLA")["matthews"] == 0.0
    assert baseline("STS-B") == {"pearson": 0.0, "spearman": 0.0}


def test_the_marked_pronoun_of_wsc_is_the_published_one(shared):
    rows = [
        json.loads(line)
        for line in TASKS["WSC"].file(shared / "glue", "dev").read_text().splitlines()
    ]
    agreeing = 0
    for row, example in zip(rows, TASKS["WSC"].read(shared / "glue", "dev"), strict=True):
        marked = example.choices[0][0].split(" * ")[1]
        agreeing += marked.lower().startswith(row["target"]["span2_text"].lower())
    assert agreeing == len(rows) - 1  # one published index is off by one word


def test_lone_quotes_and_byte_order_marks_are_text(tmp_path):
    row = '1\t1\t2\the said " yes\t" no quotation ends here'
    written(
        tmp_path, "MRPC", f"\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n{row}\r\n{row}\r\n"
    )
    examples = TASKS["MRPC"].read(tmp_path, "dev")
    assert [example.choices for example in examples] == [
        (('he said " yes', '" no quotation ends here'),)
    ] * 2
    assert examples[0].label == 1.0
    # The task's own directory will do.
    assert TASKS["MRPC"].read(tmp_path / "MRPC", "dev") == examples


def test_cola_has_no_header(tmp_path):
    written(tmp_path, "CoLA", "gj04\t1\t\tOne sentence.\ncj99\t0\t*\tAnother the.\n")
    assert [(e.choices[0][0], e.label) for e in TASKS["CoLA"].read(tmp_path, "dev")] == [
        ("One sentence.", 1.0),
        ("Another the.", 0.0),
    ]


def test_boolean_labels_and_choices(tmp_path):
    written(
        tmp_path, "BoolQ", json.dumps({"question": "is it", "passage": "It is.", "answer": True})
    )
    assert TASKS["BoolQ"].read(tmp_path, "dev")[0].label == 1.0
    row = {"premise": "It fell.", "choice1": "a", "choice2": "b", "question": "cause", "label": 1}
    written(tmp_path, "COPA", json.dumps(row))
    example = TASKS["COPA"].read(tmp_path, "dev")[0]
    question = "It fell. What was the cause of this?"
    assert (example.choices, example.label) == (((question, "a"), (question, "b")), 1.0)


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("SST-2", "sentence\tlabel\ngood\t1\nbad\n", "line 3: 1 columns, expected 2"),
        ("SST-2", "sentence\tlabel\ngood\t1\textra\n", "line 2: 3 columns, expected 2"),
        ("SST-2", "sentence\tlabel\ngood\t7\n", "line 2: label '7' is not one of 0, 1"),
        ("SST-2", "text\tlabel\ngood\t1\n", "line 2: SST-2 needs 'sentence'; it has text, label"),
        ("SST-2", "sentence\tlabel\n", "no examples"),
        ("SST-2", "", "no examples"),
        (
            "STS-B",
            "sentence1\tsentence2\tscore\na\tb\tnan\n",
            "line 2: score 'nan' is not a finite number",
        ),
        (
            "CB",
            '{"premise": "a", "hypothesis": "b", "label": "neutral"}\n{"prem\n',
            "line 2: not JSON",
        ),
        ("CB", "[1]\n", "line 1: a list; each example must be a JSON object"),
        (
            "WSC",
            '{"text": "a b", "target": {"span2_index": 9}, "label": true}\n',
            "line 1: WSC needs",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path, task, text, message):
    written(tmp_path, task, text)
    with pytest.raises(DataError, match=message):
        TASKS[task].read(tmp_path, "dev")


def test_bytes_that_are_not_text_are_named(tmp_path):
    written(tmp_path, "SST-2", "")
    TASKS["SST-2"].file(tmp_path, "dev").write_bytes(b"sentence\tlabel\n\xff\xfe\t1\n")
    with pytest.raises(DataError, match=r"dev\.tsv: not UTF-8"):
        TASKS["SST-2"].read(tmp_path, "dev")


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"dev\.tsv: no such file"):
        TASKS["SST-2"].read(tmp_path, "dev")
    with pytest.raises(DataError, match="has no split 'test' with labels; there are: train, dev"):
        TASKS["SST-2"].read(tmp_path, "test")
    with pytest.raises(SettingsError, match="task must be one of CoLA, .*embedded, text, classes"):
        published({"base": "BASE", "task": "SST"})
    with pytest.raises(SettingsError, match="task RTE reads files: give data"):
        published({"base": "BASE", "task": "RTE"})


def test_the_embedded_task_is_made_once_and_the_same_each_time(tmp_path):
    place = embedded(tmp_path / "place", recipe=EmbeddedRecipe(steps=1))
    labels = find_labels(place.data / "train.tsv")
    assert labels.names == tuple("0123456789")
    assert len(labels.read(place.data / "train.tsv")) == 600
    dev = labels.read(place.data / "dev.tsv")
    assert len(dev) == 300
    words = [example.choices[0][0].split() for example in dev]
    assert {len(picture) for picture in words} == {16}
    assert {int(word) for picture in words for word in picture} == set(range(17))
    first, second = (
        embedded(tmp_path / name, recipe=EmbeddedRecipe(steps=1)) for name in ("one", "two")
    )
    assert (first.model / "model.safetensors").read_bytes() == (
        second.model / "model.safetensors"
    ).read_bytes()
    before = (first.model / "model.safetensors").stat().st_mtime_ns
    assert embedded(tmp_path / "one") == first
    assert (first.model / "model.safetensors").stat().st_mtime_ns == before
