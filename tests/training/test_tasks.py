"""Tasks: published files are read as they are, bad rows are named, metrics are right."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from lsrdecomp.calibration.dataset import DataError
from lsrdecomp.errors import CheckpointError
from lsrdecomp.training.tasks import TASKS, find_task

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


def test_published_majorities(shared):
    read = {
        name: TASKS[name].read(shared / "glue", "dev") for name in ("CoLA", "MRPC", "WSC", "STS-B")
    }
    assert TASKS["MRPC"].baseline(read["MRPC"]) == pytest.approx(
        {"accuracy": 279 / 408, "f1": 2 * 279 / (408 + 279)}
    )
    assert TASKS["WSC"].baseline(read["WSC"]) == pytest.approx({"accuracy": 66 / 104})
    assert TASKS["CoLA"].baseline(read["CoLA"])["matthews"] == 0.0
    assert TASKS["STS-B"].baseline(read["STS-B"]) == {"pearson": 0.0, "spearman": 0.0}


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
    assert find_task(tmp_path / "MRPC") is TASKS["MRPC"]


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
    with pytest.raises(DataError, match="no task is called"):
        find_task(tmp_path)


def test_metrics_agree_with_their_definitions():
    labels, answers = np.array([1, 1, 0, 0, 1, 0, 1, 1.0]), np.array([1, 0, 0, 1, 1, 0, 1, 0.0])
    true_positive, true_negative, false_positive, false_negative = 3, 2, 1, 2
    f1 = 2 * true_positive / (2 * true_positive + false_positive + false_negative)
    product = (3 + 1) * (3 + 2) * (2 + 1) * (2 + 2)
    matthews = (true_positive * true_negative - false_positive * false_negative) / math.sqrt(
        product
    )
    assert TASKS["MRPC"].score(labels, answers) == pytest.approx({"accuracy": 5 / 8, "f1": f1})
    assert TASKS["CoLA"].score(labels, answers)["matthews"] == pytest.approx(matthews)
    ranks = TASKS["STS-B"].score([1.0, 2.0, 4.0], [1.0, 10.0, 11.0])
    assert ranks["spearman"] == pytest.approx(1.0)
    assert ranks["pearson"] == pytest.approx(np.corrcoef([1.0, 2.0, 4.0], [1.0, 10.0, 11.0])[0, 1])
