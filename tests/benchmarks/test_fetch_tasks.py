"""What is fetched from the hub is written so that the tasks read it as the published files."""

from __future__ import annotations

import pytest

from benchmarks.lab import fetch_tasks
from benchmarks.lab.tasks import TASKS

PAIR = {"sentence1": 'He said "no.', "sentence2": "A tab\tand a\nline."}
SPANS = {"span1_index": 0, "span1_text": "Mark", "span2_index": 2, "span2_text": "He"}
COPA = {"premise": "It rained.", "choice1": "Dry.", "choice2": "Wet.", "question": "effect"}
ROWS = {
    "CoLA": ({"sentence": "Him sleeps."}, 0, 0),
    "SST-2": ({"sentence": "a fine film "}, 1, 1),
    "MRPC": (PAIR, 1, 1),
    "STS-B": (PAIR, 3.75, 3.75),
    "RTE": (PAIR, 1, 1),
    "CB": ({"premise": "Who knows?", "hypothesis": "someone knows"}, 2, 2),
    "COPA": (COPA, 1, 1),
    "WSC": ({"text": "Mark lied. He knew.", **SPANS}, 1, 1),
    "BoolQ": ({"question": "is it", "passage": "It is."}, 1, 1),
}
"""A row as the hub has it, its label there, and the label that the task must read."""


@pytest.mark.parametrize("name", ROWS)
def test_a_fetched_task_is_read_as_published(name, tmp_path):
    row, theirs, label = ROWS[name]
    task = TASKS[name]
    assert (
        fetch_tasks.write(task, [{**row, "label": theirs}] * 2, task.file(tmp_path, "train")) == 2
    )
    examples = task.read(tmp_path, "train")
    assert [example.label for example in examples] == [label, label]
    words = {
        word for choice in examples[0].choices for text in choice if text for word in text.split()
    }
    said = [value for key, value in row.items() if isinstance(value, str) and key != "question"]
    assert {word for text in said for word in text.split()} <= words | {"effect"}


def test_every_task_with_files_has_a_source():
    assert set(fetch_tasks.SOURCES) == set(TASKS) - {"embedded"} == set(fetch_tasks.PUBLISHED)
