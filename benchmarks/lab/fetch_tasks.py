"""Fetch GLUE and SuperGLUE from the hub and write them as published, for ``--data``.

    pip install datasets
    python -m benchmarks.lab.fetch_tasks glue/ [--tasks MRPC RTE …]

Writes ``glue/<task>/train`` and ``dev`` as tsv or jsonl; a task that is there is left alone. The
terms are upstream's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab.tasks import TASKS, Task

GLUE, SUPERGLUE = "nyu-mll/glue", "aps/super_glue"
SOURCES = {
    "CoLA": (GLUE, "cola"),
    "SST-2": (GLUE, "sst2"),
    "MRPC": (GLUE, "mrpc"),
    "STS-B": (GLUE, "stsb"),
    "RTE": (GLUE, "rte"),
    "CB": (SUPERGLUE, "cb"),
    "COPA": (SUPERGLUE, "copa"),
    "WSC": (SUPERGLUE, "wsc"),
    "BoolQ": (SUPERGLUE, "boolq"),
}
SPLITS = {"train": "train", "dev": "validation"}
Row = Mapping[str, Any]


def _wsc(row: Row) -> dict[str, Any]:
    spans = ("span1_index", "span2_index", "span1_text", "span2_text")
    return {
        "text": row["text"],
        "target": {name: row[name] for name in spans},
        "label": bool(row["label"]),
    }


# A row of the hub as the published file has it; class labels are numbers there and names here.
PUBLISHED: Mapping[str, Callable[[Row], dict[str, Any]]] = {
    "CoLA": lambda row: {
        "source": "",
        "label": row["label"],
        "mark": "",
        "sentence": row["sentence"],
    },
    "SST-2": lambda row: {"sentence": row["sentence"], "label": row["label"]},
    "MRPC": lambda row: {
        "Quality": row["label"],
        "#1 String": row["sentence1"],
        "#2 String": row["sentence2"],
    },
    "STS-B": lambda row: {
        "sentence1": row["sentence1"],
        "sentence2": row["sentence2"],
        "score": row["label"],
    },
    "RTE": lambda row: {
        **_named("RTE", row),
        "sentence1": row["sentence1"],
        "sentence2": row["sentence2"],
    },
    "CB": lambda row: {
        **_named("CB", row),
        "premise": row["premise"],
        "hypothesis": row["hypothesis"],
    },
    "COPA": lambda row: {
        key: row[key] for key in ("premise", "choice1", "choice2", "question", "label")
    },
    "WSC": _wsc,
    "BoolQ": lambda row: {
        "question": row["question"],
        "passage": row["passage"],
        "answer": bool(row["label"]),
    },
}


def _named(task: str, row: Row) -> dict[str, str]:
    return {"label": TASKS[task].labels[row["label"]]}


def write(task: Task, rows: Iterable[Row], path: Path) -> int:
    """Write rows of the hub as the published file; returns how many."""
    records = [PUBLISHED[task.name](row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8", newline="") as file:
        if task.suffix == "jsonl":
            file.writelines(json.dumps(record) + "\n" for record in records)
        else:
            names = list(records[0])
            if task.columns is None:
                file.write("\t".join(names) + "\n")
            for record in records:
                file.write("\t".join(" ".join(str(record[name]).split()) for name in names) + "\n")
    part.replace(path)
    return len(records)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=SOURCES, default=list(SOURCES))
    arguments = parser.parse_args()
    from datasets import load_dataset

    for name in arguments.tasks:
        for split, theirs in SPLITS.items():
            path = TASKS[name].file(arguments.out, split)
            if not path.exists():
                count = write(TASKS[name], load_dataset(*SOURCES[name], split=theirs), path)
                print(f"{path}: {count:,} examples", flush=True)


if __name__ == "__main__":
    main()
