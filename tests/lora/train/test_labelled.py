"""Files with labels: rows are read as they are, bad ones are named, metrics are right."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

pytest.importorskip("sklearn")

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.base.dataset import DataError
from lsrdecomp.lora.train.finetune_settings import SettingsError
from lsrdecomp.lora.train.labelled import Labels, find_labels, texts_of
from lsrdecomp.lora.train.run_data import split_off

TWO = Labels(("0", "1"))
SCORES = Labels()


def json_lines(file, *rows):
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_classes_are_numbered_in_the_order_of_their_names(tmp_path):
    words = tmp_path / "words.tsv"
    words.write_text("text\tlabel\nso so\tmeh\nbad\tbad\nfine\tgood\nbad\tbad\n")
    labels = find_labels(words)
    assert labels == Labels(("bad", "good", "meh"))
    assert [example.label for example in labels.read(words)] == [2.0, 0.0, 1.0, 0.0]
    assert (labels.outputs, TWO.outputs, SCORES.outputs) == (3, 2, 1)
    numbers = [{"text": "a", "label": label} for label in (10, 9, 2)]
    assert find_labels(json_lines(tmp_path / "numbers.jsonl", *numbers)).names == ("2", "9", "10")
    truth = [{"text": "a", "label": label} for label in (True, False)]
    assert find_labels(json_lines(tmp_path / "truth.jsonl", *truth)).names == ("false", "true")


def test_second_texts_and_choices(tmp_path):
    pairs = json_lines(tmp_path / "pairs.jsonl", {"text": "a", "second": "b", "label": "2.5"})
    (example,) = SCORES.read(pairs)
    assert (example.choices, example.label) == ((("a", "b"),), 2.5)
    row = {"text": "It fell. Why?", "choices": ["a", "b", "c"], "label": 2}
    file = json_lines(tmp_path / "choices.jsonl", row, row)
    labels = find_labels(file)
    assert labels == Labels(("0", "1", "2"), has_choices=True)
    assert labels.outputs == 1
    first, _ = labels.read(file)
    assert first.label == 2.0
    assert texts_of([first]) == [("It fell. Why?", choice) for choice in "abc"]
    with pytest.raises(DataError, match='line 1: "choices" must be a list of 2 texts'):
        Labels(("0", "1"), has_choices=True).read(file)


@pytest.mark.parametrize(
    ("labels", "text", "message"),
    [
        (TWO, "text\tlabel\ngood\t1\nbad\n", "line 3: 1 columns, expected 2"),
        (TWO, "text\tlabel\ngood\t7\n", "line 2: label '7' is not one of 0, 1"),
        (TWO, "sentence\tlabel\ngood\t1\n", 'needs a text in "text"; it has sentence, label'),
        (TWO, "text\tclass\ngood\t1\n", 'text or a number in "label"; it has text, class'),
        (TWO, "text\tlabel\n", "no examples"),
        (SCORES, "text\tlabel\na\tnan\n", "line 2: score 'nan' is not a finite number"),
        (SCORES, "text\tlabel\na\thigh\n", "line 2: score 'high' is not a finite number"),
    ],
)
def test_a_bad_row_is_named(tmp_path, labels, text, message):
    (tmp_path / "dev.tsv").write_text(text)
    with pytest.raises(DataError, match=message):
        labels.read(tmp_path / "dev.tsv")


def test_one_class_is_none_and_a_missing_file_is_named(tmp_path):
    (tmp_path / "one.tsv").write_text("text\tlabel\na\tyes\nb\tyes\n")
    with pytest.raises(DataError, match="1 different labels; there must be at least two"):
        find_labels(tmp_path / "one.tsv")
    with pytest.raises(CheckpointError, match=r"none\.tsv: no such file"):
        find_labels(tmp_path / "none.tsv")
    with pytest.raises(DataError, match="is Parquet; write it as JSON lines"):
        find_labels(tmp_path / "train.parquet")


def test_metrics_agree_with_their_definitions():
    labels, answers = np.array([1, 1, 0, 0, 1, 0, 1, 1.0]), np.array([1, 0, 0, 1, 1, 0, 1, 0.0])
    true_positive, true_negative, false_positive, false_negative = 3, 2, 1, 2
    f1 = 2 * true_positive / (2 * true_positive + false_positive + false_negative)
    product = (3 + 1) * (3 + 2) * (2 + 1) * (2 + 2)
    matthews = (true_positive * true_negative - false_positive * false_negative) / math.sqrt(
        product
    )
    expected = {"accuracy": 5 / 8, "f1": f1, "matthews": matthews}
    assert TWO.score(labels, answers) == pytest.approx(expected)
    assert list(Labels(("a", "b", "c")).score(labels, answers)) == [
        "accuracy",
        "macro_f1",
        "matthews",
    ]
    assert Labels(("0", "1"), has_choices=True).score(labels, answers) == {"accuracy": 5 / 8}
    ranks = SCORES.score([1.0, 2.0, 4.0], [1.0, 10.0, 11.0])
    assert ranks["spearman"] == pytest.approx(1.0)
    assert ranks["pearson"] == pytest.approx(np.corrcoef([1.0, 2.0, 4.0], [1.0, 10.0, 11.0])[0, 1])


def test_a_share_that_leaves_one_side_empty_is_refused():
    examples = list(range(10))
    remaining, apart = split_off(examples, 0.2, seed=0)
    assert (len(remaining), len(apart)) == (8, 2)
    assert sorted(remaining + apart) == examples
    for share, count in ((0.01, 0), (0.99, 10)):
        with pytest.raises(SettingsError, match=f"leaves {count} of them apart"):
            split_off(examples, share, seed=0)
