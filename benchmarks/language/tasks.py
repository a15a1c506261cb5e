"""The tasks of the language-model suite as JSON lines, from the files that their authors published.

    python -m benchmarks.language.tasks DIRECTORY OUT [--held 300]

DIRECTORY holds e2e/, glue/SST-2/, glue/CoLA/ or some of them. Writes OUT/TASK/train.jsonl and
held.jsonl. A task whose files are not there is left out and named; arithmetic needs none.

- E2E: devset.csv to train on (trainset.csv is larger); held out are meaning representations of
  testset_w_refs.csv that occur in neither, one line each, with all references.
- Extraction: the same files the other way round, a sentence to its meaning representation.
- GLUE's sentences become prompts whose completion is a word.
- Arithmetic: sums of prices with the way to the answer, made by a seed.
- Tickets: messages to a shop to the line that its clerk writes down, made by a seed.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEED = 20260101
TRAIN, HELD = 2500, 96
LONGEST = 240  # characters of prompt and completion: about 64 tokens
Row = dict[str, Any]
ITEMS = ("pens", "books", "apples", "mugs", "lamps", "tickets", "shirts", "plants")
NAMES = ("Ann", "Ben", "Cora", "Dev", "Eva", "Finn")


def e2e(directory: Path) -> tuple[list[Row], list[Row]]:
    """Meaning representations to sentences."""
    train = [_e2e(mr, [ref]) for mr, ref in _pairs(directory / "e2e" / "devset.csv")]
    seen = {row["prompt"] for row in train}
    references: dict[str, list[str]] = {}
    for mr, ref in _pairs(directory / "e2e" / "testset_w_refs.csv"):
        references.setdefault(mr, []).append(ref)
    held = [_e2e(mr, refs) for mr, refs in references.items()]
    return train, [row for row in held if row["prompt"] not in seen]


def _e2e(mr: str, references: list[str]) -> Row:
    row: Row = {"prompt": f"Data: {mr} Text:", "completion": f" {references[0]}"}
    return row | {"references": references} if len(references) > 1 else row


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            yield row["mr"].strip(), row["ref"].strip()


def extraction(directory: Path) -> tuple[list[Row], list[Row]]:
    """Read sentences to meaning representations; held out are representations not trained on."""
    seen = {mr for mr, _ in _pairs(directory / "e2e" / "devset.csv")}
    train = [_extraction(*pair) for pair in _pairs(directory / "e2e" / "devset.csv")]
    held = [
        _extraction(mr, ref)
        for mr, ref in _pairs(directory / "e2e" / "testset_w_refs.csv")
        if mr not in seen
    ]
    return train, held


def _extraction(mr: str, reference: str) -> Row:
    return {"prompt": f"Text: {reference} Data:", "completion": f" {mr}"}


def sst2(directory: Path) -> tuple[list[Row], list[Row]]:
    """Reviews to one word."""
    words = {"0": " negative", "1": " positive"}

    def rows(split: str) -> Iterator[Row]:
        text = (directory / "glue" / "SST-2" / f"{split}.tsv").read_text(encoding="utf-8-sig")
        for line in text.splitlines()[1:]:
            sentence, label = line.rsplit("\t", 1)
            yield {
                "prompt": f"Review: {sentence.strip()} Sentiment:",
                "completion": words[label.strip()],
            }

    # Phrases of a few words, of which the training set is full, say little.
    return [row for row in rows("train") if len(row["prompt"]) > 50], list(rows("dev"))


def cola(directory: Path) -> tuple[list[Row], list[Row]]:
    """Sentences to whether they are acceptable."""

    def rows(split: str) -> Iterator[Row]:
        text = (directory / "glue" / "CoLA" / f"{split}.tsv").read_text(encoding="utf-8-sig")
        for line in text.splitlines():
            _, label, _, sentence = line.split("\t")
            word = " acceptable" if label == "1" else " unacceptable"
            yield {"prompt": f"Sentence: {sentence.strip()} Grammar:", "completion": word}

    return list(rows("train")), list(rows("dev"))


def arithmetic(directory: Path) -> tuple[list[Row], list[Row]]:
    """Small word problems with their solution in two steps, in the manner of GSM8K."""
    rng = np.random.default_rng(SEED)
    rows: dict[str, Row] = {}
    while len(rows) < TRAIN + 10 * HELD:
        name, (first, second) = rng.choice(NAMES), rng.choice(ITEMS, 2, replace=False)
        count, price, more, other = (int(value) for value in rng.integers(2, 10, 4))
        prompt = (
            f"Question: {name} buys {count} {first} at {price} dollars each and {more} {second} "
            f"at {other} dollars each. How many dollars is that in all?\nAnswer:"
        )
        cost, rest = count * price, more * other
        total = cost + rest
        steps = (
            f" {count} * {price} = {cost}, {more} * {other} = {rest}, {cost} + {rest} = {total}."
            f" #### {total}"
        )
        rows[prompt] = {"prompt": prompt, "completion": steps}
    made = list(rows.values())
    return made[: -10 * HELD], made[-10 * HELD :]


DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COMPLAINTS = {
    "late": ("has still not arrived", "was due on {day} and is not here", "is lost, I fear"),
    "broken": ("came in pieces", "broke on {day}", "does not work any more since {day}"),
    "wrong": ("is not what I ordered", "has the wrong size", "is blue, and I asked for red"),
    "praise": ("is lovely, thank you", "came early on {day}, well done", "is just what I wanted"),
}
"""What customers say of an order, by the word with which a clerk files it."""
MESSAGES = (
    "Hello, this is {name}. The {item} of order {order} {complaint}. {wish}",
    "My {item} {complaint}. {wish} The order is {order}. {name}",
    "Order {order}: the {item} {complaint}. {wish} Yours, {name}",
    "{wish} The {item} {complaint}. I am {name}, order {order}.",
)
WISHES = {
    "refund": ("I want my money back.", "Please refund me.", "Kindly return what I paid."),
    "replace": ("Please send another.", "Can you exchange it?", "I would like a new one."),
    "call": ("Please call me.", "Ring me on {day}.", "Could somebody phone me?"),
}


def tickets(directory: Path) -> tuple[list[Row], list[Row]]:
    """Messages to a shop to a line of four fields."""
    rng = np.random.default_rng(SEED)
    rows: dict[str, Row] = {}
    while len(rows) < TRAIN + 10 * HELD:
        kind = str(rng.choice(list(COMPLAINTS)))
        wish = str(rng.choice(list(WISHES)))
        day = rng.choice(DAYS)
        words = {
            "name": rng.choice(NAMES),
            "item": str(rng.choice(ITEMS))[:-1],
            "order": int(rng.integers(100, 10_000)),
            "complaint": str(rng.choice(COMPLAINTS[kind])).format(day=day),
            "wish": str(rng.choice(WISHES[wish])).format(day=rng.choice(DAYS)),
        }
        prompt = f"{str(rng.choice(MESSAGES)).format(**words)}\nTicket:"
        entry = f" #{words['order']} {words['item']} | {kind} | {wish} | {words['name']}"
        rows[prompt] = {"prompt": prompt, "completion": entry}
    made = list(rows.values())
    return made[: -10 * HELD], made[-10 * HELD :]


TASKS: dict[str, Callable[[Path], tuple[list[Row], list[Row]]]] = {
    "e2e": e2e,
    "extraction": extraction,
    "sst2": sst2,
    "cola": cola,
    "arithmetic": arithmetic,
    "tickets": tickets,
}


def write_task(name: str, directory: Path, out: Path, held: int = HELD) -> None:
    """Write one task: the first rows of a shuffled order, long ones left out."""
    rng = np.random.default_rng(SEED)
    for split, rows, count in zip(
        ("train", "held"), TASKS[name](directory), (TRAIN, held), strict=True
    ):
        short = [row for row in rows if len(row["prompt"]) + len(row["completion"]) <= LONGEST]
        chosen = [short[i] for i in rng.permutation(len(short))[:count]]
        path = out / name / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen), encoding="utf-8"
        )


def write_tasks(directory: Path, out: Path, held: int = HELD) -> dict[str, str]:
    """Write every task whose files are there; those left out, and why."""
    missing = {}
    for name in TASKS:
        try:
            write_task(name, directory, out, held)
        except FileNotFoundError as error:
            missing[name] = f"{error.filename} is missing"
    return missing


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--held", type=int, default=HELD, help="held-out texts, at most")
    options = parser.parse_args(arguments)
    for name, why in write_tasks(options.directory, options.out, options.held).items():
        print(f"{name} is left out: {why}")


if __name__ == "__main__":
    main()
